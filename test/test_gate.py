"""The parity gate against honest runtimes and against each fault it is there for.

The model is played back from the golden outputs that ship: these are what the
published code computes, so each test changes them as a runtime would.
"""

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest

from vslam_features.artifacts import golden
from vslam_features.artifacts.card import ModelCard
from vslam_features.artifacts.cases import Case, image_cases, saved_cases, shipped_cases
from vslam_features.artifacts.gate import run_gate
from vslam_features.artifacts.gate_table import table
from vslam_features.artifacts.incidents import Incidents
from vslam_features.artifacts.preprocessing import Preprocessing
from vslam_features.errors import BackendError, DataError, ImageError, ModelFileError, NonFiniteError

NAMES = ("xfeat", "aliked-n16", "aliked-t16", "lighterglue", "lightglue-aliked", "effnet_cov")
BY_ROLE = {"features": "xfeat", "matcher": "lighterglue", "global": "effnet_cov"}


def card_of(name: str, **changes) -> ModelCard:
    """The card of a model whose golden outputs ship."""
    meta = golden.load(name).meta
    channels, *size = meta["preprocessing"].replace("x", "-").split("-")
    steps = Preprocessing(channels, int(size[0]), int(size[1]), size[2]) if size else Preprocessing(channels)
    fields = {"source_sha256": meta["source_sha256"], "preprocessing": steps, "features_model": meta["features"]}
    return ModelCard(meta["role"], name, "", **{**fields, **changes})


def key(inputs) -> bytes:
    return b"".join(np.ascontiguousarray(inputs[n]).tobytes() for n in sorted(inputs))


class Playback:
    """A model that gives the expected outputs of its cases, changed by ``fault(outputs, case number, view)``."""

    def __init__(self, cases, fault=lambda outputs, number, view: outputs):
        self.runs, self.fault = {}, fault
        for number, case in enumerate(cases):
            for view, (inputs, outputs) in enumerate(zip(case.runs, case.expected)):
                self.runs[key(inputs)] = (outputs, number, view)

    def __call__(self, inputs):
        outputs, number, view = self.runs[key(inputs)]
        return self.fault({n: v.copy() for n, v in outputs.items()}, number, view)


@pytest.fixture(scope="module")
def shipped():
    """Cases by the name of a model."""
    return {name: shipped_cases(card_of(name)) for name in NAMES}


def gate(shipped, name, fault, precision="fp32", **options):
    return run_gate(Playback(shipped[name], fault), shipped[name], card_of(name, precision=precision), **options)


# -- honest runtimes -----------------------------------------------------------------------


def rounding(level: float):
    """Relative noise of a precision: of values, and of keypoints in pixels."""
    rng = np.random.default_rng(0)

    def fault(outputs, number, view):
        for name, value in outputs.items():
            if name == "keypoints":
                value += rng.normal(0, level, value.shape)
            elif value.dtype.kind == "f":
                scale = np.sqrt(np.mean(value**2)) if "descriptor" in name else value
                value += (level * scale * rng.normal(size=value.shape)).astype(np.float32)
        return outputs

    return fault


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision, level", [("fp32", 5e-6), ("fp16", 4e-3), ("bf16", 3e-2), ("int8", 6e-2)])
def test_rounding_of_the_precision_passes(shipped, name, precision, level):
    report = gate(shipped, name, rounding(level), precision)
    assert report.passed, table(report)
    assert report.reference == "golden"


@pytest.mark.parametrize("name", ["xfeat", "aliked-n16"])
def test_swapped_ranks_and_other_keypoints_at_the_threshold_pass(shipped, name):
    def fault(o, number, view):
        order = np.arange(len(o["scores"]))
        order[10:12] = 11, 10
        order = order[: len(order) - 5]  # five of the weakest fall out, one that was weaker comes in
        o = {n: v[order] for n, v in o.items()}
        extra = {"keypoints": [[1.5, 1.5]], "scores": [o["scores"].min()], "descriptors": o["descriptors"][:1]}
        return {n: np.concatenate([v, np.asarray(extra[n], np.float32)]) for n, v in o.items()}

    report = gate(shipped, name, fault)
    assert report.passed, table(report)


