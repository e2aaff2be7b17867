"""Shapes that engines are built for: what is dynamic, what the card, the options and the role say, and who wins."""

import dataclasses

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import card, save
from onnx import TensorProto, helper

from vslam_features.artifacts.preprocessing import Preprocessing
from vslam_features.artifacts.profiles import profiles_of
from vslam_features.artifacts.shapes import Profile, joined, parse_profiles, parse_shapes
from vslam_features.errors import ConfigError, ModelFileError
from vslam_features.runtimes.onnx_inputs import GraphInput, read_inputs

F32, I64 = TensorProto.FLOAT, TensorProto.INT64
POINTS = {"keypoints0": (F32, ["M", 2]), "keypoints1": (F32, ["N", 2])}
SPARSE = {**POINTS, "descriptors0": (F32, ["M", 64]), "descriptors1": (F32, ["N", 64])}
SCALARS = {"image_size0": (F32, [2]), "image_size1": (F32, [2]), "min_covisibility": (F32, [])}
IMAGE = {"image": (F32, [1, "C", "H", "W"])}
MATCHER, FEATURES = card("matcher", "m"), card("features", "f")


def model(inputs, initializers=(), ir_version=10) -> onnx.ModelProto:
    """A graph of these inputs, name -> (type, dims), None for a graph that says no rank; it returns a constant."""
    one = helper.make_tensor("one", F32, [1], [1.0])
    node = helper.make_node("Constant", [], ["y"], value=one)
    infos = [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()]
    out = helper.make_tensor_value_info("y", F32, [1])
    graph = helper.make_graph([node], "g", infos, [out], initializer=list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=ir_version)


@pytest.fixture
def profiles(tmp_path):
    def run(tensors, of=MATCHER, overrides="", **fields):
        made = dataclasses.replace(of, **fields)
        found = profiles_of(save(model(tensors), made, tmp_path / "m.onnx"), made, overrides)
        return {name: str(profile) for name, profile in found.items()}

    return run


# -- the file's inputs -----------------------------------------------------------------------

DIMS = st.integers(0, 5000) | st.sampled_from(["N", "batch", "número", ""])
KINDS = {F32: np.float32, I64: np.int64, TensorProto.FLOAT16: np.float16, TensorProto.BOOL: np.bool_}
INPUTS = st.dictionaries(
    st.text(st.characters(codec="utf-8", min_codepoint=33), min_size=1, max_size=12).filter(lambda n: n != "y"),
    st.tuples(st.sampled_from(list(KINDS)), st.none() | st.lists(DIMS, max_size=4)),
    max_size=4,
)


@settings(max_examples=60)
@given(INPUTS)
def test_inputs_are_those_that_onnx_writes(tmp_path_factory, inputs):
    path = save(model(inputs), FEATURES, tmp_path_factory.mktemp("inputs") / "m.onnx")
    wanted = {
        name: GraphInput(np.dtype(KINDS[kind]), None if dims is None else tuple(dims))
        for name, (kind, dims) in inputs.items()
    }
    assert read_inputs(path) == wanted and list(read_inputs(path)) == list(inputs)


def test_weights_that_old_files_list_as_inputs_are_none(tmp_path):
    weight = helper.make_tensor("w", F32, [2], [1.0, 2.0])
    path = save(model({**IMAGE, "w": (F32, [2])}, [weight], ir_version=3), FEATURES, tmp_path / "m.onnx")
    assert list(read_inputs(path)) == ["image"]


def test_a_picture_whose_sides_have_one_name(profiles):
    assert profiles({"image": (F32, [1, 3, "S", "S"])}, FEATURES)["image"] == "1x3x96x96,1x3x480x480,1x3x1024x1024"


@pytest.mark.parametrize(
    "inputs, said",
    [
        (
            {"image": (F32, [0, 3, "H", "W"])},
            "m.onnx: no engine can be built for its input 'image': .*axis 0 goes 0, 0, 0",
        ),
        (
            {**SPARSE, "keypoints0": (F32, [512, 2]), "descriptors0": (F32, [1024, 64])},
            r"m.onnx: its input 'descriptors0' axis -2 goes \(1024, 1024, 1024\), but 'keypoints0' \(512,",
        ),
        ({"image": (F32, [1, "S", "S", "S"])}, r"m.onnx: its input 'image' axis -. goes"),
    ],
)
def test_lengths_that_cannot_be_are_the_file_s(profiles, inputs, said):
    with pytest.raises(ModelFileError, match=said):
        profiles(inputs, MATCHER if "keypoints0" in inputs else FEATURES)


