"""How a file's tensors become ours: every convention, layout, rank and type, on files that compute the same."""

from dataclasses import replace

import cv2
import numpy as np
import onnx
import pytest
import yaml
from dense_models import CHANNELS, FEATURES_CARD, MAP, MATCHER_CARD, SEEN, STEPS, map_matcher, map_model, renamed
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import (
    DIM,
    ONE,
    Opened,
    build,
    card,
    engine,
    features_model,
    matcher_model,
    own_cache,  # noqa: F401 (fixture)
    save,
)
from spox import Tensor, argument
from spox.opset.ai.onnx import v18 as op

from vslam_features.artifacts import golden
from vslam_features.artifacts.binding import Binding
from vslam_features.artifacts.card import ModelCard, read_card, sidecar_path
from vslam_features.artifacts.layouts import KEYPOINTS, LAYOUTS
from vslam_features.config import Config
from vslam_features.errors import DataError, ModelFileError
from vslam_features.features.dense import FlexGlue as DenseFeatures
from vslam_features.features.learned import XFeat
from vslam_features.matching.flexglue import FlexGlue
from vslam_features.matching.learned import LighterGlue
from vslam_features.models import Models
from vslam_features.runtimes.base import TensorSpec
from vslam_features.runtimes.ort import OnnxRuntime
from vslam_features.types import Frame

SIZES = ((848, 480), (544, 640))


def session_of(model: onnx.ModelProto, path):
    path.write_bytes(model.SerializeToString())
    return OnnxRuntime().load(path, ONE)


def binding_of(model: onnx.ModelProto, tmp_path, own: ModelCard) -> Binding:
    return Binding(session_of(model, tmp_path / "file.onnx"), own, "file.onnx")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, np.ndarray]:
    """A matcher's inputs of a shipped pair, as if of two images of different sizes, which maps cover all the same."""
    run = Binding(session_of(map_model(), tmp_path_factory.mktemp("maps") / "maps.onnx"), FEATURES_CARD).run
    images = next(p.images for p in golden.pairs() if p.name == "room-step")
    inputs = {}
    for i, (image, size) in enumerate(zip(images, SIZES)):
        corners = cv2.goodFeaturesToTrack(image, 500, 0.005, 2).reshape(-1, 2)
        inputs[f"descriptors{i}"] = run({"image": STEPS.apply(image)})["descriptors"]
        inputs[f"keypoints{i}"] = ((corners + 0.5) * size / image.shape[::-1] - 0.5).astype(np.float32)
        inputs[f"image_size{i}"] = np.array(size, np.float32)
    return inputs


@pytest.fixture(scope="module")
def expected(pair, tmp_path_factory) -> dict[str, np.ndarray]:
    """What the file that takes everything as we have it says of the pair."""
    found = Binding(session_of(map_matcher(), tmp_path_factory.mktemp("plain") / "plain.onnx"), MATCHER_CARD).run(pair)
    assert (found["matches0"] >= 0).sum() > 100
    return found


def same(got, expected, exact=True) -> None:
    assert {n: (v.dtype, v.shape) for n, v in got.items()} == {n: (v.dtype, v.shape) for n, v in expected.items()}
    for name, value in expected.items():
        if exact or value.dtype.kind == "i":
            np.testing.assert_array_equal(got[name], value, name)
        else:
            np.testing.assert_allclose(got[name], value, atol=2e-5, err_msg=name)


# -- coordinates ---------------------------------------------------------------------------------

# In W = 848, H = 480, with the features model at 512 x 384: the outer corner of the first pixel is (-0.5, -0.5) in our
# pixels, the image's centre (423.5, 239.5), the centre of the last pixel (847, 479).
POINTS = np.array([[-0.5, -0.5], [423.5, 239.5], [847, 479]], np.float32)
FORMULAS = {
    "pixels": POINTS,
    "corner_pixels": [[0, 0], [424, 240], [847.5, 479.5]],
    "unit": [[0, 0], [0.5, 0.5], [1 - 0.5 / 848, 1 - 0.5 / 480]],
    "signed": [[-1, -1], [0, 0], [1 - 1 / 848, 1 - 1 / 480]],
    "unit_centres": [[-0.5 / 847, -0.5 / 479], [0.5, 0.5], [1, 1]],
    "signed_centres": [[-1 - 1 / 847, -1 - 1 / 479], [0, 0], [1, 1]],
    "long_side": [[-424.5 / 424, -240.5 / 424], [-0.5 / 424, -0.5 / 424], [423 / 424, 239 / 424]],
    "model_pixels": [[-0.5, -0.5], [255.5, 191.5], [511.5 - 256 / 848, 383.5 - 192 / 480]],
    "model_corner_pixels": [[0, 0], [256, 192], [512 - 256 / 848, 384 - 192 / 480]],
}


