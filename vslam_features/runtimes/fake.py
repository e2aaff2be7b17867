"""A runtime that fails on demand, for tests and drills of what guards the others."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .. import registry
from ..errors import BackendError, ConfigError, ModelFileError
from ..options import option, plugin_name
from .base import LoadRequest, Runtime, Session
from .digest import input_digest


class Calls:
    """Which calls of a session, counted from 1: ``""`` none, ``"all"``, or a list such as ``"3,5-7"``."""

    def __init__(self, text: str, name: str = "calls"):
        self._all = text.strip() == "all"
        self._ranges: list[tuple[int, int]] = []
        for part in [] if self._all or not text.strip() else text.split(","):
            low, dash, high = (p.strip() for p in part.partition("-"))
            numbers = [low, high] if dash else [low, low]
            if not all(n.isascii() and n.isdecimal() for n in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
                raise ConfigError(f"fake runtime: {name}: '{part.strip()}' is neither a call (from 1) nor a range 5-7")
            self._ranges.append((int(numbers[0]), int(numbers[1])))

    def __contains__(self, call: int) -> bool:
        return self._all or any(low <= call <= high for low, high in self._ranges)


class Fake(Runtime):
    """Another runtime with faults: what it returns goes through the same checks as what others return."""

    @dataclass(frozen=True)
    class Options:
        """Parameters of the fake runtime. Calls are given as '3', '3,5-7' or 'all', counted from 1 in each session."""

        inner: str = plugin_name("runtime", "onnxruntime", "The runtime that does the work.")
        only: str = option("", "Faults only in models whose file name contains this text.")
        nan_calls: str = option("", "Calls whose float outputs hold NaN.")
        nan_inputs: str = option("", "Inputs whose float outputs hold NaN: starts of their digests, by commas.")
        nan_everywhere: bool = option(False, "NaN in all elements of these outputs; else in the first.")
        zero_calls: str = option("", "Calls that find nothing: integers -1 (single ones and unsigned: 0), floats 0.")
        error_calls: str = option("", "Calls that fail.")
        fail_load: bool = option(False, "Loading fails.")
        delay_ms: float = option(0.0, "Added to every call, ms.", low=0.0, high=600_000.0)

    def __init__(self, options=None):
        super().__init__(options)
        for name in ("nan_calls", "zero_calls", "error_calls"):
            Calls(getattr(self.options, name), name)  # complains before anything is loaded

    def _load(self, path: Path, request: LoadRequest) -> Session:
        faulty = self.options.only in path.name
        if faulty and self.options.fail_load:
            raise ModelFileError(f"fake runtime: injected failure to load {path}")
        inner = registry.get("runtime", self.options.inner)().load(path, request)
        return FakeSession(inner, self.options if faulty else Fake.Options())


class FakeSession(Session):
    """A session of the inner runtime whose results are spoilt as the options say."""

    def __init__(self, inner: Session, options: Fake.Options):
        self._inner, self._options = inner, options
        self.inputs, self.outputs = inner.inputs, inner.outputs
        self.active = replace(inner.active, runtime=f"fake({inner.active.runtime})")
        self._nan = Calls(options.nan_calls)
        self._zero = Calls(options.zero_calls)
        self._error = Calls(options.error_calls)
        self._nan_inputs = tuple(p.strip() for p in options.nan_inputs.split(",") if p.strip())
        self.calls = 0

    def _run(self, inputs):
        self.calls += 1
        time.sleep(self._options.delay_ms / 1e3)
        if self.calls in self._error:
            raise BackendError(f"{self.active}: injected error in call {self.calls}")
        outputs = self._inner._run(inputs)
        if self.calls in self._zero:
            outputs = {name: _nothing(value) for name, value in outputs.items()}
        if self.calls in self._nan or (self._nan_inputs and input_digest(inputs).startswith(self._nan_inputs)):
            outputs = {name: self._with_nan(value) for name, value in outputs.items()}
        return outputs

    def _with_nan(self, value: np.ndarray) -> np.ndarray:
        if value.dtype.kind != "f":
            return value
        value = value.copy()
        value.flat[slice(None) if self._options.nan_everywhere else slice(0, 1)] = np.nan
        return value


def _nothing(value: np.ndarray) -> np.ndarray:
    """What a matcher returns that finds nothing: of single numbers (the layer after which it stopped) 0."""
    return np.full_like(value, -1 if value.dtype.kind == "i" and value.ndim else 0)