def test_types_without_arrays_and_negative_dims_are_unknown(tmp_path):
    made = model({"a": (TensorProto.BFLOAT16, [-1, 2])})
    made.graph.input.append(helper.make_tensor_sequence_value_info("list", F32, [1]))
    assert read_inputs(save(made, FEATURES, tmp_path / "m.onnx")) == {"a": GraphInput(None, ("", 2))}


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_graph_is_an_error_of_ours_or_reads(tmp_path_factory, data):
    content = bytearray(model({**SPARSE, **SCALARS}).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "m.onnx"
    path.write_bytes(content)
    try:
        assert all(isinstance(found, GraphInput) for found in read_inputs(path).values())
    except ModelFileError as error:
        assert str(path) in str(error)


# -- what the role says ----------------------------------------------------------------------


def test_a_matcher_of_keypoints(profiles):
    assert profiles({**SPARSE, **SCALARS}) == {
        "keypoints0": "1x2,1024x2,4096x2",
        "keypoints1": "1x2,1024x2,4096x2",
        "descriptors0": "1x64,1024x64,4096x64",
        "descriptors1": "1x64,1024x64,4096x64",
    }


def test_names_and_ranks_are_the_files(profiles):
    inputs = {"a": (F32, [1, "x", 2]), "b": (F32, [1, "y", 2]), "c": (F32, ["batch", "", 64]), "d": (F32, [1, "", 64])}
    ties = dict(zip(SPARSE, inputs))
    found = profiles(inputs, inputs=ties, shapes={"keypoints0": "16x2,512x2,2048x2"})
    assert found == {
        "a": "1x16x2,1x512x2,1x2048x2",
        "b": "1x1x2,1x1024x2,1x4096x2",
        "c": "1x16x64,1x512x64,1x2048x64",  # as long as its keypoints, whatever the file calls the axis
        "d": "1x1x64,1x1024x64,1x4096x64",
    }
    assert profiles(inputs, inputs=ties, overrides="a:1x16x2,1x512x2,1x2048x2; keypoints1:1x2,1024x2,4096x2") == found


def test_a_matcher_of_fixed_maps_and_one_of_maps_of_any_size(profiles):
    fixed = {**POINTS, "descriptors0": (F32, [1, 256, 64, 64]), "descriptors1": (F32, [1, 256, 64, 64])}
    assert set(profiles(fixed)) == set(POINTS)
    any_size = {"descriptors0": (F32, [1, 256, "h", "w"]), "descriptors1": (F32, [1, "h", "w", 256])}
    found = profiles({**POINTS, **any_size}, layouts={"descriptors1": "hwc"})
    assert found["descriptors0"] == "1x256x8x8,1x256x64x64,1x256x160x160"
    assert found["descriptors1"] == "1x8x8x256,1x64x64x256,1x160x160x256"
    tokens = {name: (F32, [1, f"cells{name[-1]}", 256]) for name in any_size}
    found = profiles({**POINTS, **tokens}, layouts=dict.fromkeys(tokens, "tokens"))
    assert found["descriptors0"] == "1x64x256,1x4096x256,1x25600x256" and found["keypoints0"] == "1x2,1024x2,4096x2"


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (Preprocessing(), "1x1x96x96,1x1x480x640,1x3x1024x1280"),
        (Preprocessing("rgb"), "1x3x96x96,1x3x480x640,1x3x1024x1280"),
        (Preprocessing("grey", 320, 256, "area"), "1x1x256x320,1x1x256x320,1x1x256x320"),
    ],
)
def test_an_image_is_what_the_preprocessing_makes(profiles, steps, wanted):
    assert profiles(IMAGE, of=FEATURES, preprocessing=steps) == {"image": wanted}


