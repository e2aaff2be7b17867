"""Networks from the published architectures: ONNX graphs, MegaLoc in torch; nothing at run time imports them."""

from __future__ import annotations

import hashlib
from importlib import resources


def revision() -> str:
    """Twelve digits that change with any of these files: a model built by others is built again."""
    digest = hashlib.sha256()
    for file in sorted(resources.files(__package__).iterdir(), key=lambda f: f.name):
        if file.name.endswith(".py"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
