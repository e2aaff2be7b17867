"""Opens learned models: file, card, parity record, runtime and fallback, as the configuration says."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from .artifacts import cases, records
from .artifacts.binding import Binding
from .artifacts.cache import cache_folder
from .artifacts.card import PRECISIONS, ModelCard, identity
from .artifacts.engine_maker import ensure_engine
from .artifacts.gate import ParityReport, run_gate
from .artifacts.incidents import Incidents
from .artifacts.store import locate
from .config import Config
from .engine import Engine, OpenedModel
from .errors import ModelFileError, ParityError, VslamFeaturesError
from .gate_pairs import gate_pairs
from .health import Health
from .reference import ModelFile, Reference
from .runtimes.base import Session
from .runtimes.choice import runtime_of

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
        file = self._file(model)
        if file.card.role != role:
            raise ModelFileError(f"{file.path}: its card says role '{file.card.role}', it was named as {role}")
        session, reference = self._session(file), Reference.of(file, r.threads)
        # Before the gate, which would blame the model.
        Binding(session, file.card, str(file.path)).require()
        if session.active.note:
            logger.warning("%s: %s", file.card.name, session.active.note)
        record = self._record(file, session, reference)
        load_fallback, note = self._fallback(reference, record)
        before = records.predecessor(record) if file.path.suffix == ".engine" else None
        told = f"an engine before it failed on saved pairs on {before.time[:10]}: verify it with them" if before else ""
        note = "; ".join(filter(None, (note, _EMULATED if file.card.emulated else "", told)))
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

        The record is renewed where the pairs that ship are run, against what the model is compared with at start (or
        against ``reference``, where that is all there is). Saved ``inputs`` alone are a replay: they prove nothing of
        others. What became of the record is in the report.

        Args:
            reference: name or path of the model that it is compared with; empty: golden outputs, or the fp32 file.
            images: pictures or folders of them, beside the pairs that ship.
            inputs: saved inputs (incidents, collected pairs) or folders of them: instead of the pairs that ship, but
                beside them where ``reference`` is given.
            extract: features of a picture for a matcher, see ``cases.image_cases``.
        Raises:
            as ``open``, but for ParityError; DataError: images or inputs cannot be used.
        """
        threads = self.config.runtime.threads
        file = self._file(model)
        session, own = self._session(file), Reference.of(file, threads)
        compared = own
        if reference:
            other = ModelFile.at(locate(reference, "fp32"))
            if other.card.role != file.card.role:
                raise ModelFileError(f"{other.path}: is a {other.card.role} model, {file.path} is {file.card.role}")
            compared = Reference(other, other.sha256 == file.sha256, threads)
        saved = cases.saved_cases(inputs, file.card) if inputs else []
        # Only these records are taken at start.
        counts = (own.same or compared.label == own.label) and bool(reference) == bool(inputs)
        chosen = []
        if reference or not inputs:
            chosen = gate_pairs(file, session, compared)
            chosen += cases.image_cases(file.card, images, extract) if images else []
            if not counts:  # golden outputs are those of another reference
                chosen = [cases.Case(c.name, c.runs) for c in chosen]
        chosen += saved
        report = self._gate(file, session, compared, chosen)
        report = replace(report, saved=max(0, len(report.rows) - len(chosen) + len(saved)))
        if not counts:
            why = "saved inputs alone prove nothing of others" if inputs and not reference else _foreign(own, inputs)
            return replace(report, record=f"not kept: {why}")
        if _unfinished(report, chosen):
            return replace(report, record="not kept: the time ran out before anything was found")
        record = self._save(report, file, session, compared, len(saved))
        if record.objects and report.passed:
            text = f"failed on {record.time[:10]} with {record.saved} saved pairs: {record.reasons[0]}"
            return replace(report, record="stays as it was", objection=text)
        if records.find(file.sha256, file.card, session.active, report.precision) != record:
            return replace(report, record="not kept: the cache cannot be written to")
        return replace(report, record=f"kept for {session.active.device}")

    def health(self) -> list[Health]:
        """How the opened models do."""
        return [engine.health() for engine in self.engines]

    def _file(self, model: str) -> ModelFile:
        """What runs: for TensorRT an engine, which is built where there is none for this GPU."""
        r = self.config.runtime
        if r.name == "tensorrt" and Path(model).suffix not in (".engine", ".xml"):
            return ModelFile.at(ensure_engine(model, r, self.progress))
        return ModelFile.at(locate(model, r.precision))

    def _session(self, file: ModelFile) -> Session:
        return file.load(*runtime_of(file.path, self.config.runtime))

    def _gate(self, file: ModelFile, session: Session, reference: Reference, chosen) -> ParityReport:
        # Golden outputs need no reference. Where it is needed and cannot be loaded, that is no fault of the model.
        other, told = None, ""
        if any(case.expected is None for case in chosen):
            loaded, card = reference.load()
            other = Binding(loaded, card, str(reference.file.path)).run
            told = f"{reference.file.path.name} on {loaded.active.runtime} {loaded.active.version}"
        report = run_gate(
            Binding(session, file.card, str(file.path)).run,
            chosen,
            file.card,
            reference_run=other,
            progress=self.progress,
            limit_s=self.config.models.gate_s,
            precision=_computed(session, file.card),
        )
        return replace(report, ran=f"{session.active} on {session.active.device}", compared_with=told)

    def _save(
        self, report: ParityReport, file: ModelFile, session: Session, reference: Reference, saved: int = 0
    ) -> records.Record:
        return records.save(
            report, file.sha256, file.card, session.active, reference.label, reference.file.card, saved=saved
        )

    def _found(self, file: ModelFile, session: Session, reference: Reference) -> records.Record:
        """The parity record of a session; made now where there is none that holds. Raises ParityError: no time."""
        card = file.card
        record = records.find(file.sha256, card, session.active, _computed(session, card))
        known = record is not None and (record.reference == "golden" or reference.same or _compared(record, reference))
        if known or (record is not None and record.objects):
            return record
        self.progress(f"{card.name}: comparing with its reference on {session.active} (first use here)")
        chosen = gate_pairs(file, session, reference)
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
            shown = file.path if file.path.suffix == ".engine" else name
            shown = f"{shown} --reference {reference.file.path} --inputs THEM" if record.saved else shown
            text = (
                f"{name} on {session.active} does not compute what its reference computes"
                f"{f' on saved pairs ({record.time[:10]})' if record.saved else ''}: "
                f"{'; '.join(record.reasons[:3])}; 'vslam-features models verify {shown}' shows the table; "
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


def _foreign(own: Reference, inputs: Sequence[Path]) -> str:
    """Why a comparison with a reference that was named leaves no record."""
    if not inputs:
        return "a reference was named (with saved --inputs besides, it is kept)"
    return f"at start it is compared with {own.file.path}, not with what was named"


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
