"""``models export megaloc``: the tiny network through all of it; the released size in a process, with its memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vslam_features import classical
from vslam_features.artifacts.card import read_card
from vslam_features.artifacts.catalogue import find_entry
from vslam_features.artifacts.preprocessing import Preprocessing
from vslam_features.artifacts.store import model_path
from vslam_features.cli.main import main
from vslam_features.config import Config
from vslam_features.errors import ExportError
from vslam_features.models import Models

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytest.importorskip("safetensors")

from safetensors.torch import save_file  # noqa: E402

from vslam_features.export import onnx_file, recipe  # noqa: E402
from vslam_features.export.megaloc import Exportable  # noqa: E402
from vslam_features.graph import model_file  # noqa: E402
from vslam_features.networks.megaloc import MEGALOC_TINY, randomised  # noqa: E402

ROOT = Path(__file__).parents[2]
# shared/facts.md: op for op the histogram of the published file.
OPERATORS = (
    "Add 92 MatMul 72 Mul 60 Reshape 53 Transpose 50 Slice 38 LayerNormalization 25 Div 16 Softmax 12 Erf 12 Sub 7 "
    "ReduceLogSumExp 6 Unsqueeze 6 Conv 5 ReduceL2 4 Clip 4 Expand 4 Concat 3 Relu 3 Gemm 3 Gather 1 Exp 1 Einsum 1"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of the module's own."""
    path = tmp_path_factory.mktemp("exports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VSLAM_FEATURES_CACHE", str(path))
        yield path


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(randomised(MEGALOC_TINY, 3).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def process(cache, weights) -> subprocess.CompletedProcess:
    """The command, as people run it."""
    command = [sys.executable, "-m", "vslam_features", "models", "export", "megaloc", "--tiny", "--weights", weights]
    environment = {**os.environ, "VSLAM_FEATURES_CACHE": str(cache)}
    return subprocess.run(
        [*map(str, command), "--json"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )


@pytest.fixture(scope="module")
def exported(process) -> dict:
    """What it printed."""
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def said(capsys, *args) -> tuple[int, str, str]:
    code = main([*map(str, args)])
    return code, *capsys.readouterr()


# -- the files ---------------------------------------------------------------------------------


def test_both_files_are_placed_and_nothing_else(exported, cache):
    files = {p: Path(f) for p, f in exported["files"].items()}
    assert files == {p: model_path("megaloc-tiny", p) for p in ("fp32", "fp16")}
    assert sorted((cache / "models").iterdir()) == sorted(files.values())
    assert files["fp16"].stat().st_size < 0.6 * files["fp32"].stat().st_size


def test_progress_is_on_stderr_and_the_exporter_is_silent(exported, process):
    lines = process.stderr.splitlines()
    steps = [line for line in lines if " s  " in line]
    assert len(steps) >= 8 and any("exporting to ONNX" in s for s in steps)
    rest = [line for line in lines if line not in steps]
    assert len(rest) <= 2 and all("fp16" in line or "not the published file" in line for line in rest), rest


def test_the_figures_are_within_their_limits(exported):
    checks = {c["label"]: c for c in exported["self_check"]["checks"]}
    assert all(c["passed"] for c in checks.values()) and len(exported["self_check"]["images"]) == 4
    assert max(checks["wrapper against original, max difference"]["values"]) <= 1e-6
    assert max(checks["ONNX fp32 against torch, max difference"]["values"]) <= 1e-6
    assert min(checks["fp16 twin against fp32, cosine"]["values"]) >= 0.9999
    assert min(checks["our preprocessing against torch's, cosine"]["values"]) >= 0.9999
    assert exported["fp16"]["blocked"] == 65  # the same nodes as of the released size


def test_the_graph_has_none_of_the_operators_that_backends_lack(exported):
    for precision in ("fp32", "fp16"):
        operators = exported["graphs"][precision]["operators"]
        assert not {op for op in operators if op == "Resize" or op.startswith("Scatter")}
        assert operators["Gather"] == 1
        assert set(operators) - {"Cast"} == set(OPERATORS.split()[::2])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_cards(exported, weights, precision):
    from vslam_features.artifacts.cache import sha256_of

    card = read_card(Path(exported["files"][precision]))
    assert (card.role, card.name, card.precision, card.licence) == ("global", "megaloc-tiny", precision, "none")
    assert card.source_sha256 == sha256_of(weights)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as torchvision documents them
    assert card.preprocessing == Preprocessing("rgb", 70, 56, "antialias", mean, std)
    assert set(card.tools) == {"vslam_features", "torch", "onnx", "onnxscript", "onnx-ir"}
    assert card.tools["torch"] == torch.__version__ and "(<= 1.0e-06)" in str(card.self_check)
    assert card.self_check["images"] == "4" and "fp16 twin against fp32, cosine" in card.self_check


def test_info_shows_the_self_check(exported, capsys):
    code, out, _ = said(capsys, "models", "info", exported["files"]["fp32"], "--json")
    facts = json.loads(out)
    assert code == 0 and "wrapper against original, max difference" in facts["card"]["self_check"]
    assert facts["inputs"] == {"image": "float32 1x3x56x70"} and facts["outputs"] == {"descriptor": "float32 1x64"}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_files_say_nothing_of_the_machine_and_who_made_them(exported, weights, precision):
    content = Path(exported["files"][precision]).read_bytes()
    places = [ROOT, Path.home(), Path(sys.prefix), Path(torch.__file__).parent, weights.parent, Path.cwd()]
    for text in [*map(str, places), 'File "', ".py", "site-packages", "Traceback", weights.name]:
        assert text.encode() not in content, text
    model = onnx.load_from_string(content)
    assert model.producer_name == "pytorch" and model.opset_import[0].version == 18
    assert [p.key for p in model.metadata_props] == ["vslam_features"]
    assert not model.doc_string and not any(n.doc_string or n.metadata_props for n in model.graph.node)
    assert not any(v.metadata_props or v.doc_string for v in model.graph.value_info)


def test_they_are_valid_with_the_card(exported):
    for file in exported["files"].values():
        onnx.checker.check_model(file, full_check=True)
        onnx.shape_inference.infer_shapes(onnx.load(file), check_type=True, strict_mode=True)


def test_the_same_weights_give_the_same_graph_and_a_table(exported, weights, tmp_path, capsys):
    picture = ROOT / "vslam_features" / "golden"
    options = ["--tiny", "--weights", weights, "--out", tmp_path / "out", "--images", picture]
    code, out, err = said(capsys, "models", "export", "megaloc", *options)
    assert code == 0 and "Traceback" not in err
    assert "nodes" in out and "wrapper against original" in out and "PASSED" in out
    assert "fp16 twin: 65 nodes compute in fp32" in out
    again = tmp_path / "out" / "megaloc-tiny.fp32.onnx"
    assert str(again) in out and sorted(p.name for p in again.parent.iterdir()) == [
        "megaloc-tiny.fp16.onnx",
        "megaloc-tiny.fp32.onnx",
    ]
    one, two = (onnx.load(f) for f in (again, exported["files"]["fp32"]))
    assert one.graph == two.graph
    assert read_card(again).self_check["images"] == "8"  # of the folder's sixteen


def test_raw_shows_what_the_rewrites_are_for_and_keeps_nothing(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path))
    code, out, _ = said(capsys, "models", "export", "megaloc", "--tiny", "--raw")
    rows = {row[0]: row[1:] for row in map(str.split, out.splitlines())}
    assert code == 0 and out.splitlines()[0].split() == ["rewritten", "as", "it", "is"]
    assert rows["Gather"][0] == "1" and int(rows["Gather"][1]) > 2
    assert (rows["Resize"], rows["ScatterND"], rows["ScatterElements"]) == (["-", "1"], ["-", "1"], ["-", "1"])
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


# -- what they are used for -----------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_the_parity_gate_passes_and_both_files_are_one_model(exported, runtime):
    pytest.importorskip(runtime)
    identities = set()
    for precision in ("fp32", "fp16"):
        config = Config.from_flat({"runtime.name": runtime, "runtime.precision": precision})
        engine = Models(config).open("global", "megaloc-tiny")
        assert engine.model.verified
        identities.add(engine.identity)
    assert len(identities) == 1 and "rgb-70x56-antialias" in str(identities.pop())


def test_the_plug_in_describes_by_it(exported):
    from vslam_features import registry
    from vslam_features.types import Frame

    plugin = registry.get("global", "megaloc")
    made = plugin(plugin.Options(model="megaloc-tiny"), None, Models(Config()))
    image = np.random.default_rng(0).integers(0, 256, (120, 160), np.uint8)
    descriptor = made.describe(Frame(0, "camera", image), None)
    assert descriptor.shape == (64,) and np.linalg.norm(descriptor) == pytest.approx(1, abs=1e-3)
    assert not classical.available(Config.from_flat({"retrieval.name": "megaloc", "features.name": "sift",
                                                     "matcher.name": "nearest",
                                                     "retrieval.options.model": "megaloc-tiny"}))[1]  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "f32"])
