"""``models collect``: which pairs are chosen, of constructed tracks, and what becomes of the files."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vslam_features.artifacts import incidents, saved_pairs
from vslam_features.artifacts.card import ModelCard
from vslam_features.artifacts.cases import saved_cases
from vslam_features.artifacts.saved_pairs import KINDS, SavedPair, load, pairs_in, require_same_features, save
from vslam_features.errors import DataError, IdentityError
from vslam_features.replay.collect import NEAR, SeenPair, choose, enough, look_wide, shares
from vslam_features.types import ModelIdentity, PairKind, Status

T0, SECOND = 1_760_000_000_123_456_789, 10**9
XFEAT = ModelIdentity("features", "xfeat", "ab" * 32, "any")
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def seen(kf_id, ref, matches, kind=PairKind.TRACK, status=Status.OK, moved=0.0, inliers=None):
    inliers = matches if inliers is None else inliers
    return SeenPair(kf_id, ref, T0 + kf_id * SECOND, T0 + ref * SECOND, kind, status, matches, inliers, moved)


def walk(count=60, shift=10):
    """A walk along a wall of which each keyframe sees ``10 * shift`` pixels: neighbours lose ``shift`` a step.

    Adjacent pairs have 100 - shift matches and so on; after half of it, it is seen again from the beginning.
    """
    adjacent = [seen(i, i - 1, 100 - shift + i % 3) for i in range(1, count)]
    loops = [seen(i, i - count // 2, 30 + i % 7, PairKind.LOOP) for i in range(count // 2, count)]
    return adjacent + loops


def ids(choice, kind):
    return [(p.kf_id, p.ref_kf_id) for k, p in choice.pairs if k == kind]


# -- the choice ------------------------------------------------------------------------------------


def test_eight_pairs_are_six_hard_ones_and_two_controls_as_in_the_document():
    assert shares(8) == {"wide": 3, "revisit": 3, "control": 2}
    assert shares(1) == {"wide": 1, "revisit": 0, "control": 0}
    assert all(sum(shares(n).values()) == n for n in range(100))


def test_wide_pairs_are_those_that_verify_with_the_fewest_matches():
    wide = [seen(20, 10, 25), seen(40, 33, 22), seen(50, 42, 60), seen(30, 21, 19)]
    nothing = [
        seen(25, 5, 90, status=Status.TOO_FEW_INLIERS), seen(26, 6, 0, status=Status.NO_MATCHES),
        seen(27, 7, 9, status=Status.DEGENERATE),
    ]  # fmt: skip
    choice = choose(walk() + wide + nothing, 8)
    assert ids(choice, "wide") == [(30, 21), (40, 33), (20, 10)] and not choice.notes


def test_of_equals_that_which_moved_most_is_wider():
    wide = [seen(20, 10, 25, moved=0.1), seen(40, 33, 25, moved=0.4), seen(50, 42, 25, moved=0.2)]
    assert ids(choose(wide, 2), "wide") == [(40, 33), (50, 42)]


def test_revisits_are_verified_loops_first_then_those_with_most_matches():
    loops = [
        seen(40, 2, 50, PairKind.LOOP), seen(50, 12, 20, PairKind.RELOCALISATION),
        seen(60, 22, 80, PairKind.LOOP, Status.AMBIGUOUS), seen(70, 32, 30, PairKind.LOOP, Status.TOO_FEW_INLIERS),
        seen(80, 42, 0, PairKind.LOOP, Status.STOPPED_EARLY),
    ]  # fmt: skip
    choice = choose(loops, 8)
    assert ids(choice, "revisit") == [(50, 12), (40, 2), (60, 22), (70, 32)], "one without a match proves nothing"
    assert choice.notes == (
        "0 of 3 wide pairs wanted were found", "0 of 2 control pairs wanted were found",
        "more of others instead: 1 revisit", "4 of 8 pairs in all",
    )  # fmt: skip


def test_pairs_on_which_the_model_failed_come_first_and_are_no_controls():
    recovered, nan = Status.FAULT_RECOVERED, Status.NON_FINITE
    found = [
        seen(20, 10, 90, status=recovered), seen(40, 33, 22), seen(33, 22, 0, status=nan),
        seen(50, 5, 0, PairKind.LOOP, Status.BACKEND_ERROR), seen(60, 9, 20, PairKind.LOOP),
        seen(9, 8, 50, status=recovered), seen(8, 7, 0, status=nan), seen(7, 6, 90),
    ]  # fmt: skip
    choice = choose(found, 8)
    assert ids(choice, "wide") == [(33, 22), (20, 10), (40, 33)]
    assert ids(choice, "revisit") == [(50, 5), (60, 9)] and ids(choice, "control") == [(7, 6)]


def test_controls_are_adjacent_keyframes_of_a_middling_number():
    adjacent = [seen(i * 10, i * 10 - 1, n) for i, n in enumerate((300, 100, 200, 20, 260), 1)]
    assert ids(choose(adjacent, 2), "control") == [(30, 29), (50, 49)]


def test_pairs_show_different_places():
    """Ten keyframes that come back to one place make one revisit, not three."""
    loops = [seen(50 + i, 10 + i, 20 + i, PairKind.LOOP) for i in range(10)] + [seen(90, 70, 60, PairKind.LOOP)]
    chosen = ids(choose(loops + walk(), 8), "revisit")
    assert chosen[0] == (50, 10)
    for i, (a, b) in enumerate(chosen):
        assert all(abs(a - c) > NEAR or abs(b - d) > NEAR for c, d in chosen[:i])


def test_where_there_is_one_place_only_all_of_its_pairs_are_good_enough():
    loops = [seen(50 + i, 10 + i, 20 + i, PairKind.LOOP) for i in range(3)]
    assert len(ids(choose(loops, 3), "revisit")) == 3


def test_missing_wide_pairs_are_made_up_for_and_told():
    choice = choose(walk(), 8)
    assert [choice.count(kind) for kind in KINDS] == [0, 6, 2]
    assert choice.notes == ("0 of 3 wide pairs wanted were found", "more of others instead: 3 revisit")
    assert choose([], 8).pairs == () and choose([], 8).notes[-1] == "0 of 8 pairs in all"


def test_enough_is_as_many_hard_ones_of_either_kind_and_controls():
    assert enough(walk(), 8)
    assert not enough([p for p in walk() if p.kind is PairKind.TRACK], 8)
    assert not enough([p for p in walk() if p.kind is PairKind.LOOP], 8)


pairs = st.lists(
    st.builds(
        seen,
        st.integers(1, 40), st.just(0), st.integers(0, 50), st.sampled_from(PairKind), st.sampled_from(Status),
        st.floats(0, 1),
    ).flatmap(lambda p: st.builds(replace, st.just(p), ref_kf_id=st.integers(0, p.kf_id - 1))),
    max_size=60,
)  # fmt: skip


@given(pairs, st.integers(1, 20))
def test_any_pairs_make_a_choice_of_the_wanted_number_where_there_are_so_many(found, wanted):
    last = {(p.kf_id, p.ref_kf_id): p for p in found}  # the later result of a pair is the one that counts
    worth = [p for p in last.values() if p.worth]
    choice = choose(found, wanted)
    assert len(choice.pairs) == min(wanted, len(worth))
    assert len({(p.kf_id, p.ref_kf_id) for _, p in choice.pairs}) == len(choice.pairs)
    assert all(kind == p.worth and (p.matches or p.failed) for kind, p in choice.pairs)
    short = any(choice.count(kind) < share for kind, share in shares(wanted).items())
    assert bool(choice.notes) == short
    assert choose(reversed(found), wanted) == choose(found, wanted) or len(last) < len(found)


# -- looking for wide pairs ------------------------------------------------------------------------


@pytest.mark.parametrize("reach", [1, 2, 3, 7, 20, 1000])
def test_the_widest_pair_that_verifies_is_found_to_a_quarter(reach):
    asked = []

    def match(new, old):
        asked.append((new, old))
        distance = new - old
        return seen(new, old, 200 - distance, status=Status.OK if distance <= reach else Status.TOO_FEW_INLIERS)

    found = look_wide(range(100), match, anchors=5)
    assert len(set(asked)) == len(asked) <= 5 * 12
    assert all(p.kf_id - p.ref_kf_id <= reach and p.kf_id - p.ref_kf_id >= 2 for p in found)
    if reach == 1:
        assert not found
        return
    widest = max(p.kf_id - p.ref_kf_id for p in found if p.kf_id == 99)
    assert min(reach, 99) * 0.75 <= widest <= min(reach, 99)


def test_what_is_looked_at_are_keyframes_that_are_there():
    def match(new, old):
        assert new in ids_ and old in ids_ and old < new
        return seen(new, old, 10)

    for count in range(6):
        ids_ = [7 + i for i in range(count)]
        calls = []
        found = look_wide(ids_, match, 3, lambda *at, calls=calls: calls.append(at))
        assert bool(found) == (count > 2)
        assert not calls or calls[-1][0] == calls[-1][1]


# -- files -----------------------------------------------------------------------------------------


def a_pair(dense=False, features=XFEAT, **fields) -> SavedPair:
    rng, inputs = np.random.default_rng(3), {}
    for side, n in enumerate((5, 7)):
        inputs[f"keypoints{side}"] = rng.uniform(0, 99, (n, 2)).astype(np.float32)
        inputs[f"descriptors{side}"] = rng.normal(size=(8, 3, 4) if dense else (n, 8)).astype(np.float32)
        inputs[f"image_size{side}"] = np.array([640, 480], np.float32)
    known = {"kind": "wide", "stamps_ns": (T0 + 7, T0), "keyframes": (12, 3), "matcher": "lighterglue"}
    return SavedPair(**{**known, "matches": 40, "inliers": 30, "source": "walk", **fields}, features=features,
                     inputs=inputs)  # fmt: skip


@pytest.mark.parametrize("dense", [False, True])
def test_a_pair_comes_back_as_it_was_and_is_a_case(tmp_path, dense):
    pair = a_pair(dense)
    path = save(tmp_path / "new", pair)
    found = load(path)
    assert replace(found, inputs={}) == replace(pair, inputs={}) and found.seconds_apart == 7e-9
    for name, value in pair.inputs.items():
        assert found.inputs[name].dtype == np.float32
        np.testing.assert_array_equal(found.inputs[name], value)
    (case,) = saved_cases([tmp_path / "new"])
    assert sorted(case.runs[0]) == sorted(pair.inputs) == sorted(incidents.load_inputs(path)) and case.expected is None
    with np.load(path, allow_pickle=False) as data:  # any reader of .npz files can look at it
        assert json.loads(str(data["meta"]))["features"]["sha256"] == XFEAT.sha256


def test_incidents_and_plain_inputs_lie_beside_pairs(tmp_path):
    save(tmp_path, a_pair())
    np.savez(tmp_path / "plain.npz", **a_pair().inputs)
    incidents.Incidents(tmp_path).save("matcher", "lighterglue", "00", "fake", "NaN", a_pair().inputs, None)
    assert len(saved_cases([tmp_path])) == 3 and len(pairs_in(tmp_path)) == 1
    incident = next(p for p in tmp_path.glob("*first.npz"))
    with pytest.raises(DataError, match="is no pair that"):
        load(incident)
    with pytest.raises(DataError, match="is no incident"):
        incidents.load(next(tmp_path.glob("wide*.npz")))


def test_foreign_features_are_refused_by_name(tmp_path):
    path = save(tmp_path, a_pair())
    saved_cases([tmp_path], ModelCard("matcher", "lighterglue", "x", features_model="xfeat"))
    saved_cases([tmp_path], ModelCard("matcher", "anything", "x"))
    with pytest.raises(DataError, match=rf"{path.name}.*features of xfeat, lightglue-aliked matches .* aliked-n16"):
        saved_cases([tmp_path], ModelCard("matcher", "lightglue-aliked", "x", features_model="aliked-n16"))
    with pytest.raises(DataError, match=r"features of xfeat, effnet is a global model"):
        saved_cases([tmp_path], ModelCard("global", "effnet", "x"))


def test_a_folder_holds_pairs_of_one_identity(tmp_path):
    save(tmp_path, a_pair())
    require_same_features(tmp_path, "xfeat", XFEAT)
    require_same_features(tmp_path, "")
    with pytest.raises(IdentityError, match=r"of features 'xfeat' .* of aliked-n16: name another folder.*--force"):
        require_same_features(tmp_path, "aliked-n16")
    with pytest.raises(IdentityError, match=r"weights abababababab.*weights cdcdcdcdcdcd"):
        require_same_features(tmp_path, "xfeat", replace(XFEAT, sha256="cd" * 32))


def test_the_same_pair_has_the_same_name_and_others_of_the_same_ids_have_not(tmp_path):
    names = {save(tmp_path, p).name for p in (a_pair(), a_pair(), a_pair(source="other"), a_pair(stamps_ns=(T0, 5)))}
    assert len(names) == 3 and all(n.startswith("wide-00012-00003-") for n in names)
    np.savez(tmp_path / "mine.npz", a=np.zeros(3))
    (tmp_path / sorted(names)[0]).write_bytes(b"damaged")
    saved_pairs.remove_others(tmp_path, {tmp_path / sorted(names)[1]})
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["mine.npz", sorted(names)[1]])


def test_a_pair_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(Exception, match="No space left on device"):
        save(tmp_path, a_pair())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("keypoints0", np.zeros((5, 3), np.float32), "keypoints"),
        ("descriptors0", np.zeros((4, 8), np.float32), "descriptors"),
        ("image_size1", np.zeros(3, np.float32), "image_size"),
        ("keypoints1", np.zeros((7, 2)), "finite float32, got float64"),
        ("descriptors1", np.full((7, 8), np.nan, np.float32), "not finite"),
        ("spare", np.zeros(3, np.float32), "expected the arrays"),
    ],
)
def test_arrays_that_no_matcher_takes_are_refused_before_and_after(tmp_path, name, value, text):
    pair = a_pair()
    bad = replace(pair, inputs={**pair.inputs, name: value})
    with pytest.raises(DataError, match=text):
        save(tmp_path, bad)
    path = save(tmp_path, pair)
    with np.load(path) as data:
        meta = data["meta"]
    np.savez(path, meta=meta, **bad.inputs)
    with pytest.raises(DataError, match=rf"{path.name}.*{text}"):
        saved_cases([path])


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("schema", 2, "schema 2, this version reads 1"), ("kind", "easy", "kind is one of"),
        ("stamps_ns", [1], "description"), ("stamps_ns", [1.5, 2], "expected int"), ("features", {}, "'role'"),
        ("features", None, "description"), ("matches", "40", "expected int"), ("matches", True, "expected int"),
        ("source", None, "expected str"),
    ],
)  # fmt: skip
def test_a_description_that_breaks_is_named(tmp_path, field, value, text):
    path = save(tmp_path, a_pair())
    with np.load(path) as data:
        arrays = dict(data)
    meta = {**json.loads(str(arrays.pop("meta"))), field: value}
    np.savez(path, meta=np.array(json.dumps(meta)), **arrays)
    for reader in (load, pairs_in, incidents.load_inputs):
        with pytest.raises(DataError, match=rf"{path.name}.*{text}"):
            reader(tmp_path if reader is pairs_in else path)


@FUZZ
@given(st.data())
def test_damaged_files_raise_one_error_that_names_them(tmp_path, data):
    content = bytearray(save(tmp_path / "good", a_pair()).read_bytes())
    path = tmp_path / "damaged.npz"
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    for reader in (load, incidents.load_inputs, lambda p: saved_cases([p])):
        try:
            reader(path)
        except DataError as error:
            assert "damaged.npz" in str(error)
