"""A recording as topics and raw messages: rosbag2 (sqlite3, mcap, zstd), bare files and ROS 1, by ``rosbags``.

The library signals damage by many exception types (its own, struct.error,
AssertionError, those of SQLite, YAML and the decompressors). Here all become
:class:`~vslam_features.errors.BagError` when nothing can be read, and
``damage`` when something could.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from ..errors import BagError
from .salvage import McapSalvage, SqliteSalvage, decompressor, sqlite_size

_SALVAGE = {".mcap": McapSalvage, ".db3": SqliteSalvage}


class Recording:
    """An open recording.

    Attributes:
        topics: {name: (type, message count)}, ROS 1 types in their ROS 2 spelling.
        damage: why it cannot be read to its end; empty while none is known.
    Raises:
        BagError: nothing can be read; says what and the next step.
    """

    def __init__(self, path: Path):
        self.path = path
        self.damage = ""
        self._reader, self._parts = None, []
        self._deserialize = None
        try:
            self._reader = self._open_indexed()
            self.topics = {}
            for c in self._reader.connections:
                if isinstance(c.topic, str) and isinstance(c.msgtype, str):  # SQLite's columns hold anything
                    self.topics[c.topic] = (c.msgtype, c.msgcount + self.topics.get(c.topic, ("", 0))[1])
        except ImportError as error:
            raise BagError(
                f"{path}: reading it needs rosbags, which is missing ({error}): pip install rosbags"
            ) from error
        except PermissionError as error:
            raise BagError(f"{path}: may not be read: {error}; check the permissions") from error
        except Exception as error:  # see the module docstring
            self._salvage(error)
        self._note_unmerged_log()

    @property
    def is_ros1(self) -> bool:
        """True for a ROS 1 ``.bag``."""
        return self.path.suffix == ".bag"

    def messages(self, names) -> Iterator[tuple[str, int, bytes]]:
        """(topic, log time ns, raw message) of the topics ``names`` in log order; damage ends it and is noted."""
        names = set(names)
        try:
            if self._reader is None:
                for part, unpack in self._parts:
                    for topic, stamp, raw in part.messages(names):
                        yield topic, stamp, unpack(raw)
                return
            connections = [c for c in self._reader.connections if c.topic in names]
            if connections:
                for connection, stamp, raw in self._reader.messages(connections=connections):
                    yield connection.topic, stamp, raw
        except GeneratorExit:
            raise
        except Exception as error:  # see the module docstring
            self.damage = f"damaged: reading stopped early: {_text(error)}"

    def deserialize(self, raw: bytes, kind: str):
        """The message object, arrays as read-only numpy. Raises BagError."""
        if self._deserialize is None:
            self._deserialize = _deserializer(self.is_ros1)
        try:
            return self._deserialize(raw, kind)
        except Exception as error:  # see the module docstring
            raise BagError(f"{self.path}: a {kind} message cannot be read: {_text(error)}") from error

    def close(self) -> None:
        """Release the files. Safe to call twice."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _open_indexed(self):
        if self.is_ros1:
            from rosbags.rosbag1 import Reader
        else:
            from rosbags.rosbag2 import Reader
        for file in [self.path] if self.path.is_file() else sorted(self.path.glob("*.db3")):
            size = sqlite_size(file) if file.suffix == ".db3" else None
            if size is not None and file.stat().st_size < size[1]:
                # SQLite itself takes the missing part of the last page for zeros and says nothing.
                raise BagError(f"{file.name} has {file.stat().st_size} of {size[1]} bytes")
        reader = Reader(self.path)
        reader.open()
        return reader

    def _salvage(self, error: Exception) -> None:
        cause = _text(error)
        if self.is_ros1:
            raise BagError(
                f"{self.path}: cannot be opened: {cause}; a recording that was cut is repaired by "
                f"'rosbag reindex {self.path}'"
            ) from error
        files, unpack, promised = [self.path], None, {}
        if self.path.is_dir():
            info = self._metadata(cause)
            files, unpack = self._files_of(info, cause)
            promised = _promised_counts(info)
        self.topics = {}
        for file in files:
            kind = _SALVAGE.get(file.suffix)
            if kind is None:
                raise BagError(
                    f"{file}: cannot be opened: {cause}; a damaged {file.suffix or 'file'} cannot be read in part: "
                    "copy it again, or decompress it by hand"
                ) from error
            part = kind(file)
            try:
                found = part.topics()
            except BagError as nothing:
                if len(files) == 1:
                    raise BagError(f"{nothing} ({cause})") from error
                continue
            self._parts.append((part, unpack or bytes))
            for name, (msgtype, count) in found.items():
                self.topics[name] = (msgtype, count + self.topics.get(name, ("", 0))[1])
        if not self._parts:
            raise BagError(f"{self.path}: none of its files can be read: {cause}") from error
        for name, (msgtype, count) in self.topics.items():
            if count:  # a topic of which nothing is left is not there to be chosen
                self.topics[name] = (msgtype, max(count, promised.get(name, 0)))
        self.damage = f"damaged: {cause}; read from the front as far as it goes"

    def _metadata(self, cause: str) -> dict:
        """What metadata.yaml says, with a list of file names in it at least."""
        try:
            info = yaml.safe_load((self.path / "metadata.yaml").read_text())["rosbag2_bagfile_information"]
            info["relative_file_paths"] = [str(name) for name in info["relative_file_paths"]]
            return info
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
            raise BagError(
                f"{self.path / 'metadata.yaml'}: cannot be read: {_text(error)} ({cause}); "
                f"make a new one with 'ros2 bag reindex {self.path}'"
            ) from error

    def _files_of(self, info: dict, cause: str) -> tuple[list[Path], Callable | None]:
        files = [self.path / Path(name).name for name in info["relative_file_paths"]]
        present = [f for f in files if f.is_file()]
        if not present:
            raise BagError(
                f"{self.path}: metadata.yaml names {', '.join(f.name for f in files) or 'no file'}, "
                "none of which is there; copy the whole folder"
            )
        if str(info.get("compression_mode", "")).lower() != "message":
            return present, None
        unzip = decompressor("zstd")
        return present, lambda raw: unzip(raw, 1 << 30)

    def _note_unmerged_log(self) -> None:
        folder = self.path if self.path.is_dir() else self.path.parent
        pattern = "*.db3-wal" if self.path.is_dir() else self.path.name + "-wal"
        logs = [p.name for p in folder.glob(pattern) if p.stat().st_size]
        if logs and not self.damage:
            # Files are opened as immutable, so messages that are only in SQLite's log are not seen.
            self.damage = f"{logs[0]} holds messages that are not in the .db3 yet; run 'ros2 bag reindex' first"


def _promised_counts(info: dict) -> dict[str, int]:
    """Messages of each topic by metadata.yaml, as far as that can be read: it was written before the damage."""
    try:
        counts = {t["topic_metadata"]["name"]: t["message_count"] for t in info["topics_with_message_count"]}
    except (KeyError, TypeError):
        return {}
    return {name: count for name, count in counts.items() if type(count) is int}


def _deserializer(is_ros1: bool):
    from rosbags.typesys import Stores, get_typestore

    # The few message types that are read here are the same in all ROS 2 distributions.
    store = get_typestore(Stores.ROS1_NOETIC if is_ros1 else Stores.ROS2_HUMBLE)
    return store.deserialize_ros1 if is_ros1 else store.deserialize_cdr


def _text(error: Exception) -> str:
    """One line for people."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
