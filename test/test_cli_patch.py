"""``vslam-features models patch``: a model file in, a patched one out, whole or not at all, with its card inside."""

import dataclasses
import json
import re

import numpy as np
import pytest
import yaml

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from early_stop_helpers import feed, ort_session, scopes  # noqa: E402
from graph_helpers import LEVELS  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from model_helpers import clear_environment, command, own_cache  # noqa: E402, F401
from onnx import numpy_helper  # noqa: E402
from patch_helpers import CARD, MATCHER, PLAIN, older, saved  # noqa: E402

from vslam_features.artifacts.card import read_card, sidecar_path  # noqa: E402
from vslam_features.artifacts.store import model_path  # noqa: E402
from vslam_features.cli import model_patch_times  # noqa: E402
from vslam_features.cli.model_patch_times import forced_stop  # noqa: E402
from vslam_features.errors import ModelFileError  # noqa: E402
from vslam_features.graph import early_stop, fp16, model_file, rules  # noqa: E402

CHECKED = (2, 4)
THEIRS = {
    **{f"{kind}{i}": f"{short}_{side}" for kind, short in (("keypoints", "kp"), ("descriptors", "desc"))
       for i, side in enumerate("ab")},
    **{"min_covisibility": "threshold", "matches0": "assignment", "mscores0": "confidence"},
    "covisibility_score": "overlap",
}  # fmt: skip


