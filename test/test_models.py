"""Opening models: which file, which record, what is refused, what runs where files are missing."""

import contextlib
import gc
import importlib.util
import json
import logging
import weakref
from dataclasses import replace

import numpy as np
import onnx
import pytest
import yaml
from helpers import SECOND, T0, frame, image
from model_helpers import (
    DEFAULTS,
    _tiny_cache,  # noqa: F401 (fixtures)
    card,
    features_model,
    learned,  # noqa: F401
    matcher_model,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
    tiny_config,
    weights_file,
    weights_sha256,
    with_precision,
)

from vslam_features import models as models_module
from vslam_features.artifacts import cases, golden, records
from vslam_features.artifacts.cache import cache_folder, cache_root
from vslam_features.artifacts.card import read_card, sidecar_path
from vslam_features.artifacts.catalogue import find_entry
from vslam_features.artifacts.store import content_sha256, model_path
from vslam_features.classical import available
from vslam_features.config import Config, GeometryConfig
from vslam_features.errors import (
    ConfigError,
    IdentityError,
    ModelFileError,
    ModelMissingError,
    NonFiniteError,
    ParityError,
    PluginError,
    RuntimeMissingError,
)
from vslam_features.features.learned import XFeat
from vslam_features.frontend import FrontEnd
from vslam_features.geometry import Verifier
from vslam_features.matching.learned import LighterGlue
from vslam_features.matching.verified import VerifiedMatcher
from vslam_features.models import Models
from vslam_features.networks.recipes import build_model
from vslam_features.reference import ModelFile, Reference
from vslam_features.replay.scenes import make_scene
from vslam_features.runtimes.base import LoadRequest
from vslam_features.runtimes.ort import OnnxRuntime
from vslam_features.runtimes.ov import shared_core
from vslam_features.runtimes.provider_cache import cache_settings
from vslam_features.types import Status

with_tiny = pytest.mark.usefixtures("tiny")
with_learned = pytest.mark.usefixtures("learned")
FEATURES = card("features", "tiny-features")
LEARNED = {"features.name": "xfeat", "matcher.name": "lighterglue", "retrieval.name": "effnet_cov"}


def opened(role="features", **values):
    """An engine of a tiny model."""
    return Models(tiny_config(**values)).open(role, f"tiny-{role}")


def extractor(model="tiny-features", **values) -> XFeat:
    return XFeat(300, 0, XFeat.Options(model), Models(tiny_config(**values)))


def matcher(model="tiny-matcher", **values) -> VerifiedMatcher:
    return VerifiedMatcher(
        LighterGlue(LighterGlue.Options(model), Models(tiny_config(**values))), Verifier(GeometryConfig())
    )


def two_frames():
    made = make_scene("room", width=320, height=240, fps=5.0)
    return made.frame(0), made.frame(1)


@pytest.fixture
def gates(monkeypatch) -> list:
    """Names of models, one for each time that the gate ran."""
    ran, gate = [], models_module.run_gate

    def counted(run, cases, card, **options):
        ran.append(f"{card.name} {card.precision}")
        return gate(run, cases, card, **options)

    monkeypatch.setattr(models_module, "run_gate", counted)
    return ran


# -- files -------------------------------------------------------------------------------------


@with_tiny
def test_an_opened_model_says_what_it_is():
    engine = opened()
    path = model_path("tiny-features", "fp32")
    health = engine.health()
    assert (health.sha256, health.file, health.linked) == (content_sha256(path), path.name, True)
    assert health.verified.startswith("passed on 8 pairs") and health.fallback == "ready"
    assert engine.identity.sha256 == content_sha256(path) and engine.identity.name == "tiny-features"


@with_tiny
def test_a_path_opens_the_same_as_a_name():
    path = model_path("tiny-features", "fp32")
    assert Models(tiny_config()).open("features", str(path)).identity == opened().identity


@with_tiny
def test_a_model_of_another_role_is_refused():
    with pytest.raises(ModelFileError, match=r"its card says role 'matcher', it was named as features"):
        Models(tiny_config()).open("features", "tiny-matcher")


@with_tiny
def test_a_matcher_refuses_features_that_it_did_not_learn():
    with pytest.raises(PluginError, match="tiny-matcher matches features of tiny-features, got sift"):
        FrontEnd(Config.from_flat({"features.name": "sift", "matcher.name": "lighterglue",
                                   "matcher.options.model": "tiny-matcher", "retrieval.name": "vlad"}))  # fmt: skip


