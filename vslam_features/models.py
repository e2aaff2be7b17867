"""Opens learned models: file, card, parity record, runtime and fallback, as the configuration says."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from . import registry
from .artifacts.cache import cache_folder, sha256_of
from .artifacts.card import ModelCard, identity, read_card
from .artifacts.cases import shipped_cases
from .artifacts.gate import run_gate
from .artifacts.incidents import Incidents
from .artifacts.records import Record, find, save
from .artifacts.store import locate
from .config import Config
from .engine import Engine, Health, OpenedModel
from .errors import ModelError, ModelFileError, ModelMissingError, ParityError
from .runtimes.base import LoadRequest, Session

logger = logging.getLogger(__name__)


class Models:
    """The learned models of a front-end; the plug-ins open theirs here.

    Args:
        config: ``runtime`` and ``models`` of it are used.
        progress: called with a line of text while something slow goes on (the parity gate).
    """

    def __init__(self, config: Config, progress=None):
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
        path = locate(model, r.precision)
        card, sha256 = read_card(path), sha256_of(path)
        if card.role != role:
            raise ModelFileError(f"{path}: its card says role '{card.role}', it was named as {role}")
        session = self._load(path, sha256, r.name, r.options, self._request())
        if session.active.note:
            logger.warning("%s: %s", card.name, session.active.note)
        fallback_path, fallback_sha = self._reference(card, path, sha256)
        reference = partial(self._load_reference, fallback_path, fallback_sha)
        record = self._verify(card, sha256, session, reference)
        linked = record.passed
        opened = OpenedModel(path, card, sha256, identity(card, sha256, linked=linked), linked, record.summary)
        # Descriptors of an unverified model compare with nothing else, its own reference included.
        keep = r.fallback == "reference" and (linked or role == "matcher")
        engine = Engine(opened, session, reference if keep else None, self.incidents)
        self.engines.append(engine)
        return engine

    def health(self) -> list[Health]:
        """How the opened models do."""
        return [engine.health() for engine in self.engines]

    def _request(self) -> LoadRequest:
        r = self.config.runtime
        return LoadRequest(device=r.device, strict=r.strict, threads=r.threads)

    def _load(self, path: Path, sha256: str, runtime: str, options: dict, request: LoadRequest) -> Session:
        cls = registry.get("runtime", runtime)
        session = cls(cls.Options(**options)).load(path, request)
        if sha256_of(path) != sha256:
            raise ModelFileError(f"{path}: changed while it was loaded; start again when nothing writes to it")
        return session

    def _reference(self, card: ModelCard, path: Path, sha256: str) -> tuple[Path, str]:
        """The fp32 file made from the same weights; the file itself where there is none."""
        if card.precision == "fp32" and path.suffix == ".onnx":
            return path, sha256
        try:
            twin = locate(card.name, "fp32")
            if read_card(twin).source_sha256 == card.source_sha256:
                return twin, sha256_of(twin)
        except ModelError as error:
            logger.info("%s: no fp32 reference: %s", card.name, error)
        return path, sha256

    def _load_reference(self, path: Path, sha256: str) -> Session:
        if not path.is_file():
            raise ModelMissingError(f"the reference {path} is gone since the model was opened; start again")
        return self._load(
            path, sha256, "onnxruntime", {}, LoadRequest(threads=self.config.runtime.threads, optimise=False)
        )

    def _verify(self, card: ModelCard, sha256: str, session: Session, reference) -> Record:
        """The parity record of a session; made now where there is none. Raises ParityError where it failed."""
        record = find(sha256, card, session.active)
        if record is None:
            self.progress(f"{card.name}: comparing with its reference on {session.active} (first use here)")
            report = run_gate(
                session.run, shipped_cases(card), card,
                reference_run=lambda inputs: reference().run(inputs),
                progress=self.progress, limit_s=self.config.models.gate_s,
            )  # fmt: skip
            record = save(report, sha256, card, session.active)
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
