"""``models patch cumsum`` and ``bf16-attention``: what TensorRT needs in the graph, and what is said of it."""

import dataclasses
import json
import re

import numpy as np
import pytest
import yaml

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from graph_helpers import all_nodes, count  # noqa: E402
from matcher_graph import Matcher  # noqa: E402
from model_helpers import clear_environment, command, own_cache  # noqa: E402, F401
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from patch_helpers import CARD, older, plain_graph, saved  # noqa: E402

from vslam_features.artifacts.card import read_card, sidecar_path  # noqa: E402
from vslam_features.artifacts.store import model_path  # noqa: E402
from vslam_features.cli import model_patch_run  # noqa: E402
from vslam_features.config import Config  # noqa: E402
from vslam_features.errors import ModelFileError  # noqa: E402
from vslam_features.graph import cumsum, model_file  # noqa: E402
from vslam_features.models import Models  # noqa: E402

PLAIN = plain_graph(Matcher(layers=5, dim=64, seed=3, sharpness=20))
CORES = 20  # of PLAIN: 5 layers, self and cross attention of two images


def summing(kind: str = "last") -> onnx.ModelProto:
    """PLAIN on descriptors plus 0.1 times their sums along the 64 values; ``kind``: along the rows, as none may be."""
    model = onnx.ModelProto()
    model.CopyFrom(PLAIN)
    for i in "01":
        for node in model.graph.node:
            node.input[:] = [f"mixed{i}" if name == f"descriptors{i}" else name for name in node.input]
        nodes = [
            helper.make_node("CumSum", [f"descriptors{i}", "axis"], [f"sums{i}"], f"cumsum{i}", exclusive=1),
            helper.make_node("Mul", [f"sums{i}", "share"], [f"part{i}"], f"part{i}"),
            helper.make_node("Add", [f"descriptors{i}", f"part{i}"], [f"mixed{i}"], f"mixed{i}"),
        ]
        for node in reversed(nodes):
            model.graph.node.insert(0, node)
    axis = np.array(0 if kind == "rows" else -1)
    for name, value in (("axis", axis), ("share", np.array(0.1, np.float32))):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


@pytest.fixture(autouse=True)
def _settings(own_cache, monkeypatch):  # noqa: F811
    clear_environment(monkeypatch)


@pytest.fixture
def file(tmp_path):
    return saved(PLAIN, tmp_path / "small.onnx", CARD)


@pytest.fixture
def sums(tmp_path):
    return saved(summing(), tmp_path / "sums.onnx", CARD)


def patch(capsys, kind, path, *args) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = command("models", "patch", kind, str(path), *map(str, args))
    return code, *capsys.readouterr()


def valid(path) -> onnx.ModelProto:
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path)
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


# -- cumsum --------------------------------------------------------------------------------------


def test_cumsum_becomes_a_product_with_its_card_inside(sums, capsys):
    before = sums.read_bytes()
    code, said, errors = patch(capsys, "cumsum", sums)
    out = sums.with_name("sums_cumsum.onnx")
    assert (code, errors) == (0, "") and sums.read_bytes() == before
    model = valid(out)
    assert count(model, "CumSum") == 0 and count(model, "MatMul") == count(PLAIN, "MatMul") + 2
    card = read_card(out)
    assert card.patches == ("cumsum",) and card.precision == "fp32" and not card.emulated
    assert dataclasses.replace(card, patches=(), tools=CARD.tools, schema=1) == CARD
    rows = [line.split() for line in said.splitlines()]
    assert sorted(rows[1:3]) == [["sums0", "1", "64", "yes", "no"], ["sums1", "1", "64", "yes", "no"]]
    assert "matrices: 16 KiB" in said and str(out) in said
    plain, got = map(int, re.search(r"8 pairs, (\d+) matches of (\d+), 100.0% equal", said).groups())
    assert plain == got >= 100


def test_cumsum_in_json(sums, tmp_path, capsys):
    out = tmp_path / "new" / "x.onnx"
    code, said, _ = patch(capsys, "cumsum", sums, "--json", "--out", out)
    told = json.loads(said)
    assert code == 0 and told["file"] == str(out) and told["patches"] == ["cumsum"]
    assert told["constant_bytes"] == 64 * 64 * 4 and told["report"]["passed"]
    assert {"name": "sums0", "axis": 1, "size": 64, "exclusive": True, "reverse": False} in told["replaced"]
    assert json.loads(patch(capsys, "cumsum", sums, "--json", "--no-compare")[1])["report"] is None


def test_cumsum_twice_says_that_nothing_is_left(sums, tmp_path, capsys):
    assert patch(capsys, "cumsum", sums, "--no-compare")[0] == 0
    done = sums.with_name("sums_cumsum.onnx")
    files = sorted(tmp_path.iterdir())
    code, said, errors = patch(capsys, "cumsum", done)
    assert (code, errors) == (0, "") and re.search("nothing left to do.*has no CumSum.*its card: cumsum", said)
    code, said, _ = patch(capsys, "cumsum", done, "--json")
    assert json.loads(said)["file"] == str(done) and sorted(tmp_path.iterdir()) == files