@with_tiny
def test_a_file_that_changes_while_it_is_opened_is_refused(monkeypatch):
    path = model_path("tiny-features", "fp32")
    load = ModelFile.load

    def slow(self, *args):
        save(features_model(seed=1), FEATURES)
        return load(self, *args)

    monkeypatch.setattr(ModelFile, "load", slow)
    with pytest.raises(ModelFileError, match=f"{path.name}: its content has changed since it was opened"):
        opened()


# -- devices -----------------------------------------------------------------------------------


@with_tiny
@pytest.mark.parametrize("device", ["cuda", "tensorrt"])
def test_a_device_that_is_not_here_is_refused_at_construction_naming_what_is(device):
    """By what the session got; the library's list of providers may promise more."""
    with pytest.raises(RuntimeMissingError) as caught:
        FrontEnd(tiny_config(runtime__device=device))
    assert f"asked for '{device}'" in str(caught.value) and "CPUExecutionProvider" in str(caught.value)


@with_tiny
def test_without_strict_it_runs_on_the_cpu_and_says_so_once(caplog):
    front_end = FrontEnd(tiny_config(runtime__device="cuda", runtime__strict=False))
    for health in front_end.models.health():
        assert "asked for 'cuda'" in health.note and "CPUExecutionProvider" in health.runtime
    for i, f in enumerate(two_frames()):
        tracked = front_end.track(f)
        assert not tracked.faults, i
    said = [r for r in caplog.records if r.levelno == logging.WARNING and "asked for 'cuda'" in r.message]
    assert len(said) == 3 and tracked.pairs[0].matches.status is Status.OK
    assert "CPUExecutionProvider" in tracked.pairs[0].matches.runtime


@with_tiny
def test_an_unknown_device_is_a_configuration_error():
    with pytest.raises(ConfigError, match="tpu"):
        FrontEnd(tiny_config(runtime__device="tpu"))


# -- precisions --------------------------------------------------------------------------------

HALF = with_precision(FEATURES, "fp16")


@with_tiny
def test_fp16_linked_by_a_record_has_the_identity_of_fp32_and_they_match():
    save(features_model(half=True), HALF)
    full, half = extractor(), extractor(runtime__precision="fp16")
    assert full.engine.model.sha256 != half.engine.model.sha256 and full.identity == half.identity
    found = records.records_of(half.engine.model.sha256)
    assert [r.reference for r in found] == [full.engine.model.sha256] and found[0].passed
    a, b = two_frames()
    one, other = full.extract(a), half.extract(b)
    assert not np.array_equal(full.extract(b).descriptors, other.descriptors)  # rounded
    assert matcher().match(one, other).status is matcher().match(other, one).status is Status.OK


@with_tiny
def test_fp16_that_fails_the_gate_is_refused_with_figures():
    save(features_model(half=True, noise=0.3), HALF)
    with pytest.raises(ParityError) as caught:
        opened(runtime__precision="fp16")
    text = str(caught.value)
    assert "tiny-features on onnxruntime" in text and "% RMS off the reference" in text
    assert "models verify tiny-features" in text and "models.allow_unverified" in text


@with_tiny
def test_fp16_that_failed_runs_when_told_to_with_an_identity_of_its_own(caplog):
    save(features_model(half=True, noise=0.3), HALF)
    full = extractor()
    half = extractor(runtime__precision="fp16", models__allow_unverified=True)
    assert half.identity != full.identity and "models.allow_unverified is set" in caplog.text
    health = half.engine.health()
    assert not health.linked and health.verified.startswith("failed: ") and health.fallback == "none"
    a, b = two_frames()
    with pytest.raises(IdentityError) as caught:
        matcher().match(full.extract(a), half.extract(b))
    assert full.identity.sha256[:12] in str(caught.value) and half.identity.sha256[:12] in str(caught.value)
    assert matcher().match(half.extract(a), half.extract(b)).status is Status.OK  # with itself
    # Stored features of the failed file are not taken for those of another runtime either.
    other = extractor(runtime__precision="fp16", runtime__name="fake", models__allow_unverified=True)
    assert other.engine.model.sha256 == half.engine.model.sha256 and other.identity != half.identity


@with_tiny
def test_fp16_alone_proves_nothing_of_fp32_until_that_is_there(gates):
    """Without the fp32 file it is compared with itself, which ties it to nothing; later it is compared again."""
    full = model_path("tiny-features", "fp32")
    content = full.read_bytes()
    identity = opened().identity
    full.unlink()
    save(features_model(half=True), HALF)
    alone = opened(runtime__precision="fp16").identity
    assert alone.sha256 == content_sha256(model_path("tiny-features", "fp16")) != identity.sha256
    full.write_bytes(content)
    assert opened(runtime__precision="fp16").identity == identity
    assert gates == ["tiny-features fp16"] * 2