@pytest.mark.parametrize("convention", KEYPOINTS)
def test_coordinates_of_known_points(convention):
    image, model = np.array([848.0, 480.0]), np.array(SEEN, np.float64)
    there = KEYPOINTS[convention].to_file(POINTS, image, model)
    assert there.dtype == np.float32
    np.testing.assert_allclose(there, FORMULAS[convention], atol=1e-4 if "pixels" in convention else 1e-6)
    np.testing.assert_allclose(KEYPOINTS[convention].to_ours(there, image, model), POINTS, atol=1e-3)


@given(st.sampled_from(sorted(KEYPOINTS)), st.tuples(st.integers(1, 9000), st.integers(1, 9000)), st.integers(0, 2**32))
def test_coordinates_go_there_and_back_in_images_of_any_size(convention, size, seed):
    size, model = np.array(size, np.float64), np.array(SEEN, np.float64)
    points = (np.random.default_rng(seed).uniform(0, 1, (5, 2)) * size - 0.5).astype(np.float32)
    there = KEYPOINTS[convention].to_file(points, size, model)
    np.testing.assert_allclose(KEYPOINTS[convention].to_ours(there, size, model), points, atol=1e-6 * size.max() + 1e-6)


@pytest.mark.parametrize("convention", KEYPOINTS)
def test_a_file_that_takes_keypoints_in_any_coordinates_gives_the_same_matches(convention, pair, expected, tmp_path):
    own = replace(MATCHER_CARD, keypoints=convention, preprocessing=STEPS)
    got = binding_of(map_matcher(keypoints=convention), tmp_path, own).run(pair)
    same(got, expected, exact=convention == "pixels")
    if convention != "pixels":  # and the check can fail: it does where the card says nothing
        wrong = binding_of(map_matcher(keypoints=convention), tmp_path, MATCHER_CARD).run(pair)
        assert not np.array_equal(wrong["mscores0"], expected["mscores0"])


def test_normalised_coordinates_without_an_image_size_in_the_file(pair, expected, tmp_path):
    """The size comes with the run all the same: it is that of each image."""
    own = replace(MATCHER_CARD, keypoints="signed")
    binding = binding_of(map_matcher(keypoints="signed", image_size=False), tmp_path, own)
    binding.require()
    same(binding.run(pair), expected, exact=False)
    with pytest.raises(DataError, match=r"'keypoints1' is given as 'signed': image_size1 is needed"):
        binding.run({n: v for n, v in pair.items() if n != "image_size1"})


def test_keypoints_of_a_features_model_in_other_coordinates(tmp_path):
    image = argument(Tensor(np.float32, (1, 1, "H", "W")))
    points = op.const(np.array([[[0.5, 0.25], [0.75, 0.5]]], np.float32))
    rows = op.const(np.ones((1, 2, 4), np.float32))
    zero = op.mul(op.reduce_sum(image, keepdims=0), op.const(np.float32(0)))
    outputs = {"keypoints": points, "scores": op.add(op.const(np.ones((1, 2), np.float32)), zero), "descriptors": rows}
    own = card("features", "unit", keypoints="unit", layouts={"keypoints": "yx"})
    got = binding_of(build({"image": image}, outputs), tmp_path, own).run(
        {"image": np.ones((1, 1, 40, 80), np.float32)}
    )
    np.testing.assert_allclose(got["keypoints"], [[0.25 * 80 - 0.5, 0.5 * 40 - 0.5], [0.5 * 80 - 0.5, 0.75 * 40 - 0.5]])
    assert got["descriptors"].shape == (2, 4) and got["scores"].shape == (2,)


# -- layouts, ranks, types -----------------------------------------------------------------------

