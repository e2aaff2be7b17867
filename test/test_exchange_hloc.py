"""hloc's files: their layout as hloc reads it, and the way back into a map."""

import os
import sys

import numpy as np
import pytest
from exchange_helpers import GLOBAL, keyframe, matches, pair, write_map
from helpers import IDENTITY, two_views
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vslam_features.errors import MapDamagedError, MapError, MapFileError, PluginError
from vslam_features.exchange.hloc import export_hloc
from vslam_features.exchange.hloc_import import import_hloc
from vslam_features.maps.reader import MapReader
from vslam_features.maps.verify import verify
from vslam_features.maps.writer import MapWriter
from vslam_features.types import MapEntry, MapModels, ModelIdentity, PairKind, Status

h5py = pytest.importorskip("h5py", reason="pip install h5py (extra hloc)")
NETVLAD = ModelIdentity("global", "netvlad", "cd" * 32, "rgb")


def entries(count: int = 3):
    """Keyframes with a global descriptor each, each matched with the one before and the first."""
    out, keyframes = [], []
    for i in range(count):
        place = np.random.default_rng(i).normal(size=16).astype(np.float32)
        place /= np.linalg.norm(place)
        kf = keyframe(i, 12 + i, global_descriptor=place)
        found = []
        if keyframes:
            found.append(pair(kf, keyframes[-1], matches([(0, 3), (7, 1)], model="fundamental")))
        if len(keyframes) > 1:
            weak = matches([(5, 5)], [False], Status.TOO_FEW_INLIERS)
            found.append(pair(kf, keyframes[0], weak, PairKind.LOOP))
        out.append(MapEntry(kf, tuple(found)))
        keyframes.append(kf)
    return out


def export(path, what=None, models=None, **options):
    source = write_map(path / "map.vmap", entries() if what is None else what, models)
    with MapReader(source) as reader:
        export_hloc(reader, path / "hloc", **options)
    return path / "hloc"


def test_the_layout_is_hlocs(tmp_path):
    what = entries()
    folder = export(tmp_path, what)
    assert sorted(os.listdir(folder)) == ["features.h5", "global-feats.h5", "matches.h5", "pairs.txt"]
    names = ["kf_000000.png", "kf_000001.png", "kf_000002.png"]
    with h5py.File(folder / "features.h5") as features, h5py.File(folder / "global-feats.h5") as places:
        assert list(features) == list(places) == names
        for name, entry in zip(names, what):
            kf, group = entry.keyframe, features[name]
            np.testing.assert_array_equal(group["keypoints"][()], kf.features.keypoints)  # hloc adds the half pixel
            np.testing.assert_array_equal(group["scores"][()], kf.features.scores)
            np.testing.assert_array_equal(group["descriptors"][()], kf.features.descriptors.T)
            np.testing.assert_array_equal(group["image_size"][()], kf.features.image_size)
            np.testing.assert_allclose(places[name]["global_descriptor"][()], kf.global_descriptor)
    pairs = [line.split(" ") for line in (folder / "pairs.txt").read_text().splitlines()]
    assert pairs == [[names[1], names[0]], [names[2], names[0]], [names[2], names[1]]]
    with h5py.File(folder / "matches.h5") as found:
        for name0, name1 in pairs:
            group = found["/".join((name0.replace("/", "-"), name1.replace("/", "-")))]
            assert group["matches0"].shape == group["matching_scores0"].shape
        group = found[f"{names[1]}/{names[0]}"]
        assert group["matches0"].shape == (13,)
        index = np.flatnonzero(group["matches0"][()] != -1)  # as hloc's get_matches reads them
        assert np.column_stack([index, group["matches0"][()][index]]).tolist() == [[0, 3], [7, 1]]
        np.testing.assert_allclose(group["matching_scores0"][()][index], [0.9, 0.6])


def test_dense_descriptors_and_missing_global_ones_are_left_out(tmp_path):
    kf = keyframe(0)
    object.__setattr__(kf.features, "descriptors", np.zeros((4, 6, 8), np.float32))
    folder = export(tmp_path, [MapEntry(kf)], MapModels(IDENTITY))
    assert sorted(os.listdir(folder)) == ["features.h5", "matches.h5", "pairs.txt"]
    with h5py.File(folder / "features.h5") as features:
        assert sorted(features["kf_000000.png"]) == ["image_size", "keypoints", "scores"]