def test_rows_of_score_zero_are_no_keypoints(shipped):
    def fault(o, number, view):
        padding = {"keypoints": np.zeros((9, 2)), "scores": np.zeros(9), "descriptors": np.ones((9, 64))}
        return {n: np.concatenate([v, padding[n].astype(np.float32)]) for n, v in o.items()}

    assert gate(shipped, "xfeat", fault).passed


def test_matches_at_the_threshold_may_fall_on_either_side(shipped):
    cases = [Case(c.name, c.runs, ({n: v.copy() for n, v in c.expected[0].items()},)) for c in shipped["lighterglue"]]
    for case in cases:
        matched = np.flatnonzero(case.expected[0]["matches0"] >= 0)[:5]
        case.expected[0]["mscores0"][matched] = 0.1005

    def fault(o, number, view):
        borderline = np.abs(o["mscores0"] - 0.1005) < 1e-6
        o["mscores0"][borderline] = 0.0995
        o["matches0"][borderline] = np.where(np.arange(borderline.sum()) % 2, -1, o["matches0"][borderline])
        return o

    report = run_gate(Playback(cases, fault), cases, card_of("lighterglue"))
    assert report.passed, table(report)
    assert [row.comparison.agreement for row in report.rows] == [1.0] * len(cases)
    assert all(row.comparison.matches[1] < row.comparison.matches[0] for row in report.rows)


# -- faults --------------------------------------------------------------------------------


def on(pairs, change):
    """A fault of some pairs only (None: all)."""
    return lambda o, number, view: change(o) if pairs is None or number in pairs else o


def nan_in_one_element(o):
    name = next(n for n in ("mscores0", "descriptors", "descriptor") if n in o)
    o[name].flat[7] = np.nan
    return o


def noise(o, level=0.03):
    rng = np.random.default_rng(len(o))
    for name, value in o.items():
        if value.dtype.kind == "f" and name != "keypoints":
            value += (level * np.sqrt(np.mean(value**2)) * rng.normal(size=value.shape)).astype(np.float32)
    return o


def changed(name, change):
    return lambda o: {**o, name: change(o[name])}


def infinite(o):
    return {n: v + np.float32(np.inf) if n in ("mscores0", "scores", "descriptor") else v for n, v in o.items()}


# name: role (None: any), tensor that changes (None: all outputs), pairs (None: all), change, what a reason says
FAULTS = {
    "nan": (None, None, [2], nan_in_one_element, "NaN"),
    "infinite": (None, None, [2], infinite, "NaN"),
    "noise of 3 %": (None, None, None, noise, "RMS off"),
    "noise of 10 % on one pair": (None, None, [1], lambda o: noise(o, 0.1), "RMS off"),
    "missing output": (None, None, None, lambda o: dict(list(o.items())[1:]), "is missing"),
    "no match on a pair": ("matcher", "matches0", [4], lambda m: np.full_like(m, -1), "no match"),
    "scores of zero on a pair": ("matcher", "mscores0", [4], np.zeros_like, "no match"),
    "matches one row off": ("matcher", "matches0", None, lambda m: np.roll(m, 1), "matches agree"),
    "matches of other rows": (
        "matcher",
        "matches0",
        None,
        lambda m: np.where(m < 0, m, (m + 1) % 200),
        "matches agree",
    ),
    "matches out of range": ("matcher", "matches0", [0], lambda m: m + 500, "matches0 goes"),
    "a third lost": ("matcher", "mscores0", [0], lambda s: np.where(np.arange(len(s)) % 3, s, 0), "apart"),
    "half a pixel": ("features", "keypoints", None, lambda k: k + np.float32(0.5), "shifted by (+0.50, +0.50)"),
    "x and y swapped": ("features", "keypoints", None, lambda k: k[:, ::-1], "keypoints are"),
    "permuted": ("features", "descriptors", None, lambda d: np.roll(d, 1, axis=0), "keypoints are"),
    "length 2": ("features", "descriptors", None, lambda d: 2 * d, "descriptors is 100"),
    "constant": ("features", "descriptors", None, lambda d: np.repeat(d[:1], len(d), axis=0), "no match"),
    "no keypoints": ("features", "scores", [3], np.zeros_like, "keypoints are"),
    "half of the keypoints": ("features", None, [3], lambda o: {n: v[::2] for n, v in o.items()}, "keypoints are"),
    "length 3": ("global", "descriptor", None, lambda d: 3 * d, "has length 3.0"),
    "constant descriptor": ("global", "descriptor", None, lambda d: np.full_like(d, d.size**-0.5), "cosine"),
    "zeros": ("global", "descriptor", [0], np.zeros_like, "cosine"),
    "permuted descriptor": ("global", "descriptor", None, lambda d: np.roll(d, 1), "cosine"),
}