FORMS = {
    "batch": ({"batch": True}, {}, True),
    "hwc": ({"layout": "hwc"}, {"layouts": {"descriptors0": "hwc", "descriptors1": "hwc"}}, True),
    "tokens": ({"layout": "tokens"}, {"layouts": {"descriptors0": "tokens", "descriptors1": "tokens"}}, True),
    "chw": ({}, {"layouts": {"descriptors0": "chw", "descriptors1": "chw"}}, True),
    "yx": ({"order": "yx"}, {"layouts": {"keypoints0": "yx", "keypoints1": "yx"}}, True),
    "fp16 maps": ({"dtype": np.float16}, {}, True),  # the features model rounds to fp16: nothing is lost
    "int32 matches": ({"index": np.int32}, {}, True),
    "all": (
        {"batch": True, "layout": "tokens", "order": "yx", "dtype": np.float16, "index": np.int32, "keypoints": "unit"},
        {
            "keypoints": "unit",
            "layouts": {"descriptors0": "tokens", "descriptors1": "tokens", "keypoints0": "yx", "keypoints1": "yx"},
        },
        False,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_another_form_gives_the_same_matches(form, pair, expected, tmp_path):
    arguments, fields, exact = FORMS[form]
    binding = binding_of(map_matcher(**arguments), tmp_path, replace(MATCHER_CARD, **fields))
    binding.require()
    assert binding.dense and binding.map_shape("descriptors0") == MAP and binding.channels("descriptors0") == CHANNELS
    same(binding.run(pair), expected, exact)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("layout", ["chw", "hwc", "tokens"])
def test_maps_come_out_as_ours_whatever_their_layout(layout, batch, tmp_path):
    picture = {"image": STEPS.apply(golden.pairs()[0].images[0])}
    expected = binding_of(map_model(), tmp_path, FEATURES_CARD).run(picture)["descriptors"]
    own = replace(FEATURES_CARD, layouts={"descriptors": layout})
    binding = binding_of(map_model(layout=layout, batch=batch), tmp_path, own)
    assert binding.dense and binding.channels("descriptors") == CHANNELS
    got = binding.run(picture)["descriptors"]
    assert got.shape == MAP
    np.testing.assert_array_equal(got, expected)


@given(
    st.sampled_from(sorted(n for n, layout in LAYOUTS.items() if "descriptors" in layout.tensors)),
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9),
)  # fmt: skip
def test_layouts_go_there_and_back(layout, channels, h, w, cell):
    ours = np.random.default_rng(0).normal(size=(channels, h, w)).astype(np.float32)
    image = np.empty((1, 1, h * cell, w * cell), np.float32)
    there = LAYOUTS[layout].to_file(ours)
    assert there.ndim == LAYOUTS[layout].file_rank
    np.testing.assert_array_equal(LAYOUTS[layout].to_ours(there, {"image": image}), ours)


def test_tokens_that_are_no_map_of_the_image_are_told(tmp_path):
    own = replace(FEATURES_CARD, layouts={"descriptors": "tokens"})
    image = argument(Tensor(np.float32, (1, 1, "H", "W")))
    few = op.slice(op.reshape(image, op.const(np.array([-1, 1]))), *(op.const(np.array([v])) for v in (0, 24, 0)))
    binding = binding_of(build({"image": image}, {"descriptors": few}), tmp_path, own)
    assert binding.run({"image": np.ones((1, 1, 6, 4), np.float32)})["descriptors"].shape == (1, 6, 4)
    assert binding.run({"image": np.ones((1, 1, 12, 8), np.float32)})["descriptors"].shape == (1, 6, 4)
    with pytest.raises(ModelFileError, match=r"'descriptors': 24 tokens are no map of square cells of 90x10 pixels"):
        binding.run({"image": np.ones((1, 1, 10, 90), np.float32)})


def test_images_in_other_layouts_and_ranks(tmp_path):
    shapes = {(1, "H", "W", 3): {"image": "hwc"}, ("H", "W", 3): {"image": "hwc"}, (3, "H", "W"): {}}
    picture = np.random.default_rng(0).uniform(0, 1, (1, 3, 4, 5)).astype(np.float32)
    for shape, layouts in shapes.items():
        image = argument(Tensor(np.float32, shape))
        model = build({"image": image}, {"descriptor": op.reshape(image, op.const(np.array([-1])))})
        own = card("global", "flat", layouts=layouts)
        got = binding_of(model, tmp_path, own).run({"image": picture})["descriptor"]
        want = picture[0].transpose(1, 2, 0) if layouts else picture[0]
        np.testing.assert_array_equal(got, want.ravel())


def scalars_model(shape, dtype) -> onnx.ModelProto:
    """A sparse matcher that tells, as a score, what it was given for the scalars."""
    model_inputs = {}
    for i, count in enumerate("MN"):
        model_inputs[f"keypoints{i}"] = argument(Tensor(np.float32, (count, 2)))
        model_inputs[f"descriptors{i}"] = argument(Tensor(np.float32, (count, DIM)))
    scalars = {name: argument(Tensor(dtype, shape)) for name in ("min_covisibility", "early_stop_decay")}
    told = [op.reshape(op.cast(v, to=np.float32), op.const(np.array([1]))) for v in scalars.values()]
    zero = op.mul(op.add(*(op.reduce_sum(v, keepdims=0) for n, v in model_inputs.items() if n[-1] == "0")), _zero())
    zero = op.add(zero, op.mul(op.add(*(op.reduce_sum(v, keepdims=0) for n, v in model_inputs.items() if n[-1] == "1")),
                               _zero()))  # fmt: skip
    outputs = {
        "matches0": op.const(np.array([0, 1])),
        "mscores0": op.add(op.concat(told, axis=0), zero),
        "covisibility_score": op.reshape(told[0], op.const(np.array([1, 1]))),
    }
    return build({**model_inputs, **scalars}, outputs)


def _zero():
    return op.const(np.float32(0))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scalars_in_every_form_and_what_stands_for_them(shape, dtype, tmp_path):
    binding = binding_of(scalars_model(shape, dtype), tmp_path, card("matcher", "scalars"))
    binding.require()
    pair = {
        f"{n}{i}": np.zeros((2, d), np.float32) for i in (0, 1) for n, d in (("keypoints", 2), ("descriptors", DIM))
    }
    pair |= {f"image_size{i}": np.array([9, 9], np.float32) for i in (0, 1)}  # the file takes none
    assert binding.run(pair)["mscores0"].tolist() == [0.0, 1.0]  # rejects nothing, never stops
    got = binding.run(
        {**pair, "min_covisibility": np.array(0.5, np.float32), "early_stop_decay": np.array([0.25], "f4")}
    )
    assert got["mscores0"].tolist() == [0.5, 0.25] and got["covisibility_score"].shape == ()


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([np.int32, np.int64, np.uint8, np.float32]), st.integers(0, 3000))
def test_a_value_that_a_type_cannot_hold_is_told(dtype, value):
    class Session:
        inputs = {"image": spec(np.float32, (1, None, None, None)), "max_keypoints": spec(dtype, ())}
        outputs = {"descriptor": spec(np.float32, (None,))}

        def run(self, inputs):
            return {"descriptor": np.array([inputs["max_keypoints"]], np.float32)}

    image = np.zeros((1, 1, 2, 2), np.float32)
    binding = Binding(Session(), replace(card("features", "x"), outputs={}))
    inputs = {"image": image, "max_keypoints": np.array([value], np.int64)}
    if dtype is np.uint8 and value > 255:
        with pytest.raises(DataError, match="'max_keypoints' is uint8, which does not hold the int64 values given"):
            binding.run(inputs)
    else:
        assert binding.run(inputs)["descriptor"] == [value]