def test_an_image_in_another_order_or_without_a_batch(profiles):
    steps = Preprocessing("rgb", 320, 256, "area")
    hwc = profiles({"image": (F32, ["b", "h", "w", "c"])}, FEATURES, preprocessing=steps, layouts={"image": "hwc"})
    assert hwc == {"image": "1x256x320x3,1x256x320x3,1x256x320x3"}
    assert profiles({"image": (F32, [3, "h", "w"])}, FEATURES)["image"] == "3x96x96,3x480x640,3x1024x1280"
    assert profiles({"image": (F32, [1, 3, 64, 64])}, of=FEATURES) == {}


def test_the_number_of_rows_is_a_profile_of_values(tmp_path):
    inputs = {**IMAGE, "max_keypoints": (I64, [1])}
    path = save(model(inputs), FEATURES, tmp_path / "m.onnx")
    assert profiles_of(path, FEATURES)["max_keypoints"] == Profile((1,), (1024,), (3840,), values=True)
    assert profiles_of(path, FEATURES, "max_keypoints:512")["max_keypoints"] == Profile((512,), (512,), (512,), True)
    assert not profiles_of(path, FEATURES)["image"].values
    with pytest.raises(ConfigError, match="'max_keypoints' of m.onnx holds one number"):
        profiles_of(path, FEATURES, "max_keypoints:1x2")
    scalar = save(model({**IMAGE, "max_keypoints": (TensorProto.INT32, [])}), FEATURES, tmp_path / "s.onnx")
    assert profiles_of(scalar, FEATURES)["max_keypoints"].max == (3840,)


# -- who wins --------------------------------------------------------------------------------


def test_options_come_before_the_card_and_the_card_before_the_role(profiles):
    shapes = {"keypoints0": "8x2,256x2,512x2", "keypoints1": "4x2,64x2,128x2"}
    found = profiles(SPARSE, shapes=shapes, overrides="descriptors0:2x64,3x64,4x64")
    assert found["keypoints0"] == "2x2,3x2,4x2" and found["descriptors0"] == "2x64,3x64,4x64"
    assert found["keypoints1"] == "4x2,64x2,128x2" and found["descriptors1"] == "4x64,64x64,128x64"


def test_axes_of_one_name_are_equally_long(profiles):
    """TensorRT checks this at every run: the parser names the axes."""
    inputs = {name: (kind, ["N", *dims[1:]]) for name, (kind, dims) in SPARSE.items()}
    found = profiles(inputs, overrides="keypoints1:9x2,99x2,999x2")
    assert {shape.replace("x64", "x2") for shape in found.values()} == {"9x2,99x2,999x2"}
    with pytest.raises(ConfigError, match=r"'keypoints1' of m.onnx axis -2 goes \(7, 7, 7\), but 'keypoints0' \(5, 5"):
        profiles(inputs, overrides="keypoints0:5x2;keypoints1:7x2")


AXIS = st.lists(st.integers(1, 9000), min_size=3, max_size=3).map(sorted)


@settings(max_examples=40)
@given(AXIS, AXIS, st.booleans(), st.booleans())
def test_counts_agree_whoever_gives_them(tmp_path_factory, first, second, by_card, of_descriptors):
    path = save(model(SPARSE), MATCHER, tmp_path_factory.mktemp("counts") / "m.onnx")
    name, last = ("descriptors", 64) if of_descriptors else ("keypoints", 2)
    texts = {f"{name}{i}": ",".join(f"{n}x{last}" for n in axis) for i, axis in enumerate((first, second))}
    shapes = texts if by_card else {}
    overrides = "" if by_card else ";".join(f"{n}:{text}" for n, text in texts.items())
    found = profiles_of(path, dataclasses.replace(MATCHER, shapes=shapes), overrides)
    for i, axis in enumerate((first, second)):
        for name in ("keypoints", "descriptors"):
            assert found[f"{name}{i}"].axes[0] == tuple(axis)