@with_tiny
@pytest.mark.parametrize("in_cache", ["nothing", "others"])
def test_fp16_by_its_path_has_its_fp32_file_beside_it(gates, tmp_path, in_cache):
    """As files are that were exported to a folder or copied to a robot; one in the cache may be of other weights."""
    paths = {p: tmp_path / f"tiny-features.{p}.onnx" for p in ("fp32", "fp16")}
    model_path("tiny-features", "fp32").rename(paths["fp32"])
    save(features_model(half=True), HALF, paths["fp16"])
    if in_cache == "others":
        save(features_model(seed=3), replace(FEATURES, source_sha256=weights_sha256("others")))
    full, half = (extractor(str(path)) for path in paths.values())
    assert half.identity == full.identity and half.identity.sha256 == content_sha256(paths["fp32"])
    assert records.records_of(content_sha256(paths["fp16"]))[0].reference == content_sha256(paths["fp32"])
    assert gates == ["tiny-features fp16"]  # the fp32 file is the same as before, wherever it lies


@with_tiny
def test_files_of_other_weights_are_no_reference(gates):
    """The fp32 file of that name was made from something else."""
    save(features_model(half=True), replace(HALF, source_sha256=weights_sha256("others")))
    engine = opened(runtime__precision="fp16")
    assert engine.identity.sha256 == engine.model.sha256
    assert records.records_of(engine.model.sha256)[0].reference == "self"
    save(features_model(half=True, seed=3), replace(HALF, source_sha256=FEATURES.source_sha256))
    save(features_model(half=True), HALF, model_path("tiny-features", "fp32"))  # whatever its name says
    engine = opened(runtime__precision="fp16")
    assert records.records_of(engine.model.sha256)[0].reference == "self"
    unknown = replace(HALF, source_sha256="")
    save(features_model(), replace(FEATURES, source_sha256=""))
    save(features_model(half=True, seed=3), unknown)
    engine = opened(runtime__precision="fp16")
    assert records.records_of(engine.model.sha256)[0].reference == "self"


@with_tiny
def test_less_precision_by_a_runtime_is_judged_as_such_and_has_a_record_of_its_own(gates):
    pytest.importorskip("openvino")
    values = {"runtime__name": "openvino", "runtime__options__precision_hint": "f32"}
    opened("global", **values)
    values["runtime__options__precision_hint"] = "bf16"
    engine = opened("global", **values)
    if not engine.session.active.provider.endswith("bf16"):
        pytest.skip("this CPU has no bf16")
    found = {r.provider: r for r in records.records_of(engine.model.sha256) if r.runtime == "openvino"}
    assert {p: r.precision for p, r in found.items()} == {"CPU f32": "fp32", "CPU bf16": "bf16"}
    assert gates == ["tiny-global fp32"] * 2 and engine.identity == opened("global").identity


@pytest.mark.slow
@with_learned
def test_fp16_of_the_real_features_is_linked_and_matches_fp32():
    build_model(find_entry("xfeat"), weights_file(cache_root(), "xfeat.pt"), "fp16")
    full, half = (extractor("xfeat", runtime__precision=p) for p in ("fp32", "fp16"))
    assert full.engine.model.sha256 != half.engine.model.sha256
    assert full.identity == half.identity and full.identity.sha256 == find_entry("xfeat").weights.sha256
    a, b = two_frames()
    found = matcher(DEFAULTS[1]).match(full.extract(a), half.extract(b))
    assert found.status is Status.OK and found.num_inliers > 50


@pytest.mark.slow
@with_learned
def test_fp16_of_the_real_matcher_finds_what_fp32_finds():
    build_model(find_entry(DEFAULTS[1]), weights_file(cache_root(), "lighterglue"), "fp16")
    a, b = map(extractor("xfeat").extract, two_frames())
    found = [matcher(DEFAULTS[1], runtime__precision=p).match(a, b) for p in ("fp32", "fp16")]
    pairs = [set(map(tuple, m.pairs)) for m in found]
    assert len(pairs[0] & pairs[1]) > 0.9 * len(pairs[0] | pairs[1]) > 50
    assert all(m.status is Status.OK for m in found)


# -- fallbacks ---------------------------------------------------------------------------------

FAKE = {"runtime__name": "fake", "runtime__precision": "fp16"}
PICTURE = {"image": image(120, 160)[None, None].astype(np.float32) / 255, "max_keypoints": np.array([50], np.int64)}


