"""The bytes of an engine: magic, length, JSON, and the graph that ONNX Runtime runs."""

from __future__ import annotations

import hashlib
import json
import struct

_MAGIC = b"ftrt"


def pack(facts: dict, graph: bytes) -> bytes:
    """An engine."""
    text = json.dumps(facts | {"graph_sha256": hashlib.sha256(graph).hexdigest()}).encode()
    return _MAGIC + struct.pack("<II", len(text), len(graph)) + text + graph


def unpack(plan: bytes) -> tuple[dict, bytes]:
    """Raises ValueError with what the library would log, where it is cut, damaged, or no engine at all."""
    if len(plan) < 12 or plan[:4] != _MAGIC:
        raise ValueError("Serialization assertion magicTagRead == kMAGIC_TAG failed. Magic tag does not match")
    facts, graph = struct.unpack("<II", plan[4:12])
    if len(plan) != 12 + facts + graph:
        raise ValueError("Serialization assertion safeRead failed. Serialized engine is truncated")
    content = plan[12 + facts :]
    try:
        found = json.loads(plan[12 : 12 + facts])
    except ValueError as error:
        raise ValueError("Serialization assertion failed. Serialized engine contains damaged data") from error
    if hashlib.sha256(content).hexdigest() != found["graph_sha256"]:
        raise ValueError("Serialization assertion failed. Serialized engine contains damaged data")
    return found, content
