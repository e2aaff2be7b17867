"""``models info`` of a file without a card: the proposed card loads, binds, and says what is uncertain."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from dense_models import FEATURES_CARD, MATCHER_CARD, STEPS, map_matcher, map_model, renamed
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import ONE, command, features_model, global_model, matcher_model, own_cache  # noqa: F401 (fixture)
from stop_helpers import early_stop_model
from test_binding import NAMES

from vslam_features.artifacts import golden
from vslam_features.artifacts.binding import Binding
from vslam_features.artifacts.card import ModelCard, read_card, sidecar_path
from vslam_features.artifacts.proposal import propose
from vslam_features.runtimes.base import TensorSpec
from vslam_features.runtimes.ort import OnnxRuntime

PICTURES = golden.pairs()[4].images


def saved(model, path):
    path.write_bytes(model.SerializeToString())
    return path


def bound(path, own=None) -> Binding:
    binding = Binding(OnnxRuntime().load(path, ONE), own or read_card(path), str(path))
    binding.require()
    return binding


def proposed(path) -> str:
    """Writes what is proposed beside the file, as a user does."""
    text = propose(path, OnnxRuntime().load(path, ONE))
    sidecar_path(path).write_text(text)
    return text


def opaque(model) -> dict[str, str]:
    """Names that say nothing, in the order of the file."""
    return {t.name: f"{i + 100}" for i, t in enumerate((*model.graph.input, *model.graph.output))}


LIKE_LIGHTGLUE = {
    **{f"keypoints{i}": f"kpts{i}" for i in (0, 1)},
    **{f"descriptors{i}": f"desc{i}" for i in (0, 1)},
    **{f"image_size{i}": f"size{i}" for i in (0, 1)},
}
COUNTED_FROM_1 = {n: n[:-1] + str(int(n[-1]) + 1) for n in LIKE_LIGHTGLUE}
WORDS = {
    "keypoints0": "query_points", "keypoints1": "ref_points", "descriptors0": "dense_feats.query",
    "descriptors1": "dense_feats.ref", "image_size0": "wh_query", "image_size1": "wh_ref",
    "min_covisibility": "covis_threshold", "matches0": "indices", "mscores0": "confidence",
    "covisibility_score": "overlap",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    run = bound(saved(map_model(), tmp_path_factory.mktemp("maps") / "maps.onnx"), FEATURES_CARD).run
    inputs, rng = {}, np.random.default_rng(0)
    for i, image in enumerate(PICTURES):
        inputs[f"descriptors{i}"] = run({"image": STEPS.apply(image)})["descriptors"]
        inputs[f"keypoints{i}"] = rng.uniform(0, 200, (700 + i, 2)).astype(np.float32)
        inputs[f"image_size{i}"] = np.array(image.shape[::-1], np.float32)
    return inputs


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    "names", [LIKE_LIGHTGLUE, COUNTED_FROM_1, WORDS, {**NAMES["inputs"], **NAMES["outputs"]}, None]
)
@pytest.mark.parametrize("layout", ["chw", "hwc", "tokens"])
def test_a_proposed_card_binds_a_renamed_matcher_bit_for_bit(layout, names, batch, pair, tmp_path):
    """Keypoints, which no file tells, are in pixels here, as is proposed where the file takes image sizes."""
    expected = bound(saved(map_matcher(), tmp_path / "plain.onnx"), MATCHER_CARD).run(pair)
    assert (expected["matches0"] >= 0).sum() > 50
    model = map_matcher(layout=layout, batch=batch)
    path = saved(renamed(model, names or opaque(model)), tmp_path / "theirs.onnx")
    text = proposed(path)
    got = bound(path).run(pair)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)
    uncertain = [line for line in text.splitlines() if "uncertain: by its" in line]
    assert bool(uncertain) == (names is not LIKE_LIGHTGLUE and names is not WORDS and names is not COUNTED_FROM_1)
    assert "keypoints: pixels  # uncertain, the file does not say" in text


def test_swapped_sides_are_told_by_their_names_whatever_their_order(pair, tmp_path):
    swapped = {f"{n}{i}": f"{n}{1 - i}" for n in ("keypoints", "descriptors", "image_size") for i in (0, 1)}
    path = saved(renamed(map_matcher(), swapped), tmp_path / "theirs.onnx")
    card = yaml.safe_load(proposed(path))
    assert card["inputs"]["keypoints0"] == "keypoints0" and card["inputs"]["descriptors1"] == "descriptors1"


def test_what_cannot_be_told_is_said(tmp_path):
    model = map_matcher(keypoints="signed", image_size=False, layout="tokens", dtype=np.float16)
    names = {"min_covisibility": "a", "keypoints0": "p", "keypoints1": "q"}
    text = proposed(saved(renamed(model, names), tmp_path / "my model (v2).onnx"))
    assert "keypoints: signed  # uncertain" in text and "takes no size of the images" in text
    assert "descriptors0: tokens  # uncertain: 3072 cells of a map, or descriptors of keypoints?" in text
    assert "licence: LicenseRef-unknown  # the file does not say" in text and "name: my-model-v2" in text
    assert "precision: fp16  # by the types of its tensors" in text
    assert 'keypoints0: p  # float32 Nx2; uncertain' in text  # fmt: skip
    own = read_card(tmp_path / "my model (v2).onnx")
    assert own.layouts["descriptors1"] == "tokens" and own.keypoints == "signed"


def test_the_layers_of_a_matcher_that_stops_early_are_asked_for(tmp_path):
    """No file tells them, and without them nobody sees a wrong stop."""
    text = proposed(saved(early_stop_model(), tmp_path / "theirs.onnx"))
    assert "# layers: 9  # missing" in text and "# early_stop_layers: [2, 4, 6, 8]  # missing" in text
    assert yaml.safe_load(text)["inputs"]["early_stop_decay"] == "early_stop_decay"
    sidecar_path(tmp_path / "theirs.onnx").write_text(text.replace("# layers", "layers").replace("# early", "early"))
    own = read_card(tmp_path / "theirs.onnx")
    assert (own.layers, own.early_stop_layers) == (9, (2, 4, 6, 8))
    assert "early_stop_layers" not in proposed(saved(map_matcher(), tmp_path / "plain.onnx"))


def test_tensors_that_are_none_of_ours_are_named(tmp_path):
    graph = matcher_model()
    extra = graph.graph.input.add()
    extra.CopyFrom(graph.graph.input[0])
    extra.name = "attention_mask"
    for name, kind in (("attention_mask", 9), ("matches1", 7)):
        if name == "matches1":
            extra = graph.graph.output.add()
            extra.CopyFrom(graph.graph.output[0])
            extra.name = name
            graph.graph.node.add(op_type="Identity", input=["matches0"], output=[name])
        extra.type.tensor_type.elem_type = kind
    text = proposed(saved(graph, tmp_path / "extra.onnx"))
    assert "# none of ours, which the file cannot be run without: 'attention_mask' (bool Nx2)" in text
    assert "# none of ours, which are not used: 'matches1' (int64 N)" in text


@pytest.mark.parametrize(
    "model, role, layouts",
    [
        (map_model(), "features", {"descriptors": "chw"}),
        (map_model(batch=True), "features", {"descriptors": "chw"}),
        (map_model(layout="hwc"), "features", {"descriptors": "hwc"}),
        (map_model(layout="tokens", batch=True), "features", {"descriptors": "tokens"}),
        (features_model(), "features", {}),
        (global_model(), "global", {}),
        (matcher_model(), "matcher", {}),
    ],
)
def test_roles_are_told_by_the_tensors(model, role, layouts, tmp_path):
    path = saved(renamed(model, opaque(model)), tmp_path / "theirs.onnx")
    text = proposed(path)
    own = read_card(path)
    assert own.role == role and own.layouts == layouts, text
    plain = saved(model, tmp_path / "plain.onnx")
    image = {"image": own.preprocessing.apply(PICTURES[0])}
    if role == "matcher":
        return
    if "max_keypoints" in own.inputs:
        image["max_keypoints"] = np.array([20])
    base = ModelCard(role, "plain", "", layouts=layouts)
    expected, got = bound(plain, base).run(image), bound(path).run(image)
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)
    if model.graph.name and own.preprocessing.width:
        assert own.preprocessing.channels == "grey" and "kernel: antialias  # uncertain" in text


def test_a_file_of_no_role_gets_none(tmp_path):
    class Session:
        inputs = {"x": TensorSpec(np.dtype("i8"), (3, 4))}
        outputs = {"y": TensorSpec(np.dtype("f4"), None)}

    assert propose(tmp_path / "x.onnx", Session()) == ""


_SPEC = st.builds(
    TensorSpec,
    st.sampled_from([np.dtype(d) for d in ("f4", "f2", "i8", "i4", "?", "u1")]),
    st.none() | st.lists(st.sampled_from([None, 1, 2, 3, 64, 256, 4096]), max_size=5).map(tuple),
)
_NAME = st.sampled_from(["yes", "a: b", "kpts_0", "x.1", "0", "#", "image", "désc", "null", "size\n", '"', "matches0"])


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(_NAME, _SPEC, max_size=7), st.dictionaries(_NAME, _SPEC, max_size=5), st.text(max_size=12))
def test_whatever_is_proposed_loads(inputs, outputs, stem):
    class Session:
        pass

    Session.inputs, Session.outputs = inputs, outputs
    text = propose(Path("folder") / f"{stem.replace('/', '').replace(chr(0), '') or 'x'}.onnx", Session())
    if text:
        own = ModelCard.from_dict(yaml.safe_load(text), "proposed")
        assert set(own.inputs.values()) <= set(inputs) and set(own.outputs.values()) <= set(outputs)


def test_info_proposes_and_then_says_whether_the_card_fits(own_cache, tmp_path, capsys):  # noqa: F811
    path = saved(renamed(map_matcher(), {**NAMES["inputs"], **NAMES["outputs"]}), tmp_path / "theirs.onnx")
    assert command("models", "info", str(path), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["inputs"]["kp_a"] == "float32 Nx2" and "has no model card" in facts["card"]
    assert command("models", "info", str(path)) == 0
    shown = capsys.readouterr().out
    assert shown.endswith(facts["proposed_card"]) and f"save this as {sidecar_path(path)}" in shown
    sidecar_path(path).write_text(facts["proposed_card"])
    assert command("models", "info", str(path), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["binding"] == "the card fits the file" and facts["card"]["inputs"]["keypoints0"] == "kp_a"
    assert "proposed_card" not in facts
    sidecar_path(path).write_text("role: matcher\nname: x\nlicence: y\ninputs: {keypoints0: gone}\n")
    assert command("models", "info", str(path), "--json") == 0
    assert "ties our 'keypoints0' to 'gone'" in json.loads(capsys.readouterr().out)["binding"]
    sidecar_path(path).write_text("role: x")  # a broken card is mended by its writer, not replaced
    assert command("models", "info", str(path), "--json") == 0
    assert "proposed_card" not in json.loads(capsys.readouterr().out)
    model = global_model()
    model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = 1  # five axes are no image
    facts = propose_of(model)
    assert facts == ""


def propose_of(model) -> str:
    """What is proposed by the declared inputs and outputs alone, which no runtime need take."""

    class Session:
        inputs = {t.name: _spec(t) for t in model.graph.input}
        outputs = {t.name: _spec(t) for t in model.graph.output}

    return propose(Path("x.onnx"), Session())


def _spec(tensor) -> TensorSpec:
    dims = tensor.type.tensor_type.shape.dim
    return TensorSpec(np.dtype("f4"), tuple(d.dim_value or None for d in dims))