def shipped_golden(monkeypatch):
    """Golden outputs of the tiny features, as if their published code had made them and they shipped."""
    path = model_path("tiny-features", "fp32")
    session = OnnxRuntime().load(path, LoadRequest(threads=1))
    outputs = {c.name: tuple(map(session.run, c.runs)) for c in cases.shipped_cases(FEATURES)}
    found = golden.Golden({"max_keypoints": cases.MAX_KEYPOINTS}, outputs, "ab" * 32)
    own = (FEATURES.name, FEATURES.source_sha256)
    monkeypatch.setattr(golden, "golden_for", lambda c: found if (c.name, c.source_sha256) == own else None)


@with_tiny
def test_a_fallback_that_is_another_file_has_to_prove_its_weights_once(gates, monkeypatch):
    shipped_golden(monkeypatch)
    save(features_model(half=True), HALF)
    opened(**FAKE)
    assert gates == ["tiny-features fp16", "tiny-features fp32"]
    engine = opened(**FAKE, runtime__options__nan_calls="1")
    answer = engine.run(PICTURE)
    assert answer.recovered and engine.counts.recovered == 1 and len(gates) == 2
    full = opened()  # optimised: what is proven without that is another record
    assert full.identity == engine.identity and gates[2:] == ["tiny-features fp32"]
    np.testing.assert_allclose(answer.outputs["descriptors"], full.run(PICTURE).outputs["descriptors"], atol=1e-5)


@with_tiny
def test_a_record_on_any_cpu_vouches_for_the_fallback(gates, monkeypatch):
    shipped_golden(monkeypatch)
    save(features_model(half=True), HALF)
    opened()
    assert opened(runtime__precision="fp16").health().fallback == "ready"
    assert gates == ["tiny-features fp32", "tiny-features fp16"]


@with_tiny
def test_another_file_under_the_same_card_is_no_fallback_of_a_verified_model(gates, monkeypatch, caplog):
    """Its keypoints would be published under an identity that golden outputs proved of the fp16 file alone."""
    shipped_golden(monkeypatch)
    save(features_model(half=True), HALF)
    before = opened(**FAKE)
    save(features_model(seed=1), FEATURES)
    for _ in range(2):
        engine = opened(**FAKE, runtime__options__nan_calls="1")
        assert engine.identity == before.identity and engine.health().linked
        with pytest.raises(NonFiniteError):
            engine.run(PICTURE)
        assert (engine.health().fallback, engine.counts.lost) == ("none", 1)
    assert gates == ["tiny-features fp16", "tiny-features fp32", "tiny-features fp32"], "its failed record is kept"
    said = engine.health().verified
    assert said.startswith("passed on 8 pairs against golden outputs") and "no fallback: " in said
    assert "tiny-features.fp32.onnx does not compute what its card claims" in caplog.text
    assert "run 'vslam-features models fetch tiny-features --force'" in caplog.text


@with_tiny
def test_a_sidecar_that_binds_the_reference_otherwise_makes_it_another(gates):
    """The file is the one that the model was compared with, and may give other tensors by those names."""
    save(features_model(half=True), HALF)
    opened(runtime__precision="fp16")
    path = model_path("tiny-features", "fp32")
    values = read_card(path).to_dict() | {"outputs": {"scores": "scores"}}
    sidecar_path(path).write_text(yaml.safe_dump(values))
    opened(runtime__precision="fp16")
    assert gates == ["tiny-features fp16"] * 2
    values["outputs"] = {"keypoints": "descriptors", "descriptors": "keypoints"}
    sidecar_path(path).write_text(yaml.safe_dump(values))
    with pytest.raises(ModelFileError, match="tiny-features.fp32.onnx: output 'descriptors', our 'keypoints', is"):
        opened(runtime__precision="fp16")


@with_tiny
def test_a_record_against_a_file_that_is_gone_does_not_count_beside_another(gates):
    """Own weights, without golden outputs: the identity is that of the fp32 file which was compared."""
    save(features_model(half=True), HALF)
    before = opened(runtime__precision="fp16").identity
    save(features_model(seed=1), FEATURES)
    with pytest.raises(ParityError, match="does not compute what its reference computes"):
        opened(runtime__precision="fp16")
    save(features_model(seed=1, half=True), HALF)
    engine = opened(runtime__precision="fp16")
    assert engine.identity != before and engine.identity.sha256 == content_sha256(model_path("tiny-features", "fp32"))
    assert engine.health().fallback == "ready" and gates == ["tiny-features fp16"] * 3


