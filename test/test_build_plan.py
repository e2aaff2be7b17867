"""What a build asks for: typing, flags, layers, shapes, patches and the command of trtexec, for each version."""

from dataclasses import replace

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

import graph_helpers  # noqa: E402
from attention_graphs import plain  # noqa: E402
from engine_helpers import CARD, CORES, ORIN, SHAPES, T4, able, attention_nodes, graph, order, place  # noqa: E402
from model_helpers import own_cache  # noqa: E402, F401
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from patch_helpers import saved  # noqa: E402

from vslam_features.artifacts.card import ModelCard, read_card  # noqa: E402
from vslam_features.artifacts.preprocessing import Preprocessing  # noqa: E402
from vslam_features.artifacts.store import content_sha256  # noqa: E402
from vslam_features.engines import trtexec  # noqa: E402
from vslam_features.engines.make import planned  # noqa: E402
from vslam_features.errors import ConfigError, ModelFileError, ModelMissingError  # noqa: E402
from vslam_features.graph.bf16_attention import attention_in_bf16  # noqa: E402

STRONG = (("STRONGLY_TYPED",), (), ("TF32",))
WEAK = ((), ("FP16", "BF16", "OBEY_PRECISION_CONSTRAINTS"), ("TF32",))
ELEVEN = ((), (), ("TF32",))  # types every network strongly
SHAPE_WORDS = [
    f"--{kind}Shapes=descriptors0:{n}x64,descriptors1:{n}x64,keypoints0:{n}x2,keypoints1:{n}x2"
    for kind, n in (("min", 1), ("opt", 256), ("max", 600))
]


@pytest.fixture(autouse=True)
def _models(own_cache):  # noqa: F811
    place("fp32", "fp16")


def plan_of(tmp_path, **wanted):
    """Of half precision with attention in BF16, unless another type is asked for."""
    wanted = {"attention": "bf16" if wanted.get("precision") == "fp16" else "auto", **wanted}
    version = wanted.get("version", "10.13.3")
    return planned(order(shapes=SHAPES, **wanted), able(version), tmp_path)


def asked(plan) -> tuple:
    return plan.network_flags, plan.flags, plan.cleared


@pytest.mark.parametrize("version", ["10.0.1", "10.3.0", "10.13.3.9"])
@pytest.mark.parametrize(
    "precision, typing, wanted",
    [
        ("fp32", "auto", STRONG),
        ("fp16", "auto", STRONG),
        ("fp16", "strong", STRONG),
        ("fp16", "weak", WEAK),
        ("fp32", "weak", ((), (), ("TF32",))),
    ],
)
def test_ten(tmp_path, version, precision, typing, wanted):
    prepared, plan = plan_of(tmp_path, version=version, precision=precision, typing=typing)
    assert asked(plan) == wanted
    assert plan.typing == ("weak" if typing == "weak" else "strong")
    layered = wanted == WEAK
    assert bool(plan.layers) == layered and plan.layer_type == ("bf16" if layered else "")
    # Casts are in the file where TensorRT is not told.
    model = onnx.load(prepared.path)
    casts = [n for n in model.graph.node if n.op_type == "Cast" and n.attribute[0].i == TensorProto.BFLOAT16]
    assert bool(casts) == (precision == "fp16" and typing != "weak")
    assert prepared.card.precision == ("bf16" if precision == "fp16" else "fp32")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("version", ["11.0.0", "11.4.0.106"])
def test_eleven_types_all_networks_strongly(tmp_path, version, precision):
    prepared, plan = plan_of(tmp_path, version=version, precision=precision)
    assert asked(plan) == ELEVEN and plan.typing == "strong" and not plan.layers
    assert prepared.card.precision == ("bf16" if precision == "fp16" else "fp32")
    with pytest.raises(ConfigError, match=f"{version} builds strongly typed engines only"):
        order(precision=precision, version=version, typing="weak")


