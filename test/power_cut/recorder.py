"""Runs a child process and records what it does to the files of a folder (Linux, a C compiler)."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import which
from typing import NamedTuple

HERE = Path(__file__).parent
_RECORD = struct.Struct("<B3xIQqQ")


class Op(NamedTuple):
    """One operation that succeeded.

    ``kind``: O created, W wrote ``data`` at ``number``, T set the size to ``number``, S synced a file, D synced the
    folder, R renamed ``name`` to ``data``, U unlinked, M a note of the process (``name`` is its text).
    """

    kind: str
    name: str
    inode: int
    number: int
    data: bytes


@dataclass(frozen=True)
class Recording:
    """``before``: name -> (inode, content), all of it on the disk. ``ops``: what happened then, in order."""

    before: dict[str, tuple[int, bytes]]
    ops: list[Op]

    def marks(self, prefix: str, until: int | None = None) -> list[str]:
        """What the notes with this first word say after it, of the first ``until`` operations."""
        found = (op.name for op in self.ops[:until] if op.kind == "M")
        return [text.split(" ", 1)[1] for text in found if text.split(" ", 1)[0] == prefix]


def missing() -> str:
    """Why nothing can be recorded here; empty where it can."""
    if not sys.platform.startswith("linux"):
        return "the recorder of file operations is for Linux"
    return "" if which("cc") else "no C compiler (cc) for the recorder of file operations"


@cache
def shim(folder: Path) -> Path:
    """The compiled library, in ``folder``."""
    library = folder / "power_cut.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "shim.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def environment(library: Path, folder: Path, log: Path | None = None) -> dict[str, str]:
    """Of a process whose work in ``folder`` goes through the library."""
    paths = [str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    ours = {"LD_PRELOAD": str(library), "POWER_CUT_FOLDER": str(folder.resolve()), "PYTHONPATH": ":".join(paths)}
    return {**os.environ, **ours, **({"POWER_CUT_LOG": str(log)} if log else {})}


def run(library: Path, folder: Path, scenario: str, *arguments: object, log: Path | None = None, killed=False) -> None:
    """Run a scenario of ``child.py`` in ``folder``; ``killed``: it ends by killing itself."""
    command = [sys.executable, str(HERE / "child.py"), scenario, str(folder), *map(str, arguments)]
    done = subprocess.run(command, env=environment(library, folder, log), capture_output=True, text=True, timeout=100)
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr


def record(library: Path, folder: Path, log: Path, scenario: str, *arguments: object) -> Recording:
    """Run a scenario and log it. Raises AssertionError where it fails or cannot be replayed."""
    before = {p.name: (p.stat().st_ino, p.read_bytes()) for p in folder.iterdir()}
    run(library, folder, scenario, *arguments, log=log)
    ops = _read(log.read_bytes())
    strange = [op for op in ops if op.kind == "X"]
    assert not strange, f"cannot be replayed: {strange[:3]}"
    _replays(before, ops, folder)
    return Recording(before, ops)


def _read(log: bytes) -> list[Op]:
    ops, at = [], 0
    while at < len(log):
        kind, name_bytes, inode, number, data_bytes = _RECORD.unpack_from(log, at)
        at += _RECORD.size
        name, data = log[at : at + name_bytes], log[at + name_bytes : at + name_bytes + data_bytes]
        at += name_bytes + data_bytes
        ops.append(Op(chr(kind), name.decode(), inode, number, data))
    return ops


def _replays(before: dict, ops: list[Op], folder: Path) -> None:
    """The log is complete: replayed without a cut it gives the folder, byte for byte."""
    from .disk import Disk

    disk = Disk(before)
    for op in ops:
        disk.apply(op)
    there = {p.name: p.read_bytes() for p in folder.iterdir()}
    found = disk.now()
    assert found.keys() == there.keys(), f"log gives {sorted(found)}, folder has {sorted(there)}"
    wrong = [name for name in there if found[name] != there[name]]
    assert not wrong, f"log gives another content of {wrong}"