def fault_of(name: str):
    """The fault as a function for ``Playback``."""
    _, tensor, pairs, change, _ = FAULTS[name]
    return on(pairs, change if tensor is None else changed(tensor, change))


@pytest.mark.parametrize(
    "role, fault",
    [(role, fault) for fault, (of, *_) in FAULTS.items() for role in BY_ROLE if of in (None, role)],
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_faults_are_caught(shipped, role, fault, precision):
    said = FAULTS[fault][-1]
    report = gate(shipped, BY_ROLE[role], fault_of(fault), precision)
    assert not report.passed, table(report)
    assert any(said in reason for reason in report.reasons), report.reasons


def test_a_fault_on_one_pair_names_it_and_only_it(shipped):
    report = gate(shipped, "lighterglue", on([4], changed("matches0", lambda m: np.full_like(m, -1))))
    assert [row.name for row in report.rows if row.problems] == ["room-step"]
    assert report.reasons == ("room-step: no match, the reference has 87",)


def test_another_model_of_the_same_shapes_fails(shipped):
    """Descriptors turned by a rotation keep every distance, within a picture and between pictures, and mean nothing."""
    rng = np.random.default_rng(3)
    basis = np.linalg.qr(rng.normal(size=(64, 64)))[0].astype(np.float32)
    for precision in ("fp32", "fp16", "int8"):
        assert not gate(shipped, "xfeat", on(None, changed("descriptors", lambda d: d @ basis)), precision).passed
    others = {number: case.expected for number, case in enumerate(shipped["effnet_cov"])}
    report = gate(shipped, "effnet_cov", lambda o, number, view: others[(number + 1) % len(others)][view], "fp16")
    assert all(row.problems for row in report.rows)


def test_nan_of_a_session_is_counted_and_the_gate_goes_on(shipped):
    def fault(o, number, view):
        if number == 2:
            o["mscores0"][:4] = np.nan
            raise NonFiniteError("outputs are not finite", o)
        return o

    report = gate(shipped, "lighterglue", fault)
    assert [row.nan for row in report.rows] == [0, 0, 4, 0, 0, 0, 0, 0]
    assert report.reasons == ("gravel: 4 of 512 values are NaN or infinite",)
    assert "NaN on 1 of 8 pairs" in table(report)


def test_a_failing_backend_is_counted_and_the_gate_goes_on(shipped):
    def fault(o, number, view):
        if number in (0, 5):
            raise BackendError("CUDA error: out of memory\nstack")
        return o

    report = gate(shipped, "xfeat", fault)
    assert len(report.rows) == 8
    assert report.reasons == ("cup, room-wide: the model failed: CUDA error: out of memory",)


def test_outputs_in_memory_that_the_next_run_reuses_are_copied(shipped):
    memory = {}

    def fault(o, number, view):
        for name, value in o.items():
            buffer = memory.setdefault(name, np.zeros((4096, *value.shape[1:]), value.dtype))
            buffer[: len(value)] = value
            o[name] = buffer[: len(value)]
        return o

    assert gate(shipped, "xfeat", fault).passed


# -- the reference -------------------------------------------------------------------------


def test_a_reference_session_serves_where_no_outputs_ship(shipped):
    card = card_of("lighterglue", source_sha256="0" * 64)
    cases = shipped_cases(card)
    assert [c.name for c in cases] == [c.name for c in shipped["lighterglue"]]
    assert all(c.expected is None for c in cases)
    honest, broken = Playback(shipped["lighterglue"]), Playback(shipped["lighterglue"], fault_of("nan"))
    report = run_gate(honest, cases, card, reference_run=honest)
    assert report.passed and report.reference == "session"
    assert not run_gate(broken, cases, card, reference_run=honest).passed


def empty(o, number, view):
    return {**o, "matches0": np.full_like(o["matches0"], -1), "mscores0": np.zeros_like(o["mscores0"])}


def test_a_reference_without_matches_proves_nothing(shipped):
    cases = [Case(c.name, c.runs) for c in shipped["lighterglue"]]
    blind = Playback(shipped["lighterglue"], empty)
    report = run_gate(blind, cases, card_of("lighterglue"), reference_run=blind)
    assert not report.passed
    assert "proves nothing" in report.reasons[0]
    assert all(not row.problems and not row.evidence for row in report.rows)


def test_a_reference_that_says_the_same_of_every_picture_proves_nothing(shipped):
    cases = [Case(c.name, c.runs) for c in shipped["effnet_cov"]]
    constant = Playback(shipped["effnet_cov"], fault_of("constant descriptor"))
    report = run_gate(constant, cases, card_of("effnet_cov"), reference_run=constant)
    assert not report.passed and "proves nothing" in report.reasons[0]


def test_outputs_of_a_matcher_keep_their_shape(shipped):
    report = gate(shipped, "lighterglue", lambda o, n, v: {k: v[None] for k, v in o.items()})
    assert report.reasons[0] == "8 of 8 pairs: matches0 has shape (1, 256), expected (256,)"


def test_one_pair_without_matches_takes_nothing_from_the_others(shipped):
    reference = Playback(shipped["lighterglue"], lambda o, n, v: empty(o, n, v) if n == 7 else o)
    cases = [Case(c.name, c.runs) for c in shipped["lighterglue"]]
    report = run_gate(reference, cases, card_of("lighterglue"), reference_run=reference)
    assert report.passed
    assert [row.evidence for row in report.rows] == [True] * 7 + [False]
    # Matches that the reference has not are a difference all the same.
    inventive = Playback(shipped["lighterglue"])
    assert not run_gate(inventive, cases, card_of("lighterglue"), reference_run=reference).passed


@pytest.mark.parametrize("error", [BackendError("x"), NonFiniteError("x", {}), None])
def test_a_reference_that_fails_proves_nothing(shipped, error):
    def reference(inputs):
        raise error

    cases = [Case(c.name, c.runs) for c in shipped["lighterglue"]]
    report = run_gate(
        Playback(shipped["lighterglue"]), cases, card_of("lighterglue"), reference_run=reference if error else None
    )
    assert not report.passed
    assert "proves nothing" in report.reasons[0]


def test_nan_shows_also_where_the_reference_fails(shipped):
    def reference(inputs):
        raise BackendError("x")

    broken = Playback(shipped["lighterglue"], fault_of("nan"))
    cases = [Case(c.name, c.runs) for c in shipped["lighterglue"]]
    report = run_gate(broken, cases, card_of("lighterglue"), reference_run=reference)
    assert [row.nan for row in report.rows] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert report.reasons == ("gravel: 1 values are NaN or infinite",)


def test_no_cases_prove_nothing():
    assert "proves nothing" in run_gate(lambda inputs: {}, [], card_of("xfeat")).reasons[0]


def test_the_gate_ends_in_time_and_says_so(shipped):
    report = gate(shipped, "xfeat", lambda o, n, v: o, limit_s=0.0)
    assert not report.passed
    assert any("stopped after 0 s" in reason for reason in report.reasons)
    assert len(report.rows) < 8


def test_progress_names_each_pair(shipped):
    lines = []
    gate(shipped, "effnet_cov", lambda o, n, v: o, progress=lines.append)
    assert lines[0] == "effnet_cov: parity pair 1 of 8 (cup)" and len(lines) == 8


# -- cases ---------------------------------------------------------------------------------


def test_pictures_are_small_varied_and_free():
    pairs = golden.pairs()
    entries = json.loads((golden.folder() / "pairs.json").read_text())["pairs"]
    assert len(pairs) == 8 and {p.kind for p in pairs} == {"homography", "3-D scene", "different places"}
    assert all(e["licence"].startswith(("CC0", "public domain", "Apache-2.0")) for e in entries)
    sizes = {image.shape[:2] for p in pairs for image in p.images}
    assert any(h % 32 and w % 32 for h, w in sizes) and any(h % 32 == w % 32 == 0 for h, w in sizes)
    assert any(image.ndim == 3 for p in pairs for image in p.images)
    assert sum(f.stat().st_size for f in golden.folder().iterdir()) < 2.5e6


def test_golden_outputs_serve_only_the_weights_and_preprocessing_that_they_are_of():
    assert golden.golden_for(card_of("xfeat")) is not None
    assert golden.golden_for(card_of("xfeat", source_sha256="1" * 64)) is None
    assert golden.golden_for(card_of("xfeat", source_sha256="")) is None
    assert golden.golden_for(card_of("xfeat", preprocessing=Preprocessing("grey"))) is None
    assert golden.golden_for(replace(card_of("xfeat"), role="matcher")) is None
    # A variant of a model, by another name, has the same outputs.
    variant = golden.golden_for(replace(card_of("xfeat"), name="mine"))
    assert variant.sha256 == golden.golden_for(card_of("xfeat")).sha256


def test_a_damaged_golden_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "xfeat.npz").write_bytes(b"PK not really")
    monkeypatch.setattr(golden, "folder", lambda: tmp_path)
    with pytest.raises(ModelFileError, match="xfeat.npz"):
        golden.load("xfeat")
    with pytest.raises(ModelFileError, match="xfeat.npz"):
        golden.golden_for(ModelCard("features", "other", "", source_sha256="1" * 64))
    with pytest.raises(DataError, match="pictures"):
        golden.pairs()