def test_layers_are_those_of_attention_in_the_file(tmp_path):
    prepared, plan = plan_of(tmp_path, precision="fp16", typing="weak")
    nodes = attention_nodes(prepared.path)
    assert len(nodes) == 3 * CORES and nodes <= set(plan.layers)
    kinds = {n.name: n.op_type for n in onnx.load(prepared.path).graph.node}
    assert len(plan.layers) == len(set(plan.layers)) and set(plan.layers) <= set(kinds)
    others = {kinds[name] for name in set(plan.layers) - nodes}
    assert others <= {"Mul", "Div", "Add", "Max", "ReduceMax"}, "what lies between the products"


def test_nodes_without_names_get_some(tmp_path):
    model = graph()
    for node in model.graph.node:
        node.name = ""
    path = saved(model, tmp_path / "nameless.onnx", CARD)
    prepared, plan = plan_of(tmp_path, model=str(path), precision="fp16", typing="weak")
    assert attention_nodes(prepared.path) <= set(plan.layers) and "" not in plan.layers


@pytest.mark.parametrize("version, own", [("10.3.0", ["--stronglyTyped"]), ("11.4.0", [])])
def test_the_command_of_a_strong_build(tmp_path, version, own):
    prepared, plan = plan_of(tmp_path, version=version, precision="fp16", workspace_mb=3072, optimisation_level=4)
    assert trtexec.command(plan, prepared.path, tmp_path / "a.engine", tmp_path / "t", 1) == [
        "trtexec", f"--onnx={prepared.path}", f"--saveEngine={tmp_path}/a.engine", "--skipInference", "--device=1",
        *own, "--noTF32", *SHAPE_WORDS, "--memPoolSize=workspace:3072", "--builderOptimizationLevel=4",
        f"--timingCacheFile={tmp_path}/t",
    ]  # fmt: skip


def test_the_command_of_a_weak_build(tmp_path):
    prepared, plan = plan_of(tmp_path, precision="fp16", typing="weak")
    types = ",".join(f"{name}:bf16" for name in plan.layers)
    assert trtexec.command(plan, prepared.path, tmp_path / "a.engine", None) == [
        "trtexec", f"--onnx={prepared.path}", f"--saveEngine={tmp_path}/a.engine", "--skipInference", "--device=0",
        "--fp16", "--bf16", "--precisionConstraints=obey", "--noTF32", f"--layerPrecisions={types}",
        f"--layerOutputTypes={types}", *SHAPE_WORDS, "--builderOptimizationLevel=3",
    ]  # fmt: skip


def test_names_that_its_grammar_cannot_say(tmp_path):
    _, plan = plan_of(tmp_path, precision="fp16", typing="weak")
    quoted = trtexec.command(replace(plan, layers=("a:b",)), tmp_path, tmp_path, None)
    assert "--layerPrecisions='a:b':bf16" in quoted
    for name in ("a,b", "a'b"):
        with pytest.raises(ConfigError, match="runtime.options.builder to api"):
            trtexec.command(replace(plan, layers=(name,)), tmp_path, tmp_path, None)


# -- which file, and how it is typed -------------------------------------------------------------


def test_auto_is_weak_where_there_is_no_half_file(tmp_path):
    (fp32,) = place("fp32")
    fp32.with_name("small.fp16.onnx").unlink()
    found = order(precision="fp16").source
    assert (found.typing, found.path, found.precision) == ("weak", fp32, "fp16")
    assert "there is no fp16 file" in found.reasons[0]
    with pytest.raises(ConfigError, match="no model is named 'small'"):  # a name that no registry has
        order(precision="fp16", typing="strong")


def test_eleven_needs_the_half_file_of_a_registered_model(tmp_path):
    saved(graph(), place("fp32")[0].with_name("lighterglue.fp32.onnx"), replace(CARD, name="lighterglue"))
    with pytest.raises(ModelMissingError, match="fetch lighterglue --precision fp16.*11.4 builds strongly typed"):
        order("lighterglue", precision="fp16", version="11.4")
    assert order("lighterglue", precision="fp16", version="10.3").source.typing == "weak"


