"""Opens learned models: file, card, parity record, runtime and fallback, as the configuration says."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import registry
from .artifacts import cases, records
from .artifacts.cache import cache_folder
from .artifacts.card import PRECISIONS, ModelCard, identity, read_card
from .artifacts.file_kind import FileKind, require_kind
from .artifacts.gate import ParityReport, run_gate
from .artifacts.incidents import Incidents
from .artifacts.store import content_sha256, locate
from .config import Config
from .engine import Engine, Health, OpenedModel, bound
from .errors import ConfigError, ModelError, ModelFileError, ModelMissingError, ParityError
from .runtimes.base import LoadRequest, Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _File:
    """A model file; ``sha256`` is of its content when it was first looked at."""

    path: Path
    card: ModelCard
    sha256: str

    @classmethod
    def at(cls, path: Path) -> _File:
        if path.suffix == ".onnx":
            require_kind(path, FileKind.ONNX)  # a Git LFS pointer or a web page is called by its name
        return cls(path, read_card(path), content_sha256(path))


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
        file = _File.at(locate(model, r.precision))
        if file.card.role != role:
            raise ModelFileError(f"{file.path}: its card says role '{file.card.role}', it was named as {role}")
        session, reference = self._session(file), _Reference(self, self._twin(file))
        if session.active.note:
            logger.warning("%s: %s", file.card.name, session.active.note)
        record = self._record(file, session, reference)
        opened = OpenedModel(
            file.path, file.card, file.sha256, identity(file.card, proven_sha256(record)), record.passed, record.summary
        )
        # Descriptors of an unverified model compare with nothing else, its own reference included.
        keep = r.fallback == "reference" and (record.passed or role == "matcher")
        engine = Engine(opened, session, reference.load if keep else None, self.incidents)
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
            inputs: saved inputs (incidents) or folders of them, instead of the pairs that ship.
            extract: features of a picture for a matcher, see ``cases.image_cases``.
        Raises:
            as ``open``, but for ParityError; DataError: images or inputs cannot be used.
        """
        file = _File.at(locate(model, self.config.runtime.precision))
        session = self._session(file)
        twin = _File.at(locate(reference, "fp32")) if reference else self._twin(file)
        if twin.card.role != file.card.role:
            raise ModelFileError(f"{twin.path}: is a {twin.card.role} model, {file.path} is {file.card.role}")
        if inputs:
            chosen = cases.saved_cases(inputs)
        else:
            chosen = [*self._shipped(file, session), *(cases.image_cases(file.card, images, extract) if images else [])]
            if reference:  # golden outputs are those of another reference
                chosen = [cases.Case(c.name, c.runs) for c in chosen]
        report = self._gate(file, session, _Reference(self, twin), chosen)
        if not inputs and not reference and not _unfinished(report, chosen):
            records.save(report, file.sha256, file.card, session.active, _label(file, twin))
        return report

    def health(self) -> list[Health]:
        """How the opened models do."""
        return [engine.health() for engine in self.engines]

    def load(self, file: _File, runtime: str, options: dict, request: LoadRequest) -> Session:
        """A session of a file that is still the one that was looked at. Raises ModelFileError."""
        cls = registry.get("runtime", runtime)
        session = cls(cls.Options(**options)).load(file.path, request)
        if content_sha256(file.path) != file.sha256:
            raise ModelFileError(f"{file.path}: its content has changed since it was opened; start again")
        return session

    def _session(self, file: _File) -> Session:
        r = self.config.runtime
        return self.load(file, r.name, r.options, LoadRequest(r.device, r.strict, r.threads))

    def _twin(self, file: _File) -> _File:
        """The fp32 file made from the same weights; the file itself where there is none."""
        if file.card.precision == "fp32" and file.path.suffix == ".onnx":
            return file
        try:
            twin = _File.at(locate(file.card.name, "fp32"))
        except (ModelError, ConfigError) as error:  # ConfigError: its name is none of the registry
            logger.info("%s: no fp32 reference: %s", file.card.name, error)
            return file
        return twin if _same_weights(twin.card, file.card) else file

    def _shipped(self, file: _File, session: Session) -> list[cases.Case]:
        spec = session.inputs.get(file.card.inputs.get("descriptors0", "descriptors0"))
        dim = spec.shape[-1] if spec is not None and spec.shape else None
        return cases.shipped_cases(file.card, dim or 64)

    def _gate(self, file: _File, session: Session, reference: _Reference, chosen) -> ParityReport:
        return run_gate(
            bound(session, file.card),
            chosen,
            file.card,
            reference_run=reference.run,
            progress=self.progress,
            limit_s=self.config.models.gate_s,
            precision=_computed(session, file.card),
        )

    def _record(self, file: _File, session: Session, reference: _Reference) -> records.Record:
        """The parity record of a session; made now where there is none. Raises ParityError where it failed."""
        card = file.card
        record = records.find(file.sha256, card, session.active, _computed(session, card))
        if record is not None and record.reference == "self" and reference.file.sha256 != file.sha256:
            record = None  # the fp32 file came later
        if record is None:
            self.progress(f"{card.name}: comparing with its reference on {session.active} (first use here)")
            chosen = self._shipped(file, session)
            report = self._gate(file, session, reference, chosen)
            if _unfinished(report, chosen):  # a busy machine: that proves nothing, so that no record is kept
                raise ParityError(
                    f"{card.name} on {session.active}: {len(report.rows)} of {len(chosen)} pairs were compared within "
                    f"models.gate_s ({self.config.models.gate_s:g} s): raise it, or run "
                    f"'vslam-features models verify {card.name}' while the machine has nothing else to do"
                )
            record = records.save(report, file.sha256, card, session.active, _label(file, reference.file))
        if not record.passed:
            text = (
                f"{card.name} on {session.active} does not compute what its reference computes: "
                f"{'; '.join(record.reasons[:3])}; 'vslam-features models verify {card.name}' shows the table; "
                "choose another runtime or precision"
            )
            if not self.config.models.allow_unverified:
                raise ParityError(text + ", or set models.allow_unverified to run it all the same")
            logger.warning("%s (models.allow_unverified is set)", text)
        return record