def renamed(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for value in (*out.graph.input, *out.graph.output, *out.graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in out.graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(value, value) for value in values]
    return out


@pytest.fixture(autouse=True)
def _settings(own_cache, monkeypatch):  # noqa: F811
    clear_environment(monkeypatch)


@pytest.fixture
def file(tmp_path):
    return saved(PLAIN, tmp_path / "small.onnx", CARD)


def patch(capsys, path, *args) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = command("models", "patch", "early-stop", str(path), *map(str, args))
    return code, *capsys.readouterr()


def pair(seed=0, m=20, n=25):
    rng = np.random.default_rng(seed)
    points = {f"keypoints{i}": rng.uniform(0, 400, (k, 2)).astype(np.float32) for i, k in enumerate((m, n))}
    return MATCHER.pair(m, n, seed) | points


def check_rule(path, names=None, tolerance=1e-4):
    """The file stops where the reference does, for thresholds on both sides of each score."""
    names, session, stops = names or {}, ort_session(onnx.load(path)), set()
    for seed in range(4):
        inputs = pair(seed)
        scores = MATCHER.scores(inputs)[0]
        for threshold in (0, *(s + d for s in scores for d in (-0.02, 0.02)), 2):
            for decay in (0, 0.3, 1):
                limits = [threshold * (1 - decay) ** (5 - k) for k in CHECKED]
                if any(abs(scores[k - 1] - limit) < 0.01 for k, limit in zip(CHECKED, limits)):
                    continue
                expected = MATCHER.match(inputs, threshold, decay, CHECKED)
                given = {names.get(n, n): v for n, v in (inputs | feed({}, threshold, decay)).items()}
                got = dict(zip((o.name for o in session.get_outputs()), session.run(None, given)))
                ours = ("matches0", "mscores0", "covisibility_score", "stopped_after_layer", "layer_scores")
                got = [got[names.get(n, n)] for n in ours]
                assert got[3] == expected[3]
                for a, b in zip(got[1:], expected[1:]):
                    np.testing.assert_allclose(a, b, atol=tolerance)
                if expected[3]:
                    np.testing.assert_array_equal(got[0], expected[0])
                stops.add(expected[3])
    assert stops == {0, *CHECKED}


# -- what comes out ------------------------------------------------------------------------------


def test_a_file_becomes_one_that_stops_early_with_its_card_inside(file, capsys):
    before = file.read_bytes()
    code, said, errors = patch(capsys, file, "--layers", "2,4")
    out = file.with_name("small_early_stop.onnx")
    assert (code, errors) == (0, "") and str(out) in said
    assert file.read_bytes() == before and sorted(p.name for p in file.parent.glob("[!.]*onnx*")) == [
        "small.onnx", "small_early_stop.onnx"]  # fmt: skip
    onnx.checker.check_model(str(out), full_check=True)
    card = read_card(out)
    assert set(card.tools) == {"maker", "vslam_features", "onnx", "onnx-ir"} and card.schema == 3
    assert dataclasses.replace(card, early_stop_layers=(), patches=(), tools=CARD.tools, schema=1) == CARD
    assert card.early_stop_layers == CHECKED and card.patches == ("early-stop 2,4",)
    assert len(onnx.load(out).metadata_props) == 1
    check_rule(out)


def test_the_table_has_what_a_stop_spares(file, capsys):
    code, said, _ = patch(capsys, file, "--layers", "2,4")
    rows = {line.rsplit("%")[0][:14].strip(): line.split() for line in said.splitlines()[1:5]}
    assert list(rows) == ["layer 2", "layer 4", "never", "plain matcher"]
    nodes = [int(cells[2 if name != "never" else 1]) for name, cells in rows.items()]
    proto = onnx.load(file.with_name("small_early_stop.onnx"))
    own = re.compile("early_stop|layer_scores|_stop|_scalar|_shape|_size|stopped_after_layer")
    depth = [sum(not own.search(n.name) for n in scope.node) for scope in scopes(proto)]
    assert nodes[:3] == list(np.cumsum(depth)) and nodes[3] == len(PLAIN.graph.node)
    code, said, _ = patch(capsys, file, "--layers", "2,4", "--json")
    told = json.loads(said)
    sizes = [sum(numpy_helper.to_array(t).nbytes for t in scope.initializer) for scope in scopes(proto)]
    assert [stage["constant_bytes"] for stage in told["stages"]] == sizes and told["constant_bytes"] == sum(sizes)
    assert told["spared"] == {
        "2": {"nodes": nodes[2] - nodes[0], "constant_bytes": sum(sizes[1:])},
        "4": {"nodes": nodes[2] - nodes[1], "constant_bytes": sizes[2]},
    }
    assert told["file"] == str(file.with_name("small_early_stop.onnx")) and told["patches"] == ["early-stop 2,4"]
    times = told["times"]
    assert times["runtime"].startswith("onnxruntime") and times["keypoints"] > 100
    assert min(times["plain_ms"], times["never_ms"], *times["after_ms"].values()) > 0
    assert json.loads(patch(capsys, file, "--layers", "2", "--json", "--no-timing")[1])["times"] is None


def test_tensors_of_other_names_and_a_card_beside_the_file(tmp_path, capsys):
    path = saved(renamed(PLAIN, THEIRS | {f"score_{k}": f"heads.{k - 1}.p" for k in range(1, 6)}), tmp_path / "x.onnx")
    inputs = {o: t for o, t in THEIRS.items() if o[-1] in "01" and o[0] in "kd" or o == "min_covisibility"}
    card = {"role": "matcher", "name": "x", "licence": "none", "inputs": inputs,
            "outputs": {o: t for o, t in THEIRS.items() if o not in inputs} | {"score_5": "heads.4.p"}}  # fmt: skip
    sidecar_path(path).write_text(yaml.safe_dump(card))
    out = tmp_path / "new" / "out.onnx"
    args = ("--layers", "2,4", "--num-layers", 5, "--scores", "heads.{index}.p", "--out", out)
    code, said, errors = patch(capsys, path, *args)
    assert (code, errors) == (0, "") and "of plain" in said
    made = read_card(out)
    assert made.inputs == inputs and made.layers == 5 and made.patches == ("early-stop 2,4",)
    assert made.outputs == {k: v for k, v in card["outputs"].items() if k != "score_5"}, "that output is gone"
    check_rule(out, THEIRS)


def test_half_precision_first(tmp_path, capsys):
    half = ir.to_proto(fp16.to_half(ir.from_proto(PLAIN), rules.by_op("ArgMax")).model)
    path = saved(half, tmp_path / "small.fp16.onnx", dataclasses.replace(CARD, precision="fp16"))
    code, said, errors = patch(capsys, path, "--layers", "2,4")
    assert (code, errors) == (0, "")
    out = tmp_path / "small.fp16_early_stop.onnx"
    assert read_card(out).precision == "fp16"
    types = [t.data_type for scope in scopes(onnx.load(out)) for t in scope.initializer]
    assert types.count(onnx.TensorProto.FLOAT16) > 20
    check_rule(out, tolerance=0.02)


def test_a_name_is_looked_for_in_the_cache_and_the_result_is_in_this_folder(tmp_path, monkeypatch, capsys):
    model_path("small", "fp32").parent.mkdir(parents=True)
    saved(PLAIN, model_path("small", "fp32"), CARD)
    monkeypatch.chdir(tmp_path)
    assert patch(capsys, "small", "--layers", "2,4", "--no-timing")[0] == 0
    assert read_card(tmp_path / "small.fp32_early_stop.onnx").early_stop_layers == CHECKED


def test_weights_in_a_file_beside_it_come_along(tmp_path, capsys):
    path = saved(PLAIN, tmp_path / "small.onnx", CARD)
    onnx.save_model(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    out = tmp_path / "elsewhere" / "out.onnx"
    assert patch(capsys, path, "--layers", "2,4", "--out", out)[0] == 0
    assert [p.name for p in out.parent.iterdir()] == ["out.onnx"]
    check_rule(out)
    out.unlink()
    (tmp_path / "weights.bin").unlink()
    code, _, errors = patch(capsys, path, "--layers", "2,4", "--out", out)
    assert code == 1 and "weights.bin" in errors and not out.exists()


def test_a_file_of_others_is_never_replaced(file, capsys):
    """Releases have such names: flexglue_matcher.onnx and flexglue_matcher_early_stop.onnx."""
    target = file.with_name(f"{file.stem}_early_stop.onnx")
    for content in (b"of others", file.read_bytes()):
        target.write_bytes(content)
        code, _, err = patch(capsys, file, "--layers", "2", "--no-timing")
        assert code == 1 and f"{target} is there, and no patch made it" in err and "--out" in err
        assert target.read_bytes() == content


def test_an_older_result_is_replaced_and_the_card_beside_it_set_aside(file, capsys):
    out = file.with_name("small_early_stop.onnx")
    older(out)
    sidecar_path(out).write_text("role: features\nname: other\nlicence: none\n")
    code, _, errors = patch(capsys, file, "--layers", "2,4", "--no-timing")
    assert code == 0 and "small_early_stop.onnx.card.yaml.old" in errors
    assert read_card(out).name == "small" and sidecar_path(out).with_suffix(".yaml.old").is_file()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("num_layers", [3, 9, 12])
def test_a_stop_is_forced_after_one_layer_and_none_before(num_layers, dtype):
    for layer in range(1, num_layers):
        inputs = forced_stop(layer, num_layers, dtype)
        threshold, decay = inputs["min_covisibility"].astype(dtype), inputs["early_stop_decay"]
        limits = [np.float32(threshold) * (1 - decay) ** np.float32(num_layers - k) for k in range(1, num_layers)]
        assert np.isfinite(threshold) and limits[layer - 1] > 1.5  # more than any score
        assert all(limit <= limits[layer - 1] / 2 for limit in limits[: layer - 1])
        assert dtype == np.float16 or all(limit < 0.02 for limit in limits[: layer - 1])


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--layers", "1,2"), 1, "layer 1.*force"),
        (("--layers", "2,5"), 1, "1 to 4"),
        (("--layers", "two"), 2, "2,4,6,8, got 'two'"),
        (("--layers", "2", "--scores", "score"), 1, r"'score'.*\{layer\}.*\{index\}"),
        (("--layers", "2", "--scores", "s.{layer}"), 1, r"no values named 's.\{layer\}'.*'score_\{layer\}' for 1 to 5"),
        (("--layers", "2", "--like", "kpts,0"), 1, "'kpts'.*descriptors0"),
        (("--layers", "2", "--like", "kpts"), 2, "got 'kpts'"),
        (("--layers", "2", "--out", "x.engine"), 1, "ends in .onnx"),
        (("--layers", "2", "--num-layers", "6"), 1, "--num-layers 6: the card of .*small.onnx says 5"),
        (("--layers", "2", "--scores", "score_{index}"), 1, r"counts them from 1: write 'score_\{layer\}'"),
        (("--layers", "2", "--like", "keypoints0,1"), 1, "told to stop after layer 2: matches0 .*check --like"),
    ],
)
def test_what_is_asked_for_wrongly_is_said(file, capsys, args, code, words):
    got, _, errors = patch(capsys, file, *args)
    assert got == code and re.search(words, errors) and "Traceback" not in errors
    assert list(file.parent.iterdir()) == [file]


