"""``vslam-features models``: outcomes, exit codes, JSON, errors."""

import json
import re
import shutil
import sys
from dataclasses import replace

import cv2
import numpy as np
import pytest
import yaml
from gain_helpers import layered_model
from helpers import image
from model_helpers import (
    DEFAULTS,
    TINY,
    _tiny_cache,  # noqa: F401 (fixtures)
    card,
    clear_environment,
    command,
    features_model,
    global_model,
    learned,  # noqa: F401
    matcher_model,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
    tiny_config,
)

from vslam_features import classical, networks
from vslam_features.artifacts import records
from vslam_features.artifacts.cache import cache_root, sha256_of
from vslam_features.artifacts.card import read_card, sidecar_path
from vslam_features.artifacts.catalogue import find_entry
from vslam_features.artifacts.incidents import Incidents
from vslam_features.artifacts.preprocessing import Preprocessing
from vslam_features.artifacts.store import content_sha256, model_path
from vslam_features.cli import models as models_cli
from vslam_features.cli import models_show
from vslam_features.config import Config
from vslam_features.models import Models
from vslam_features.networks import recipes

NAMES = ["xfeat", "lighterglue", "lighterglue-early-stop", "aliked-n16", "aliked-t16", "lightglue-aliked",
         "lightglue-aliked-early-stop", "effnet_cov", "megaloc"]  # fmt: skip


@pytest.fixture(autouse=True)
def _settings(own_cache, monkeypatch):  # noqa: F811
    clear_environment(monkeypatch)


def said(capsys, *args) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = command(*map(str, args))
    return code, *capsys.readouterr()


def entry(tmp_path, name: str, model, **fields) -> dict:
    """An entry of a registry whose file lies beside it: a ready model, or with ``recipe`` weights."""
    path = tmp_path / f"{name}.file.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString(deterministic=True))
    file = {"file": path.name, "sha256": sha256_of(path), "size": path.stat().st_size, "sources": [{"path": path.name}]}
    base = {"name": name, "role": "global", "version": "1", "licence": "CC0-1.0", "homepage": "https://example.org"}
    kind = {"weights": file} if "recipe" in fields else {"file": file}
    return {**base, **kind, **fields}


def use_registry(tmp_path, monkeypatch, *entries) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(yaml.safe_dump({"schema": 2, "models": list(entries)}))
    monkeypatch.setenv("VSLAM_FEATURES_MODELS", str(path))