def spec(dtype, shape) -> TensorSpec:
    return TensorSpec(np.dtype(dtype), shape)


def test_values_beyond_half_precision_are_told(pair, tmp_path):
    large = {**pair, "descriptors0": pair["descriptors0"] * 1e6}
    with pytest.raises(DataError, match=r"input 'descriptors0' is float16, which does not hold the float32 values"):
        binding_of(map_matcher(dtype=np.float16), tmp_path, MATCHER_CARD).run(large)


# -- names ---------------------------------------------------------------------------------------

NAMES = {
    "inputs": {
        "keypoints0": "kp_a", "keypoints1": "kp_b", "descriptors0": "x.7", "descriptors1": "x.8",
        "image_size0": "wh_a", "image_size1": "wh_b", "min_covisibility": "thr",
    },
    "outputs": {"matches0": "y0", "mscores0": "y1", "covisibility_score": "y2"},
}  # fmt: skip


def test_unknown_names_are_bound_by_a_sidecar_bit_for_bit(own_cache, tmp_path):  # noqa: F811
    """The pipeline of plug-ins on a pair of pictures, with a file whose tensors have other names: the same matches."""
    save(map_model(), FEATURES_CARD)
    config = Config.from_flat({"runtime.threads": 1})
    plain = save(map_matcher(), MATCHER_CARD, tmp_path / "plain.onnx")
    other = tmp_path / "flexglue_matcher.onnx"
    other.write_bytes(renamed(map_matcher(), {**NAMES["inputs"], **NAMES["outputs"]}).SerializeToString())
    own = {"role": "matcher", "name": "theirs", "licence": "CC0-1.0", "features_model": "dense-features", **NAMES}
    sidecar_path(other).write_text(yaml.safe_dump(own))
    features = DenseFeatures(400, 640, DenseFeatures.Options("dense-features"), Models(config))
    images = next(p.images for p in golden.pairs() if p.name == "room-step")
    sides = [features.extract(Frame(i, "camera", image)) for i, image in enumerate(images)]
    found = [FlexGlue(FlexGlue.Options(str(path), 0.1, 0.05), Models(config)).match(*sides) for path in (plain, other)]
    assert len(found[0].pairs) > 100 and found[0].covisibility > 0.1
    np.testing.assert_array_equal(found[0].pairs, found[1].pairs)
    assert found[0].scores.tobytes() == found[1].scores.tobytes()
    assert found[0].covisibility == found[1].covisibility