def test_where_neither_file_is_here_the_one_that_was_asked_for_is_named(tmp_path):
    with pytest.raises(ModelMissingError, match="fetch lighterglue --precision fp16"):
        order("lighterglue", precision="fp16", version="10.3")


def test_a_path_is_taken_as_it_is(tmp_path):
    half = saved(graph("fp16"), tmp_path / "half.onnx", replace(CARD, precision="fp16"))
    single = saved(graph(), tmp_path / "single.onnx", CARD)
    found = order(str(half), precision="fp32").source
    assert (found.precision, found.typing, found.core_type) == ("fp16", "strong", "auto")
    found = order(str(single), precision="fp16").source
    assert (found.precision, found.typing) == ("fp16", "weak") and "single.onnx is fp32" in found.reasons[0]
    with pytest.raises(ConfigError, match="types of the file. Name the fp16 file$"):
        order(str(single), precision="fp16", version="11.4")
    with pytest.raises(ConfigError, match="or set runtime.options.typing to weak"):
        order(str(single), precision="fp16", typing="strong")
    with pytest.raises(ConfigError, match="is fp16; weak typing takes an fp32 file"):
        order(str(half), precision="fp16", typing="weak")


def test_a_gpu_without_bf16(tmp_path):
    prepared, plan = plan_of(tmp_path, precision="fp16", gpu=T4, attention="auto", typing="weak")
    assert (plan.typing, plan.layer_type, plan.flags) == ("weak", "fp32", ("FP16", "OBEY_PRECISION_CONSTRAINTS"))
    assert attention_nodes(prepared.path) <= set(plan.layers) and prepared.card.precision == "fp16"
    assert prepared.card.patches == ("fp32-attention by layer precisions",)
    assert any("7.5 has no BF16" in reason for reason in plan.reasons)
    for wanted in ({"version": "11.4"}, {"typing": "strong"}, {}):
        prepared, plan = plan_of(tmp_path, precision="fp16", gpu=T4, attention="auto", **wanted)
        assert plan.typing == "strong" and prepared.card.patches == ("fp32-attention",)
        assert any("7.5 has no BF16" in reason for reason in plan.reasons)
    with pytest.raises(ConfigError, match="capability 7.5 has no BF16: set it to auto or fp32"):
        order(precision="fp16", gpu=T4, attention="bf16")
    assert order(precision="fp16", gpu=T4, version="11.4", attention="as_is").source.core_type == ""
    assert order(precision="fp32", gpu=T4, version="11.4").source.typing == "strong"


@pytest.mark.parametrize(
    "options, patches, cores",
    [
        ({}, {"cumsum", "attention"}, True),
        ({"attention": "as_is"}, {"cumsum"}, False),
        ({"patches": "none"}, set(), False),
        ({"precision": "fp32"}, {"cumsum"}, False),
        ({"precision": "fp32", "attention": "bf16"}, {"cumsum", "attention"}, True),
        ({"precision": "fp32", "attention": "fp32"}, {"cumsum"}, False),
    ],
)
def test_patches(tmp_path, options, patches, cores):
    wanted = {"precision": "fp16", **options}
    wanted = {"attention": "bf16" if wanted["precision"] == "fp16" else "auto", **wanted}
    assert set(order(**wanted).wish.patches) == patches
    prepared, _ = plan_of(tmp_path, **wanted)
    assert [p for p in prepared.card.patches if p.startswith("bf16")] == ["bf16-attention centred"] * cores
    assert read_card(order(**wanted).source.path).patches == (), "the file itself stays as it is"


