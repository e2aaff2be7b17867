"""A learned model at work: guarded, counted, with a fallback behind it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from .artifacts.binding import Binding
from .artifacts.card import ModelCard
from .artifacts.contract import breaches
from .artifacts.incidents import Incidents
from .errors import BackendError, NonFiniteError, VslamFeaturesError
from .health import Counts, Health
from .runtimes.base import Session
from .types import ModelIdentity

logger = logging.getLogger(__name__)

_SUSPICION = 8  # empty results that the fallback must share before they are believed again


@dataclass(frozen=True)
class Answer:
    """Outputs by our tensor names.

    ``card``: of the file that computed them, which tells of which layers scores are. ``recovered``: the fault after
    which the fallback computed them, else empty.
    """

    outputs: dict[str, np.ndarray]
    runtime: str
    card: ModelCard
    recovered: str = ""


@dataclass(frozen=True)
class OpenedModel:
    """A model file with what is known of it.

    ``linked``: its parity record passed; ``verified``: what the record says, in words.
    """

    path: Path
    card: ModelCard
    sha256: str
    identity: ModelIdentity
    linked: bool
    verified: str


@dataclass
class Engine:
    """Runs a model; a run that fails is repeated on the fallback, counted, and kept as an incident.

    Safe to call from several threads: runs wait for one another.

    Args:
        load_fallback: loads the session that repeats failed runs, at the first fault, with the card that names its
            tensors; None: there is none.
    Attributes:
        binding: the session's tensors by our names.
    Raises:
        ModelFileError: the card does not fit the file.
    """

    model: OpenedModel
    session: Session
    load_fallback: Callable[[], tuple[Session, ModelCard]] | None
    incidents: Incidents
    counts: Counts = field(default_factory=Counts)
    last_fault: str = ""

    def __post_init__(self):
        self._lock = threading.Lock()
        self._suspicion = 0
        self._fallback: tuple[Session, Binding] | None = None
        self.binding = Binding(self.session, self.model.card, str(self.model.path))

    @property
    def identity(self) -> ModelIdentity:
        """What makes its results comparable."""
        return self.model.identity

    @property
    def suspect(self) -> bool:
        """True after an empty result that the fallback did not share, until it has shared several."""
        return self._suspicion > 0

    @property
    def runtime(self) -> str:
        """What it runs on, in words."""
        return f"{self.session.active} {self.model.card.precision}"

    def require(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Raises ModelFileError where the file lacks one of these tensors (our names), or takes an input besides."""
        self.binding.require(inputs, outputs)

    def run(self, inputs: dict[str, np.ndarray]) -> Answer:
        """Outputs for inputs by our tensor names.

        Raises:
            DataError: wrong inputs.
            NonFiniteError, BackendError: the model failed and no fallback made it good.
        """
        with self._lock:
            self.counts.runs += 1
            try:
                return Answer(self._run(self.session, self.binding, inputs), self.runtime, self.binding.card)
            except BackendError as error:
                if isinstance(error, NonFiniteError):
                    self.counts.non_finite += 1
                else:
                    self.counts.errors += 1
                self._note(str(error), inputs, getattr(error, "outputs", None))
                try:
                    answer = self._repeat(inputs, str(error))
                except VslamFeaturesError as second:
                    self.counts.lost += 1
                    self.last_fault = f"{error}; the fallback failed too: {second}"
                    if _rarely(self.counts.lost):
                        logger.error("%s: the fallback failed too: %s", self.model.card.name, second)
                    raise error from second
                if answer is None:
                    self.counts.lost += 1
                    raise
                self.counts.recovered += 1
                return answer

    def doubt(self, inputs: dict[str, np.ndarray], fault: str, empty: Callable[[dict], bool]) -> Answer | None:
        """A second opinion of the fallback on an empty result that is in doubt.

        Args:
            fault: why it is in doubt.
            empty: whether outputs are an empty result.
        Returns:
            The fallback's answer, where it is not empty: then the first was a fault, which is counted and kept. None
            where both agree, or there is no fallback, or it failed.
        """
        with self._lock:
            try:
                answer = self._repeat(inputs, fault)
            except VslamFeaturesError as error:
                logger.error("%s: no second opinion, the fallback failed: %s", self.model.card.name, error)
                return None
            if answer is None:
                return None
            if empty(answer.outputs):
                self.counts.empty_agreed += 1
                self._suspicion = max(0, self._suspicion - 1)
                return None
            self._suspicion = _SUSPICION
            self.counts.empty += 1
            self.counts.recovered += 1
            self._note(fault, inputs, None)
            return answer

    def health(self) -> Health:
        """A snapshot for people."""
        m, active = self.model, self.session.active
        fallback = "none" if self.load_fallback is None else "ready"
        if self._fallback is not None:
            fallback = str(self._fallback[0].active)
        return Health(
            role=m.card.role,
            name=m.card.name,
            file=m.path.name,
            sha256=m.sha256,
            precision=m.card.precision,
            runtime=str(active),
            device=active.device,
            note=active.note,
            verified=m.verified,
            linked=m.linked,
            fallback=fallback,
            counts=replace(self.counts),
            last_fault=self.last_fault,
        )

    def _repeat(self, inputs, fault: str) -> Answer | None:
        if self.load_fallback is None:
            return None
        if self._fallback is None:
            session, card = self.load_fallback()
            self._fallback = session, Binding(session, card)
        session, binding = self._fallback
        return Answer(self._run(session, binding, inputs), f"fallback {session.active}", binding.card, fault)

    def _run(self, session: Session, binding: Binding, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs that keep the contract of their role. Raises BackendError for others: they are no results."""
        outputs = binding.run(inputs)
        if broken := breaches(binding.card, inputs, outputs):
            raise BackendError(f"{session.active}: {'; '.join(broken)}")
        return outputs

    def _note(self, fault: str, inputs, outputs) -> None:
        """Log and keep a fault that was counted."""
        self.last_fault = fault
        card = self.model.card
        kept = self.incidents.save(
            role=card.role, name=card.name, sha256=self.model.sha256, runtime=self.runtime, fault=fault,
            inputs=inputs, outputs=outputs,
        )  # fmt: skip
        self.counts.incidents += kept is not None
        n = self.counts.faults
        if _rarely(n):
            logger.error("%s: fault %d: %s%s", card.name, n, fault, f"; the input is kept in {kept}" if kept else "")


def _rarely(n: int) -> bool:
    """The 1st, 2nd, 4th, 8th ...: a fault at each image must not drown the log."""
    return n & (n - 1) == 0
