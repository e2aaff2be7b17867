"""``trtexec``, NVIDIA's command-line builder: the command that builds what a plan asks for.

Its options: https://docs.nvidia.com/deeplearning/tensorrt/latest/reference/command-line-programs.html; that 11 has
neither ``--fp16`` and its like nor precisions of layers:
https://docs.nvidia.com/deeplearning/tensorrt/latest/api/migration/tensorrt-10x-to-11x-trtexec.html
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ..artifacts.shapes import KINDS, joined
from ..errors import BackendError, ConfigError, RuntimeMissingError
from .plan import BuildPlan

_FLAGS = {"FP16": "--fp16", "BF16": "--bf16", "OBEY_PRECISION_CONSTRAINTS": "--precisionConstraints=obey"}
_NETWORK = {"STRONGLY_TYPED": "--stronglyTyped"}
_CLEARED = {"TF32": "--noTF32"}
# Where JetPack and the tar file of NVIDIA place it, which is not on the PATH.
_PLACES = ("/usr/src/tensorrt/bin/trtexec",)
_LAST_LINES = 20


def command(plan: BuildPlan, onnx: Path, engine: Path, timing_cache: Path | None, device: int = 0) -> list[str]:
    """The command line, the name of the program first.

    Raises ConfigError where a name of the model cannot be written in it.
    """
    words = ["trtexec", f"--onnx={onnx}", f"--saveEngine={engine}", "--skipInference", f"--device={device}"]
    words += [_NETWORK[flag] for flag in plan.network_flags]
    words += [_FLAGS[flag] for flag in plan.flags]
    words += [_CLEARED[flag] for flag in plan.cleared]
    if plan.layers:
        types = ",".join(f"{_name(layer)}:{plan.layer_type}" for layer in plan.layers)
        words += [f"--layerPrecisions={types}", f"--layerOutputTypes={types}"]
    if plan.profiles:
        words += [f"--{kind}Shapes={joined(plan.profiles, kind)}" for kind in KINDS]
    if plan.workspace_mb:
        words.append(f"--memPoolSize=workspace:{plan.workspace_mb}")
    words.append(f"--builderOptimizationLevel={plan.optimisation_level}")
    if timing_cache is not None:
        words.append(f"--timingCacheFile={timing_cache}")
    return words


def find() -> Path:
    """The program. Raises RuntimeMissingError where it is not here."""
    for place in (shutil.which("trtexec"), *_PLACES):
        if place and os.access(place, os.X_OK):
            return Path(place)
    raise RuntimeMissingError(
        f"trtexec is not on the PATH, nor {' nor '.join(_PLACES)}: install TensorRT's command-line tools (on JetPack "
        "'sudo apt install libnvinfer-bin'), or set runtime.options.builder to api"
    )


def build(words: list[str], engine: Path, progress: Callable[[str], None]) -> bytes:
    """Run the command and give back what it built. ``progress``: called with each line that it prints.

    Raises:
        RuntimeMissingError: the program is not here.
        BackendError: it failed, was killed, or wrote nothing; with the last lines that speak of it.
    """
    program = find()
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        child = subprocess.Popen(
            [str(program), *words[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise RuntimeMissingError(f"{program} cannot be run: {error.strerror or error}") from error
    try:
        for line in child.stdout:
            lines.append(line.rstrip())
            progress(line.rstrip())
        code = child.wait()
    finally:  # also when we are interrupted
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()
    told = "; ".join(line for line in lines if "[E]" in line or "[F]" in line) or "; ".join([*lines][-3:])
    if code < 0:
        name = signal.Signals(-code).name
        memory = ", as happens where memory runs out" if name == "SIGKILL" else ""
        raise BackendError(f"trtexec was killed by {name}{memory}: {told or 'it said nothing'}")
    if code:
        raise BackendError(f"trtexec ended with exit code {code}: {told or 'it said nothing'}")
    if not engine.is_file() or not engine.stat().st_size:
        raise BackendError(f"trtexec ended well, but wrote no engine to {engine}: {told}")
    return engine.read_bytes()


def tell(line: str) -> None:
    """Show a line of its output."""
    print(f"  | {line}", file=sys.stderr, flush=True)


def _name(name: str) -> str:
    """A layer in the grammar NAME:VALUE,NAME:VALUE; quoted where it has a colon."""
    if "," in name or "'" in name:
        raise ConfigError(
            f"trtexec cannot be told of layer '{name}', with a comma or a quote: set runtime.options.builder to api"
        )
    return f"'{name}'" if ":" in name else name