def test_the_precision_that_openvino_picks_is_told_and_recorded_only(precision, tmp_path, monkeypatch):
    """Whatever the processor of this machine offers: the label is the session's own word."""
    good = np.eye(4, dtype=np.float32)[:2]

    def by_file(path, tensors, runtime="onnxruntime", **options):
        free = options.get("precision_hint") == "auto"
        found = good + np.float32(0.02 if free else 0)
        return np.tile(found, (len(tensors) // 2, 1)), f"CPU {precision if free else 'f32'}"

    monkeypatch.setattr(recipe, "by_file", by_file)
    monkeypatch.setattr(recipe, "find_spec", lambda name: object())
    check = recipe.SelfCheck(["a", "b"])
    recipe._check_fp32(tmp_path, [None] * 2, [None] * 2, good, check, lambda text: None)
    check.require()
    assert check.texts()[f"OpenVINO by itself ({precision}), cosine"].startswith("0.99")
    assert check.texts()["OpenVINO f32 against ONNX Runtime, cosine"] == "1 (>= 0.9999)"


# -- faults: nothing is placed, and what was there stays --------------------------------------------


class _OffByOne(Exportable):
    """Forgets the positions' last column."""

    def __init__(self, model):
        super().__init__(model)
        self.positions[..., -1] = 0


def _with_nan(network):
    network.aggregator.linear.bias.data[5] = float("nan")
    return network


def _too_large(network):
    """No weight is beyond 65504, and LayerNorm makes good in float32 what is between."""
    network.backbone.blocks[0].ls1.gamma.data *= 1e3
    network.backbone.blocks[0].attn.proj.weight.data *= 1e3
    return network


def _one_initialiser_off(export):
    def wrong(*args, **options):
        graph = export(*args, **options)
        name = next(n for n in graph.graph.initializers if n.endswith("linear.bias"))
        value = graph.graph.initializers[name]
        value.const_value = ir.tensor(value.const_value.numpy() + np.float32(0.01), name=name)
        return graph

    return wrong


def _not_typed(export):
    def wrong(*args, **options):
        graph = export(*args, **options)
        node = next(n for n in graph.graph if n.op_type == "Softmax")
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        return graph

    return wrong


def _half_off(to_half):
    def wrong(*args):
        half = to_half(*args)
        values = (v for v in half.model.graph.initializers.values() if v.dtype == ir.DataType.FLOAT16)
        value = max(values, key=lambda v: v.const_value.size)
        value.const_value = ir.tensor(value.const_value.numpy() * np.float16(1.5), name=value.name)
        return half

    return wrong


def _network(change):
    return lambda network: lambda self: change(network(self))


FAULTS = {
    "wrapper": (recipe, "Exportable", lambda old: _OffByOne, "wrapper against original, max difference"),
    "NaN": (recipe.Source, "network", _network(_with_nan), "wrapper against original, max difference: NaN"),
    "fp16 overflow": (recipe.Source, "network", _network(_too_large), "largest value computed in fp16: [0-9.e+]+"),
    "exporter": (onnx_file, "export", _one_initialiser_off, "ONNX fp32 against torch, max difference"),
    "types": (onnx_file, "export", _not_typed, "megaloc-tiny.fp32.onnx is not valid ONNX"),
    "fp16 pass": (recipe, "to_half", _half_off, "fp16 twin against fp32, cosine"),
    "card": (onnx_file, "add_card", lambda old: lambda path, card: old(path, replace(card, name="x")), "read back"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_leaves_the_files_that_were_there(fault, tmp_path, monkeypatch, capsys):
    owner, name, wrong, message = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    old = tmp_path / "megaloc-tiny.fp32.onnx"
    old.write_bytes(b"what was there")
    with pytest.raises(ExportError, match=message):
        recipe.export_megaloc(recipe.Source(tiny=True), folder=tmp_path)
    assert list(tmp_path.iterdir()) == [old] and old.read_bytes() == b"what was there"


def test_a_failed_check_is_exit_code_1_with_the_table_and_no_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "Exportable", _OffByOne)
    code, out, err = said(capsys, "models", "export", "megaloc", "--tiny", "--out", tmp_path / "out")
    assert code == 1 and not out and "FAILED" in err and "no file was kept" in err and "Traceback" not in err
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_card_beside_the_old_file_is_set_aside(exported, weights, tmp_path):
    sidecar = tmp_path / "megaloc-tiny.fp32.onnx.card.yaml"
    sidecar.write_text("role: global\n")
    made = recipe.export_megaloc(recipe.Source(weights, tiny=True), folder=tmp_path)
    assert read_card(made.files["fp32"]).name == "megaloc-tiny"
    assert not sidecar.exists() and sidecar.with_name(sidecar.name + ".old").read_text() == "role: global\n"


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 914577000\n"
WRONG = {
    "pointer": (LFS, "Git LFS pointer"),
    "page": (b"<!DOCTYPE html><html><title>Sign in</title></html>", "web page"),
    "empty": (b"", "empty|0 bytes"),
    "noise": (bytes(range(256)) * 4, "gives no weights|cannot be read|no PyTorch"),
}


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_named_for_what_it_is(kind, suffix, tmp_path, capsys):
    content, message = WRONG[kind]
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(content)
    code, out, err = said(capsys, "models", "export", "megaloc", "--weights", path, "--out", tmp_path / "out")
    assert code == 1 and not out and str(path) in err and "Traceback" not in err
    assert pytest.importorskip("re").search(message, err), err


def test_weights_of_another_network_are_named(weights, tmp_path, capsys):
    code, _, err = said(capsys, "models", "export", "megaloc", "--weights", weights, "--out", tmp_path)
    assert code == 1 and "is not the weights of megaloc" in err and "Traceback" not in err
    code, _, err = said(capsys, "models", "export", "megaloc", "--weights", tmp_path / "none.pth")
    assert code == 1 and "none.pth" in err and "Traceback" not in err


def test_wrong_folders_and_pictures(tmp_path, capsys):
    (tmp_path / "file").write_bytes(b"no picture")
    for options, message in (
        (["--out", tmp_path / "file"], "is no folder"),
        (["--images", tmp_path / "none"], "no such picture"),
        (["--images", tmp_path / "file", tmp_path / "file"], "file"),
        (["--images", ROOT / "vslam_features" / "golden" / "cup_0.png"], "two pictures at least"),
    ):
        code, out, err = said(capsys, "models", "export", "megaloc", "--tiny", *options)
        assert code == 1 and not out and message in err and "Traceback" not in err


# -- any module ------------------------------------------------------------------------------------


class _Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, left, right):
        return self.linear(left) @ self.linear(right).T, left.sum()


def test_several_inputs_and_outputs_by_name_with_axes_of_any_extent(tmp_path):
    import onnxruntime

    module, path = _Two().eval(), tmp_path / "two.onnx"
    inputs = {"left": torch.randn(3, 6), "right": torch.randn(5, 6)}
    graph = onnx_file.export(module, inputs, ["scores", "total"], {"left": {0: "m"}, "right": {0: "n"}})
    onnx_file.write(graph, path)
    session = onnxruntime.InferenceSession(path)
    assert {i.name: i.shape for i in session.get_inputs()} == {"left": ["m", 6], "right": ["n", 6]}
    left, right = torch.randn(7, 6), torch.randn(2, 6)
    scores, total = session.run(["scores", "total"], {"left": left.numpy(), "right": right.numpy()})
    with torch.no_grad():
        expected = module(left, right)
    np.testing.assert_allclose(scores, expected[0].numpy(), atol=1e-5)
    np.testing.assert_allclose(total, expected[1].numpy(), atol=1e-5)


def test_what_cannot_be_exported_is_a_typed_error(tmp_path, monkeypatch):
    class Branches(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ExportError, match="Branches cannot be exported"):
        onnx_file.export(Branches(), {"x": torch.ones(3)}, ["y"])
    graph = onnx_file.export(_Two(), {"left": torch.ones(2, 6), "right": torch.ones(2, 6)}, ["a", "b"])
    monkeypatch.setattr(model_file, "MAX_PROTO_BYTES", 50)
    with pytest.raises(ExportError, match="2 GB at most"):
        onnx_file.write(graph, tmp_path / "large.onnx")


# -- the released size ------------------------------------------------------------------------------


@pytest.mark.released
@pytest.mark.timeout(900)
def test_the_released_size(tmp_path):
    """Random weights of the released size: the graph, the files, the figures, time and memory of the process."""
    options = ["--random", "--out", str(tmp_path), "--json"]
    command = [sys.executable, "-m", "vslam_features", "models", "export", "megaloc", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr
    made = json.loads(result.stdout)
    print(f"{made['seconds']} s, {made['peak_mb']} MB at most, {made['megabytes']}")
    names = OPERATORS.split()
    histogram = {name: int(count) for name, count in zip(names[::2], names[1::2])}
    operators = made["graphs"]["fp32"]["operators"]
    assert set(operators) == set(histogram) and operators["Gather"] == 1
    if torch.__version__.startswith("2.13"):
        assert operators == histogram and made["graphs"]["fp32"]["nodes"] == 478
    assert made["fp16"]["blocked"] == 65 and made["graphs"]["fp16"]["nodes"] <= 500
    size = {p: Path(f).stat().st_size for p, f in made["files"].items()}
    assert size["fp16"] <= 0.51 * size["fp32"] and 860 * 2**20 < size["fp32"] < 880 * 2**20
    checks = {c["label"]: c["values"] for c in made["self_check"]["checks"]}
    assert max(checks["wrapper against original, max difference"]) <= 1e-6
    assert max(checks["ONNX fp32 against torch, max difference"]) <= 1e-6
    assert min(checks["fp16 twin against fp32, cosine"]) >= 0.9999
    assert made["peak_mb"] < 5000
    assert find_entry("megaloc").licence == "MIT" and read_card(Path(made["files"]["fp16"])).licence == "none"