def test_what_the_file_fixes_is_believed_before_all(profiles):
    fixed = {**SPARSE, "descriptors0": (F32, [300, 64])}
    assert profiles(fixed)["keypoints0"] == "300x2,300x2,300x2"
    with pytest.raises(ConfigError, match=r"'keypoints0' of m.onnx axis -2 goes \(1, 2, 3\), but 'descriptors0' \(300"):
        profiles(fixed, overrides="keypoints0:1x2,2x2,3x2")


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("keypoints0:1x3", r"'keypoints0' of m.onnx is Mx2 in the file, got 1x3,1x3,1x3"),
        ("keypoints0:1x1x9x2", "'keypoints0' of m.onnx is Mx2 in the file"),
        ("keypoints9:1x2", "'keypoints9' of m.onnx is no input, it has keypoints0, keypoints1, descriptors0"),
        ("keypoints0:9x2,5x2,5x2", r"shapes: 'keypoints0': 9x2,5x2,5x2: axis 0 goes 9, 5, 5: expected 1 or more"),
        ("keypoints0:0x2", "expected 1 or more"),
        ("keypoints0:1x2,3x2", "'keypoints0': '1x2,3x2': expected MIN,OPT,MAX, each as 1x1024x2"),
        ("keypoints0:1x2,3x2,1x3x2", "are of 2, 2 and 3 axes"),
        ("keypoints0:-1x2", "expected MIN,OPT,MAX"),
        ("keypoints0:٣x2", "expected MIN,OPT,MAX"),
        ("1x2", "'1x2': expected NAME:SHAPES"),
        ("keypoints0:1x2;keypoints0:1x2", "'keypoints0' is given twice"),
    ],
)
def test_options_that_do_not_fit(profiles, overrides, message):
    with pytest.raises(ConfigError, match=message):
        profiles({**SPARSE, **SCALARS}, overrides=overrides)


def test_a_card_that_does_not_fit(profiles):
    with pytest.raises(ModelFileError, match="shapes of the card: 'keypoints0' is Mx2 in the file, got 1x3"):
        profiles(SPARSE, shapes={"keypoints0": "1x3"})
    with pytest.raises(ModelFileError, match=r"shapes of the card: 'image' is no input"):
        profiles(SPARSE, shapes={"image": "1x3"})
    with pytest.raises(ModelFileError, match="shapes of the card: 'x': expected MIN,OPT,MAX"):
        profiles(SPARSE, shapes={"keypoints0": "x"})
    with pytest.raises(ModelFileError, match="'inputs' of the card names 'kpts', the file has 'descriptors0'"):
        profiles(SPARSE, inputs={"keypoints0": "kpts"})


def test_an_axis_of_which_nobody_speaks_is_asked_for(profiles):
    unknown = {**SPARSE, "descriptors0": (F32, [1, "M", "D"])}
    with pytest.raises(ModelFileError, match=r"how long axis 2 of its input 'descriptors0'.*each as 1x1024x\?"):
        profiles(unknown)
    assert profiles(unknown, shapes={"descriptors0": "1x64,512x64,1024x64"})["keypoints0"] == "1x2,512x2,1024x2"
    no_rank = {**SPARSE, "descriptors0": (F32, None)}
    with pytest.raises(ModelFileError, match="does not say how many axes its input 'descriptors0' has"):
        profiles(no_rank)
    assert profiles(no_rank, shapes={"descriptors0": "1x5x64"})["descriptors0"] == "1x5x64,1x5x64,1x5x64"


# -- the text --------------------------------------------------------------------------------


@given(st.lists(AXIS, min_size=1, max_size=5))
def test_shapes_survive_their_text(axes):
    profile = Profile(*(tuple(a[i] for a in axes) for i in range(3)))
    assert parse_shapes(str(profile)) == profile
    assert parse_profiles(f" a:b:{profile} ; c:{profile};") == {"a:b": profile, "c": profile}


def test_joined_is_what_trtexec_and_onnxruntime_read():
    shapes = parse_profiles("a:1x2,3x2,5x2;b:1x3x64x64")
    assert joined(shapes, "min") == "a:1x2,b:1x3x64x64" and joined(shapes, "opt") == "a:3x2,b:1x3x64x64"
    assert joined(shapes, "max") == "a:5x2,b:1x3x64x64"
    for name in ("onnx::x", "a,b", "a b", "a'"):
        with pytest.raises(ConfigError, match="rename it in the file"):
            joined({name: parse_shapes("1")}, "min")