def test_a_features_model_without_golden_outputs_gets_the_pictures():
    cases = shipped_cases(ModelCard("features", "mine", "", preprocessing=Preprocessing("rgb")))
    assert len(cases) == 8 and all(c.expected is None and len(c.runs) == 2 for c in cases)
    assert all(
        run["image"].shape[:2] == (1, 3) and run["max_keypoints"].dtype == np.int64 for c in cases for run in c.runs
    )


def test_a_matcher_of_unknown_features_gets_two_views_of_points_in_space():
    cases = shipped_cases(ModelCard("matcher", "mine", ""), dim=32)
    again = shipped_cases(ModelCard("matcher", "mine", ""), dim=32)
    assert len(cases) == 8
    for case, same in zip(cases, again):
        (inputs,) = case.runs
        assert key(inputs) == key(same.runs[0])
        a, b = inputs["descriptors0"], inputs["descriptors1"]
        assert a.shape[1] == 32 and len(a) != len(b) and len(a) == len(inputs["keypoints0"])
        assert np.allclose(np.linalg.norm(a, axis=1), 1, atol=1e-3)
        similar = a @ b.T
        pairs = [(i, j) for i, j in enumerate(similar.argmax(1)) if similar[:, j].argmax() == i and similar[i, j] > 0.9]
        p, q = (inputs[f"keypoints{side}"][[pair[side] for pair in pairs]] for side in (0, 1))
        assert len(pairs) > 60
        _, inliers = cv2.findFundamentalMat(p, q, cv2.FM_RANSAC, 0.5, 0.999)
        assert (
            case.name == "seeded-0" or inliers.mean() > 0.95
        )  # the first: the same view twice, up to a hand's breadth