PICTURE = {"preprocessing": {"channels": "grey", "width": 32, "height": 32, "kernel": "area"}}


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A registry with a ready global descriptor."""
    use_registry(tmp_path, monkeypatch, entry(tmp_path, "ready", global_model(), card=PICTURE))
    return tmp_path / "ready.file.onnx"


# -- list ----------------------------------------------------------------------------------------


def test_list_of_a_fresh_machine(capsys):
    code, out, _ = said(capsys, "models", "list")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == NAMES
    assert all(line.split("  ")[-1].strip() == "-" for line in lines[1:-1])
    assert str(cache_root()) in lines[-1]
    code, out, _ = said(capsys, "models", "list", "--json")
    listed = {m["name"]: m for m in json.loads(out)["models"]}
    assert code == 0 and list(listed) == NAMES
    megaloc = listed["megaloc"]
    assert megaloc["weights_mb"] is None and "models export megaloc --weights model.safetensors" in megaloc["get"]
    assert all(not m["built"] and not m["weights"] and not m["verified"] for m in listed.values())
    assert listed["xfeat"]["weights_mb"] == pytest.approx(6.25, abs=0.01)
    assert [n for n, m in listed.items() if m["default"]] == [n for n in NAMES if n in models_show.default_models()]


def test_list_tells_what_is_here_and_where_it_was_verified(ready, capsys):
    assert said(capsys, "models", "fetch", "ready")[0] == 0
    _, out, _ = said(capsys, "models", "list", "--json")
    found = json.loads(out)["models"][-1]
    assert (found["name"], found["built"], found["verified"], found["failed"]) == (
        "ready",
        ["fp32"],
        ["onnxruntime"],
        [],
    )
    line = said(capsys, "models", "list")[1].splitlines()[-2]
    assert line.split()[0] == "ready" and "fp32" in line and line.endswith("onnxruntime")


def test_a_broken_registry_of_the_user_is_an_error_that_names_it(tmp_path, monkeypatch, capsys):
    use_registry(tmp_path, monkeypatch, {"name": "x"})
    code, _, err = said(capsys, "models", "list")
    assert code == 1 and "registry.yaml" in err and "Traceback" not in err


# -- fetch and build -------------------------------------------------------------------------------


def test_a_ready_file_is_placed_with_its_card_and_verified(ready, capsys):
    code, out, _ = said(capsys, "models", "fetch", "ready")
    assert code == 0 and out == "ready fp32: equals its reference on 8 pairs\n"
    target = model_path("ready", "fp32")
    assert target.read_bytes() == ready.read_bytes()
    placed = read_card(target)
    assert (placed.name, placed.role, placed.licence) == ("ready", "global", "CC0-1.0")
    assert placed.preprocessing.id == "grey-32x32-area" and placed.source_sha256 == sha256_of(ready)
    assert [r.passed for r in records.records_of(content_sha256(target))] == [True]


def test_a_file_that_is_there_is_not_written_again_unless_forced(ready, capsys):
    said(capsys, "models", "fetch", "ready")
    target = model_path("ready", "fp32")
    inode = target.stat().st_ino
    assert said(capsys, "models", "fetch", "ready")[0] == 0 and target.stat().st_ino == inode
    assert said(capsys, "models", "fetch", "ready", "--force")[0] == 0 and target.stat().st_ino != inode


@pytest.mark.parametrize("damage", [b"", b"<html>", None])
def test_a_damaged_or_replaced_file_is_made_anew(ready, damage, capsys):
    said(capsys, "models", "fetch", "ready")
    target = model_path("ready", "fp32")
    target.write_bytes(matcher_model().SerializeToString() if damage is None else damage)
    assert said(capsys, "models", "fetch", "ready")[0] == 0
    assert target.read_bytes() == ready.read_bytes()


def built(tmp_path, monkeypatch, model, role="global") -> None:
    """A registry with a model that is built, by a recipe of the test's own: ``model(precision)``."""
    steps = Preprocessing(**PICTURE["preprocessing"]) if role == "global" else Preprocessing()
    monkeypatch.setitem(recipes.RECIPES, "tiny", recipes.Recipe(lambda weights, precision: model(precision), steps))
    monkeypatch.setattr(recipes, "read_tensors", lambda path: {})
    use_registry(tmp_path, monkeypatch, entry(tmp_path, "made", b"weights", recipe="tiny", role=role))