def proven_sha256(record: records.Record) -> str:
    """The weights that a model is known to compute, which make its features comparable with those of other files.

    Golden outputs prove what the card says of the source. A comparison with the fp32 file ties a model to that file,
    one with itself to nothing else: a card alone is only a claim. What failed stands for itself on this runtime.
    """
    if not record.passed:
        runtime = f"{record.runtime} {record.version} {record.provider} {record.device}"
        return hashlib.sha256(f"{record.sha256} unverified on {runtime}".encode()).hexdigest()
    return {"golden": record.source_sha256, "self": record.sha256}.get(record.reference, record.reference)


class _Reference:
    """What a model is compared with and falls back on: ONNX Runtime's CPU without graph optimisation."""

    def __init__(self, models: Models, file: _File):
        self.file = file
        self._models = models
        self._run: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None

    def load(self) -> tuple[Session, ModelCard]:
        """Raises ModelMissingError, ModelFileError where the file is gone or another since it was opened."""
        if not self.file.path.is_file():
            raise ModelMissingError(f"the reference {self.file.path} is gone since the model was opened; start again")
        request = LoadRequest(threads=self._models.config.runtime.threads, optimise=False)
        return self._models.load(self.file, "onnxruntime", {}, request), self.file.card

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Loads at the first run: golden outputs need no session."""
        if self._run is None:
            self._run = bound(*self.load())
        return self._run(inputs)


def _label(file: _File, twin: _File) -> str:
    return "self" if twin.sha256 == file.sha256 else twin.sha256


def _same_weights(a: ModelCard, b: ModelCard) -> bool:
    """Whether two files are to compute the same; of files of unknown making nobody knows."""
    same = (a.role, a.source_sha256, a.preprocessing.id) == (b.role, b.source_sha256, b.preprocessing.id)
    return same and bool(a.source_sha256)


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