@with_tiny
def test_a_fallback_that_is_the_same_fp16_file_is_named_as_that(caplog):
    model_path("tiny-features", "fp32").unlink()
    save(features_model(half=True), HALF)
    engine = opened(runtime__precision="fp16")
    text = "the fallback is the same fp16 file, which overflows where the model does"
    text += ": run 'vslam-features models fetch tiny-features'"
    assert engine.health().verified.endswith(text) and caplog.text.count(text) == caplog.text.count("run '") == 1
    caplog.clear()
    assert "fallback" not in opened("matcher").health().verified and not warnings_of(caplog)


@with_tiny
def test_the_session_of_the_gate_does_not_stay(monkeypatch):
    """A reference takes as much memory as the model; a fault that asks for it is rare."""
    loaded, load = [], ModelFile.load

    def kept(self, *args):
        session = load(self, *args)
        loaded.append(weakref.ref(session))
        return session

    monkeypatch.setattr(ModelFile, "load", kept)
    save(features_model(half=True), HALF)
    engine = opened(runtime__precision="fp16")
    gc.collect()
    assert [ref() for ref in loaded] == [engine.session, None]


def openvino_file(folder, precision="fp32"):
    """The tiny global model as OpenVINO's own files, with a card of a name that nobody knows."""
    openvino = pytest.importorskip("openvino")
    path = folder / "own.xml"
    openvino.save_model(shared_core().read_model(str(model_path("tiny-global", "fp32"))), path)
    values = read_card(model_path("tiny-global", "fp32")).to_dict() | {"name": "own", "source_sha256": ""}
    sidecar_path(path).write_text(yaml.safe_dump({**values, "precision": precision}))
    return path


@with_tiny
def test_openvinos_own_files_are_compared_and_fall_back_on_openvino(tmp_path):
    """ONNX Runtime does not read them."""
    path = openvino_file(tmp_path)
    engine = Models(tiny_config(runtime__name="openvino")).open("global", str(path))
    assert engine.health().verified.startswith("passed on 8 pairs against itself")
    session, _ = engine.load_fallback()
    assert (session.active.runtime, session.active.provider) == ("openvino", "CPU f32")
    report = Models(tiny_config(runtime__name="openvino")).verify(str(path))
    assert report.passed and report.tensors[0].name == "descriptor"


@with_tiny
def test_a_reference_that_cannot_be_loaded_is_no_fault_of_the_model(tmp_path, monkeypatch):
    path = openvino_file(tmp_path)
    load = ModelFile.load

    def only_optimised(self, runtime, options, request):
        if not request.optimise:
            raise RuntimeMissingError("not installed")
        return load(self, runtime, options, request)

    monkeypatch.setattr(ModelFile, "load", only_optimised)
    with pytest.raises(RuntimeMissingError, match="not installed"):
        Models(tiny_config(runtime__name="openvino")).open("global", str(path))
    assert records.records_of(content_sha256(path)) == []


def test_a_file_that_no_runtime_computes_exactly_is_no_reference(tmp_path):
    (tmp_path / "x.engine").write_bytes(b"x")
    reference = Reference(ModelFile(tmp_path / "x.engine", FEATURES, "ab" * 32), True)
    with pytest.raises(RuntimeMissingError, match=r"x\.engine: no runtime computes a \.engine file exactly"):
        reference.load()


# -- replaced files ----------------------------------------------------------------------------


@with_tiny
def test_another_file_of_the_same_name_is_another_model(gates):
    """Its card claims the same weights; without golden outputs that proves nothing."""
    first = extractor()
    before = first.extract(two_frames()[0])
    save(features_model(seed=1), FEATURES)
    second = extractor()
    assert gates == ["tiny-features fp32"], "the record of the old file is not that of the new one"
    assert first.identity != second.identity and first.identity.name == second.identity.name
    with pytest.raises(IdentityError, match=f"{second.identity.sha256[:12]}.*{first.identity.sha256[:12]}"):
        matcher().match(second.extract(two_frames()[1]), before)
    assert first.extract(two_frames()[0]).model == first.identity  # what is loaded stays what it was


