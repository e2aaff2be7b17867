"""A disk that is full, and folders that cannot be written: the reason is told, and nothing half-written is left."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exchange_helpers import keyframe, matches, pair, write_map
from test_exchange_legacy import record, write

from vslam_features.types import MapEntry

CALLS = {
    "colmap": "from vslam_features.exchange.colmap import export_colmap as f; f(MapReader('map.vmap'), Path('out'))",
    "hloc": "from vslam_features.exchange.hloc import export_hloc as f; f(MapReader('map.vmap'), Path('out'))",
    "legacy": "from vslam_features.exchange.legacy import import_legacy as f; f(Path('old'), Path('out'))",
    "from hloc": "from vslam_features.exchange.hloc_import import import_hloc as f; "
    "f(Path('hloc/features.h5'), Path('out'))",
}
PROGRAM = """
import resource, sys
from pathlib import Path
from vslam_features.errors import MapError
from vslam_features.maps.reader import MapReader
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    {call}
except MapError as error:
    print("MapError:", error)
else:
    print("done")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A map, a map of tinynav and files of hloc, some 300 kB each."""
    out = tmp_path_factory.mktemp("disk")
    keyframes = [keyframe(i, 1500) for i in range(4)]
    found = [(i, i) for i in range(1500)]
    entries = [MapEntry(keyframes[0])]
    for older, newer in zip(keyframes, keyframes[1:]):
        entries.append(MapEntry(newer, (pair(newer, older, matches(found, model="fundamental")),)))
    write_map(out / "map.vmap", entries)
    write(out / "old", {t: record(t, 200, half=False) for t in (5, 6)})
    h5py = pytest.importorskip("h5py", reason="pip install h5py (extra hloc)")
    (out / "hloc").mkdir()
    with h5py.File(out / "hloc" / "features.h5", "w") as file:
        for i in range(4):
            data = {"keypoints": np.ones((500, 2), "f4"), "descriptors": np.random.rand(128, 500).astype("f4")}
            for key, value in (data | {"image_size": np.array([640, 480])}).items():
                file[f"{i}/{key}"] = value
    return out


def run(folder: Path, name: str, limit: int = 0) -> str:
    program = PROGRAM.format(call=CALLS[name])
    root = str(Path(__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", program, str(limit)],
        cwd=folder, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("limit", [1, 5_000, 60_000, 150_001], ids=["at once", "early", "later", "late"])
@pytest.mark.parametrize("name", CALLS)
def test_a_full_disk_is_told_and_nothing_is_left(folder, name, limit):
    before = sorted(os.listdir(folder))
    told = run(folder, name, limit)
    assert told.startswith("MapError:") and "out" in told
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("name", CALLS)
def test_with_room_it_is_done(folder, name):
    assert run(folder, name) == "done\n"
    out = folder / "out"
    if out.is_dir():
        for path in out.iterdir():
            path.unlink()
        out.rmdir()
    else:
        out.unlink()


@pytest.mark.parametrize("name", CALLS)
def test_a_folder_that_is_missing_is_told(folder, name):
    told = run_in_missing(folder, name)
    assert told.startswith("MapError:") and "does not exist" in told


def run_in_missing(folder: Path, name: str) -> str:
    kept = CALLS[name]
    CALLS[name] = kept.replace("'out'", "'nowhere/out'")
    try:
        return run(folder, name)
    finally:
        CALLS[name] = kept
