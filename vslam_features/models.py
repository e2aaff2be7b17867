"""Opens learned models: file, card, parity record, runtime and fallback, as the configuration says."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from .artifacts import cases, records
from .artifacts.binding import Binding
from .artifacts.cache import cache_folder
from .artifacts.card import PRECISIONS, ModelCard, identity
from .artifacts.dense_cases import Describe, dense_cases
from .artifacts.gate import ParityReport, run_gate
from .artifacts.incidents import Incidents
from .artifacts.store import locate
from .config import Config
from .engine import Engine, OpenedModel
from .errors import ConfigError, ModelError, ModelFileError, ParityError, VslamFeaturesError
from .health import Health
from .reference import ModelFile, Reference
from .runtimes.base import LoadRequest, Session

logger = logging.getLogger(__name__)

Fallback = Callable[[], tuple[Session, ModelCard]]
_EMULATED = "emulates BF16 in float32 to predict the accuracy of a device: not the file that a device runs"


class Models:
    """The learned models of a front-end; the plug-ins open theirs here.

    Args:
        config: ``runtime`` and ``models`` of it are used.
        progress: called with a line of text while something slow goes on (the parity gate).
    """

    def __init__(self, config: Config, progress: Callable[[str], None] | None = None):
        self.config = config
        self.progress = progress or (lambda text: logger.info("%s", text))
        self.engines: list[Engine] = []
        m = config.models
        self.incidents = Incidents(cache_folder("incidents"), m.incidents, m.incidents_mb)

    def open(self, role: str, model: str) -> Engine:
        """A model ready to run.

        Args:
            model: name in the model registry, or path of a model file with a card.
        Raises:
            ModelMissingError: its file is not here. ModelFileError: it is not what it should be.
            RuntimeMissingError: the runtime or its device is not here. ParityError: it failed the gate.
        """
        r = self.config.runtime
        file = ModelFile.at(locate(model, r.precision))
        if file.card.role != role:
            raise ModelFileError(f"{file.path}: its card says role '{file.card.role}', it was named as {role}")
        session, reference = self._session(file), Reference.of(file, r.threads)
        # Before the gate, which would blame the model.
        Binding(session, file.card, str(file.path)).require()
        if session.active.note:
            logger.warning("%s: %s", file.card.name, session.active.note)
        record = self._record(file, session, reference)
        load_fallback, note = self._fallback(reference, record)
        note = "; ".join(filter(None, (note, _EMULATED if file.card.emulated else "")))
        if note:
            logger.warning("%s: %s", file.card.name, note)
        opened = OpenedModel(
            file.path,
            file.card,
            file.sha256,
            identity(file.card, proven_sha256(record)),
            record.passed,
            "; ".join(filter(None, (record.summary, note))),
        )
        engine = Engine(opened, session, load_fallback, self.incidents)
        self.engines.append(engine)
        return engine

    def verify(
        self,
        model: str,
        *,
        reference: str = "",
        images: Sequence[Path] = (),
        inputs: Sequence[Path] = (),
        extract: cases.Extract | None = None,
    ) -> ParityReport:
        """Compare a model with its reference now, whatever the records say.

        The record is renewed unless only saved ``inputs`` are run, which prove
        nothing about others.

        Args:
            reference: name or path of the model that it is compared with; empty: golden outputs, or the fp32 file.
            images: pictures or folders of them, beside the pairs that ship.
            inputs: saved inputs (incidents, collected pairs) or folders of them, instead of the pairs that ship.
            extract: features of a picture for a matcher, see ``cases.image_cases``.
        Raises:
            as ``open``, but for ParityError; DataError: images or inputs cannot be used.
        """
        threads = self.config.runtime.threads
        file = ModelFile.at(locate(model, self.config.runtime.precision))
        session, compared = self._session(file), Reference.of(file, threads)
        if reference:
            other = ModelFile.at(locate(reference, "fp32"))
            if other.card.role != file.card.role:
                raise ModelFileError(f"{other.path}: is a {other.card.role} model, {file.path} is {file.card.role}")
            compared = Reference(other, other.sha256 == file.sha256, threads)
        if inputs:
            chosen = cases.saved_cases(inputs, file.card)
        else:
            chosen = [*self._shipped(file, session), *(cases.image_cases(file.card, images, extract) if images else [])]
            if reference:  # golden outputs are those of another reference
                chosen = [cases.Case(c.name, c.runs) for c in chosen]
        report = self._gate(file, session, compared, chosen)
        if not inputs and not reference and not _unfinished(report, chosen):
            self._save(report, file, session, compared)
        return report

    def health(self) -> list[Health]:
        """How the opened models do."""
        return [engine.health() for engine in self.engines]

    def _session(self, file: ModelFile) -> Session:
        r = self.config.runtime
        return file.load(r.name, r.options, LoadRequest(r.device, r.strict, r.threads))

    def _shipped(self, file: ModelFile, session: Session) -> list[cases.Case]:
        binding = Binding(session, file.card, str(file.path))
        if file.card.role != "matcher":
            return cases.shipped_cases(file.card)
        if binding.dense:
            return dense_cases(
                self._describe(file, binding.map_shape("descriptors0")), binding.map_shape("descriptors0")
            )
        return cases.shipped_cases(file.card, binding.channels("descriptors0") or 64)

    def _describe(self, matcher: ModelFile, takes: tuple[int, int, int] | None) -> Describe | None:
        """Maps of pictures by a matcher's features model on ONNX Runtime's CPU; None where it is not here.

        Raises ModelFileError where they are of another shape (C, h, w) than the matcher ``takes``.
        """
        try:
            file = features_of(matcher)
            session = file.load("onnxruntime", {}, LoadRequest(threads=self.config.runtime.threads))
            binding = Binding(session, file.card, str(file.path))
            binding.require(("image",), ("descriptors",))
        except (ModelError, ConfigError) as error:  # ConfigError: its name is none of the registry
            name = matcher.card.features_model
            why = f"of '{name}': {error}" if name else "of pictures: its card names no features_model"
            logger.warning("%s: compared on seeded maps instead of maps %s", matcher.card.name, why)
            return None
        gives = binding.map_shape("descriptors")
        tokens = matcher.card.layouts.get("descriptors0") == "tokens"  # which tell how many cells, not in how many rows
        if takes and gives and (_cells(takes) != _cells(gives) if tokens else takes != gives):
            raise ModelFileError(f"{matcher.path}: takes maps {takes}, its features model {file.path} gives {gives}")
        return lambda image: binding.run({"image": file.card.preprocessing.apply(image)})["descriptors"]

    def _gate(self, file: ModelFile, session: Session, reference: Reference, chosen) -> ParityReport:
        # Golden outputs need no reference. Where it is needed and cannot be loaded, that is no fault of the model.
        needed = any(case.expected is None for case in chosen)
        return run_gate(
            Binding(session, file.card, str(file.path)).run,
            chosen,
            file.card,
            reference_run=Binding(*reference.load(), str(reference.file.path)).run if needed else None,
            progress=self.progress,
            limit_s=self.config.models.gate_s,
            precision=_computed(session, file.card),
        )

    def _save(self, report: ParityReport, file: ModelFile, session: Session, reference: Reference) -> records.Record:
        return records.save(report, file.sha256, file.card, session.active, reference.label, reference.file.card)

    def _found(self, file: ModelFile, session: Session, reference: Reference) -> records.Record:
        """The parity record of a session; made now where there is none that holds. Raises ParityError: no time."""
        card = file.card
        record = records.find(file.sha256, card, session.active, _computed(session, card))
        if record is not None and (record.reference == "golden" or reference.same or _compared(record, reference)):
            return record
        self.progress(f"{card.name}: comparing with its reference on {session.active} (first use here)")
        chosen = self._shipped(file, session)
        report = self._gate(file, session, reference, chosen)
        if _unfinished(report, chosen):  # a busy machine: that proves nothing, so that no record is kept
            raise ParityError(
                f"{card.name} on {session.active}: {len(report.rows)} of {len(chosen)} pairs were compared within "
                f"models.gate_s ({self.config.models.gate_s:g} s): raise it, or run "
                f"'vslam-features models verify {card.name}' while the machine has nothing else to do"
            )
        return self._save(report, file, session, reference)

    def _record(self, file: ModelFile, session: Session, reference: Reference) -> records.Record:
        """The same of a model that is to run. Raises ParityError where it failed."""
        name, record = file.card.name, self._found(file, session, reference)
        if not record.passed:
            text = (
                f"{name} on {session.active} does not compute what its reference computes: "
                f"{'; '.join(record.reasons[:3])}; 'vslam-features models verify {name}' shows the table; "
                "choose another runtime or precision"
            )
            if not self.config.models.allow_unverified:
                raise ParityError(text + ", or set models.allow_unverified to run it all the same")
            logger.warning("%s (models.allow_unverified is set)", text)
        return record

    def _fallback(self, reference: Reference, record: records.Record) -> tuple[Fallback | None, str]:
        """What repeats the failed runs of a model, and what people must know of it."""
        file, card = reference.file, reference.file.card
        # Descriptors of an unverified model compare with nothing else, its own reference included.
        if self.config.runtime.fallback != "reference" or not (record.passed or card.role == "matcher"):
            return None, ""
        fetch = f"vslam-features models fetch {card.name}"
        if not reference.runnable:
            return None, f"no fallback: no runtime computes a {file.path.suffix} file exactly; run '{fetch}'"
        if reference.same:
            weak = f"the fallback is the same {card.precision} file, which overflows where the model does"
            return reference.load, "" if card.precision == "fp32" else f"{weak}: run '{fetch}'"
        try:
            problem = self._doubt(reference, record)
        except VslamFeaturesError as error:
            problem = f"cannot be verified: {error}"
        if problem:
            return None, f"no fallback: {file.path.name} {problem}; run '{fetch} --force'"
        return reference.load, ""

    def _doubt(self, reference: Reference, record: records.Record) -> str:
        """Why a reference that is another file may compute something else than the model; empty: it does not.

        Its card only claims the model's weights, and the model's golden record says nothing of this file.
        """
        if record.passed and _compared(record, reference):
            return ""
        file = reference.file
        own = records.find_on_cpu(file.sha256, file.card)
        if own is None:
            session, _ = reference.load()
            # A record of its own: what holds without optimisation does not prove the same with it.
            session.active = replace(session.active, provider=f"{session.active.provider} unoptimised")
            own = self._found(file, session, replace(reference, same=True))
        if not own.passed:
            return f"does not compute what its card claims ({own.reasons[0]})"
        return "computes other weights" if record.passed and proven_sha256(own) != proven_sha256(record) else ""


def _cells(shape: tuple[int, int, int]) -> tuple[int, int]:
    """Channels and cells of a map (C, h, w)."""
    return shape[0], shape[1] * shape[2]


def features_of(matcher: ModelFile) -> ModelFile:
    """The file of a matcher's features model: by its name in the cache, else one of that name beside the matcher.

    Raises ModelError or ConfigError where there is none.
    """
    name = matcher.card.features_model
    try:
        return ModelFile.at(locate(name, "fp32"))
    except (ModelError, ConfigError):
        for path in sorted(matcher.path.parent.glob("*.onnx")):
            with contextlib.suppress(ModelError):
                file = ModelFile.at(path)
                if (file.card.role, file.card.name) == ("features", name):
                    return file
        raise


def proven_sha256(record: records.Record) -> str:
    """The weights that a model is known to compute, which make its features comparable with those of other files.

    Golden outputs prove what the card says of the source. A comparison with the fp32 file ties a model to that file,
    one with itself to nothing else: a card alone is only a claim. What failed stands for itself on this runtime.
    """
    if not record.passed:
        runtime = f"{record.runtime} {record.version} {record.provider} {record.device}"
        return hashlib.sha256(f"{record.sha256} unverified on {runtime}".encode()).hexdigest()
    return {"golden": record.source_sha256, "self": record.sha256}.get(record.reference, record.reference)


def _compared(record: records.Record, reference: Reference) -> bool:
    """Whether a record is of a comparison with this very reference, run by this card."""
    return (record.reference, record.reference_card) == (reference.label, records.card_id(reference.file.card))


def _computed(session: Session, card: ModelCard) -> str:
    """The precision that a model computes in, where its runtime may take less than the file has.

    Runtimes say so behind the name of the provider (``CPU bf16``). TF32 has the mantissa of fp16.
    """
    told = {"f16": "fp16", "fp16": "fp16", "tf32": "fp16", "bf16": "bf16"}
    words = [told[w] for w in session.active.provider.split()[1:] if w in told]
    return max([card.precision, *words], key=PRECISIONS.index)


def _unfinished(report: ParityReport, chosen: Sequence[cases.Case]) -> bool:
    """Whether the time ran out before anything was found."""
    return len(report.rows) < len(chosen) and not any(row.problems for row in report.rows)
