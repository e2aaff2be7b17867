"""Dense features in the front-end node: a real process, whose map holds their keyframes."""

import numpy as np
import pytest

pytest.importorskip("rclpy")

from dense_models import DENSE, MAP, place_dense_models
from model_helpers import GLOBAL_CARD, global_model, own_cache, save  # noqa: F401 (fixture)
from ros_helpers import CLOUDS, sequence
from test_models_node import Watch, node

from vslam_features.maps.reader import MapReader
from vslam_features.types import Status


def test_a_node_of_dense_features_matches_and_stores_them(domain, tmp_path, own_cache):  # noqa: F811
    place_dense_models()
    save(global_model(), GLOBAL_CARD)
    house = tmp_path / "house.vmap"
    parameters = {**DENSE, "retrieval.exclude_s": 0.25, "rectified": "yes", "map_path": str(house)}
    with node(domain, tmp_path, parameters) as process, Watch(domain) as peer:
        peer.feed(sequence(6))
        assert [peer.value(stage, "plugin") for stage in ("describe", "match")] == ["flexglue", "flexglue"]
        pairs = np.concatenate([CLOUDS["pairs"](m) for m in peer.clouds["pairs"]])
        track = pairs[pairs["kind"] == 0]
        assert len(track) == 5 and (track["status"] == Status.OK).all(), track
        assert (track["num_matches"] > 40).all() and (track["covisibility"] > 0.05).all()
        points = [len(CLOUDS["keyframes"](m)) for m in peer.clouds["keyframes"]]
        assert process.stop() == 0, process.output
    with MapReader(house) as reader:
        stored = [reader.keyframe(header.id).features for header in reader.headers()]
    assert [len(f) for f in stored] == points and len(points) == 6
    assert {(f.descriptors.shape, f.descriptors.dtype) for f in stored} == {(MAP, np.dtype(np.float16))}
