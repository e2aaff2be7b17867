"""The handle of the fake TensorRT: which version and GPU there is, what fails, and what is alive."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from pathlib import Path

import pytest

FAKES = Path(__file__).parent / "fakes"
_PACKAGES = ("tensorrt", "cuda", "fake_gpu", "fake_trt")


class FakeMachine:
    """A machine with GPU and TensorRT, both fakes. Child processes see the same one.

    Args:
        patch: a ``pytest.MonkeyPatch``, whose undoing puts ``sys.path`` and the environment back.
    """

    def __init__(self, patch):
        self._patch = patch
        patch.syspath_prepend(str(FAKES))
        others = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), *([others] if others else [])]))
        for name in ("TENSORRT", "GPU", "FAULTS", "CUDA", "CUDA_PYTHON"):
            patch.delenv(f"VSLAM_FAKE_{name}", raising=False)
        forget_modules()

    def use(self, **settings: str) -> None:
        """Become another machine, whose modules are imported anew.

        Args:
            settings: the variables ``VSLAM_FAKE_...``: ``tensorrt="11.4.0.106"``, ``gpu="NVIDIA RTX 3060;8.6;12.8"``
                (``""``: none), ``cuda``, ``cuda_python``, ``faults`` (JSON).
        """
        self._check()
        for name, value in settings.items():
            self._patch.setenv(f"VSLAM_FAKE_{name.upper()}", value)
        forget_modules()

    @property
    def trt(self):
        """The module ``tensorrt``."""
        return importlib.import_module("tensorrt")

    @property
    def cuda(self):
        """The module ``cuda.bindings.runtime``."""
        return importlib.import_module("cuda.bindings.runtime")

    @property
    def cudart(self):
        """The module ``cuda.cudart`` of older releases."""
        return importlib.import_module("cuda.cudart")

    def live(self) -> dict[str, int]:
        """What is alive: allocations, streams, graphs, and the objects of TensorRT."""
        gc.collect()
        counts = importlib.import_module("fake_trt.objects").counts()
        return importlib.import_module("fake_gpu.live").live() | counts

    def set_faults(self, **wanted) -> None:
        """Order faults as in ``VSLAM_FAKE_FAULTS``; calls are counted anew from here."""
        self._faults().set(**wanted)

    def calls(self, name: str | None = None) -> int:
        """How often a function was called since ``set_faults``; None: all of CUDA."""
        return self._faults().counts[name or "cuda_call"]

    def misuses(self) -> list[str]:
        """What broke a rule of CUDA or TensorRT; asking takes them off the list that fails the test at its end."""
        found, self._faults().misuses = self._faults().misuses, []
        return found

    @contextlib.contextmanager
    def misused(self, match: str):
        """For what must break a rule in these words."""
        with pytest.raises(importlib.import_module("fake_gpu.faults").Misuse, match=match):
            yield
        assert self.misuses()

    def close(self) -> None:
        """Fails where a rule was broken and nobody asked."""
        self._check()
        forget_modules()

    def _check(self) -> None:
        gc.collect()
        left = self.misuses()
        assert not left, f"misuse of the GPU: {left}"

    @staticmethod
    def _faults():
        return importlib.import_module("fake_gpu.faults").FAULTS


def forget_modules() -> None:
    """Let the next import run the modules again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]:
        del sys.modules[name]
    importlib.invalidate_caches()
