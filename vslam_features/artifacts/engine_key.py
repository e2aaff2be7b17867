"""What an engine must have been built for, and in what one that is here differs from it.

TensorRT builds for one GPU, one driver and one version of its library, and from one graph. An engine is loaded only
where all of that is as it was; anything else is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

# Bump where a patch writes another graph, or chooses other layers, than it did: engines of before are rebuilt.
PATCHES = {"cumsum": 1, "attention": 2}

_WORDS = {
    "source_sha256": "the ONNX file has changed",
    "gpu": "GPU",
    "capability": "compute capability",
    "driver": "driver",
    "tensorrt": "TensorRT",
    "precision": "precision",
    "typing": "typing",
}


@dataclass(frozen=True)
class EngineWish:
    """All that decides which engine is built.

    Args:
        source_sha256: ``content_sha256`` of the ONNX file, before any patch.
        precision: ``fp32``, ``fp16``, ... that is asked for. typing: ``strong`` or ``weak``.
        profiles: name of the file's tensor -> three shapes, least, usual and largest.
        patches: name -> version, of those that are to be made where the graph has what they are for.
        gpu, capability, driver: as CUDA gives them, e.g. ``Orin``, ``8.7``, ``12.6``. tensorrt: version of the library.
        options: of the build, name -> value.
    """

    source_sha256: str
    precision: str
    typing: str
    profiles: Mapping[str, list[list[int]]]
    patches: Mapping[str, int]
    gpu: str
    capability: str
    driver: str
    tensorrt: str
    options: Mapping[str, object] = field(default_factory=dict)

    def facts(self) -> dict:
        """Plain JSON values, by the names that the header of an engine has for them."""
        return json.loads(json.dumps(asdict(self), sort_keys=True))

    def key(self) -> str:
        """SHA-256 over all of it."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()


def differences(header: Mapping[str, object], wish: EngineWish) -> list[str]:
    """Why an engine is not the one that is wished for, in words; empty: it is.

    Args:
        header: the field ``engine`` of its header (``runtimes.engine_file``).
    """
    if header.get("key") == wish.key():
        return []
    found = []
    for name, new in wish.facts().items():
        old = header.get(name)
        if old == new:
            continue
        if isinstance(new, dict):
            found += _in_mapping(name, old if isinstance(old, dict) else {}, new)
        else:
            found.append(_WORDS[name] if name == "source_sha256" else f"{_WORDS[name]} {new}, was {old}")
    return found or ["it was built by another version of vslam_features"]


def _in_mapping(name: str, old: dict, new: dict) -> list[str]:
    what = {"patches": "patch", "profiles": "shapes of", "options": "option"}[name]
    return [
        f"{what} {key} {_text(new.get(key))}, was {_text(old.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join("x".join(map(str, shape)) if isinstance(shape, list) else str(shape) for shape in value)
    return "none" if value is None else str(value)