def test_a_built_file_that_is_damaged_is_built_again(tmp_path, monkeypatch, capsys):
    built(tmp_path, monkeypatch, lambda precision: global_model())
    assert said(capsys, "models", "fetch", "made")[0] == 0
    target = model_path("made", "fp32")
    content = target.read_bytes()
    assert read_card(target).source_sha256 == sha256_of(tmp_path / "made.file.onnx")
    target.write_bytes(content[: len(content) // 2])
    code, _, err = said(capsys, "models", "fetch", "made")
    assert code == 0 and "making it anew" in err and target.read_bytes() == content


def test_build_takes_what_was_fetched_and_builds_each_time(tmp_path, monkeypatch, capsys):
    calls = []
    built(tmp_path, monkeypatch, lambda precision: calls.append(precision) or global_model())
    assert said(capsys, "models", "build", "made", "--precision", "fp32")[0] == 0
    assert said(capsys, "models", "build", "made")[0] == 0
    assert calls == ["fp32", "fp32"] and model_path("made", "fp32").is_file()


def test_a_file_that_fails_its_gate_after_the_build_is_removed(tmp_path, monkeypatch, capsys):
    """The fp16 variant computes something else than the fp32 file."""
    built(tmp_path, monkeypatch, lambda p: features_model(half=p == "fp16", noise=0.3 * (p == "fp16")), role="features")
    assert said(capsys, "models", "fetch", "made")[0] == 0
    code, out, err = said(capsys, "models", "fetch", "made", "--precision", "fp16")
    assert code == 1 and "made fp16: differs from its reference on 8 pairs" in out
    assert "failed its comparison, the file was removed" in err and "FAILED" in err and "descriptors" in err
    assert not model_path("made", "fp16").exists() and model_path("made", "fp32").is_file()


def test_a_ready_file_that_fails_leaves_no_card_behind(tmp_path, monkeypatch, capsys):
    nothing = entry(
        tmp_path, "nothing", matcher_model(least=2.0), role="matcher", features_model="some", card={"layers": 1}
    )
    use_registry(tmp_path, monkeypatch, nothing)
    code, _, err = said(capsys, "models", "fetch", "nothing")
    target = model_path("nothing", "fp32")
    assert code == 1 and "proves nothing" in err
    assert not target.exists() and not sidecar_path(target).exists()


def test_weights_from_a_file_that_is_here(tmp_path, monkeypatch, capsys):
    values = entry(tmp_path, "ready", global_model(), card=PICTURE)
    values["file"]["sources"] = [{"path": "not/here.onnx"}]
    use_registry(tmp_path, monkeypatch, values)
    file = tmp_path / "ready.file.onnx"
    code, _, err = said(capsys, "models", "fetch", "ready", "--from", sidecar_path(file))
    assert code == 1 and "error: ready: " in err
    other = tmp_path / "other.onnx"
    other.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 6247949\n")
    code, _, err = said(capsys, "models", "fetch", "ready", "--from", other)
    assert code == 1 and "Git LFS pointer" in err and sha256_of(file) in err
    assert said(capsys, "models", "fetch", "ready", "--from", file)[0] == 0
    assert model_path("ready", "fp32").is_file()
    code, _, err = said(capsys, "models", "fetch", "ready", "xfeat", "--from", file)
    assert code == 1 and "is for one model, got 2: name one" in err


def test_offline_without_weights_names_the_alternatives_and_tries_the_others(ready, capsys):
    code, out, err = said(capsys, "models", "fetch", "xfeat", "ready", "--offline")
    assert code == 1 and "ready fp32: equals" in out
    assert "error: xfeat: xfeat.pt of xfeat (6.2 MB" in err and "with a network" in err and "--from FILE" in err
    code, _, err = said(capsys, "models", "build", "xfeat")
    assert code == 1 and "could not be had" in err and "Traceback" not in err


def test_sets_of_names(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(models_cli, "_make", lambda entry, *rest: asked.append(entry.name) or 0)
    monkeypatch.setattr("vslam_features.artifacts.sources.fetch_weights", lambda entry, **options: entry.name)
    code, _, err = said(capsys, "models", "fetch", "all")
    assert code == 0 and asked == [n for n in NAMES if n != "megaloc"]
    assert "megaloc: not among 'all'" in err and "models export megaloc --weights model.safetensors" in err
    asked.clear()
    assert said(capsys, "models", "fetch", "xfeat", "default", "xfeat")[0] == 0
    assert asked == list(dict.fromkeys(["xfeat", *models_show.default_models()]))


@pytest.mark.parametrize("verb", ["fetch", "build", "info", "verify"])
def test_a_model_that_is_exported_says_how(verb, capsys):
    code, out, err = said(capsys, "models", verb, "megaloc")
    assert code == 1 and not out and "Traceback" not in err and err.count("\n") <= 2
    assert "download model.safetensors from https://huggingface.co/gberton/MegaLoc" in err
    assert "'vslam-features models export megaloc --weights model.safetensors' (docs/megaloc.md)" in err


def test_those_that_can_be_fetched_are_when_one_that_cannot_is_named_beside_them(ready, capsys):
    code, out, err = said(capsys, "models", "fetch", "megaloc", "ready")
    assert code == 1 and "ready fp32: equals" in out and "error: megaloc: the weights of megaloc are not fetched" in err


def test_a_configuration_with_a_model_that_is_exported_says_how():
    config = Config.from_flat({"retrieval.name": "megaloc"})
    chosen, problem = classical.available(config)
    assert chosen.retrieval.name == "vlad" and "models export megaloc --weights model.safetensors" in problem
    assert "models fetch megaloc" not in problem and "models fetch xfeat" in problem


@pytest.mark.parametrize("options", [["--weights", "w.safetensors"], ["--tiny"], ["--random"], ["--tiny", "--raw"]])
@pytest.mark.parametrize("library", ["torch", "onnx_ir"])
def test_exporting_without_its_libraries_names_the_extra(library, options, monkeypatch, capsys):
    for name in list(sys.modules):
        if name.startswith(("vslam_features.export", "vslam_features.graph", "vslam_features.networks.megaloc")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, "torch", None)  # which a machine that runs these tests may have
    code, out, err = said(capsys, "models", "export", "megaloc", *options)
    assert code == 1 and not out and "pip install 'vslam_features[export]'" in err and "Traceback" not in err


@pytest.mark.parametrize("options, message", [
    ([], "--weights FILE is missing: download model.safetensors from https://huggingface.co/gberton/MegaLoc"),
    (["--random", "--weights", "x.pth"], "--random makes the weights"),
])  # fmt: skip
def test_what_is_exported_must_be_said(options, message, capsys):
    code, out, err = said(capsys, "models", "export", "megaloc", *options)
    assert code == 1 and not out and message in err and "Traceback" not in err


@pytest.mark.parametrize("args", [[], ["xfeat"], ["megaloc", "--tiny", "--random"], ["megaloc", "--weights"]])
def test_wrong_usage_of_export_is_exit_code_2(args, capsys):
    assert said(capsys, "models", "export", *args)[0] == 2


@pytest.mark.parametrize("verb", ["fetch", "build", "info", "verify"])
def test_a_wrong_name_is_told_with_the_closest(verb, capsys):
    code, out, err = said(capsys, "models", verb, "xfaet")
    assert code == 1 and not out and "no model is named 'xfaet': is xfeat meant" in err and "Traceback" not in err


@pytest.mark.parametrize("args", [[], ["fetch"], ["verify"], ["build", "xfeat", "--precision", "int3"], ["sing"]])
def test_wrong_usage_is_exit_code_2(args, capsys):
    assert said(capsys, "models", *args)[0] == 2


@pytest.fixture
def stops(tmp_path, monkeypatch):
    """A registry with a matcher that is built to stop early."""
    built(tmp_path, monkeypatch, lambda precision: global_model())
    recipe = replace(recipes.RECIPES["tiny"], layers=5, scored=lambda weights, precision: layered_model())
    monkeypatch.setitem(recipes.RECIPES, "tiny", recipe)
    values = {"recipe": "tiny", "role": "matcher", "features_model": "some", "early_stop_layers": [2, 4]}
    use_registry(tmp_path, monkeypatch, entry(tmp_path, "made", b"weights", **values))


@pytest.mark.usefixtures("stops")
def test_a_built_matcher_is_current_while_its_layers_and_what_makes_it_stop_are_the_same(tmp_path, monkeypatch):
    made, target = find_entry("made"), model_path("made", "fp32")
    recipes.build_model(made, tmp_path / "made.file.onnx")
    assert read_card(target).early_stop_layers == (2, 4) and models_cli._is_of(target, made)
    assert not models_cli._is_of(target, replace(made, early_stop_layers=(2,)))
    assert not models_cli._is_of(target, replace(made, early_stop_layers=()))
    assert networks.revision() != networks.revision(early_stop=True) == networks.revision(early_stop=True)
    monkeypatch.setattr(networks, "revision", lambda early_stop=False: "of others" if early_stop else "")
    assert not models_cli._is_of(target, made)
    monkeypatch.setattr(models_cli, "find_spec", lambda name: None if name == "onnx_ir" else name)
    assert models_cli._is_of(target, made), "a robot that cannot build it keeps it"


@pytest.mark.usefixtures("stops")
@pytest.mark.parametrize("missing", ["vslam_features.networks.recipes", "onnx_ir"])
def test_a_built_model_without_the_builder_names_the_package(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, err = said(capsys, "models", "fetch", "made")
    assert code == 1 and "needs onnx, spox and onnx-ir" in err and "Traceback" not in err
    assert "pip install 'vslam_features[models]'" in err and str(model_path("made", "fp32")) in err


# -- info ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
def test_info_of_a_name_and_of_a_path(capsys):
    path = model_path("tiny-features", "fp32")
    for model in ("tiny-features", path):
        code, out, _ = said(capsys, "models", "info", model, "--json")
        facts = json.loads(out)
        assert code == 0 and out.count("\n") == 1
        assert (facts["file"], facts["sha256"]) == (str(path), content_sha256(path))
        assert facts["card"]["name"] == "tiny-features" and facts["card"]["preprocessing"]["channels"] == "any"
        assert facts["inputs"] == {"image": "float32 1xNxNxN", "max_keypoints": "int64 1"}
        assert facts["outputs"]["descriptors"].startswith("float32 ")
        assert {r["runtime"] for r in facts["records"]} == {"onnxruntime", "fake(onnxruntime)"}
        assert facts["identity"] == [str(Models(tiny_config()).open("features", "tiny-features").identity)]
    assert len(said(capsys, "models", "info", "tiny-features")[1].splitlines()) > 20


@pytest.mark.usefixtures("tiny")
def test_info_of_files_that_are_no_models(tmp_path, capsys):
    plain = tmp_path / "plain.onnx"
    plain.write_bytes(global_model().SerializeToString())
    code, out, _ = said(capsys, "models", "info", plain, "--json")
    facts = json.loads(out)
    assert code == 0 and "has no model card" in facts["card"] and facts["inputs"] == {"image": "float32 1x1x32x32"}
    page = tmp_path / "page.onnx"
    page.write_text("<!DOCTYPE html><html>sign in</html>")
    code, out, _ = said(capsys, "models", "info", page, "--json")
    assert code == 0 and "page" in json.loads(out)["kind"].lower() and "tensors" in json.loads(out)
    code, _, err = said(capsys, "models", "info", tmp_path / "gone.onnx")
    assert code == 1 and "there is no model file" in err


# -- verify ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
def test_verify_prints_a_table_or_json(capsys):
    code, out, _ = said(capsys, "models", "verify", "tiny-matcher")
    assert code == 0 and "PASSED" in out and "seeded-7" in out and max(map(len, out.splitlines())) <= 120
    code, out, _ = said(capsys, "models", "verify", "tiny-matcher", "--json")
    report = json.loads(out)
    assert code == 0 and report["passed"] and len(report["pairs"]) == 8 and report["recorded"] == []


@pytest.mark.usefixtures("tiny")
def test_verify_against_another_model(capsys):
    strict = save(matcher_model(least=0.98), card("matcher", "strict"), cache_root() / "strict.onnx")
    code, out, _ = said(capsys, "models", "verify", strict, "--reference", "tiny-matcher")
    assert code == 1 and "FAILED" in out and "matches, the reference has" in out
    assert said(capsys, "models", "verify", "tiny-matcher", "--reference", "tiny-matcher")[0] == 0


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("model", ["tiny-features", "tiny-matcher", "tiny-global"])
def test_verify_on_pictures_of_the_user(model, tmp_path, capsys):
    big = image(260, 340)
    for i in range(3):
        cv2.imwrite(str(tmp_path / f"p{i}.png"), big[5 * i : 5 * i + 240, 7 * i : 7 * i + 320])
    code, out, _ = said(capsys, "models", "verify", model, "--images", tmp_path)
    assert code == 0 and "p0 p1" in out and "p1 p2" in out
    code, _, err = said(capsys, "models", "verify", model, "--images", tmp_path / "p0.png")
    assert code == 1 and "expected two pictures at least" in err


@pytest.mark.usefixtures("tiny")
def test_features_of_pictures_are_not_made_by_the_runtime_that_is_judged(tmp_path, capsys):
    """A runtime whose outputs are all NaN: its matcher fails, for features are there to match."""
    for i in range(2):
        cv2.imwrite(str(tmp_path / f"p{i}.png"), image(240, 320))
    broken = ["--set", "runtime.name=fake", "--set", "runtime.options.nan_calls=all", "--set", "runtime.fallback=none"]
    code, out, _ = said(capsys, "models", "verify", "tiny-matcher", "--images", tmp_path, *broken)
    assert code == 1 and "p0 p1" in out and "NaN on 9 of 9 pairs" in out


@pytest.mark.usefixtures("tiny")
def test_verify_on_a_runtime_that_fails(capsys):
    broken = ["--set", "runtime.name=fake", "--set", "runtime.options.error_calls='3'"]
    code, out, _ = said(capsys, "models", "verify", "tiny-matcher", *broken)
    assert code == 1 and "injected error in call 3" in out and "FAILED" in out
    code, _, err = said(capsys, "models", "verify", "tiny-matcher", "--set", "runtime.device=cuda")
    assert code == 1 and "CPUExecutionProvider" in err


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "make", [lambda p: p.write_bytes(b"no zip"), lambda p: np.savez(p, other=np.zeros(3)), lambda p: None]
)
def test_inputs_that_are_none(make, tmp_path, capsys):
    path = tmp_path / "inputs.npz"
    make(path)
    code, out, err = said(capsys, "models", "verify", "tiny-global", "--inputs", path)
    assert code == 1 and "Traceback" not in err and ("inputs" in err or "expected ['image']" in out)


def incident(folder, role: str, name: str, fault: str, inputs: dict):
    """An incident file of a model."""
    return Incidents(folder, interval_s=0).save(role, name, "ab" * 32, "fake 1", fault, inputs, None)


@pytest.mark.usefixtures("tiny")
def test_incidents_of_other_models_are_left_out(tmp_path, capsys):
    picture = {"image": image(32, 32).astype(np.float32)[None, None] / 255}
    folder = tmp_path / "incidents"
    for _ in range(2):
        incident(folder, "matcher", "tiny-matcher", "no match", {"keypoints0": np.zeros((3, 2), np.float32)})
    incident(folder, "features", "tiny-global", "of the same name", picture)
    code, _, err = said(capsys, "models", "verify", "tiny-global", "--inputs", folder)
    assert code == 1 and "no incident is of tiny-global (global)" in err
    assert "tiny-global (features): 1, tiny-matcher (matcher): 2" in err and "Traceback" not in err
    mine = incident(folder, "global", "tiny-global", "NaN in 'descriptor'", picture)
    code, out, _ = said(capsys, "models", "verify", "tiny-global", "--inputs", folder, "--json")
    report = json.loads(out)
    assert code == 0 and [pair["name"] for pair in report["pairs"]] == [mine.stem]
    assert report["recorded"] == [
        f"recorded in {mine.name}: tiny-global on fake 1: NaN in 'descriptor'",
        "left out, incidents of other models: tiny-global (features): 1, tiny-matcher (matcher): 2",
    ]
    np.savez(folder / "plain.npz", **picture)
    code, out, _ = said(capsys, "models", "verify", "tiny-global", "--inputs", folder, "--json")
    assert code == 0 and [pair["name"] for pair in json.loads(out)["pairs"]] == [mine.stem, "plain"]


@pytest.mark.slow
@pytest.mark.usefixtures("learned")
def test_the_real_default_models_are_verified(capsys):
    for name in DEFAULTS:
        code, out, _ = said(capsys, "models", "verify", name)
        assert code == 0 and "golden outputs" in out and "PASSED" in out


@pytest.mark.slow
@pytest.mark.usefixtures("learned")
def test_the_real_default_models_are_fetched_from_weights_that_are_here(capsys):
    for name in DEFAULTS:
        model_path(name, "fp32").unlink()
    code, out, _ = said(capsys, "models", "fetch", *DEFAULTS, "--offline")
    assert code == 0 and [line.split(":")[0] for line in out.splitlines()] == [f"{n} fp32" for n in DEFAULTS]
    assert "equals the golden outputs on 8 pairs" in out


# -- replay ----------------------------------------------------------------------------------------


def test_a_replay_shows_the_comparison_at_a_first_use(tiny, tmp_path, capsys):  # noqa: F811
    """Minutes of silence of a large model look like a hang; a second run finds the record and compares nothing."""
    shutil.rmtree(tiny / "records")
    (tmp_path / "views").mkdir()
    for i in range(2):
        cv2.imwrite(str(tmp_path / "views" / f"{i}.png"), image(120, 160))
    settings = [part for name, value in TINY.items() for part in ("--set", f"{name}={value}")]
    args = ["replay", tmp_path / "views", "--out", tmp_path / "out", "--no-report", *settings]
    code, _, err = said(capsys, *args)
    lines = re.split("[\r\n]", err)
    assert code == 0 and any(line.startswith("tiny-global: comparing with its reference on ") for line in lines)
    assert "tiny-global: parity pair 8 of 8 (two-places)" in lines  # not behind the progress bar
    code, _, err = said(capsys, *args)
    assert code == 0 and "parity pair" not in err
