"""The engines of TinyNav's pull request 261, as its table has them, before the gate; and others that are wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vslam_features.artifacts.card import ModelCard
from vslam_features.artifacts.cases import Case, matching, shipped_cases
from vslam_features.artifacts.engine_cases import LARGEST, engine_cases
from vslam_features.artifacts.gate import run_gate
from vslam_features.artifacts.gate_table import engine_rows, table

CARD = ModelCard("matcher", "flexglue", "CC0-1.0")
REFERENCE = (275, 264, 148, 185, 239, 244, 265, 229)  # ONNX Runtime
# Platform and engine: NaN, zero-match pairs, matches a pair, whether it may run.
ENGINES = {
    "RTX 3060, TRT 10.13, unpatched": (6, 6, (0, 0, 0, 0, 0, 0, 266, 229), False),
    "RTX 3060, TRT 10.13, patched": (0, 0, (272, 265, 150, 185, 239, 244, 266, 230), True),
    "Orin Nano, TRT 10.3, unpatched": (6, 6, (0, 0, 0, 0, 0, 0, 266, 230), False),
    "Orin Nano, TRT 10.3, without the CumSum fix": (0, 1, (263, 241, 141, 0, 228, 224, 253, 224), False),
    "Orin Nano, TRT 10.3, patched": (0, 0, (261, 238, 140, 169, 228, 224, 247, 221), True),
}
POINTS = 320


def saved_pairs() -> list[Case]:
    rng = np.random.default_rng(0)
    sides = [(rng.uniform(0, 400, (POINTS, 2)), rng.normal(size=(POINTS, 4)), (544, 640)) for _ in range(2)]
    return [Case(f"pair-{i}", ({**matching(sides), "number": np.array(i)},)) for i in range(8)]


def outputs(matches: int) -> dict[str, np.ndarray]:
    """Keypoint i matches POINTS - 1 - i, for the first so many; some scores are confident, some hardly."""
    rows = np.arange(POINTS)
    scores = np.where(rows < matches, 0.3 + 0.69 * (rows * 7 % 10) / 9, 0).astype(np.float32)
    matched = np.where(rows < matches, POINTS - 1 - rows, -1)
    return {"matches0": matched, "mscores0": scores, "covisibility_score": np.array(0.9, np.float32)}


def reference(inputs):
    return outputs(REFERENCE[int(inputs["number"])])


def engine(counts, nan: int = 0, change=lambda outputs: outputs):
    """A model of so many matches a pair; the first ``nan`` pairs as attention that overflowed leaves them."""

    def run(inputs):
        i = int(inputs["number"])
        found = outputs(counts[i])
        if i < nan:
            found["covisibility_score"] = np.array(np.nan, np.float32)
        return change(found)

    return run


def judged(run, precision="fp16"):
    return run_gate(run, saved_pairs(), CARD, reference_run=reference, precision=precision)


def told(report, name, saved=8):
    return engine_rows(replace(report, ran=name, compared_with="on ONNX Runtime", saved=saved))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ENGINES)
def test_the_engines_of_the_document(name, precision):
    nan, zero, counts, right = ENGINES[name]
    report = judged(engine(counts, nan), precision)
    assert report.passed == right, table(report)
    assert [{n: v for n, v in row.items() if n != "pairs"} for row in told(report, name)] == [
        {"engine": "reference on ONNX Runtime", "nan": [0, 8], "zero_matches": [0, 8], "matches": list(REFERENCE)},
        {"engine": name, "nan": [nan, 8], "zero_matches": [zero, 8], "matches": list(counts)},
    ]
    failed = [i for i, row in enumerate(report.rows) if row.problems]
    assert failed == [i for i, n in enumerate(counts) if not right and n == 0]


@pytest.mark.parametrize("name", ENGINES)
def test_the_table_has_the_lines_of_the_document(name):
    nan, zero, counts, _ = ENGINES[name]
    lines = table(replace(judged(engine(counts, nan)), ran=name)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("engine "))
    assert lines[at].split("  ")[-1] == "matches a pair"
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[at + 2 : at + 4]]
    wanted = [["reference", "shipped", "0/8", "0/8", REFERENCE], [name, "shipped", f"{nan}/8", f"{zero}/8", counts]]
    assert cells == [[*row[:4], ", ".join(map(str, row[4]))] for row in wanted]
    assert max(map(len, lines)) <= 120


def test_saved_pairs_have_rows_of_their_own():
    rows = told(judged(engine(REFERENCE, 1)), "mine", saved=3)
    assert [(row["pairs"], row["engine"], row["nan"]) for row in rows] == [
        ("shipped", "reference on ONNX Runtime", [0, 5]),
        ("shipped", "mine", [1, 5]),
        ("saved", "reference on ONNX Runtime", [0, 3]),
        ("saved", "mine", [0, 3]),
    ]
    assert [row["matches"] for row in rows][::2] == [list(REFERENCE[:5]), list(REFERENCE[5:])]


def test_many_pairs_and_long_names_are_wrapped_and_cut():
    cases = [replace(c, name=f"{c.name} {i}") for i in range(5) for c in saved_pairs()]
    report = run_gate(engine(REFERENCE), cases, CARD, reference_run=reference)
    report = replace(report, ran="tensorrt 10.13.3.9 TensorRT bf16 fp16 on cuda:0 NVIDIA GeForce RTX 3060 Laptop GPU")
    lines = table(report).splitlines()
    assert max(map(len, lines)) <= 120
    at = next(i for i, line in enumerate(lines) if line.startswith("engine ")) + 2
    end = lines.index("", at)
    text = " ".join(line[lines[at - 2].index("matches a pair") :] for line in lines[at:end])
    assert text.replace(",", "").split() == [str(n) for n in REFERENCE * 10]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_counts_that_are_30_percent_low_fail_on_every_pair(precision):
    report = judged(engine([round(0.7 * n) for n in REFERENCE]), precision)
    assert not report.passed and all(row.problems for row in report.rows)


@given(st.lists(st.floats(-0.02, 0.02), min_size=8, max_size=8))
def test_counts_within_2_percent_pass(shares):
    report = judged(engine([int(n * (1 + share)) for n, share in zip(REFERENCE, shares)]))
    assert report.passed, table(report)


@given(st.integers(0, 7), st.integers(-60, 60), st.sampled_from(["fp16", "bf16"]))
def test_the_limit_of_counts_is_10_percent_on_each_pair(pair, more, precision):
    counts = [n + more * (i == pair) for i, n in enumerate(REFERENCE)]
    report = judged(engine(counts, change=lambda o: o), precision)
    assert report.passed == (abs(more) <= 0.1 * REFERENCE[pair])
    assert [bool(row.problems) for row in report.rows] == [i == pair and not report.passed for i in range(8)]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "change",
    [
        lambda s: np.where(s > 0, 1, 0),
        lambda s: np.where(s > 0, 0.11, 0),
        lambda s: s / 2,
        lambda s: np.where(s > 0, 1.29 - s, 0),
    ],
    ids=["one", "low", "half", "reversed"],
)
def test_right_matches_with_wrong_scores_fail(change, precision):
    """Also where no score is confident, which alone are compared closely."""

    def wrong(o):
        return {**o, "mscores0": change(o["mscores0"]).astype(np.float32)}

    assert not judged(engine(REFERENCE, change=wrong), precision).passed
    unsure = lambda inputs: (o := reference(inputs)) | {"mscores0": o["mscores0"] * np.float32(0.8)}  # noqa: E731
    report = run_gate(
        lambda inputs: wrong(unsure(inputs)), saved_pairs(), CARD, reference_run=unsure, precision=precision
    )
    assert not report.passed and "scores of equal matches are" in report.reasons[0]
    assert run_gate(unsure, saved_pairs(), CARD, reference_run=unsure, precision=precision).passed


def test_nan_of_the_reference_and_a_failing_engine_are_told_in_the_rows():
    def silent(inputs):
        return reference(inputs) | {"covisibility_score": np.array(np.nan if inputs["number"] < 2 else 1, np.float32)}

    rows = engine_rows(run_gate(engine(REFERENCE), saved_pairs(), CARD, reference_run=silent))
    assert [row["nan"] for row in rows] == [[2, 8], [0, 8]]
    assert rows[1]["matches"] == [None, None, *REFERENCE[2:]]
    json.dumps(rows, allow_nan=False)


# -- engines: sizes -------------------------------------------------------------------------------


def nearest(inputs):
    """Mutual nearest neighbours of cosine over 0.6."""
    similar = inputs["descriptors0"] @ inputs["descriptors1"].T
    best, back = similar.argmax(1), similar.argmax(0)
    good = (back[best] == np.arange(len(best))) & (similar.max(1) > 0.6)
    return {"matches0": np.where(good, best, -1), "mscores0": np.where(good, similar.max(1), 0).astype(np.float32)}


def cases_of(largest, card=CARD):
    shipped = shipped_cases(card)
    return [*shipped, *engine_cases(card, shipped, largest)]


AGAIN = ["seeded-0 again", "seeded-0 turned", "seeded-0 once more", "seeded-7 turned"]
SIZES = {"keypoints0": (1, 2048, 2), "keypoints1": (1, 2048, 2), "descriptors0": (1, 2048, 64)}


def test_the_largest_inputs_have_matches_unequal_numbers_and_lie_in_the_picture():
    cases = cases_of(SIZES)
    assert [c.name for c in cases[8:]] == [LARGEST, *AGAIN]
    (inputs,) = cases[8].runs
    assert [len(inputs[f"{n}{i}"]) for n in ("keypoints", "descriptors") for i in (0, 1)] == [2048, 1638, 2048, 1638]
    for i in (0, 1):
        assert (inputs[f"keypoints{i}"] >= 0).all() and (inputs[f"keypoints{i}"] < inputs[f"image_size{i}"]).all()
        assert inputs[f"keypoints{i}"].dtype == inputs[f"descriptors{i}"].dtype == np.float32
    assert (nearest(inputs)["matches0"] >= 0).sum() > 200
    assert run_gate(nearest, cases, CARD, reference_run=nearest).passed


WRONG = {
    "wrong on more than 1024 keypoints": lambda inputs, runs: len(inputs["keypoints0"]) > 1024,
    "wrong where the numbers differ by more than 100": lambda inputs, runs: (
        abs(len(inputs["keypoints0"]) - len(inputs["keypoints1"])) > 100
    ),
    "wrong once its buffers have grown": lambda inputs, runs: max(runs) > 1024 and len(inputs["keypoints0"]) < 1024,
}


@pytest.mark.parametrize("name", WRONG)
def test_engines_that_are_right_on_the_pairs_that_ship_alone(name):
    runs = []

    def run(inputs):
        runs.append(len(inputs["keypoints0"]))
        found = nearest(inputs)
        return {n: np.roll(v, 1) for n, v in found.items()} if WRONG[name](inputs, runs) else found

    assert run_gate(run, shipped_cases(CARD), CARD, reference_run=nearest).passed
    runs.clear()
    report = run_gate(run, cases_of(SIZES), CARD, reference_run=nearest)
    assert [row.name for row in report.rows if row.problems] == (AGAIN if "grown" in name else [LARGEST])


def test_a_graph_that_launches_with_the_inputs_that_it_was_recorded_with():
    """From the third run of some shapes on."""
    seen, recorded = {}, {}

    def run(inputs):
        key = tuple(value.shape for value in inputs.values())
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 3:
            recorded[key] = inputs
        return nearest(recorded.get(key, inputs))

    cases = cases_of(SIZES)
    report = run_gate(run, [cases[0], *cases[8:]], CARD, reference_run=nearest)  # pairs of different sizes
    assert [row.name for row in report.rows if row.problems] == ["seeded-0 once more"]


def test_no_more_is_run_of_an_engine_that_takes_no_more():
    assert [c.name for c in cases_of({})[8:]] == AGAIN
    assert [c.name for c in cases_of({"keypoints0": (1, 100, 2), "keypoints1": (1, 100, 2)})[8:]] == AGAIN


def test_maps_get_points_all_over():
    maps = np.random.default_rng(0).normal(size=(2, 4, 6, 8)).astype(np.float32)
    sides = [(np.zeros((5, 2)), m, (80, 60)) for m in maps]
    largest = {"keypoints0": [512, 2], "keypoints1": [512, 2]}
    case, _, turned, *_ = engine_cases(CARD, [Case("a", (matching(sides),))], largest)
    assert [len(case.runs[0][f"keypoints{i}"]) for i in (0, 1)] == [512, 409]
    np.testing.assert_array_equal(turned.runs[0]["descriptors0"], maps[0])
    for i in (0, 1):
        np.testing.assert_array_equal(case.runs[0][f"descriptors{i}"], maps[i])
        points = case.runs[0][f"keypoints{i}"]
        assert (points >= 0).all() and (points <= [79, 59]).all() and (points.std(axis=0) > 10).all()


@pytest.mark.parametrize(
    ("largest", "shape"),
    [((4, 6, 8), (6, 8)), ((1, 4, 60, 50), (60, 50)), ((1, 4, 160, 160), (64, 64)), ((1, 160, 160, 4), (6, 8))],
    ids=["no larger", "larger", "too large", "another layout"],
)
def test_maps_grow_to_the_largest_that_a_cpu_can_follow(largest, shape):
    maps = np.random.default_rng(0).normal(size=(2, 4, 6, 8)).astype(np.float32)
    pair = Case("a", (matching([(np.zeros((5, 2)), m, (80, 60)) for m in maps]),))
    sizes = {name: value for i in (0, 1) for name, value in ((f"keypoints{i}", (9, 2)), (f"descriptors{i}", largest))}
    (inputs,) = engine_cases(CARD, [pair], sizes)[0].runs
    assert [inputs[f"descriptors{i}"].shape for i in (0, 1)] == [(4, *shape)] * 2
    assert inputs["descriptors0"].dtype == np.float32 and inputs["descriptors0"].flags.c_contiguous


def test_covisibility_that_golden_outputs_do_not_know_is_compared_with_the_reference():
    shipped = [Case(c.name, c.runs, (nearest(c.runs[0]),)) for c in shipped_cases(CARD)]
    cases = [*shipped, *engine_cases(CARD, shipped, SIZES)]

    def scored(score):
        return lambda inputs: {**nearest(inputs), "covisibility_score": np.array(score, np.float32)}

    honest, wrong = scored(0.8), scored(0.9)
    assert run_gate(wrong, [c for c in cases if c.expected is not None], CARD).passed
    assert run_gate(honest, cases, CARD, reference_run=honest).passed
    report = run_gate(wrong, cases, CARD, reference_run=honest)
    assert [row.name for row in report.rows if row.problems] == [LARGEST, "seeded-0 turned", "seeded-7 turned"]


def test_pictures_grow_to_the_largest_and_so_do_keypoints():
    card = ModelCard("features", "mine", "CC0-1.0")
    shipped = shipped_cases(card)
    case, again, turned, *_ = engine_cases(card, shipped, {"image": (1, 3, 480, 640), "max_keypoints": (4096,)})
    for run, small in zip(case.runs, shipped[0].runs):
        assert run["image"].shape == (1, 3, 480, 640) and run["image"].dtype == np.float32
        assert list(run["max_keypoints"]) == [4096]
        assert abs(run["image"].mean() - small["image"].mean()) < 0.02
    assert again.runs is shipped[0].runs
    np.testing.assert_array_equal(turned.runs[0]["image"], np.flip(shipped[0].runs[0]["image"], axis=-1))
    assert engine_cases(card, shipped, {"image": (1, 3, 32, 32)})[0].name == again.name


def test_the_largest_sizes_are_those_of_the_layout_of_the_file():
    """Profiles are of the file's tensors, cases of ours: 3 channels are no width, 4 rows no channels."""
    card = ModelCard("features", "mine", "CC0-1.0", layouts={"image": "hwc"})
    case = engine_cases(card, shipped_cases(card), {"image": (1, 480, 640, 3)})[0]
    assert {run["image"].shape for run in case.runs} == {(1, 3, 480, 640)}
    card = ModelCard("matcher", "mine", "CC0-1.0", layouts={"descriptors0": "hwc", "descriptors1": "hwc"})
    pair = Case("a", (matching([(np.zeros((5, 2)), np.zeros((4, 2, 8), np.float32), (80, 60))] * 2),))
    sizes = {"keypoints0": (9, 2), "keypoints1": (9, 2), "descriptors0": (4, 16, 4), "descriptors1": (4, 16, 4)}
    assert engine_cases(card, [pair], sizes)[0].runs[0]["descriptors0"].shape == (4, 2, 8)