def test_a_card_beside_the_file_is_taken(tmp_path, capsys):
    path = saved(summing(), tmp_path / "x.onnx")
    sidecar_path(path).write_text(yaml.safe_dump({"role": "matcher", "name": "mine", "licence": "none"}))
    assert patch(capsys, "cumsum", path)[0] == 0
    card = read_card(tmp_path / "x_cumsum.onnx")
    assert (card.name, card.patches) == ("mine", ("cumsum",))


def test_cumsum_that_cannot_be_replaced_is_refused_and_nothing_written(sums, tmp_path, capsys):
    rows = saved(summing("rows"), tmp_path / "rows.onnx", CARD)
    bare = saved(summing(), tmp_path / "bare.onnx")
    files = sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".onnx")
    for path, options, words in (
        (sums, ("--max-size", 63), "64 values, at most 63.*--max-size"),
        (rows, (), "'cumsum1' cannot be a MatMul.*no fixed length"),
        (bare, (), "no model card"),
        (sums, ("--out", sums), "stays as it is"),
    ):
        code, said, errors = patch(capsys, "cumsum", path, *options)
        assert code == 1 and not said and re.search(words, errors) and "Traceback" not in errors, errors
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".onnx") == files


def test_a_wrong_matrix_is_found_and_nothing_written(sums, tmp_path, monkeypatch, capsys):
    right = cumsum.triangle
    monkeypatch.setattr(cumsum, "triangle", lambda size, *flags: right(size, *flags).T)
    out = tmp_path / "sums_cumsum.onnx"
    before = older(out)
    code, said, errors = patch(capsys, "cumsum", sums)
    assert code == 1 and not said and "computes something else" in errors and "mscores0" in errors
    assert out.read_bytes() == before and sorted(p.name for p in tmp_path.glob("*.onnx")) == ["sums.onnx", out.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelFileError("x"), MemoryError()], ids=repr)
@pytest.mark.parametrize("kind", ["cumsum", "bf16-attention"])
@pytest.mark.parametrize("step", ["write", "add_card", "load"])
def test_what_goes_wrong_on_the_way_leaves_what_was_there(sums, tmp_path, monkeypatch, capsys, kind, step, error):
    out = tmp_path / "out.onnx"
    older(out)
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    module = model_patch_run if step == "load" else model_file
    original, calls = getattr(module, step), []

    def fails(*args):
        calls.append(args)
        result = original(*args)
        if step != "load" or len(calls) == 2:  # the patched file
            raise error
        return result

    monkeypatch.setattr(module, step, fails)
    code, _, _ = patch(capsys, kind, sums, "--out", out)
    assert code == {KeyboardInterrupt: 130, ModelFileError: 1, MemoryError: 70}[type(error)]
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


# -- bf16-attention ------------------------------------------------------------------------------


def test_attention_becomes_bf16_and_the_card_says_so(file, capsys):
    code, said, errors = patch(capsys, "bf16-attention", file)
    out = file.with_name("small_bf16_attention.onnx")
    assert (code, errors) == (0, "")
    model = valid(out)
    kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.value_info}
    found = [kinds[n.output[0]] for n in all_nodes(model.graph) if n.op_type == "Softmax"]
    assert found.count(TensorProto.BFLOAT16) == CORES and len(found) == CORES + 2
    card = read_card(out)
    assert (card.precision, card.patches, card.emulated) == ("bf16", ("bf16-attention",), False)
    (label,) = set(card.self_check) - set(CARD.self_check)
    assert "emulated" in label and re.search(r"8 pairs, \d+ matches of \d+", card.self_check[label])
    assert said.splitlines()[1].split() == [str(CORES), "1", "?", "?"]
    assert "emulated on ONNX Runtime, against the plain file: 8 pairs" in said and str(out) in said
    assert "predicts" not in said


def test_the_emulated_twin_has_another_name_and_is_called_what_it_is(file, capsys):
    code, said, errors = patch(capsys, "bf16-attention", file, "--emulate")
    out = file.with_name("small_bf16_attention_emulated.onnx")
    assert (code, errors) == (0, "") and "build from one without --emulate" in said
    card = read_card(out)
    assert (card.precision, card.patches, card.emulated) == ("bf16", ("bf16-attention emulated",), True)
    model = valid(out)
    assert not [n for n in all_nodes(model.graph) if n.op_type == "Softmax" and n.input[0].endswith("bfloat16")]
    told = json.loads(patch(capsys, "bf16-attention", file, "--emulate", "--json")[1])
    assert told["emulated"] and len(told["cores"]) == CORES and told["report"]["precision"] == "bf16"
    assert told["report"]["emulated"] and told["report"]["passed"] and told["spared"] == told["done_before"] == 0
    got, plain = map(int, re.search(r"(\d+) matches of (\d+)", said).groups())
    assert plain >= 100 and 0.95 < got / plain < 1.05


