"""A map of thousands of keyframes with descriptors as long as MegaLoc's, opened by a front-end."""

import numpy as np
import onnx
import pytest
import spox.opset.ai.onnx.v18 as op
from helpers import SECOND, T0, features, frame, image, unit
from model_helpers import build, card, save
from spox import Tensor, argument

from vslam_features.artifacts.preprocessing import Preprocessing
from vslam_features.config import Config
from vslam_features.frontend import FrontEnd
from vslam_features.maps.file_store import FileStore
from vslam_features.maps.keyframe_map import KeyframeMap
from vslam_features.maps.reader import MapReader
from vslam_features.maps.writer import MapWriter
from vslam_features.retrieval.exact import BLOCK_BYTES
from vslam_features.types import Keyframe, MapEntry

COUNT, DIM, TOP_K, ALIKE = 3000, 8448, 5, 8
PLACES = (0, 17, 1023, 1024, 1768, COUNT - 1)  # keyframes that queries are images of, some where blocks end


def wide_model() -> onnx.ModelProto:
    """The picture in 8x8 pixels, without its mean, by a random matrix: as many numbers as MegaLoc has."""
    pixels = argument(Tensor(np.float32, (1, 1, 32, 32)))
    small = op.reshape(op.average_pool(pixels, kernel_shape=[4, 4], strides=[4, 4]), op.const(np.array([1, 64])))
    centred = op.sub(small, op.reduce_mean(small))
    wide = op.matmul(centred, op.const(np.random.default_rng(0).normal(size=(64, DIM)).astype(np.float32)))
    return build({"image": pixels}, {"descriptor": op.div(wide, op.reduce_l2(wide))})


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Opens a map with an index; the model is in the module's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path_factory.mktemp("wide")))
        save(wide_model(), card("global", "wide", preprocessing=Preprocessing("grey", 32, 32, "area")))
        settings = {"features.name": "sift", "features.max_keypoints": 50, "matcher.name": "nearest",
                    "retrieval.name": "megaloc", "retrieval.options.model": "wide", "retrieval.top_k": TOP_K,
                    "keyframes.every": 1, "threads": 1, "runtime.threads": 1}  # fmt: skip

        def open_(path=None, index="flat"):
            front_end = FrontEnd(Config.from_flat({**settings, "retrieval.index": index}))
            if path is not None:
                front_end.use_map(KeyframeMap(FileStore(path, front_end.map_models, read_only=True)))
            return front_end

        yield open_


@pytest.fixture(scope="module")
def frames():
    return [frame(image(seed=i), T0 + i * SECOND) for i in range(len(PLACES))]


@pytest.fixture(scope="module")
def path(opened, frames, tmp_path_factory):
    """A map of random descriptors; the image of each place is there once, and what differs from it by hardly anything
    several times: by the last bit of some numbers in half precision."""
    rng, front_end = np.random.default_rng(1), opened()
    descriptors = unit(rng, COUNT, DIM).astype(np.float16)
    free = np.setdiff1d(np.arange(COUNT), PLACES)
    for place, shown in zip(PLACES, frames):
        own = front_end.process(shown)[1].keyframe.global_descriptor.astype(np.float16)
        descriptors[place] = own
        for row in rng.choice(free, ALIKE, replace=False):
            moved = np.where(rng.random(DIM) < 0.1, np.nextafter(own, np.float16(1)), own)
            descriptors[row] = moved
    path = tmp_path_factory.mktemp("map") / "large.vmap"
    writer = MapWriter(path, front_end.map_models, create=True)
    local = features(unit(rng, 1, 128), size=(160, 120), model=front_end.features.identity)
    entries = [
        MapEntry(Keyframe(i, T0 + i * SECOND, "cam", local, global_descriptor=d)) for i, d in enumerate(descriptors)
    ]
    for i in range(0, COUNT, 250):
        writer.append(*entries[i : i + 250])
    writer.close()
    return path


@pytest.fixture(scope="module")
def stored(path) -> np.ndarray:
    """(COUNT, DIM) f16, as the file has them."""
    with MapReader(path) as m:
        found = dict(m.global_descriptors())
    assert sorted(found) == list(range(COUNT))
    return np.stack([found[i] for i in range(COUNT)])


@pytest.mark.parametrize("index, itemsize", [("flat", 4), ("faiss", 2)])
def test_a_large_map_is_opened_and_searched_exactly(opened, path, stored, frames, index, itemsize):
    assert stored.dtype == np.float16
    front_end, payload = opened(path, index), COUNT * DIM * itemsize
    assert len(front_end.index) == COUNT
    assert payload < front_end.index.nbytes <= payload + BLOCK_BYTES + 8 * COUNT
    wide = stored.astype(np.float64)
    for place, shown in zip(PLACES, frames):
        tracked, loops = front_end.process(shown)
        assert not tracked.faults and not loops.faults
        query = loops.keyframe.global_descriptor
        np.testing.assert_array_equal(query, stored[place].astype(np.float32), strict=True)
        similarity = (wide * query.astype(np.float64)).sum(axis=1)
        best = np.lexsort((np.arange(COUNT), -similarity))[:TOP_K]
        assert [c.ref_kf_id for c in loops.candidates] == best.tolist()
        assert [np.float32(c.similarity) for c in loops.candidates] == similarity[best].astype(np.float32).tolist()
        assert np.ptp(similarity[best]) < 1e-4 and similarity[best[-1]] > 0.99, "or the order were easy"
    assert len(front_end.index) == COUNT, "localisation adds nothing"
    front_end.keyframes.close()
