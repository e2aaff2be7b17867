"""``models export flexglue``: the tiny network through all of it; the released size in a process, with its memory."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vslam_features.artifacts.cache import sha256_of
from vslam_features.artifacts.card import read_card
from vslam_features.artifacts.compare import compare
from vslam_features.artifacts.comparison import LIMITS
from vslam_features.artifacts.store import model_path
from vslam_features.cli.main import main
from vslam_features.errors import ExportError

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytest.importorskip("skimage")

import skimage.data  # noqa: E402
from flexglue_helpers import STEPS, by_torch, feed, keypoints_of, moved  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from vslam_features.export import flexglue, onnx_file  # noqa: E402
from vslam_features.export.descriptors import opened, run  # noqa: E402
from vslam_features.networks.flexglue import FLEXGLUE_TINY  # noqa: E402
from vslam_features.networks.flexglue_weights import constructed, randomised  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # the first test exports
ROOT = Path(__file__).parents[2]
PRECISIONS = ("fp32", "fp16")
NAMES = ("flexglue-tiny", "flexglue-matcher-tiny", "flexglue-matcher-early-stop-tiny")
SHIPPED = (2, 4, 6, 8)
GOLDEN = ROOT / "vslam_features" / "golden"


@pytest.fixture(scope="module")
def models(flexglue_cache) -> dict[str, dict]:
    """Name -> what the command printed of it."""
    return {model["name"]: model for model in flexglue_cache.result["models"]}


@pytest.fixture
def cache(flexglue_cache, monkeypatch) -> Path:
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(flexglue_cache.root))
    return flexglue_cache.root


@pytest.fixture(scope="module")
def network():
    torch.set_num_threads(1)
    return constructed(FLEXGLUE_TINY, 0)


@pytest.fixture(scope="module")
def pair(network):
    """A pair that overlaps, and the true partners of its keypoints."""
    views, forward = moved(skimage.data.astronaut())
    points, truth = keypoints_of(views, forward)
    return views, feed(network, views, points), truth


def said(capsys, *args) -> tuple[int, str, str]:
    code = main([*map(str, args)])
    return code, *capsys.readouterr()


def file_of(models, name, precision="fp32") -> Path:
    return Path(models[name]["files"][precision])


# -- the files ---------------------------------------------------------------------------------------


def test_six_files_are_placed_and_nothing_else(models, cache):
    assert tuple(models) == NAMES
    expected = {model_path(name, precision) for name in NAMES for precision in PRECISIONS}
    placed = {Path(path) for model in models.values() for path in model["files"].values()}
    assert placed == expected == set((cache / "models").iterdir())
    for name in NAMES:
        assert file_of(models, name, "fp16").stat().st_size < 0.75 * file_of(models, name).stat().st_size


def test_cards(models, network):
    for precision in PRECISIONS:
        encoder, matcher, stopping = (read_card(file_of(models, name, precision)) for name in NAMES)
        assert (encoder.role, matcher.role, stopping.role) == ("features", "matcher", "matcher")
        assert encoder.preprocessing == STEPS and encoder.preprocessing.id.startswith("rgb-192x160-antialias")
        assert matcher.features_model == stopping.features_model == encoder.name == "flexglue-tiny"
        assert matcher.layers == stopping.layers == 9
        assert (matcher.early_stop_layers, matcher.patches) == ((), ())
        assert (stopping.early_stop_layers, stopping.patches) == (SHIPPED, ("early-stop 2,4,6,8",))
        assert len({card.source_sha256 for card in (encoder, matcher, stopping)}) == 1
        for card in (encoder, matcher, stopping):
            assert (card.precision, card.licence, card.version) == (precision, "none", "constructed, seed 0")
            assert "fp32" in str(card.self_check) and card.tools["torch"] == torch.__version__


def test_the_figures_are_within_their_limits(models):
    for model in models.values():
        checks = {c["label"]: c for c in model["self_check"]["checks"]}
        assert checks and all(c["passed"] for c in checks.values())
    checks = {c["label"]: c["values"] for c in models["flexglue-matcher-tiny"]["self_check"]["checks"]}
    assert max(checks["ONNX fp32 against torch, scores"]) <= 1e-4
    assert min(checks["ONNX fp32 against torch, equal matches"]) == 1
    checks = {c["label"]: c["values"] for c in models[NAMES[2]]["self_check"]["checks"]}
    assert checks["fp32 at decay 1, values off the plain file"] == [0, 0]


def test_files_are_valid_and_say_nothing_of_the_machine(models):
    for name in NAMES:
        for precision in PRECISIONS:
            path = file_of(models, name, precision)
            onnx.checker.check_model(str(path), full_check=True)
            onnx.shape_inference.infer_shapes(onnx.load(path), check_type=True, strict_mode=True, data_prop=True)
            content = path.read_bytes()
            places = [ROOT, Path.home(), Path(sys.prefix), Path(torch.__file__).parent, Path.cwd()]
            for text in [*map(str, places), 'File "', ".py", "site-packages", "Traceback"]:
                assert text.encode() not in content, text
            model = onnx.load_from_string(content)
            assert [p.key for p in model.metadata_props] == ["vslam_features"]
            assert not model.doc_string and not any(n.doc_string or n.metadata_props for n in model.graph.node)


def test_info_shows_the_tensors_of_the_contract(models, capsys):
    code, out, _ = said(capsys, "models", "info", file_of(models, NAMES[0]), "--json")
    facts = json.loads(out)
    assert code == 0 and facts["outputs"] == {"descriptors": "float32 64x20x24"}
    code, out, _ = said(capsys, "models", "info", file_of(models, NAMES[2]), "--json")
    facts = json.loads(out)
    assert code == 0 and facts["inputs"]["early_stop_decay"].startswith("float32")
    assert {"matches0", "mscores0", "covisibility_score", "stopped_after_layer", "layer_scores"} == set(
        facts["outputs"]
    )


# -- what they compute -------------------------------------------------------------------------------


def test_more_than_a_hundred_matches_and_most_are_right(models, network, pair):
    _, inputs, truth = pair
    found = run(opened(file_of(models, NAMES[1])), inputs)
    reference = by_torch(network, inputs)
    np.testing.assert_array_equal(found["matches0"], reference.matches0)
    sure = found["mscores0"] > 0.1
    assert sure.sum() >= 100 and (found["matches0"] == truth)[sure].mean() > 0.6


def test_maps_of_the_fp16_file_are_stored_in_two_bytes_and_match_the_same(models, pair):
    views, inputs, _ = pair
    session = opened(file_of(models, NAMES[0], "fp16"))
    live = {
        f"descriptors{i}": run(session, {"image": STEPS.apply(view)})["descriptors"] for i, view in enumerate(views)
    }
    stored = {name: value.astype(np.float16) for name, value in live.items()}
    assert all((stored[name] == value).all() and np.abs(value).max() > 1 for name, value in live.items())
    matcher = opened(file_of(models, NAMES[1]))
    found = [run(matcher, inputs | {n: v.astype(np.float32) for n, v in kind.items()}) for kind in (live, stored)]
    assert (found[0]["matches0"] >= 0).sum() >= 100
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value)


def test_the_fp16_matcher_is_within_the_limits_of_the_parity_gate(models, pair):
    _, inputs, _ = pair
    plain = [run(opened(file_of(models, NAMES[1], precision)), inputs) for precision in PRECISIONS]
    card = read_card(file_of(models, NAMES[1], "fp16"))
    result = compare(card, [inputs], [plain[0]], [plain[1]], LIMITS["fp16"])
    assert result.evidence and not result.problems and result.matches[0] >= 100


def test_the_plain_file_is_patched_to_the_same_matcher(models, pair, tmp_path, capsys):
    """The scores of the layers are in the plain file, by the names that ``models patch`` expects."""
    target = tmp_path / "patched.onnx"
    options = ["--layers", "2,4,6,8", "--out", target, "--no-timing"]
    code, _, err = said(capsys, "models", "patch", "early-stop", file_of(models, NAMES[1]), *options)
    assert code == 0, err
    assert read_card(target).early_stop_layers == SHIPPED
    one, other = opened(target), opened(file_of(models, NAMES[2]))
    for threshold, decay in ((0, 1), (1, 0), (1, 0.2)):
        scalars = {"min_covisibility": np.array(threshold, np.float32), "early_stop_decay": np.array(decay, np.float32)}
        expected, found = (run(session, pair[1] | scalars) for session in (other, one))
        assert set(expected) == set(found)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)


def test_the_early_stop_file_stops_pictures_of_different_places(models, network):
    views = moved(skimage.data.astronaut())[0][0], moved(skimage.data.coffee())[0][1]
    scalars = {"min_covisibility": np.array(0.5, np.float32), "early_stop_decay": np.array(0, np.float32)}
    inputs = feed(network, views) | scalars
    found = run(opened(file_of(models, NAMES[2])), inputs)
    assert found["stopped_after_layer"] == 2 == by_torch(network, inputs, SHIPPED).stopped_after_layer
    assert (found["matches0"] == -1).all() and found["layer_scores"][1:].tolist() == [-1, -1, -1]


# -- the command ---------------------------------------------------------------------------------------


def test_progress_is_on_stderr_and_the_weights_are_named_for_what_they_are(flexglue_cache):
    lines = flexglue_cache.said.splitlines()
    assert any("exporting the matcher to ONNX" in line for line in lines)
    assert any("constructed, seed 0: made, not trained" in line for line in lines)
    assert not any("Traceback" in line for line in lines)


def test_weights_of_our_own_network_and_no_other(tmp_path, monkeypatch, capsys):
    """The name says what it is, and the card which file; the layers of a test network are taken for granted here."""
    path = tmp_path / "mine.safetensors"
    save_file(randomised(FLEXGLUE_TINY, 3).state_dict(), path)
    source = flexglue.Source(path, tiny=True)
    encoder, matcher = source.cards(source.network())
    assert encoder.source_sha256 == matcher.source_sha256 == sha256_of(path) and encoder.version == ""
    assert flexglue.Source(path).name("-matcher-early-stop") == "flexglue-matcher-early-stop"
    assert flexglue.Source().name("-matcher") == "flexglue-matcher-random"
    code, out, err = said(capsys, "models", "export", "flexglue", "--weights", path, "--out", tmp_path / "out")
    assert code == 1 and not out and "FlexGlue release do not fit" in err and "Traceback" not in err
    code, _, err = said(capsys, "models", "export", "flexglue")
    assert code == 1 and "--weights FILE is missing" in err and "FlexGlue release do not fit" in err


@pytest.mark.parametrize(
    "options, message",
    [
        (["flexglue", "--tiny", "--early-stop-layers", "1,2"], "with force only"),
        (["flexglue", "--tiny", "--early-stop-layers", "2,9"], "from 1 to 8"),
        (["flexglue", "--tiny", "--raw"], "one graph of flexglue"),
        (["megaloc", "--tiny", "--early-stop-layers", "2"], "megaloc is no matcher"),
        (["flexglue", "--tiny", "--images", str(GOLDEN / "cup_0.png")], "two pictures at least"),
    ],
)
def test_wrong_options_are_told_before_anything_is_exported(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(onnx_file, "export", lambda *a, **k: pytest.fail("exported"))
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path))
    code, out, err = said(capsys, "models", "export", *options)
    assert code == 1 and not out and message in err and "Traceback" not in err


# -- faults: nothing is placed, and what was there stays ---------------------------------------------


@pytest.fixture(scope="module")
def graphs(network):
    """What the exporter makes, once for all faults: of encoder and matcher."""
    image = {"image": torch.zeros(1, 3, 160, 192)}
    return onnx_file.export(network.encoder, image, ["descriptors"]), flexglue.export_scored(network.matcher)


def _changed(graph, end, change):
    graph = graph.clone()
    name = next(name for name in graph.graph.initializers if name.endswith(end))
    value = graph.graph.initializers[name]
    value.const_value = ir.tensor(change(value.const_value.numpy()), name=name)
    return graph


def _half_off(to_half):
    """The weights of the attention's output are left out of the fp16 twin."""

    def wrong(model, keep):
        half = to_half(model, keep)
        values = half.model.graph.initializers.values()
        for value in values:
            if value.dtype == ir.DataType.FLOAT16 and value.const_value.size >= 64 * 64:
                value.const_value = ir.tensor(value.const_value.numpy() * np.float16(1.5), name=value.name)
        return half

    return wrong