def test_layer_1_is_checked_with_force(file, capsys):
    assert patch(capsys, file, "--layers", "1,4", "--force")[0] == 0
    assert read_card(file.with_name("small_early_stop.onnx")).early_stop_layers == (1, 4)


def test_a_patched_file_is_not_patched_again(file, capsys):
    assert patch(capsys, file, "--layers", "2,4", "--no-timing")[0] == 0
    out = file.with_name("small_early_stop.onnx")
    content = out.read_bytes()
    for layers in ("2,4", "3"):
        code, _, errors = patch(capsys, out, "--layers", layers)
        assert code == 1 and "patched already: early-stop 2,4" in errors
    sidecar_path(out).write_text("role: matcher\nname: x\nlicence: none\nlayers: 5\n")  # which does not say so
    code, _, errors = patch(capsys, out, "--layers", "2")
    assert code == 1 and "stops early already" in errors
    assert out.read_bytes() == content and len(list(out.parent.glob("*.onnx"))) == 2


def test_files_that_cannot_be_patched(file, tmp_path, capsys):
    other = saved(PLAIN, tmp_path / "other.onnx", dataclasses.replace(CARD, role="features"))
    bare, unknown = saved(PLAIN, tmp_path / "bare.onnx"), saved(PLAIN, tmp_path / "unknown.onnx",
                                                               dataclasses.replace(CARD, layers=0))  # fmt: skip
    engine, pointer = tmp_path / "x.engine", tmp_path / "pointer.onnx"
    engine.write_bytes(b"1234")
    pointer.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n")
    for path, words in (
        (other, "role 'features'"), (bare, "no model card"), (unknown, "--num-layers"), (engine, "only .*onnx"),
        (pointer, "git lfs pull"), (tmp_path / "none.onnx", "no model file"),
    ):  # fmt: skip
        code, _, errors = patch(capsys, path, "--layers", "2")
        assert code == 1 and re.search(words, errors), errors
    code, _, errors = patch(capsys, file, "--layers", "2", "--out", file)
    assert code == 1 and "stays as it is" in errors and read_card(file) == CARD
    assert not list(tmp_path.glob("*early_stop*"))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_are_refused_or_harmless(file, capsys, data):
    content = bytearray(file.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:start]
    else:
        for i, byte in enumerate(data.draw(st.binary(min_size=1, max_size=4))):
            content[min(start + i, len(content) - 1)] = byte
    damaged, out = file.with_name("damaged.onnx"), file.with_name("out.onnx")
    out.unlink(missing_ok=True)
    damaged.write_bytes(content)
    code, _, errors = patch(capsys, damaged, "--layers", "2,4", "--out", out, "--no-timing")
    assert code in (0, 1) and out.exists() == (code == 0), errors
    if code == 0:
        onnx.checker.check_model(str(out), full_check=True)