def test_centred_keys_are_told_and_recorded(file, capsys):
    code, said, _ = patch(capsys, "bf16-attention", file, "--centre-keys")
    assert code == 0 and f"keys of {CORES} cores are centred" in said
    assert read_card(file.with_name("small_bf16_attention.onnx")).patches == ("bf16-attention centred",)
    valid(file.with_name("small_bf16_attention.onnx"))
    told = json.loads(patch(capsys, "bf16-attention", file, "--centre-keys", "--emulate", "--json")[1])
    assert (told["centred"], told["patches"]) == (CORES, ["bf16-attention emulated centred"])
    assert read_card(file.with_name("small_bf16_attention_emulated.onnx")).emulated


def test_a_parity_report_of_the_twin_says_that_it_predicts(own_cache, capsys, caplog):  # noqa: F811
    """It passes as a bf16 model does, against the fp32 file, by a record of its own file; the log says what it is."""
    path = model_path("small", "fp32")
    path.parent.mkdir(parents=True)
    saved(PLAIN, path, CARD)
    assert patch(capsys, "bf16-attention", path, "--emulate")[0] == 0
    twin = path.with_name("small.fp32_bf16_attention_emulated.onnx")
    assert command("models", "verify", str(twin)) == 0
    said = capsys.readouterr().out
    assert "(matcher, bf16 emulated) against its reference" in said and "PASSED" in said
    engine = Models(Config.from_flat({"runtime.threads": 1})).open("matcher", str(twin))
    assert "emulates BF16" in caplog.text and "emulates BF16" in engine.health().verified
    assert command("models", "verify", str(path)) == 0
    assert "emulated" not in capsys.readouterr().out


def test_the_real_file_does_not_run_on_a_cpu_and_that_is_told(file, capsys):
    assert patch(capsys, "bf16-attention", file)[0] == 0
    out = file.with_name("small_bf16_attention.onnx")
    assert command("models", "verify", str(out)) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors and str(out) in errors
    code, _, errors = patch(capsys, "early-stop", out, "--layers", "2,4")
    assert code == 0 and "not timed" in errors
    assert read_card(out.with_name("small_bf16_attention_early_stop.onnx")).patches == (
        "bf16-attention", "early-stop 2,4")  # fmt: skip


def test_half_of_it_is_done_already(file, capsys):
    code, said, _ = patch(capsys, "bf16-attention", file, "--no-compare")
    assert code == 0 and "emulated on" not in said
    out = file.with_name("small_bf16_attention.onnx")
    code, said, errors = patch(capsys, "bf16-attention", out)
    assert (code, errors) == (0, "") and re.search(f"nothing left.*in BF16 already, in {CORES} cores", said)
    code, _, errors = patch(capsys, "bf16-attention", out, "--emulate")
    assert code == 1 and "computes in BF16 already" in errors
    assert patch(capsys, "bf16-attention", file, "--emulate", "--no-compare")[0] == 0
    twin = file.with_name("small_bf16_attention_emulated.onnx")
    code, said, _ = patch(capsys, "bf16-attention", twin, "--emulate")
    assert code == 0 and "emulates attention in BF16 already" in said
    code, _, errors = patch(capsys, "bf16-attention", twin)
    assert code == 1 and "not to be built from" in errors


def test_patches_follow_one_another_in_the_card(sums, capsys):
    assert patch(capsys, "cumsum", sums)[0] == 0
    first = sums.with_name("sums_cumsum.onnx")
    assert patch(capsys, "early-stop", first, "--layers", "2,4")[0] == 0
    second = sums.with_name("sums_cumsum_early_stop.onnx")
    code, said, errors = patch(capsys, "bf16-attention", second, "--emulate")
    assert (code, errors) == (0, "") and said.splitlines()[1].split()[0] == str(CORES)
    card = read_card(sums.with_name("sums_cumsum_early_stop_bf16_attention_emulated.onnx"))
    assert card.patches == ("cumsum", "early-stop 2,4", "bf16-attention emulated")
    assert card.early_stop_layers == (2, 4)


def test_a_model_without_attention_is_told_what_was_looked_for(tmp_path, capsys):
    model = helper.make_model(helper.make_graph(
        [helper.make_node("GlobalAveragePool", ["image"], ["p"]), helper.make_node("Flatten", ["p"], ["descriptor"])],
        "pool", [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, "H", "W"])],
        [helper.make_tensor_value_info("descriptor", TensorProto.FLOAT, [1, 3])],
    ), ir_version=8, opset_imports=[helper.make_opsetid("", 18)])  # fmt: skip
    path = saved(model, tmp_path / "pool.onnx", dataclasses.replace(CARD, role="global", layers=0))
    code, _, errors = patch(capsys, "bf16-attention", path)
    assert code == 1 and re.search("no core of attention. Looked for: Softmax.*0 other Softmax", errors)
    code, said, _ = patch(capsys, "cumsum", path)
    assert code == 0 and "has no CumSum" in said and list(tmp_path.glob("*.onnx")) == [path]