LAST = "heads.8.pooled.bias"
FAULTS = {
    "encoder": (
        lambda e, m: (_changed(e, "out_norm.bias", lambda b: b + np.float32(0.1)), m),
        "ONNX fp32 against torch",
    ),
    "head": (lambda e, m: (e, _changed(m, LAST, lambda b: b - 9)), "ONNX fp32 against torch, scores"),
    "NaN": (lambda e, m: (e, _changed(m, LAST, lambda b: b * np.nan)), "scores: NaN"),
    "fp16": (lambda e, m: (e, m), "fp16 twin"),
    "card": (lambda e, m: (e, m), "read back"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_leaves_the_files_that_were_there(fault, graphs, network, tmp_path, monkeypatch):
    wrong, message = FAULTS[fault]
    encoder, matcher = wrong(*graphs)
    monkeypatch.setattr(flexglue.Source, "network", lambda self: constructed(FLEXGLUE_TINY, 0))
    monkeypatch.setattr(flexglue, "export_scored", lambda *a: matcher.clone())
    monkeypatch.setattr(onnx_file, "export", lambda *a, **k: encoder.clone())
    monkeypatch.setattr(onnx_file, "release", lambda module: None)  # the graphs share its tensors
    if fault == "fp16":
        monkeypatch.setattr(flexglue, "to_half", _half_off(flexglue.to_half))
    if fault == "card":
        add = onnx_file.add_card
        monkeypatch.setattr(onnx_file, "add_card", lambda path, card: add(path, replace(card, name="x")))
    old = tmp_path / "flexglue-tiny.fp32.onnx"
    old.write_bytes(b"what was there")
    with pytest.raises(ExportError, match=message):
        flexglue.export_flexglue(flexglue.Source(tiny=True), SHIPPED, folder=tmp_path)
    assert list(tmp_path.iterdir()) == [old] and old.read_bytes() == b"what was there"


# -- the released size ---------------------------------------------------------------------------------


@pytest.mark.released
@pytest.mark.timeout(1500)
def test_the_released_size(tmp_path):
    """Random weights of the released dimensions, all six files: time and memory of a process."""
    options = ["--random", "--early-stop-layers", "2,4,6,8", "--out", str(tmp_path), "--json"]
    options += ["--images", str(GOLDEN / "cup_0.png"), str(GOLDEN / "cup_1.png")]
    command = [sys.executable, "-m", "vslam_features", "models", "export", "flexglue", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert result.returncode == 0, result.stderr
    made = json.loads(result.stdout)
    print(f"\nFlexGlue of the released size: {made['seconds']:.0f} s, {made['peak_mb'] / 1e3:.1f} GB at most")
    assert made["peak_mb"] < 8000
    found = {model["name"]: model for model in made["models"]}
    assert set(found) == {"flexglue-random", "flexglue-matcher-random", "flexglue-matcher-early-stop-random"}
    assert all(check["passed"] for model in made["models"] for check in model["self_check"]["checks"])
    # All six files passed the checker and strict inference when they were written (graph/model_file.py).
    encoder = found["flexglue-random"]["files"]["fp16"]
    image = np.random.default_rng(0).integers(0, 256, (480, 640), np.uint8)
    maps = run(opened(Path(encoder)), {"image": read_card(Path(encoder)).preprocessing.apply(image)})["descriptors"]
    assert maps.shape == (256, 64, 64)
    assert (maps.astype(np.float16) == maps).all() and maps.astype(np.float16).nbytes == 2 * 64 * 64 * 256
    matcher = onnx.load(found["flexglue-matcher-random"]["files"]["fp32"])
    assert sum(node.op_type == "CumSum" for node in matcher.graph.node) == 4