# -- whole or not at all -------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelFileError("does not load"), MemoryError()], ids=repr)
@pytest.mark.parametrize("step", ["stop_times", "write", "add_card"])
def test_what_goes_wrong_on_the_way_leaves_what_was_there(file, capsys, monkeypatch, step, error):
    out = file.with_name("small_early_stop.onnx")
    older(out)
    sidecar_path(out).write_text("role: features\nname: other\nlicence: none\n")
    before = {p: p.read_bytes() for p in file.parent.iterdir()}
    module = model_patch_times if step == "stop_times" else model_file
    original = getattr(module, step)

    def fails(*args):
        original(*args)
        raise error

    monkeypatch.setattr(module, step, fails)
    code, _, _ = patch(capsys, file, "--layers", "2,4")
    assert code == {KeyboardInterrupt: 130, ModelFileError: 1, MemoryError: 70}[type(error)]
    assert {p: p.read_bytes() for p in file.parent.iterdir()} == before


def test_a_result_that_computes_something_else_is_not_written(file, capsys, monkeypatch):
    real = early_stop.add_early_stop

    def with_a_weight_of_another_sign(*args, **options):
        done = real(*args, **options)
        last = next(graph for graph in done.model.graph.subgraphs() if graph.name == "after_layer_4")
        weight = next(value for value in last.initializers.values() if value.const_value.shape == (64, 128))
        weight.const_value = ir.tensor(-weight.const_value.numpy())
        return done

    monkeypatch.setattr(early_stop, "add_early_stop", with_a_weight_of_another_sign)
    code, _, errors = patch(capsys, file, "--layers", "2,4")
    assert code == 1 and "computes another" in errors and list(file.parent.iterdir()) == [file]


def test_a_result_that_does_not_stop_is_not_written(file, capsys, monkeypatch):
    monkeypatch.setattr(model_patch_times, "forced_stop", lambda *args: {})
    code, _, errors = patch(capsys, file, "--layers", "2,4")
    assert code == 1 and "told to stop after layer 2, it stopped after 0" in errors
    assert list(file.parent.iterdir()) == [file]


def test_a_matcher_that_cannot_be_run_here_is_patched_with_a_warning(tmp_path, capsys):
    model = MATCHER.graph()  # takes no keypoints: no matcher by the contract
    path = saved(model, tmp_path / "bare.onnx", CARD)
    code, _, errors = patch(capsys, path, "--layers", "2,4", "--like", "descriptors0,0")
    assert code == 0 and "not timed" in errors and "keypoints0" in errors
    session = ort_session(onnx.load(tmp_path / "bare_early_stop.onnx"), LEVELS[0])
    assert session.run(None, feed(MATCHER.pair(5, 6, 0), 2, 0))[3] == 2
