"""The tiny MegaLoc in the front-end node, a real process over DDS: its maps, and what it says of the model."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy")
sys.path.insert(0, str(Path(__file__).parents[1] / "ros"))

from megaloc_helpers import NAME, SETTINGS, model_file, other_preprocessing, other_weights
from ros_domain import domain  # noqa: F401 (fixtures)
from ros_helpers import CLOUDS, sequence
from test_map_node import Caller, headers, keyframe_tables, make_map, state  # noqa: F401
from test_models_node import OK, WARN, Watch, node

from vslam_features.artifacts import records
from vslam_features.artifacts.card import read_card, sidecar_path
from vslam_features.artifacts.store import content_sha256
from vslam_features.maps.reader import MapReader

pytestmark = [pytest.mark.ros, pytest.mark.usefixtures("megaloc", "state")]
PARAMETERS = {**SETTINGS, "retrieval.exclude_s": 0.25, "rectified": "yes"}
EXCLUDED = 2  # images before the newest one of 10 a second
FRAMES, MORE = 8, 2


def global_model(path) -> str:
    """What a map says of its global descriptors."""
    with MapReader(path) as m:
        return str(m.models.global_descriptor)


def wait_described(peer) -> None:
    """Wait until diagnostics tell of all images' global descriptors."""
    peer.wait_keyframes(FRAMES)
    stages = ("global", f"model {NAME}")
    peer.spin_until(lambda: [peer.value(stage, "runs") for stage in stages] == [str(FRAMES)] * 2)


def candidates(peer) -> dict[int, list[int]]:
    """Keyframe -> ids of its candidates, best first."""
    table = np.concatenate([CLOUDS["loop_candidates"](m) for m in peer.clouds["loop_candidates"]])
    table = table[np.lexsort((table["rank"], table["kf_id"]))]
    return {int(i): table["ref_kf_id"][table["kf_id"] == i].tolist() for i in np.unique(table["kf_id"])}


def nearest(path, first: int, last: int) -> dict[int, list[int]]:
    """The same of the keyframes ``first`` to ``last`` of a map, by sums in f64; ``first``: that of their session."""
    with MapReader(path) as m:
        d = np.stack([d for _, d in m.global_descriptors()]).astype(np.float64)
    limits = {i: first if i - EXCLUDED <= first else i - EXCLUDED for i in range(first, last)}
    ranked = {i: np.argsort(-(d[:limit] @ d[i]), kind="stable")[:5].tolist() for i, limit in limits.items()}
    return {i: ids for i, ids in ranked.items() if ids}


def others(tmp_path, frames) -> dict[Path, str]:
    """Maps of other global descriptors -> what a refusal must name."""
    own, path = model_file().read_bytes(), tmp_path / "seed.vmap"
    other_weights(source_sha256="ab" * 32)
    made = {make_map(path, frames, **PARAMETERS): f"weights {content_sha256(model_file())[:12]}"}
    model_file().write_bytes(own)
    other_preprocessing()
    made[make_map(tmp_path / "kernel.vmap", frames, **PARAMETERS)] = "-area"
    sidecar_path(model_file()).unlink()
    plain = {n: v for n, v in PARAMETERS.items() if not n.startswith("retrieval.")}
    made[make_map(tmp_path / "vlad.vmap", frames, **plain, **{"retrieval.name": "vlad"})] = "global 'vlad'"
    return made


