"""The engine of a model for this GPU: the one that is here, or a new one where that will not do.

It is built by ``vslam-features models build`` in a process of its own: a builder takes gigabytes, which go back when it
ends, and what runs models needs neither onnx nor a builder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from .. import registry
from ..config_groups import RuntimeConfig
from ..errors import BackendError, ModelFileError, ModelMissingError
from ..runtimes import cuda, trt_library
from ..runtimes.cuda import Gpu
from ..runtimes.trt import device_index
from ..runtimes.trt_library import Capabilities
from .engine_kept import kept_engine
from .engine_source import choose_source, order_engine
from .engine_store import engine_state

logger = logging.getLogger(__name__)

_CHILD = Path(__file__).parents[1] / "cli" / "child.py"
_LAST_LINES = 8
_GRACE_S = 3.0  # a builder inside TensorRT hears nothing


def ensure_engine(model: str, runtime: RuntimeConfig, progress: Callable[[str], None]) -> Path:
    """The engine of a model for the GPU of the configuration; built now where there is none that fits.

    Args:
        model: name in the model registry, or path of an .onnx file. Where that is not here, an engine of before serves.
        runtime: whose name is ``tensorrt``.
        progress: called with the lines of a build.
    Raises:
        RuntimeMissingError: no TensorRT, or no GPU. ConfigError: this library or GPU cannot do what is asked for.
        ModelMissingError, ModelFileError: the ONNX file is not here or cannot be built from; or there is no engine that
            fits and ``runtime.options.build`` is ``never``: then with the reasons and the command.
        BackendError: the build failed, with its last lines.
    """
    machine = _machine(runtime)
    if kept := kept_engine(model, runtime.precision, runtime.options, *machine):
        logger.info("%s: the ONNX file of %s is not here, so that they cannot be compared", kept, model)
        return kept
    order = order_engine(model, runtime.precision, runtime.options, *machine)
    path, name = order.path, order.source.card.name
    if (state := engine_state(path, order.wish, order.source.card)).fits:
        return path
    reasons = "; ".join(state.reasons)
    words = build_words(model, runtime)
    command = f"vslam-features {shlex.join(words)}"
    if runtime.options["build"] == "never":
        text = f"{path}: is no engine for what is here ({reasons}), and runtime.options.build is never: run '{command}'"
        raise ModelFileError(text) if state.there else ModelMissingError(text)
    progress(f"{name}: building its TensorRT engine, which takes minutes ({reasons})")
    code, last = _run([*words, "--no-verify"], progress)
    state = engine_state(path, order.wish, order.source.card)
    if code or not state.fits:
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        told = " | ".join(last) or "it said nothing"
        why = "" if code else f", and yet the engine will not do ({'; '.join(state.reasons)})"
        raise BackendError(f"building the engine of {name} ended {how}{why}: {told}; repeat it with '{command}'")
    return path


def build_words(model: str, runtime: RuntimeConfig) -> list[str]:
    """Arguments of ``vslam-features`` that build what a configuration asks for."""
    default, options = RuntimeConfig(), registry.get("runtime", "tensorrt").Options()
    words = ["models", "build", model, "--runtime", "tensorrt"]
    if runtime.precision != default.precision:
        words += ["--precision", runtime.precision]
    if runtime.device != default.device:
        words += ["--set", f"runtime.device={runtime.device}"]
    for name, value in runtime.options.items():
        if name != "build" and value != getattr(options, name):
            words += ["--set", f"runtime.options.{name}={value}"]
    return words


def has_source(model: str, runtime: RuntimeConfig) -> bool:
    """Whether there is an engine of a model, or a file to build one from.

    Raises as :func:`ensure_engine`, but for ModelMissingError.
    """
    machine = _machine(runtime)
    if kept_engine(model, runtime.precision, runtime.options, *machine):
        return True
    try:
        choose_source(model, runtime.precision, runtime.options, machine[0], machine[1].capability)
    except ModelMissingError:
        return False
    return True


def _machine(runtime: RuntimeConfig) -> tuple[Capabilities, Gpu]:
    library = trt_library.load()
    return library.capabilities, cuda.load().device(device_index(runtime.device))


def _run(words: list[str], progress: Callable[[str], None]) -> tuple[int, list[str]]:
    """Exit code and last lines of the command, in a child that ends with this process."""
    command = [sys.executable, str(_CHILD), str(os.getpid()), "vslam_features.cli.main:main", *words]
    last: deque[str] = deque(maxlen=_LAST_LINES)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        for line in child.stdout:
            last.append(line.rstrip())
            progress(line.rstrip())
        return child.wait(), list(last)
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)  # so that it ends trtexec
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
            child.kill()
            child.wait()
        child.stdout.close()