def test_what_computes_in_bf16_already_is_left(tmp_path):
    import onnx_ir as ir

    done = ir.to_proto(attention_in_bf16(ir.from_proto(graph("fp16"))).model)
    path = saved(done, tmp_path / "done.onnx", replace(CARD, precision="bf16", patches=("bf16-attention",)))
    prepared, _ = plan_of(tmp_path, model=str(path))
    assert prepared.card.patches == ("bf16-attention",) and prepared.sha256 == content_sha256(prepared.path)
    assert f"attention: none of {CORES} cores is in half precision" in prepared.notes
    prepared, _ = plan_of(tmp_path, model=str(path), attention="bf16")
    assert f"attention: {CORES} cores are in BF16 already" in prepared.notes


def casts_of(path) -> set[int]:
    return {n.attribute[0].i for n in onnx.load(path).graph.node if n.op_type == "Cast"}


@pytest.mark.parametrize("version, typing", [("10.3", "strong"), ("10.3", "weak"), ("11.4", "strong")])
def test_attention_over_keypoints_is_in_float32(tmp_path, version, typing):
    prepared, plan = plan_of(tmp_path, precision="fp16", attention="auto", version=version, typing=typing)
    assert prepared.card.precision == "fp16", "whose limits hold"
    assert TensorProto.BFLOAT16 not in casts_of(prepared.path) and "BF16" not in plan.flags
    if typing == "weak":
        assert prepared.card.patches == ("fp32-attention by layer precisions",) and plan.layer_type == "fp32"
        assert attention_nodes(prepared.path) <= set(plan.layers)
    else:
        assert prepared.card.patches == ("fp32-attention",) and not plan.layers
        assert f"attention: {CORES} cores cast to float32" in prepared.notes
        types = onnx.shape_inference.infer_shapes(onnx.load(prepared.path), strict_mode=True).graph.value_info
        kinds = {v.name: v.type.tensor_type.elem_type for v in types}
        nodes = {n.name: n for n in onnx.load(prepared.path).graph.node}
        read = {i for name in attention_nodes(prepared.path) for i in nodes[name].input}
        assert {kinds[name] for name in read} == {TensorProto.FLOAT}


@pytest.mark.parametrize(
    "tokens, patch", [(2047, "fp32-attention"), (2048, "bf16-attention"), (4096, "bf16-attention")]
)
def test_attention_over_a_large_map_is_in_bf16(tmp_path, tokens, patch):
    card = replace(ModelCard("global", "map", "CC0-1.0"), precision="fp16")
    path = saved(plain(2, tokens=(tokens, tokens), width=8, kind="float16"), tmp_path / "map.onnx", card)
    prepared, _ = planned(order(str(path)), able("11.4"), tmp_path)
    assert [words.split()[0] for words in prepared.card.patches] == [patch]


# -- what is refused before any build ------------------------------------------------------------


def test_an_emulated_file(tmp_path):
    path = saved(graph(), tmp_path / "twin.onnx", replace(CARD, patches=("bf16-attention emulated",)))
    with pytest.raises(ModelFileError, match="emulates BF16 in float32.*build from the file that it was made from"):
        order(str(path))


def fixed(text: str, tmp_path, name="fixed.onnx", **initializers):
    """A graph of fixed shapes, with a card."""
    return saved(graph_helpers.graph(text, initializers), tmp_path / name, ModelCard("global", "fixed", "CC0-1.0"))


def test_strict_inference(tmp_path):
    nodes = [helper.make_node("Add", ["image", "half"], ["descriptor"], "mixed")]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [4])
    half = helper.make_tensor_value_info("half", TensorProto.FLOAT16, [4])
    out = helper.make_tensor_value_info("descriptor", TensorProto.FLOAT, [4])
    model = helper.make_model(helper.make_graph(nodes, "mixed", [image, half], [out]))
    path = saved(model, tmp_path / "mixed.onnx", ModelCard("global", "mixed", "CC0-1.0"))
    with pytest.raises(ModelFileError, match="strict inference.*as TensorRT would"):
        plan_of_path(path, tmp_path)


def plan_of_path(path, tmp_path, version="10.13.3"):
    return planned(order(str(path), version=version), able(version), tmp_path)


CUMSUM = "(float[1,{n}] image) => (float[1,{n}] descriptor) {{ descriptor = CumSum(image, axis) }}"


