"""Localisation and continued maps on real images: two walks of one corridor, the second is localised in the first."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from vslam_features.config import Config
from vslam_features.errors import IdentityError
from vslam_features.features.sift import Sift
from vslam_features.maps.file_store import FileStore
from vslam_features.maps.keyframe_map import KeyframeMap
from vslam_features.maps.reader import MapReader
from vslam_features.replay.loop_truth import LoopTruth
from vslam_features.replay.metrics import metrics
from vslam_features.replay.open_source import open_source
from vslam_features.replay.run_log import PLACES
from vslam_features.replay.runner import replay
from vslam_features.types import MapModels, ModelIdentity

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(600)]
CONFIG = Config.from_flat({"features.name": "sift", "matcher.name": "nearest", "retrieval.name": "vlad"})


@pytest.fixture(scope="module")
def corridor(data_dir, tmp_path_factory):
    """``truth``, ``split`` (index of the first image that revisits), folders ``first``, ``second``, ``whole``."""
    folder = data_dir / "corridor_loop"
    if not folder.is_dir():
        pytest.skip(f"no corridor_loop in {data_dir}")
    truth = LoopTruth.load(folder / "loop_matrix.png")
    split = next(i for i in range(len(truth)) if truth.has_revisit(i, exclude=10))
    base = tmp_path_factory.mktemp("corridor")
    images = sorted((folder / "images").iterdir())
    assert len(images) == len(truth) and all(truth.revisit[i, :split].any() for i in range(split, len(truth)))
    for name, part in (("first", images[:split]), ("second", images[split:])):
        (base / name).mkdir()
        for image in part:
            (base / name / image.name).symlink_to(image)
    paths = {"first": base / "first", "second": base / "second", "whole": folder / "images"}
    return SimpleNamespace(truth=truth, split=split, base=base, **paths)


def run(images, path=None, mode="new", config=CONFIG):
    with open_source(images, config) as source:
        log = replay(source, map_path=path, map_mode=mode)
    assert not log.fault_counts and not log.incomplete and (log.map is None or not log.map.problems)
    return log


@pytest.fixture(scope="module")
def first_walk(corridor):
    path = corridor.base / "first.vmap"
    run(corridor.first, path)
    return path


def of_second_walk(log, corridor):
    """recall@1, and the queries with a verified pair that is true, over the images of the second walk."""
    split, truth = corridor.split, corridor.truth
    queries = range(split, len(truth))
    top = {c.kf_id: c.ref_kf_id for c in log.candidates if c.rank == 0}
    right = [q for q in queries if q in top and truth.is_true(q, top[q])]
    places = [p for p in log.pairs if p.kind in PLACES and p.verified]
    verified = [(p.kf_id, p.ref_kf_id) for p in places if p.kf_id >= split > p.ref_kf_id]
    located = {q for q, ref in verified if truth.is_true(q, ref)}
    false = [pair for pair in verified if truth.is_false(*pair)]
    return SimpleNamespace(recall=len(right) / len(queries), located=located, top=top, false=false)


def test_a_saved_map_localises_as_well_as_a_live_one(corridor, first_walk, monkeypatch):
    split = corridor.split
    before = hashlib.sha256(first_walk.read_bytes()).hexdigest()
    log = run(corridor.second, first_walk, "localize")
    assert hashlib.sha256(first_walk.read_bytes()).hexdigest() == before
    saved, numbers = of_second_walk(log, corridor), metrics(log)["relocalisation"]

    everything = KeyframeMap.newest_older_than

    def first_walk_only(self, keyframe, seconds, count):
        """What a localisation may find, for the keyframes that it has."""
        return split - 1 if keyframe.id >= split else everything(self, keyframe, seconds, count)

    monkeypatch.setattr(KeyframeMap, "newest_older_than", first_walk_only)
    live = of_second_walk(run(corridor.whole), corridor)

    n = len(corridor.truth) - split
    assert saved.top == {q: ref for q, ref in live.top.items() if q >= split}
    assert saved.recall == live.recall >= 0.9
    # Live, loops join places of the map, so that a keyframe more may agree with the one before it.
    assert len(saved.located) >= len(live.located) - 2 and len(saved.located) >= 0.65 * n
    assert saved.false == live.false == []
    assert numbers["keyframes"] >= len(saved.located) and numbers["first"][1] <= 2


def found(path):
    """Candidates, pairs and matches of all keyframes."""
    out = []
    with MapReader(path) as m:
        for header in m.headers():
            e = m.entry(header.id)
            out.append([(c.ref_kf_id, c.similarity, c.rank) for c in e.candidates])
            for p in e.pairs:
                k = p.matches
                out.append((p.kind, p.kf_id, p.ref_kf_id, k.status, k.pairs.tobytes(), k.inliers.tobytes()))
                out.append(k.scores.tobytes())
    return out


def test_fp32_and_fp16_keyframes_side_by_side_give_the_same_matches(corridor, tmp_path, monkeypatch):
    detect = Sift._detect

    def as_of_a_half_precision_model(self, grey, mask):
        keypoints, descriptors = detect(self, grey, mask)
        return keypoints, descriptors.astype(np.float16).astype(np.float32)

    monkeypatch.setattr(Sift, "_detect", as_of_a_half_precision_model)
    config = {policy: CONFIG.with_values(features__fp16=policy) for policy in ("never", "lossless")}
    sizes = {}
    for name, policies in (("fp32", ["never"] * 2), ("fp16", ["lossless"] * 2), ("mixed", ["never", "lossless"])):
        path = tmp_path / f"{name}.vmap"
        run(corridor.first, path, "new", config[policies[0]])
        run(corridor.second, path, "continue", config[policies[1]])
        sizes[name] = path.stat().st_size
    with MapReader(tmp_path / "mixed.vmap") as m:
        kept = [m.keyframe(h.id).features.descriptors.dtype for h in m.headers()]
    assert kept == [np.float32] * corridor.split + [np.float16] * (len(kept) - corridor.split)
    fp32 = found(tmp_path / "fp32.vmap")
    assert fp32 == found(tmp_path / "fp16.vmap") and fp32 == found(tmp_path / "mixed.vmap")
    assert sizes["fp16"] < sizes["mixed"] < sizes["fp32"]


def test_a_map_of_sift_is_refused_by_other_features(corridor, first_walk):
    before = first_walk.read_bytes()
    orb = CONFIG.with_values(features__name="orb")
    for mode in ("localize", "continue"):
        with pytest.raises(IdentityError, match="features 'sift'.*features 'orb'"):
            run(corridor.second, first_walk, mode, orb)
    # The identity is all that counts, so that no files of the model are needed.
    xfeat = MapModels(ModelIdentity("features", "xfeat", "ab" * 32, "grey8"))
    for read_only in (True, False):
        with pytest.raises(IdentityError, match="features 'sift'.*features 'xfeat'"):
            FileStore(first_walk, xfeat, read_only=read_only)
    assert first_walk.read_bytes() == before