def test_maps_are_saved_loaded_and_refused_by_both_names(domain, tmp_path):  # noqa: F811
    frames, saved, running = sequence(FRAMES + MORE), tmp_path / "saved.vmap", tmp_path / "running.vmap"
    refused = others(tmp_path, frames[:2])
    with node(domain, tmp_path, {**PARAMETERS, "map_path": running}) as process, Watch(domain) as peer:
        call = Caller(peer)
        peer.feed(frames[:FRAMES])
        wait_described(peer)
        assert sorted(keyframe_tables(peer)) == list(range(FRAMES))
        assert call.set_path(saved)
        answer = call("save_map")
        assert answer.success and f"{FRAMES} keyframes in {saved}" in answer.message
        assert candidates(peer) == nearest(saved, 0, FRAMES) and len(candidates(peer)) == FRAMES - EXCLUDED - 1

        sha256 = content_sha256(model_file())
        card_id = records.card_id(read_card(model_file()))
        (record,) = [r for r in records.records_of(sha256) if (r.runtime, r.card) == ("onnxruntime", card_id)]
        values = peer.values(f"model {NAME}")
        assert (values["role"], values["precision"], values["engine_id"]) == ("global", "fp32", sha256[:16])
        assert values["runtime"].startswith("onnxruntime") and values["verified"] == record.summary
        assert (values["runs"], values["non_finite"], values["errors"], values["lost"]) == (str(FRAMES), "0", "0", "0")
        assert {level for level, _ in peer.said(f"model {NAME}")} == {OK}
        assert (peer.value("global", "plugin"), peer.value("global", "runs")) == ("megaloc", str(FRAMES))
        assert "onnxruntime" in peer.value("global", "runtime") and peer.value("global", "faults") == "0"

        for path, name in refused.items():
            assert call.set_path(path)
            answer = call("load_map")
            texts = [str(path), name, global_model(path), global_model(saved), "retrieval.name"]
            assert not answer.success and all(t in answer.message for t in texts), answer.message
            assert "\n" not in answer.message and len(headers(path)) == 2

        assert call.set_path(saved)
        answer = call("load_map")
        assert answer.success and f"{saved} is continued: {FRAMES} keyframes" in answer.message
        peer.clouds.clear()
        peer.publish(frames[FRAMES:])
        peer.wait_told(FRAMES + MORE)
        peer.wait_keyframes(MORE)
        peer.spin_until(lambda: peer.value("map", "stored") == str(FRAMES + MORE))
        assert process.stop() == 0
    assert "Traceback" not in process.output and len(headers(running)) == FRAMES
    assert candidates(peer) == nearest(saved, FRAMES, FRAMES + MORE), "all of the map, from the first image on"


def test_a_node_with_a_map_of_another_model_does_not_start(domain, tmp_path):  # noqa: F811
    for path, name in others(tmp_path, sequence(2)).items():
        with node(domain, tmp_path, {**PARAMETERS, "map_path": path}) as process:
            assert process.wait() == 1
        lines = [line for line in process.output.splitlines() if line.strip()]
        assert "configure failed" in lines[-1] and name in lines[-1] and "Traceback" not in process.output
        assert global_model(path) in lines[-1] and f"the front-end runs global '{NAME}'" in lines[-1]


@pytest.mark.slow
def test_nan_is_made_good_by_the_fallback_and_told_once(domain, tmp_path):  # noqa: F811
    """In localisation in a map, by the fake runtime, which runs the same file."""
    frames = sequence(FRAMES)
    path = make_map(tmp_path / "a.vmap", frames, **PARAMETERS)
    broken = {"runtime.name": "fake", "runtime.options.only": NAME, "runtime.options.nan_calls": "'3'"}
    parameters = {**PARAMETERS, **broken, "map_path": path, "mode": "localization"}
    with node(domain, tmp_path, parameters) as process, Watch(domain) as peer:
        peer.feed(frames)
        wait_described(peer)
        best = {kf_id - FRAMES: ids[0] for kf_id, ids in candidates(peer).items()}
        alike = [next(j for j, old in enumerate(frames) if np.array_equal(old.image, f.image)) for f in frames]
        assert best == dict(enumerate(alike)), "the same image, also where the fallback described it"
        values = peer.values(f"model {NAME}")
        counts = {n: values[n] for n in ("runs", "non_finite", "recovered", "lost", "incidents")}
        assert counts == {"runs": str(FRAMES), "non_finite": "1", "recovered": "1", "lost": "0", "incidents": "1"}
        assert values["runtime"].startswith("fake(onnxruntime)") and "not finite" in values["last_fault"]
        assert [level for level, _ in peer.said(f"model {NAME}")][:2] == [OK, WARN]
        assert (peer.value("global", "faults"), peer.value("map", "mode")) == ("0", "localization")
        assert process.stop() == 0
    assert "Traceback" not in process.output