@pytest.mark.parametrize("version", ["10.0.1", "10.3.0", "10.13.3", "11.4.0"])
def test_cumsum_is_replaced(tmp_path, version):
    path = fixed(CUMSUM.format(n=64), tmp_path, axis=np.array(1))
    prepared, _ = plan_of_path(path, tmp_path, version)
    assert [n.op_type for n in onnx.load(prepared.path).graph.node] == ["MatMul"]
    assert prepared.card.patches == ("cumsum",) and "CumSum: 1 replaced by MatMul" in prepared.notes


def test_a_cumsum_that_is_too_wide(tmp_path):
    path = fixed(CUMSUM.format(n=4096), tmp_path, axis=np.array(1))
    for version in ("10.0.1", "10.3.0"):
        with pytest.raises(ConfigError, match="sums along 4096 values, at most 1024.*TensorRT 10.*may miscompute"):
            plan_of_path(path, tmp_path, version)
    for version in ("10.4.0", "11.4.0"):
        prepared, _ = plan_of_path(path, tmp_path, version)
        (note,) = [n for n in prepared.notes if n.startswith("warning: CumSum stays")]
        assert "4096 values" in note and prepared.card.patches == ()


BRANCHES = """(float[1,4] image, bool go) => (float[1,N] descriptor) {{
    descriptor = If (go) <
        then_branch = yes () => (float[{a}] y) {{ y = {then}(image) }},
        else_branch = no () => (float[{b}] z) {{ z = {other} }} > }}"""


def test_unequal_branches_need_a_newer_version(tmp_path):
    text = BRANCHES.format(a="1,4", then="Relu", b="1,2", other="Slice(image, start, end, axes)")
    path = fixed(text, tmp_path, start=np.array([0]), end=np.array([2]), axes=np.array([1]))
    for version in ("10.3.0", "10.10.0"):
        with pytest.raises(ModelFileError, match=r"\(1, 4\) and \(1, 2\).*10.11 and newer do not.*plain model"):
            plan_of_path(path, tmp_path, version)
    prepared, _ = plan_of_path(path, tmp_path, "10.11.0")
    assert prepared.has_if


def test_equal_branches_serve_all(tmp_path):
    path = fixed(BRANCHES.format(a="1,4", then="Relu", b="1,4", other="Neg(image)"), tmp_path)
    assert plan_of_path(path, tmp_path, "10.3.0")[0].has_if
    assert not plan_of_path(fixed(CUMSUM.format(n=8), tmp_path, axis=np.array(1)), tmp_path)[0].has_if


@pytest.mark.parametrize(
    "name, file", [("../../x", "-..-x"), (".hidden", "hidden"), ("a b/ü", "a-b-ü"), ("..", "model")]
)
def test_a_name_of_a_card_leaves_the_folder_to_nobody(tmp_path, name, file):
    text = "(float[1,4] image) => (float[1,4] descriptor) { descriptor = Relu(image) }"
    path = saved(graph_helpers.graph(text), tmp_path / "odd.onnx", ModelCard("global", name, "CC0-1.0"))
    found = order(str(path)).path
    assert found.name == f"{file}.fp32.orin.engine" and found.parent.name == "engines"


def test_a_model_without_attention(tmp_path):
    path = fixed("(float[1,4] image) => (float[1,4] descriptor) { descriptor = Relu(image) }", tmp_path)
    _, plan = planned(order(str(path), precision="fp16", typing="weak"), able("10.3"), tmp_path)
    assert (plan.flags, plan.layer_type) == (("FP16",), ""), "BF16 is for layers that are set to it"
    prepared, plan = planned(order(str(path), attention="bf16"), able("10.3"), tmp_path)
    assert not plan.layers and prepared.card.patches == () and prepared.card.precision == "fp32"
    assert any(note.startswith("no core of attention") for note in prepared.notes)