def test_swapped_sides_are_bound_by_their_names(pair, expected, tmp_path):
    """Ours may be the other one's name in the file."""
    swap = {f"{n}{i}": f"{n}{1 - i}" for n in ("keypoints", "descriptors", "image_size") for i in (0, 1)}
    own = replace(MATCHER_CARD, inputs=swap)
    same(binding_of(renamed(map_matcher(), swap), tmp_path, own).run(pair), expected)


# -- wrong bindings ------------------------------------------------------------------------------

WRONG = {
    "no such tensor": (
        {}, {"inputs": {"keypoints0": "kpts"}},
        r"file.onnx: 'inputs' of the card ties our 'keypoints0' to 'kpts', the file has 'descriptors0', ",
    ),
    "no such output": ({}, {"outputs": {"matches0": "m"}}, r"'outputs' of the card ties our 'matches0' to 'm'"),
    "one for two": (
        {}, {"inputs": {"keypoints0": "keypoints1", "keypoints1": "keypoints1"}}, "ties two of ours to one tensor",
    ),
    "hidden": (
        {}, {"inputs": {"keypoints0": "min_covisibility"}},
        "has an input 'keypoints0' that is not our 'keypoints0': say in 'inputs'",
    ),
    "another shape": (
        {}, {"inputs": {"keypoints0": "image_size0", "image_size0": "keypoints0"}},
        r"input 'image_size0', our 'keypoints0', is float32 \(2,\), expected 2 axes: see 'inputs' and 'layouts'",
    ),
    "maps for keypoints": (
        {}, {"inputs": {"keypoints0": "descriptors0", "descriptors0": "keypoints0"}},
        r"input 'descriptors0', our 'keypoints0', is float32 \(96, 48, 64\), expected 2 axes",
    ),
    "floats for matches": (
        {}, {"outputs": {"matches0": "mscores0", "mscores0": "matches0"}},
        r"output 'mscores0', our 'matches0', is float32 .*expected whole numbers: see 'outputs'",
    ),
    "tokens": (
        {}, {"layouts": {"descriptors0": "tokens"}},
        r"input 'descriptors0', our 'descriptors0', is float32 \(96, 48, 64\), expected 2 axes: .*'layouts'",
    ),
    "unknown layout": ({}, {"layouts": {"descriptors0": "nchw"}}, "layouts: descriptors0: 'nchw' is none of chw, hwc"),
    "layout of nothing": ({}, {"layouts": {"descriptors": "hwc"}}, "no tensor is our 'descriptors', there are"),
    "layout of another kind": (
        {}, {"layouts": {"keypoints0": "hwc"}}, "layouts: keypoints0: 'hwc' is a layout of descriptors and image",
    ),
    "unknown convention": ({}, {"keypoints": "ndc"}, "keypoints: 'ndc' is none of pixels, corner_pixels, unit"),
    "model pixels of no model": (
        {}, {"keypoints": "model_pixels"}, "'model_pixels' needs width, height and kernel of the features model",
    ),
    "a fixed number": (
        {"number": (2048, "N")}, {},
        r"input 'keypoints0', our 'keypoints0', is float32 \(2048, 2\): it takes exactly 2048 keypoints an image",
    ),
    "a fixed number of the other": ({"number": ("M", 512), "batch": True}, {}, "it takes exactly 512 keypoints"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_binding_names_the_tensor_and_the_field(case, tmp_path):
    arguments, fields, message = WRONG[case]
    with pytest.raises(ModelFileError, match=message):
        binding_of(map_matcher(**arguments), tmp_path, replace(MATCHER_CARD, **fields))


def test_a_wrong_layout_that_only_a_run_shows_names_both_shapes(pair, tmp_path):
    own = replace(MATCHER_CARD, layouts={"descriptors0": "hwc"})
    with pytest.raises(
        DataError,
        match=r"'descriptors0': expected shape \(96, 48, 64\), got \(48, 64, 96\): .*'inputs' or 'layouts' of the card",
    ):
        binding_of(map_matcher(), tmp_path, own).run(pair)


def test_missing_inputs_are_told_by_our_names(pair, tmp_path):
    with pytest.raises(DataError, match=r"expected \[.*'keypoints0'.*\], got \["):
        binding_of(map_matcher(), tmp_path, MATCHER_CARD).run({n: v for n, v in pair.items() if n != "keypoints0"})


@pytest.mark.usefixtures("own_cache")
def test_a_wrong_card_is_refused_before_the_gate_and_leaves_no_record(own_cache, tmp_path):  # noqa: F811
    """To the gate it would be a wrong model."""
    other = save(renamed(map_matcher(), {"keypoints0": "kp"}), MATCHER_CARD, tmp_path / "other.onnx")
    with pytest.raises(ModelFileError, match=r"needs inputs .*'keypoints0'.*it has .*'kp'.*'inputs' of its card"):
        Models(Config()).open("matcher", str(other))
    assert not list(own_cache.glob("records/*"))


def test_a_fallback_with_names_of_its_own(pair, expected, tmp_path):
    names = {**NAMES["inputs"], **NAMES["outputs"]}
    path = save(map_matcher(), MATCHER_CARD, tmp_path / "plain.onnx")
    other = save(renamed(map_matcher(), names), replace(MATCHER_CARD, **NAMES), tmp_path / "other.onnx")
    broken = engine(path, tmp_path, other, error_calls="all")
    same(broken.run(pair).outputs, expected)


# -- which kind ----------------------------------------------------------------------------------


def test_dense_or_sparse_is_told_by_the_file(tmp_path):
    for model, own, dense in (
        (map_matcher(), MATCHER_CARD, True),
        (map_matcher(batch=True), MATCHER_CARD, True),
        (map_matcher(layout="tokens"), replace(MATCHER_CARD, layouts={"descriptors0": "tokens"}), True),
        (matcher_model(), card("matcher", "m"), False),
        (features_model(), card("features", "f"), False),
        (map_model(), FEATURES_CARD, True),
    ):
        assert binding_of(model, tmp_path, own).dense is dense


def test_a_kind_that_does_not_suit_the_plug_in_is_refused(tmp_path):
    sparse = engine(save(matcher_model(), card("matcher", "m"), tmp_path / "sparse.onnx"), tmp_path)
    with pytest.raises(ModelFileError, match=r"sparse.onnx: takes a descriptor a keypoint, no dense map: .*'layouts'"):
        FlexGlue(FlexGlue.Options("any"), Opened(sparse))
    maps = engine(save(map_matcher(), MATCHER_CARD, tmp_path / "maps.onnx"), tmp_path)
    with pytest.raises(ModelFileError, match=r"maps.onnx: takes dense maps: set matcher.name to 'flexglue'"):
        LighterGlue(LighterGlue.Options("any"), Opened(maps))
    points = engine(save(features_model(), card("features", "f"), tmp_path / "points.onnx"), tmp_path)
    with pytest.raises(ModelFileError, match=r"points.onnx: gives a descriptor a keypoint, no dense map"):
        DenseFeatures(9, 0, DenseFeatures.Options("any"), Opened(points))
    dense = engine(save(map_model(), FEATURES_CARD, tmp_path / "dense.onnx"), tmp_path)
    with pytest.raises(ModelFileError, match=r"dense.onnx: .*outputs .*'keypoints'.* has \['descriptors'\]"):
        XFeat(9, 0, XFeat.Options("any"), Opened(dense))


def test_the_card_of_a_bound_file_reads_back(tmp_path):
    own = replace(MATCHER_CARD, **NAMES, keypoints="signed", layouts={"descriptors0": "tokens"})
    assert read_card(save(map_matcher(), own, tmp_path / "m.onnx")) == own and own.schema == 3
