"""Shared fixtures. ``data_dir``: the real images, where a developer has them."""

import os
from pathlib import Path

import pytest
from fake_machine import FakeMachine
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # nothing is proved by times of a machine that does other work too
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def empty_cache(tmp_path_factory):
    """Tests see no model files and maps but those they place: what they prove must not depend on who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("VSLAM_FEATURES_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real images: ``VSLAM_FEATURES_DATA``, else ``../shared/data`` beside the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("VSLAM_FEATURES_DATA") or default)
    if not path.is_dir():
        pytest.skip(f"no real images at {path}; set VSLAM_FEATURES_DATA to their folder")
    return path


@pytest.fixture
def fake_tensorrt(monkeypatch):
    """A machine with GPU and TensorRT, both fakes, seen by this process and its children. Fails on their misuse."""
    machine = FakeMachine(monkeypatch)
    yield machine
    machine.close()
