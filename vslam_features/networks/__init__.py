"""Networks from the published architectures: ONNX graphs, MegaLoc in torch; nothing at run time imports them."""

from __future__ import annotations

import hashlib
from importlib import resources


def revision(early_stop: bool = False) -> str:
    """Twelve digits that change with any of these files: a model built by others is built again.

    ``early_stop``: of a model that stops early, which files of ``graph`` make as well.
    """
    digest, here = hashlib.sha256(), resources.files(__package__)
    for folder in (here, *([resources.files("vslam_features") / "graph"] if early_stop else [])):
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            if file.name.endswith(".py"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