def test_the_same_map_gives_the_same_bytes(tmp_path):
    first = export(tmp_path)
    (tmp_path / "again").mkdir()
    second = export(tmp_path / "again")
    for name in os.listdir(first):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_an_existing_folder_is_kept_unless_told(tmp_path):
    (tmp_path / "hloc").mkdir()
    (tmp_path / "hloc" / "mine.txt").write_text("mine")
    with pytest.raises(MapError, match="not empty"):
        export(tmp_path)
    assert os.listdir(tmp_path / "hloc") == ["mine.txt"]
    with MapReader(tmp_path / "map.vmap") as reader:
        export_hloc(reader, tmp_path / "hloc", overwrite=True)
    assert len(os.listdir(tmp_path / "hloc")) == 5 and (tmp_path / "hloc" / "mine.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with MapReader(tmp_path / "map.vmap") as reader, pytest.raises(MapError, match="is a file"):
        export_hloc(reader, tmp_path / "file", overwrite=True)


def test_an_older_export_leaves_no_global_descriptors_behind(tmp_path):
    export(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    write_map(other / "map.vmap", [MapEntry(keyframe(0))], MapModels(IDENTITY))
    with MapReader(other / "map.vmap") as reader:
        export_hloc(reader, tmp_path / "hloc", overwrite=True)
    assert sorted(os.listdir(tmp_path / "hloc")) == ["features.h5", "matches.h5", "pairs.txt"]


def test_nothing_is_left_of_an_export_that_fails(tmp_path):
    kf, ref = keyframe(1, 5), keyframe(0, 5)
    beyond = pair(kf, ref, matches([(0, 0), (1, 77)], model="fundamental"))
    with pytest.raises(MapDamagedError, match="pair 1-0"):
        export(tmp_path, [MapEntry(ref), MapEntry(kf, (beyond,))])
    assert os.listdir(tmp_path) == ["map.vmap"]


def test_without_h5py_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    write_map(tmp_path / "map.vmap", entries())
    monkeypatch.setitem(sys.modules, "h5py", None)
    with MapReader(tmp_path / "map.vmap") as reader, pytest.raises(PluginError, match=r"vslam_features\[hloc\]"):
        export_hloc(reader, tmp_path / "hloc")
    with pytest.raises(PluginError, match="h5py"):
        import_hloc(tmp_path / "hloc" / "features.h5", tmp_path / "new.vmap")


def take(folder, target, **options):
    return import_hloc(
        folder / "features.h5",
        target,
        global_descriptors=folder / "global-feats.h5",
        matches=folder / "matches.h5",
        **options,
    )


def test_there_and_back(tmp_path):
    what, seen = entries(), []
    target = tmp_path / "new.vmap"
    folder = export(tmp_path, what)
    done = take(folder, target, model=IDENTITY, global_model=GLOBAL, progress=lambda *a: seen.append(a))
    assert done == 3 and seen == [(1, 3), (2, 3), (3, 3)]
    with MapReader(target) as reader:
        assert reader.models == MapModels(IDENTITY, GLOBAL)
        for entry in what:
            old, new = entry.keyframe, reader.keyframe(entry.keyframe.id)
            np.testing.assert_array_equal(new.features.keypoints, old.features.keypoints)
            np.testing.assert_array_equal(new.features.descriptors, old.features.descriptors)
            np.testing.assert_array_equal(new.features.scores, old.features.scores)
            np.testing.assert_array_equal(new.global_descriptor, old.global_descriptor)
            assert new.features.image_size == old.features.image_size
            assert new.frame_id == f"kf_{old.id:06d}.png" and new.stamp_ns == old.id * 10**9
            pairs = {p.ref_kf_id: p for p in reader.pairs(old.id)}
            assert set(pairs) == {p.ref_kf_id for p in entry.pairs}
            for p in entry.pairs:
                assert pairs[p.ref_kf_id].matches.pairs.tolist() == p.matches.pairs.tolist()
                assert pairs[p.ref_kf_id].kind is p.kind


def as_hloc(path, images: dict, half: bool = True, **extra) -> None:
    """A file as hloc's extract_features writes it: everything fp16 by default, groups nested by the name's slashes."""
    with h5py.File(path, "w", libver="latest") as file:
        for name, arrays in images.items():
            group = file.create_group(name)
            for key, value in arrays.items():
                value = np.asarray(value)
                group.create_dataset(
                    key, data=value.astype(np.float16) if half and value.dtype == np.float32 else value
                )


def image(seed: int, n: int = 10, **changes) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "keypoints": rng.uniform(0, 639, (n, 2)).astype(np.float32),
        "scores": rng.uniform(size=n).astype(np.float32),
        "descriptors": rng.normal(size=(32, n)).astype(np.float32),
        "image_size": np.array([640, 480]),
    } | changes


def test_files_that_hloc_wrote(tmp_path):
    """fp16, names in folders, both forms of pair names."""
    views = two_views(outliers=0.1)
    n = len(views.p0)
    names = ["db/1.jpg", "db/2.jpg", "query/a_b.jpg"]
    points = [views.p0, views.p1, views.p0]
    images = {k: image(i, n, keypoints=p.astype(np.float32)) for i, (k, p) in enumerate(zip(names, points))}
    as_hloc(tmp_path / "feats.h5", images, half=False)
    partner = np.arange(n, dtype=np.int16)
    found = {"matches0": partner, "matching_scores0": np.ones(n, np.float16)}
    as_hloc(
        tmp_path / "m.h5", {"db-1.jpg/db-2.jpg": found, "query-a_b.jpg_db-1.jpg": found, "query-a_b.jpg/no.jpg": found}
    )
    import_hloc(tmp_path / "feats.h5", tmp_path / "new.vmap", matches=tmp_path / "m.h5")
    with MapReader(tmp_path / "new.vmap") as reader:
        assert [h.frame_id for h in reader.headers()] == names
        assert reader.models.features.name == "feats" and reader.models.features.preprocessing == "imported"
        (forward,) = reader.pairs(1)
        # the group says 1 -> 2; the map's pair has the later image first
        assert (forward.kf_id, forward.ref_kf_id, forward.kind) == (1, 0, PairKind.TRACK)
        assert forward.matches.verified and forward.matches.model == "fundamental"
        assert (forward.matches.inliers & views.right).sum() > 0.9 * views.right.sum()
        (loop,) = reader.pairs(2)
        assert (loop.kf_id, loop.ref_kf_id, loop.kind) == (2, 0, PairKind.LOOP)


def test_the_columns_of_a_pair_follow_its_direction(tmp_path):
    as_hloc(tmp_path / "f.h5", {"a": image(0, 4), "b": image(1, 6)})
    found = {"matches0": np.array([5, -1, 0, -1]), "matching_scores0": np.array([0.75, 0, 0.5, 0], np.float32)}
    as_hloc(tmp_path / "m.h5", {"a/b": found})
    import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap", matches=tmp_path / "m.h5")
    with MapReader(tmp_path / "new.vmap") as reader:
        (found,) = reader.pairs(1)
    assert found.matches.pairs.tolist() == [[5, 0], [0, 2]] and found.matches.scores.tolist() == [0.75, 0.5]
    assert not found.matches.verified


def test_images_are_taken_in_the_order_given(tmp_path):
    as_hloc(tmp_path / "f.h5", {name: image(i) for i, name in enumerate("abcd")})
    import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap", images=["d", "b"])
    with MapReader(tmp_path / "new.vmap") as reader:
        assert [h.frame_id for h in reader.headers()] == ["d", "b"]
    for images, message in ((["d", "x"], "no group 'x'"), (["a", "a"], "twice"), ([], "empty")):
        with pytest.raises(MapFileError, match=message):
            import_hloc(tmp_path / "f.h5", tmp_path / "other.vmap", images=images)


def nan(key):
    value = image(1)[key].copy()
    value[0] = np.nan
    return {key: value}


BAD = {
    "no keypoints": ({"keypoints": np.zeros(10, "f4")}, "keypoints: 2 axes"),
    "three coordinates": ({"keypoints": np.zeros((10, 3), "f4")}, r"keypoints must be \(N, 2\)"),
    "whole keypoints": ({"keypoints": np.zeros((10, 2), "i4")}, "keypoints: 2 axes of kind 'f'"),
    "NaN keypoints": (nan("keypoints"), "keypoints is not finite"),
    "NaN descriptors": (nan("descriptors"), "descriptors is not finite"),
    "NaN scores": (nan("scores"), "scores is not finite"),
    "descriptors of others": ({"descriptors": np.zeros((32, 9), "f4")}, r"descriptors: \(D, 10\) was expected"),
    "descriptors the wrong way": ({"descriptors": np.zeros((10, 32), "f4")}, r"descriptors: \(D, 10\)"),
    "shorter descriptors": ({"descriptors": np.zeros((16, 10), "f4")}, "descriptors are of length 16"),
    "bits": ({"descriptors": np.zeros((32, 10), "u1")}, "of length 32 in uint8, those of the first image of"),
    "16 bits": ({"descriptors": np.zeros((32, 10), "u2")}, "floats or uint8"),
    "text": ({"descriptors": np.array([b"abc"])}, "descriptors: 2 axes"),
    "a scalar": ({"descriptors": np.float32(1)}, "descriptors: 2 axes"),
    "scores of others": ({"scores": np.zeros(9, "f4")}, r"scores must be \(10,\)"),
    "no size": ({"image_size": np.array([0, 480])}, "image_size"),
    "half a size": ({"image_size": np.array([640])}, "image_size"),
    "too large for fp32": ({"descriptors": np.full((32, 10), 1e300)}, "descriptors is not finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_dataset_is_named_and_nothing_is_left(tmp_path, name):
    changes, message = BAD[name]
    as_hloc(tmp_path / "f.h5", {"a.png": image(0), "b.png": image(1, **changes)}, half=False)
    with pytest.raises(MapFileError, match=message) as caught:
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap")
    assert "f.h5, group b.png" in str(caught.value) and os.listdir(tmp_path) == ["f.h5"]


@pytest.mark.parametrize("missing", ["descriptors", "image_size"])
def test_a_missing_dataset_is_named(tmp_path, missing):
    images = {"a.png": image(0), "b.png": image(1)}
    del images["b.png"][missing]
    as_hloc(tmp_path / "f.h5", images)
    with pytest.raises(MapFileError, match=f"f.h5, group b.png: {missing} is missing"):
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap")


@pytest.mark.parametrize(
    "found, message",
    [
        ({"matches0": np.array([0, 9, -1, -1])}, "a partner that is not among 6"),
        ({"matches0": np.array([0, -2, -1, -1])}, "a partner that is not"),
        ({"matches0": np.array([0, -1])}, r"\(4,\) were expected"),
        ({"matches0": np.array([0.0, -1, -1, -1])}, "kind 'iu'"),
        ({"matching_scores0": np.zeros(3, "f4")}, r"\(4,\) were expected"),
        ({"matching_scores0": np.full(4, np.nan, "f4")}, "matching_scores0 is not finite"),
    ],
)
def test_bad_matches_are_named(tmp_path, found, message):
    as_hloc(tmp_path / "f.h5", {"a": image(0, 4), "b": image(1, 6)})
    good = {"matches0": np.array([0, 1, -1, -1]), "matching_scores0": np.zeros(4, "f4")}
    as_hloc(tmp_path / "m.h5", {"a/b": good | found})
    with pytest.raises(MapFileError, match=message) as caught:
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap", matches=tmp_path / "m.h5")
    assert "m.h5, group a/b" in str(caught.value) and not (tmp_path / "new.vmap").exists()


def test_a_keyframe_without_a_global_descriptor_comes_back_without(tmp_path):
    what = entries()
    object.__setattr__(what[1].keyframe, "global_descriptor", None)
    target = tmp_path / "new.vmap"
    assert take(export(tmp_path, what), target, model=IDENTITY, global_model=GLOBAL) == 3
    with MapReader(target) as reader:
        assert [kf_id for kf_id, _ in reader.global_descriptors()] == [0, 2]
        assert reader.keyframe(1).global_descriptor is None and len(reader.pairs(1)) == 1
    assert not verify(target).damaged


def test_global_descriptors_are_of_unit_length_in_the_map(tmp_path):
    as_hloc(tmp_path / "f.h5", {"a": image(0), "b": image(1), "c": image(2)})
    places = {"a": np.full(4, 3, np.float32), "b": np.full(4, 0.5, np.float32), "c": np.zeros(4, np.float32)}
    as_hloc(tmp_path / "g.h5", {name: {"global_descriptor": place} for name, place in places.items()})
    import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap", global_descriptors=tmp_path / "g.h5")
    with MapReader(tmp_path / "new.vmap") as reader:
        assert [d.tolist() for _, d in reader.global_descriptors()] == [[0.5] * 4, [0.5] * 4, [0] * 4]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MapFileError, match="f.h5: there is no such file"):
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap")


def test_global_descriptors_of_other_images_or_of_two_lengths_are_named(tmp_path):
    as_hloc(tmp_path / "f.h5", {"a": image(0), "b": image(1)})
    place = np.ones(8, np.float32)
    as_hloc(tmp_path / "g.h5", {"c": {"global_descriptor": place}})
    with pytest.raises(MapFileError, match="g.h5: no group 'a' .* of other images"):
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap", global_descriptors=tmp_path / "g.h5")
    as_hloc(tmp_path / "g.h5", {"a": {"global_descriptor": place}, "b": {"global_descriptor": place[:5]}})
    with pytest.raises(MapFileError, match="g.h5, group b: the global descriptor has 5 numbers"):
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap", global_descriptors=tmp_path / "g.h5")


def test_files_that_are_none(tmp_path):
    for content, message in ((b"", "no HDF5 file"), (b"\x89HDF\r\n\x1a\n" + bytes(100), "no HDF5 file")):
        (tmp_path / "f.h5").write_bytes(content)
        with pytest.raises(MapFileError, match=message):
            import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap")
    with pytest.raises(MapFileError, match="nowhere.h5"):
        import_hloc(tmp_path / "nowhere.h5", tmp_path / "new.vmap")
    as_hloc(tmp_path / "f.h5", {"a": {"other": np.zeros(3)}})
    with pytest.raises(MapFileError, match="no features of hloc"):
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap")


def test_links_out_of_the_file_are_not_followed(tmp_path):
    as_hloc(tmp_path / "secret.h5", {"a": image(0)})
    as_hloc(tmp_path / "f.h5", {"a": image(0)})
    with h5py.File(tmp_path / "f.h5", "r+") as file:
        del file["a/descriptors"]
        file["a/descriptors"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/a/descriptors")
    with pytest.raises(MapFileError, match="group a: descriptors is a link"):
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap")
    (tmp_path / "raw").write_bytes(bytes(32 * 10 * 4))
    with h5py.File(tmp_path / "f.h5", "r+") as file:
        del file["a/descriptors"]
        raw = [(str(tmp_path / "raw").encode(), 0, 1280)]
        file["a"].create_dataset("descriptors", (32, 10), "f4", external=raw)
    with pytest.raises(MapFileError, match="descriptors is no dataset of this file"):
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap")


def test_absurd_sizes_are_not_read(tmp_path):
    as_hloc(tmp_path / "f.h5", {"a": image(0)})
    with h5py.File(tmp_path / "f.h5", "r+") as file:
        del file["a/descriptors"]
        file["a"].create_dataset("descriptors", (2**20, 2**24), "f4", chunks=True)
    with pytest.raises(MapFileError, match="over 64 MiB"):
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap")


def test_a_group_that_contains_itself_ends(tmp_path):
    as_hloc(tmp_path / "f.h5", {"a": image(0)})
    with h5py.File(tmp_path / "f.h5", "r+") as file:
        file["a/again"] = file["a"]
    assert import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap") == 1


def test_without_an_identity_a_map_gets_one_of_its_own(tmp_path):
    identities = []
    for seed in (0, 1):
        as_hloc(tmp_path / "f.h5", {"a": image(seed)})
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap", overwrite=True)
        with MapReader(tmp_path / "new.vmap") as reader:
            identities.append(reader.models.features)
    assert identities[0] != identities[1] and identities[0].preprocessing == "imported"


def test_a_target_that_somebody_writes_to_is_not_replaced(tmp_path):
    as_hloc(tmp_path / "f.h5", {"a": image(0)})
    with MapWriter(tmp_path / "new.vmap", MapModels(IDENTITY), create=True):
        with pytest.raises(MapError, match="another process"):
            import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap", overwrite=True)
    with pytest.raises(MapError, match="there already"):
        import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap")
    assert import_hloc(tmp_path / "f.h5", tmp_path / "new.vmap", overwrite=True) == 1


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    exported = export(folder)
    return {name: (exported / name).read_bytes() for name in ("features.h5", "global-feats.h5", "matches.h5")}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["features.h5", "global-feats.h5", "matches.h5"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 255),
    st.booleans(),
)
def test_damage_is_an_error_or_a_map(files, tmp_path, name, place, byte, cut):
    for other, content in files.items():
        content = bytearray(content)
        if other == name:
            at = int(place * len(content))
            if cut:
                del content[at:]
            else:
                content[at] = byte
        (tmp_path / other).write_bytes(content)
    target = tmp_path / "new.vmap"
    try:
        take(tmp_path, target, overwrite=True)
    except MapError:
        return
    with MapReader(target) as reader:
        for header in reader.headers():
            reader.keyframe(header.id)