def global_file(tmp_path, preprocessing):
    """A convolution of an image of any number of channels, which TensorRT wants to know."""
    weights = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w")
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, "C", "H", "W"])
    out = helper.make_tensor_value_info("descriptor", TensorProto.FLOAT, [1, 4, "h", "w"])
    graph_ = helper.make_graph(
        [helper.make_node("Conv", ["image", "w"], ["descriptor"])], "g", [image], [out], [weights]
    )
    made = helper.make_model(graph_, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return saved(made, tmp_path / "g.onnx", ModelCard("global", "g", "CC0-1.0", preprocessing=preprocessing))


def shape_of(path, name="image"):
    (found,) = (i for i in onnx.load(path).graph.input if i.name == name)
    return [d.dim_value or d.dim_param for d in found.type.tensor_type.shape.dim]


def test_axes_without_a_choice_are_fixed_in_the_graph(tmp_path):
    """ "number of channels in input tensor to a convolution layer must not be dynamic", says TensorRT."""
    path = global_file(tmp_path, Preprocessing("rgb"))
    prepared, plan = planned(order(str(path)), able("10.3"), tmp_path)
    assert shape_of(prepared.path) == [1, 3, "H", "W"] and shape_of(path) == [1, "C", "H", "W"]
    assert "fixed in the graph: image 1x3x?x?" in prepared.notes
    assert [str(p) for p in plan.profiles.values()] == ["1x3x96x96,1x3x480x640,1x3x1024x1280"]
    assert prepared.sha256 == content_sha256(prepared.path) != content_sha256(path)


def test_a_model_of_one_shape_has_no_profile(tmp_path):
    """trtexec ends with an error where it is given shapes of a static model."""
    path = global_file(tmp_path, Preprocessing("rgb", 32, 24, "area"))
    prepared, plan = planned(order(str(path)), able("11.4"), tmp_path)
    assert shape_of(prepared.path) == [1, 3, 24, 32] and plan.profiles == {}
    assert not [w for w in trtexec.command(plan, prepared.path, tmp_path, None) if "Shapes" in w]
    (out,) = onnx.load(prepared.path).graph.output
    assert [d.dim_value for d in out.type.tensor_type.shape.dim] == [1, 4, 22, 30], "a 3x3 kernel takes 2 off each side"


def test_only_onnx_files(tmp_path):
    path = tmp_path / "model.xml"
    path.write_text("<net/>")
    with pytest.raises(ModelFileError, match="engines are built from .onnx files"):
        order(str(path))


def test_shapes_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="keypoints9"):
        order(shapes="keypoints9: 1x2")
    assert order(shapes=SHAPES).wish.profiles["descriptors0"] == [[1, 64], [256, 64], [600, 64]]


def test_the_engines_place_names_model_precision_and_gpu():
    path = order(precision="fp16", gpu=replace(ORIN, name="NVIDIA GeForce RTX 3060 (Laptop)")).path
    assert path.name == "small.fp16.nvidia-geforce-rtx-3060-laptop.engine" and path.parent.name == "engines"


def test_the_least_bf16_capability_is_ampere():
    for capability, core in (("8.0", "auto"), ("10.0", "auto"), ("12.1", "auto"), ("7.9", "fp32")):
        assert order(precision="fp16", gpu=replace(ORIN, capability=capability)).source.core_type == core


def test_one_value_of_a_shape_tensor_is_not_its_length(tmp_path):
    """``max_keypoints`` of 512 and nothing else: the tensor still holds one number."""
    text = """(float[1,5000] image, int64[1] max_keypoints) => (float[1,k] scores, int64[1,k] keypoints)
        { scores, keypoints = TopK(image, max_keypoints) }"""
    path = saved(graph_helpers.graph(text), tmp_path / "top.onnx", ModelCard("features", "top", "CC0-1.0"))
    prepared, plan = planned(order(str(path), shapes="max_keypoints:512"), able("10.3"), tmp_path)
    assert prepared.path == path and plan.profiles["max_keypoints"].opt == (512,)
