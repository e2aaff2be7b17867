"""A disk that loses power: what was synced is there, of the rest anything that a file system may leave.

What is assumed of the disk, and no more:

1. Data: what was written to a file before an fsync or fdatasync of it that returned is there. Of later writes each
   512-byte sector is old or new, whatever the order (``torn``), or neither: zeros or anything (``garbage``).
   Bytes outside the written range do not change, which SQLite calls powersafe overwrite.
2. Size: growth that was not synced ends anywhere. Shrinking happens wholly or not at all, and is in order with the
   other operations on that file: nothing that was written after it is visible before it. SQLite needs this to
   end a transaction by truncating the journal.
3. Names: creating, renaming and unlinking are durable once the *folder* was synced; before that each has
   happened or not, independently (``unordered``) or in their order, as with a journal of metadata (``ordered``).
   A sync of a file does not sync its name. A rename is atomic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from .recorder import Op

SECTOR = 512
DATA = ("nothing", "everything", "prefix", "writes", "torn", "garbage")
NAMES = ("ordered", "unordered")


class File:
    """An inode: its durable content, and the operations since its last sync."""

    def __init__(self, content: bytes = b""):
        self.durable = bytes(content)
        self.current = bytearray(content)
        self.pending: list[Op] = []

    def apply(self, op: Op) -> None:
        _apply(self.current, op)
        self.pending.append(op)

    def sync(self) -> None:
        if self.pending:
            self.durable = bytes(self.current)
            self.pending.clear()

    def after_cut(self, rng: random.Random, how: str) -> bytes:
        """What a power cut leaves, ``how`` is one of ``DATA``."""
        if how == "nothing" or not self.pending:
            return self.durable
        if how == "everything":
            return bytes(self.current)
        content = bytearray(self.durable)
        if how == "prefix":
            ops = self.pending[: rng.randint(0, len(self.pending))]
            for op in ops:
                _apply(content, op)
            return bytes(content)
        share = rng.choice((0.1, 0.5, 0.9, 0.99))
        for op in self._until_a_shrink(rng):
            if op.kind == "T" and op.number <= len(content):
                _apply(content, op)
            elif how == "writes":
                if rng.random() < share:
                    _apply(content, op)
            else:
                _land(content, op, rng, share, garbage=how == "garbage")
        return bytes(content)

    def _until_a_shrink(self, rng: random.Random) -> list[Op]:
        """The operations that may be visible: up to a shrinking that has not happened, chosen at random."""
        shrinks = [i for i, op in enumerate(self.pending) if op.kind == "T"]
        return self.pending[: rng.choice([*shrinks, len(self.pending)])]


class Disk:
    """A flat folder. ``ignored``: kinds of sync that this disk only claims to do (S of files, D of the folder)."""

    def __init__(self, before: dict[str, tuple[int, bytes]], ignored: str = ""):
        self.files = {inode: File(content) for inode, content in before.values()}
        self.names = {name: inode for name, (inode, _) in before.items()}
        self.durable_names = dict(self.names)
        self.pending_names: list[Op] = []
        self.ignored = ignored
        self._lost = 0

    def apply(self, op: Op) -> None:
        if op.kind in self.ignored:
            return
        if op.kind in "WT":
            self.files[op.inode].apply(op)
        elif op.kind == "S":
            self.files[op.inode].sync()
        elif op.kind == "D":
            self.durable_names = dict(self.names)
            self.pending_names.clear()
        elif op.kind in "ORU":
            if op.kind == "O":
                self._retire(op.inode)
                self.files[op.inode] = File()
            _rename(self.names, op)
            self.pending_names.append(op)

    def now(self) -> dict[str, bytes]:
        """Name -> content, as processes see them."""
        return {name: bytes(self.files[inode].current) for name, inode in self.names.items()}

    def cut(self, rng: random.Random, data: str, names: str) -> dict[str, bytes]:
        """Name -> content, as they are after a power cut now."""
        there = dict(self.durable_names)
        if names == "ordered":
            happened = self.pending_names[: rng.randint(0, len(self.pending_names))]
        else:
            happened = [op for op in self.pending_names if rng.random() < 0.5]
        for op in happened:
            _rename(there, op)
        contents = {inode: self.files[inode].after_cut(rng, data) for inode in set(there.values())}
        return {name: contents[inode] for name, inode in there.items()}

    def _retire(self, inode: int) -> None:
        """The number of a deleted file is given to a new one: the old one may still be there after a cut."""
        if inode not in self.files:
            return
        self._lost -= 1
        self.files[self._lost] = self.files.pop(inode)
        for names in (self.names, self.durable_names):
            names.update({name: self._lost for name, i in names.items() if i == inode})
        self.pending_names = [op._replace(inode=self._lost) if op.inode == inode else op for op in self.pending_names]


def states(before: dict, ops: list[Op], ignored: str = "") -> Iterator[tuple[int, Disk]]:
    """(k, disk on which the first k operations happened) for each k where something changed."""
    disk = Disk(before, ignored)
    yield 0, disk
    for k, op in enumerate(ops, 1):
        disk.apply(op)
        yield k, disk


def _apply(content: bytearray, op: Op) -> None:
    if op.kind == "T":
        del content[op.number :]
        content.extend(bytes(op.number - len(content)))
    else:
        content.extend(bytes(max(0, op.number - len(content))))
        content[op.number : op.number + len(op.data)] = op.data


def _land(content: bytearray, op: Op, rng: random.Random, share: float, garbage: bool) -> None:
    """A write, or growth, of which ``share`` of the sectors reach the disk."""
    end = op.number + len(op.data)
    if end > len(content):
        size = rng.choice((len(content), end, end, rng.randint(len(content), end)))
        grown = size - len(content)
        content.extend(rng.randbytes(grown) if garbage and rng.random() < 0.5 else bytes(grown))
    for start in range(op.number - op.number % SECTOR, min(end, len(content)), SECTOR):
        a, b = max(start, op.number), min(start + SECTOR, end, len(content))
        if a >= b:
            continue  # beyond the end, to which the file did not grow
        if rng.random() < share:
            content[a:b] = op.data[a - op.number : b - op.number]
        elif garbage and rng.random() < 0.5:
            content[a:b] = rng.randbytes(b - a) if rng.random() < 0.5 else bytes(b - a)


def _rename(names: dict[str, int], op: Op) -> None:
    if op.kind == "O":
        names[op.name] = op.inode
    elif op.kind == "U":
        names.pop(op.name, None)
    else:
        names.pop(op.name, None)
        names[op.data.decode()] = op.inode