@pytest.mark.parametrize("name", ["weights.dat", "sub/w", "x" * 200])
def test_external_weights_of_any_name_are_part_of_a_model(tmp_path, name):
    """Files that others exported; the onnx package writes the entry which is looked for."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    path, digests, folders = tmp_path / "m.onnx", set(), set()
    model = onnx.ModelProto()
    model.CopyFrom(features_model())
    weights = model.graph.initializer.add()
    weights.CopyFrom(onnx.numpy_helper.from_array(np.zeros(300, np.float32), "unused"))
    onnx.external_data_helper.set_external_data(weights, name)
    weights.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    (tmp_path / "neighbour.dat").write_bytes(b"of another model")
    for value in (0, 1):
        (tmp_path / name).write_bytes(np.full(300, value, np.float32).tobytes())
        digests.add(content_sha256(path))
        folders.add(cache_settings(str(tmp_path / "cache"), path, {}, "1.31.1")["trt_engine_cache_path"])
    assert len(digests) == 2, "other weights in the same graph are another model"
    assert len(folders) == 2, "an engine of TensorRT holds the old weights"
    before = content_sha256(path)
    (tmp_path / "neighbour.dat").write_bytes(b"changed")
    assert content_sha256(path) == before


@with_tiny
def test_keyframes_of_the_old_file_are_refused_by_the_front_end():
    a, b = two_frames()
    old = FrontEnd(tiny_config())
    old.process(a)
    save(features_model(seed=1), FEATURES)
    new = FrontEnd(tiny_config())
    new.keyframes = old.keyframes  # as if the map had been kept
    tracked, _ = new.process(b)
    assert tracked.pairs[0].matches.status is Status.BACKEND_ERROR
    assert "IdentityError" in tracked.faults["match"] and old.features.identity.sha256[:12] in tracked.faults["match"]


@with_tiny
def test_another_preprocessing_is_another_model():
    path = model_path("tiny-features", "fp32")
    before = opened().identity
    values = {**read_card(path).to_dict(), "preprocessing": {"channels": "grey"}}
    sidecar_path(path).write_text(yaml.safe_dump(values))
    after = opened().identity
    assert after != before and after.sha256 == before.sha256 and after.preprocessing == "grey"


# -- records -----------------------------------------------------------------------------------


@with_tiny
def test_a_missing_record_makes_the_gate_run_once(gates):
    for file in cache_folder("records").iterdir():
        file.unlink()
    lines = []
    FrontEnd(tiny_config(), lines.append)
    assert gates == ["tiny-features fp32", "tiny-matcher fp32", "tiny-global fp32"]
    assert [line for line in lines if "first use here" in line][0].startswith("tiny-features: comparing with its")
    assert sum("parity pair" in line for line in lines) == 24
    lines.clear()
    FrontEnd(tiny_config(), lines.append)
    assert len(gates) == 3 and not lines


@with_tiny
@pytest.mark.parametrize("field, value", [("version", "0.1"), ("device", "cpu of another kind"), ("provider", "X")])
def test_a_record_of_another_version_or_device_does_not_count(field, value, gates):
    opened("global")
    assert not gates
    for file in cache_folder("records").iterdir():  # as if this runtime had been another when they were made
        values = json.loads(file.read_text())
        if values["role"] == "global":
            file.write_text(json.dumps({**values, field: value}))
    opened("global")
    assert gates == ["tiny-global fp32"]


@with_tiny
@pytest.mark.parametrize(
    "change",
    [
        {"inputs": {"keypoints0": "keypoints1", "keypoints1": "keypoints0"}},
        {"layouts": {"keypoints0": "yx", "keypoints1": "yx"}},
        {"keypoints": "unit"},
        {"preprocessing": {"channels": "grey"}},
    ],
)
def test_a_record_holds_for_the_card_that_was_judged(change, gates):
    """A sidecar that binds tensors otherwise makes another function of the same file."""
    path = model_path("tiny-matcher", "fp32")
    opened("matcher")
    assert not gates
    sidecar_path(path).write_text(yaml.safe_dump({**read_card(path).to_dict(), **change}))
    with contextlib.suppress(ParityError):
        opened("matcher")
    assert gates == ["tiny-matcher fp32"]
    sidecar_path(path).unlink()
    opened("matcher")
    assert len(gates) == 1, "the record of the first card is still there"


@with_tiny
def test_records_of_an_older_schema_count_as_missing_without_a_complaint(gates, caplog):
    for file in cache_folder("records").iterdir():
        values = json.loads(file.read_text())
        file.write_text(json.dumps({n: v for n, v in values.items() if n != "card"} | {"schema": 1}))
    sha256 = content_sha256(model_path("tiny-global", "fp32"))
    assert records.records_of(sha256) == [] and not caplog.records
    opened("global")
    assert gates == ["tiny-global fp32"] and len(records.records_of(sha256)) == 1


@with_tiny
@pytest.mark.parametrize("content", ["", "{", "null", "[]"])
def test_a_damaged_record_is_made_anew(content, gates):
    for file in cache_folder("records").iterdir():
        file.write_text(content)
    opened("global")
    opened("global")
    assert gates == ["tiny-global fp32"]


@with_tiny
def test_a_failed_record_refuses_without_running_the_gate_again(gates):
    save(features_model(half=True, noise=0.3), HALF)
    for _ in range(2):
        with pytest.raises(ParityError):
            opened(runtime__precision="fp16")
    assert gates == ["tiny-features fp16"]


@with_tiny
def test_a_gate_that_runs_out_of_time_refuses_and_keeps_no_record(gates, monkeypatch):
    save(matcher_model(least=0.61), card("matcher", "tiny-matcher", features_model="tiny-features"))
    slow = {"runtime__name": "fake", "runtime__options__delay_ms": 600.0}
    before = set(cache_folder("records").iterdir())
    with pytest.raises(ParityError, match=r"of 8 pairs were compared within models.gate_s \(1 s\): raise it"):
        opened("matcher", models__gate_s=1.0, **slow)
    assert set(cache_folder("records").iterdir()) == before
    assert opened("matcher", **{**slow, "runtime__options__delay_ms": 0.0}).health().linked
    assert len(gates) == 2


@with_tiny
def test_a_runtime_that_breaks_a_model_is_refused():
    """NaN on one of eight pairs, and no match on one of eight: neither raises anything by itself."""
    for file in cache_folder("records").iterdir():
        file.unlink()
    for faults, said in (("nan_calls", "NaN"), ("zero_calls", "no match")):
        with pytest.raises(ParityError, match=said):
            opened("matcher", runtime__name="fake", **{f"runtime__options__{faults}": "5"})
        for file in cache_folder("records").iterdir():
            file.unlink()


@with_tiny
def test_verify_renews_the_record_but_not_by_inputs_or_another_reference(tmp_path):
    models = Models(tiny_config())
    path = model_path("tiny-global", "fp32")

    def times():
        return {f: f.stat().st_mtime_ns for f in cache_folder("records").iterdir()}

    before = times()
    picture = np.zeros((1, 1, 32, 32), np.float32)
    picture[0, 0, :16] = 1
    np.savez(tmp_path / "one.npz", image=picture)
    assert models.verify("tiny-global", inputs=[tmp_path / "one.npz"]).passed
    assert models.verify("tiny-global", reference=str(path)).passed
    assert times() == before
    assert models.verify("tiny-global").passed
    assert len(times()) == len(before) and times() != before


@with_tiny
def test_verify_refuses_a_reference_of_another_role():
    with pytest.raises(ModelFileError, match="is a matcher model, .* is global"):
        Models(tiny_config()).verify("tiny-global", reference="tiny-matcher")


# -- missing files -----------------------------------------------------------------------------


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.usefixtures("own_cache")
def test_without_files_the_classical_set_runs_with_one_warning_that_names_the_command(caplog):
    front_end = FrontEnd(Config.from_flat({**LEARNED, "keyframes.every": 1}))
    names = [front_end.config.features.name, front_end.config.matcher.name, front_end.config.retrieval.name]
    assert names == ["sift", "nearest", "vlad"]
    assert warnings_of(caplog) == [front_end.warning]
    assert "running sift + nearest + vlad instead of xfeat + lighterglue + effnet_cov" in front_end.warning
    assert "'vslam-features models fetch xfeat lighterglue-early-stop effnet_cov'" in front_end.warning
    assert str(cache_root()) in front_end.warning
    for i in range(2):
        tracked, loops = front_end.process(frame(image(240, 320), T0 + i * SECOND))
        assert not tracked.faults and not loops.faults
    assert tracked.pairs[0].matches.status is Status.OK and front_end.models.health() == []
    assert len(warnings_of(caplog)) == 1


@pytest.mark.usefixtures("own_cache")
def test_without_files_it_stops_where_that_is_wanted():
    with pytest.raises(ModelMissingError, match="models fetch xfeat lighterglue-early-stop effnet_cov'"):
        FrontEnd(Config.from_flat({**LEARNED, "models.if_missing": "error"}))


@pytest.mark.parametrize("part", ["features", "retrieval"])
@pytest.mark.usefixtures("own_cache")
def test_a_file_that_somebody_named_has_no_substitute(tmp_path, part):
    with pytest.raises(ModelMissingError, match="there is no model file .*nowhere.onnx"):
        FrontEnd(Config.from_flat({**LEARNED, f"{part}.options.model": str(tmp_path / "nowhere.onnx")}))


@pytest.mark.usefixtures("own_cache")
def test_the_command_names_the_precision():
    _, text = available(Config.from_flat({**LEARNED, "runtime.precision": "fp16"}))
    assert "models fetch xfeat lighterglue-early-stop effnet_cov --precision fp16'" in text


@pytest.mark.usefixtures("own_cache")
def test_classical_plugins_need_no_files():
    config = Config.from_flat({"features.name": "orb", "matcher.name": "nearest", "retrieval.name": "vlad"})
    assert available(config) == (config, "")


REAL = dict(zip(("features", "matcher", "retrieval"), DEFAULTS))  # not in the cache of the tests


@with_tiny
@pytest.mark.parametrize(
    "missing, names",
    [
        (["features"], ["sift", "nearest", "effnet_cov"]),
        (["matcher"], ["sift", "nearest", "effnet_cov"]),
        (["matcher", "retrieval"], ["sift", "nearest", "vlad"]),
        # VLAD has no codebook of the tiny features, so these cannot stay.
        (["retrieval"], ["sift", "nearest", "vlad"]),
    ],
)
def test_what_is_missing_is_replaced_with_what_cannot_stay_without_it(missing, names):
    values = {f"{group}.options.model": REAL[group] for group in missing}
    front_end = FrontEnd(Config.from_flat(values, base=tiny_config()))
    found = front_end.config
    assert [found.features.name, found.matcher.name, found.retrieval.name] == names
    assert all(REAL[group] in front_end.warning for group in missing)
    assert [h.name for h in front_end.models.health()] == ["tiny-global"] * (names[2] == "effnet_cov")
    assert not any(stage.faults for stage in front_end.process(frame(image(240, 320))))


@with_tiny
def test_features_with_a_codebook_stay_where_only_the_global_model_is_missing():
    """The tiny features under the name of those that the codebook is of."""
    save(features_model(), card("features", "xfeat"))
    save(matcher_model(), card("matcher", DEFAULTS[1], features_model="xfeat"))
    front_end = FrontEnd(Config.from_flat({**LEARNED, "threads": 1}))
    found = front_end.config
    assert [found.features.name, found.matcher.name, found.retrieval.name] == ["xfeat", "lighterglue", "vlad"]
    assert "running vlad instead of effnet_cov" in front_end.warning and "fetch effnet_cov'" in front_end.warning
    assert not front_end.process(frame(image(240, 320)))[1].faults


@with_tiny
def test_the_global_model_is_not_missed_where_loops_are_off():
    config = tiny_config(retrieval__options__model="effnet_cov", loops__enabled=False)
    assert available(config) == (config, "")
    assert len(FrontEnd(config).models.health()) == 2


@with_tiny
@pytest.mark.parametrize("library, extra", [("onnxruntime", "cpu")])
def test_without_the_library_the_classical_set_runs_and_the_warning_names_the_package(
    library, extra, monkeypatch, caplog
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == library else find(name, *a))
    front_end = FrontEnd(tiny_config(runtime__name=library))
    assert front_end.config.features.name == "sift" and front_end.config.retrieval.name == "vlad"
    assert f"pip install 'vslam_features[{extra}]'" in front_end.warning and warnings_of(caplog) == [front_end.warning]
    with pytest.raises(ModelMissingError, match=f"{library} is not installed"):
        FrontEnd(tiny_config(runtime__name=library, models__if_missing="error"))


@pytest.mark.usefixtures("own_cache")
def test_a_name_that_nobody_knows_is_no_missing_file():
    with pytest.raises(ConfigError, match="no model is named 'xfaet': is xfeat meant"):
        FrontEnd(Config.from_flat({**LEARNED, "features.options.model": "xfaet"}))


@with_tiny
def test_a_damaged_file_is_an_error_and_nothing_runs_instead():
    path = model_path("tiny-features", "fp32")
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ModelFileError, match="tiny-features.fp32.onnx"):
        FrontEnd(tiny_config())


# -- a matcher nobody chose --------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"features.name": "xfeat"}, "lighterglue"),
        ({"features.name": "aliked"}, "lightglue"),
        ({"features.name": "orb"}, "nearest"),
        ({"features.name": "xfeat", "matcher.name": "nearest"}, "nearest"),
        ({"features.name": "xfeat", "features.options.model": "other"}, "lighterglue"),
    ],
)
def test_the_matcher_follows_the_features_unless_it_was_chosen(values, expected):
    base = Config.from_flat({"features.name": "sift", "matcher.name": "nearest"})
    assert Config.from_flat(values, base=base).matcher.name == expected


def test_a_matcher_that_was_chosen_stays():
    base = Config.from_flat({"features.name": "xfeat", "matcher.name": "nearest"})
    assert base.with_values(features__name="aliked").matcher.name == "nearest"