def test_images_of_the_user_are_paired_in_order(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(5):
        cv2.imwrite(str(tmp_path / f"{i}.png"), rng.integers(0, 255, (40, 60), np.uint8))
    (tmp_path / "notes.txt").write_text("x")
    card = card_of("xfeat")
    assert [c.name for c in image_cases(card, [tmp_path])] == ["0 1", "1 2", "2 3", "3 4"]
    assert [c.name for c in image_cases(card, [tmp_path], max_pairs=2)] == ["0 1", "3 4"]
    assert [c.name for c in image_cases(card, [tmp_path / "4.png", tmp_path / "0.png"])] == ["4 0"]
    matcher = card_of("lighterglue")
    with pytest.raises(DataError, match="features"):
        image_cases(matcher, [tmp_path])
    with pytest.raises(DataError, match="two pictures"):
        image_cases(card, [tmp_path / "0.png"])
    with pytest.raises(ImageError, match="nothing.png"):
        image_cases(card, [tmp_path / "nothing.png", tmp_path / "0.png"])

    def extract(image):
        return np.zeros((image.shape[0], 2)), np.ones((image.shape[0], 64))

    (case,) = image_cases(matcher, [tmp_path / "0.png", tmp_path / "1.png"], extract)
    assert case.runs[0]["keypoints1"].shape == (40, 2) and list(case.runs[0]["image_size0"]) == [60, 40]


def test_saved_inputs_of_any_names_are_run(tmp_path):
    np.savez(tmp_path / "a.npz", grid=np.ones((1, 4), np.float32))
    np.savez(tmp_path / "b.npz", grid=np.zeros((1, 4), np.float32))
    cases = saved_cases([tmp_path])
    assert [c.name for c in cases] == ["a", "b"] and list(cases[0].runs[0]) == ["grid"]
    with pytest.raises(DataError, match="no .npz"):
        saved_cases([tmp_path / "empty"] if (tmp_path / "empty").mkdir() is None else [])
    with pytest.raises(DataError, match="c.npz"):
        saved_cases([tmp_path / "c.npz"])


def test_a_single_saved_picture_is_judged(shipped):
    case = shipped["xfeat"][0]
    single = [Case("incident", case.runs[:1])]
    reference = Playback(shipped["xfeat"])
    assert run_gate(reference, single, card_of("xfeat"), reference_run=reference).passed
    broken = Playback(shipped["xfeat"], on(None, changed("keypoints", lambda k: k + 1)))
    assert not run_gate(broken, single, card_of("xfeat"), reference_run=reference).passed


def test_an_incident_replays_its_fault(shipped, tmp_path):
    """Three of the inputs fail; saved, they show the fault again, and pass once the model is mended."""
    name, card = "lighterglue", card_of("lighterglue")
    honest, broken = Playback(shipped[name]), Playback(shipped[name], on([2, 3, 5], nan_in_one_element))
    box = Incidents(tmp_path, interval_s=0)
    for case in shipped[name]:
        outputs = broken(case.runs[0])
        if not np.isfinite(outputs["mscores0"]).all():
            box.save(card.role, name, "0" * 64, "fake 1", "outputs are not finite", case.runs[0], outputs)
    cases = saved_cases([tmp_path])
    report = run_gate(broken, cases, card, reference_run=honest)
    assert [row.nan for row in report.rows] == [1, 1, 1] and not report.passed
    mended = run_gate(honest, cases, card, reference_run=honest)
    assert mended.passed and all(row.evidence for row in mended.rows)


# -- the report ----------------------------------------------------------------------------


@pytest.mark.parametrize("role", BY_ROLE)
@pytest.mark.parametrize("fault", [None, "nan", "missing output"])
def test_the_table_fits_a_terminal_and_the_dictionary_is_json(shipped, role, fault):
    report = gate(shipped, BY_ROLE[role], fault_of(fault) if fault else lambda o, n, v: o)
    lines = table(report).splitlines()
    assert max(map(len, lines)) <= 120
    verdict = next(line for line in lines if line.startswith(("PASSED", "FAILED")))
    assert verdict.startswith("PASSED" if fault is None else "FAILED")
    for case in shipped[BY_ROLE[role]]:
        assert any(line.startswith(case.name) for line in lines)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["passed"] == report.passed and len(values["pairs"]) == 8


def test_long_names_and_reasons_do_not_break_the_table(shipped):
    cases = [replace(c, name=f"{c.name} " * 30) for c in shipped["xfeat"]]
    report = run_gate(Playback(cases, fault_of("half a pixel")), cases, card_of("xfeat"))
    assert max(map(len, table(report).splitlines())) <= 120
