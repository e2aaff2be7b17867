"""ONNX Runtime's CUDA and TensorRT providers: exact settings, shapes, caches, and what a session says of itself.

None of this ran on a GPU. Names and values are those of the providers' documentation; the sessions stand in for ones on
a GPU and behave as onnxruntime-gpu 1.17 to 1.31 do.
"""

import dataclasses
import json
from dataclasses import replace

import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import card, save
from onnx import TensorProto, helper

from vslam_features.artifacts.provider_options import provider_options
from vslam_features.errors import CacheError, ConfigError, ModelFileError, RuntimeMissingError
from vslam_features.models import _computed
from vslam_features.reference import ModelFile
from vslam_features.runtimes import provider_cache
from vslam_features.runtimes.base import LoadRequest
from vslam_features.runtimes.ort import OnnxRuntime
from vslam_features.runtimes.provider_cache import cache_settings
from vslam_features.runtimes.provider_shapes import fixed_axes, given_shapes
from vslam_features.runtimes.providers import other_settings, precision_of, provider_chain

F32, I64 = TensorProto.FLOAT, TensorProto.INT64
CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"
PLAIN = OnnxRuntime.Options()
SHAPES = {f"trt_{kind}_shapes": f"a:1x{n}x64" for kind, n in (("min", 16), ("opt", 512), ("max", 2048))}
POINTS = ("keypoints0", "keypoints1", "descriptors0", "descriptors1")


def graph(inputs) -> onnx.ModelProto:
    """The first input, and nothing of the others, comes out."""
    infos = [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()]
    (name, (kind, dims)), *_ = inputs.items()
    nodes = [helper.make_node("Identity", [name], ["y"])]
    made = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", kind, dims)])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.fixture
def scale(tmp_path):
    return save(graph({"image": (F32, [1, "C", "H", "W"])}), card("global", "g"), tmp_path / "g.onnx")


def matcher_file(tmp_path, **fields):
    inputs = {name: (F32, ["MN"[int(name[-1])], 2 if name[0] == "k" else 64]) for name in POINTS}
    return ModelFile.at(save(graph(inputs), card("matcher", "m", **fields), tmp_path / "m.onnx"))


# -- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "tf32"), [("1.16.3", {}), ("1.17.1", {}), ("1.18.0", {"use_tf32": "0"})])
def test_settings_of_cuda(version, tf32):
    first = {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "HEURISTIC"}
    assert provider_chain("cuda:2", PLAIN, version) == [(CUDA, {"device_id": "2", **first, **tf32}), (CPU, {})]
    options = replace(PLAIN, tf32=True, gpu_mem_limit_mb=2, conv_search="exhaustive")
    (_, settings), _ = provider_chain("cuda", options, "1.31.1")
    assert settings == {
        "device_id": "0", "use_tf32": "1", "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "EXHAUSTIVE", "gpu_mem_limit": "2097152",
    }  # fmt: skip


def test_settings_of_tensorrt():
    (trt, settings), (cuda, _), cpu = provider_chain("tensorrt:1", PLAIN, "1.31.1")
    assert (trt, cuda, cpu) == (TENSORRT, CUDA, (CPU, {}))
    assert settings == {"device_id": "1", "trt_fp16_enable": "False", "trt_bf16_enable": "False"}
    options = replace(PLAIN, trt_fp16=True, trt_bf16=True, trt_workspace_mb=512, trt_optimisation_level=5, **SHAPES)
    (_, settings), (_, on_cuda), _ = provider_chain("tensorrt", options, "1.23.0")
    assert settings == {
        "device_id": "0", "trt_fp16_enable": "True", "trt_bf16_enable": "True",
        "trt_builder_optimization_level": "5", "trt_max_workspace_size": "536870912",
        "trt_profile_min_shapes": "a:1x16x64", "trt_profile_opt_shapes": "a:1x512x64",
        "trt_profile_max_shapes": "a:1x2048x64",
    }  # fmt: skip
    assert on_cuda["device_id"] == "0"


def test_bf16_came_with_1_23():
    """Before, its name is an error of the provider's."""
    (_, settings), *_ = provider_chain("tensorrt", PLAIN, "1.22.0")
    assert "trt_bf16_enable" not in settings
    with pytest.raises(ConfigError, match="onnxruntime 1.22.0: its TensorRT provider has no bf16, 1.23 brought it"):
        provider_chain("tensorrt", replace(PLAIN, trt_bf16=True), "1.22.0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trt_min_shapes": ""}, "all of trt_min_shapes, trt_opt_shapes and trt_max_shapes, or none"),
        ({"trt_min_shapes": "a:1x16x64,b:1"}, "do not all name 'b'"),
        ({"trt_min_shapes": "a:1x513x64"}, "'a' has 1x513x64 1x512x64 1x2048x64: expected min <= opt <= max"),
        ({"trt_max_shapes": "a:1x2048x64x1"}, "expected min <= opt <= max, axis by axis"),
        ({"trt_min_shapes": "a:1x16x64,a:1x17x64"}, "trt_min_shapes: 'a:1x17x64': expected each tensor once"),
        ({"trt_opt_shapes": "a=1x512x64"}, "trt_opt_shapes: 'a=1x512x64'"),
        ({"trt_opt_shapes": "a:1x-1x64"}, "trt_opt_shapes: 'a:1x-1x64'"),
        ({"trt_opt_shapes": "a:1x512x64,"}, "trt_opt_shapes: ''"),
        ({"trt_opt_shapes": "a::1x512x64"}, "trt_opt_shapes: 'a::1x512x64'"),
    ],
)
def test_shapes_that_do_not_fit_one_another(change, message):
    with pytest.raises(ConfigError, match=message):
        provider_chain("tensorrt", replace(PLAIN, **{**SHAPES, **change}), "1.23.2")


# -- precision: what the gate judges by ----------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "told", "words", "limits"),
    [
        (CPU, {}, "", "fp32"),
        (CUDA, {"use_tf32": "0"}, "", "fp32"),
        (CUDA, {"use_tf32": "1"}, " tf32", "fp16"),
        (CUDA, {}, " tf32", "fp16"),  # before 1.18
        (TENSORRT, {"trt_fp16_enable": "0", "trt_bf16_enable": "0"}, " tf32", "fp16"),
        (TENSORRT, {"trt_fp16_enable": "1", "trt_bf16_enable": "0"}, " fp16 tf32", "fp16"),
        (TENSORRT, {"trt_fp16_enable": "0", "trt_bf16_enable": "1"}, " bf16 tf32", "bf16"),
        (TENSORRT, {"trt_fp16_enable": "1", "trt_bf16_enable": "1"}, " fp16 bf16 tf32", "bf16"),
    ],
)
def test_words_of_a_provider_choose_the_limits(monkeypatch, scale, provider, told, words, limits):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert precision_of(provider, told) == words
    session = OnnxRuntime().load(scale, LoadRequest(threads=1))
    session.active = replace(session.active, provider=provider + words)
    assert _computed(session, card("global", "g")) == limits
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # what all of NVIDIA's libraries obey
    assert precision_of(provider, told) == words.replace(" tf32", "")


# -- what a session says of itself ---------------------------------------------------------------


class OnGpu:
    """A session that says that it runs on what was asked for, as asked, and computes on the CPU."""

    def __init__(self, real, path, options, providers, **other):
        self._cpu = real(path, options, providers=[CPU], **other)
        self._chain = providers
        self.fallback = True

    def __getattr__(self, name):
        return getattr(self._cpu, name)

    def get_providers(self):
        return [name for name, _ in self._chain]

    def get_provider_options(self):
        spelt = {"True": "1", "False": "0"}
        return {name: {n: spelt.get(v, v) for n, v in told.items()} for name, told in self._chain}

    def disable_fallback(self):
        self.fallback = False


class OnAnotherGpu(OnGpu):
    """As before 1.23 for a number that no GPU has: ``enable_fallback=0`` counts for nothing, the next try is plain."""

    def get_provider_options(self):
        return {CUDA: {"device_id": "0", "use_tf32": "1"}, CPU: {}}


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(make)``: an onnxruntime whose sessions on a GPU ``make`` makes; gives the list of those it made."""
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)

    def install(make, version="1.31.1"):
        real, made = onnxruntime.InferenceSession, []

        def session(path, options, providers, **other):
            if providers[0][0] == CPU:
                return real(path, options, providers=providers, **other)
            made.append(make(real, path, options, providers, **other))
            return made[-1]

        monkeypatch.setattr(onnxruntime, "InferenceSession", session)
        monkeypatch.setattr(onnxruntime, "__version__", version)
        monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print("no libcudart"), raising=False)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CUDA, CPU])
        for module in ("ort", "provider_cache"):
            monkeypatch.setattr(f"vslam_features.runtimes.{module}.gpu_name", lambda: "NVIDIA Orin")
        return made

    return install


def falls_back(real, path, options, providers, **other):
    """As onnxruntime-gpu on a machine without a GPU: a session on the CPU, without an exception."""
    return real(path, options, providers=[CPU], **other)


def breaks(real, path, options, providers, **other):
    raise RuntimeError("libcudnn.so.9: cannot open shared object file")


@pytest.mark.parametrize("make, words", [(falls_back, "the session got CPUExecutionProvider"), (breaks, "libcudnn")])
def test_the_sessions_word_counts_not_the_librarys(gpu, capsys, caplog, scale, make, words):
    caplog.set_level("INFO")
    gpu(make)
    with pytest.raises(RuntimeMissingError, match=words):
        OnnxRuntime().load(scale, LoadRequest("cuda", threads=1))
    session = OnnxRuntime().load(scale, LoadRequest("cuda", strict=False, threads=1))
    assert session.active.provider == CPU and words in session.active.note
    assert session.active.device.startswith("cpu ")
    assert capsys.readouterr().out == "" and "no libcudart" in caplog.text


def test_a_gpu_session_is_named_by_its_device_and_precision(gpu, scale):
    made = gpu(OnGpu)
    active = OnnxRuntime().load(scale, LoadRequest("cuda:1", threads=1)).active
    assert (active.provider, active.device, active.note) == (CUDA, "cuda:1 NVIDIA Orin", "")
    active = OnnxRuntime(replace(PLAIN, tf32=True)).load(scale, LoadRequest("cuda", threads=1)).active
    assert active.provider == "CUDAExecutionProvider tf32"
    active = OnnxRuntime(replace(PLAIN, trt_fp16=True)).load(scale, LoadRequest("tensorrt", threads=1)).active
    assert (active.provider, active.device) == ("TensorrtExecutionProvider fp16 tf32", "cuda:0 NVIDIA Orin")
    assert [session.fallback for session in made] == [False] * 3, "a run would try other providers"


def test_another_gpu_or_precision_than_asked_for_is_told(gpu, scale):
    gpu(OnAnotherGpu, "1.22.0")
    with pytest.raises(RuntimeMissingError, match="the session got device_id 0 instead of 7, use_tf32 1 instead of 0"):
        OnnxRuntime().load(scale, LoadRequest("cuda:7", threads=1))
    active = OnnxRuntime().load(scale, LoadRequest("cuda:7", strict=False, threads=1)).active
    assert active.provider == "CUDAExecutionProvider tf32" and active.device == "cuda:0 NVIDIA Orin"
    assert "asked for 'cuda:7'" in active.note and "device_id 0 instead of 7" in active.note


def test_what_is_wrong_is_not_lost_behind_the_librarys_own_source(gpu, scale):
    def no_such_gpu(*_, **__):  # word for word 1.23.2
        raise RuntimeError(
            "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_execution_provider_info.cc:60 static "
            "onnxruntime::CUDAExecutionProviderInfo onnxruntime::CUDAExecutionProviderInfo::FromProviderOptions(const "
            "onnxruntime::ProviderOptions&) [ONNXRuntimeError] : 1 : FAIL : provider_options_utils.h:187 Parse Failed "
            'to parse provider option "device_id": cuda_execution_provider_info.cc:68 operator() Invalid device ID: 5, '
            "must be between 0 (inclusive) and 1 (exclusive)."
        )

    gpu(no_such_gpu)
    with pytest.raises(
        RuntimeMissingError, match=r"Provider\): \[ONNXRuntimeError\].*Invalid device ID: 5.*a driver, CUDA"
    ):
        OnnxRuntime().load(scale, LoadRequest("cuda:5", threads=1))


def test_settings_that_a_version_does_not_tell_are_not_missed():
    chain = provider_chain("tensorrt", PLAIN, "1.31.1")
    assert other_settings(chain, {}) == "" and other_settings(chain, {"device_id": "0", "trt_fp16_enable": "0"}) == ""
    assert other_settings(chain, {"trt_fp16_enable": "1"}) == "trt_fp16_enable 1 instead of 0"


def test_a_damaged_file_is_not_taken_for_a_missing_device(gpu, tmp_path):
    (tmp_path / "noise.onnx").write_bytes(b"no model" * 50)
    gpu(breaks)
    with pytest.raises(ModelFileError, match="noise.onnx"):
        OnnxRuntime().load(tmp_path / "noise.onnx", LoadRequest("cuda", threads=1))


def test_a_graph_that_tensorrt_takes_in_parts_needs_shapes_within(gpu, scale):
    def partitioned(*_, **__):
        raise RuntimeError(
            "User needs to provide all the dynamic shape inputs with associated profiles if they want to explicitly "
            "set profiles through provider options.\n"
            "Following input(s) has no associated shape profiles provided: inner_7"
        )

    gpu(partitioned)
    with pytest.raises(RuntimeMissingError, match=r"provided: inner_7; .*add these names to all of trt_min_shapes"):
        OnnxRuntime().load(scale, LoadRequest("tensorrt", threads=1))


# -- shapes from the card --------------------------------------------------------------------


def as_the_provider_reads(text: str) -> dict[str, list[int]]:
    """Split at commas, then at the first colon, then at each x, as the provider's documentation says."""
    pairs = [part.split(":") for part in text.split(",")]
    assert all(len(pair) == 2 for pair in pairs)
    return {name: [int(n) for n in shape.split("x")] for name, shape in pairs}


def test_a_models_shapes_are_those_of_its_card(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path / "cache"))
    made = gpu(OnGpu)
    matcher_file(tmp_path, shapes={"keypoints0": "16x2,512x2,2048x2"}).load("onnxruntime", {}, LoadRequest("tensorrt"))
    settings = made[0]._chain[0][1]
    counts = {kind: as_the_provider_reads(settings[f"trt_profile_{kind}_shapes"]) for kind in ("min", "opt", "max")}
    assert counts["min"] == {
        "keypoints0": [16, 2], "keypoints1": [1, 2], "descriptors0": [16, 64], "descriptors1": [1, 64]
    }  # fmt: skip
    assert counts["opt"]["descriptors0"] == [512, 64] and counts["max"]["keypoints1"] == [4096, 2]
    assert settings["trt_engine_cache_path"].startswith(str(tmp_path / "cache" / "engines" / "onnxruntime"))


def test_options_come_before_the_card(tmp_path):
    file = matcher_file(tmp_path, shapes={"keypoints0": "16x2,512x2,2048x2"})
    own = {**SHAPES, "cache_dir": "none"}
    assert provider_options(file.path, file.card, own, "tensorrt") == own
    assert provider_options(file.path, file.card, {}, "cuda") == {}


def test_fp16_would_undo_the_patch_of_attention(tmp_path):
    file = matcher_file(tmp_path, patches=("cumsum", "bf16-attention"))
    with pytest.raises(
        ConfigError, match="trt_fp16 lets TensorRT choose types, and so undoes the patch bf16-attention"
    ):
        file.load("onnxruntime", {"trt_fp16": True}, LoadRequest("tensorrt"))
    assert provider_options(file.path, file.card, {"trt_fp16": True}, "cuda") == {"trt_fp16": True}


def test_axes_without_a_choice_are_fixed_in_the_graph(gpu, tmp_path, monkeypatch):
    """A convolution's channels must be: TensorRT builds for -1 of them whatever the profile says."""
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path / "cache"))
    gpu(OnGpu)
    file = ModelFile.at(
        save(
            graph({"image": (F32, [1, "C", "H", "W"]), "max_keypoints": (I64, [1])}),
            card("features", "f", shapes={"image": "3x96x96,3x480x640,3x480x1280"}),
            tmp_path / "f.onnx",
        )
    )
    session = file.load("onnxruntime", {}, LoadRequest("tensorrt", threads=1))
    assert session.inputs["image"].shape == (1, 3, None, None)
    on_cuda = file.load("onnxruntime", {}, LoadRequest("cuda", threads=1))
    assert on_cuda.inputs["image"].shape == (1, None, None, None)
    assert fixed_axes(file.path, {}) == {}


@given(st.dictionaries(st.text("abc_./", min_size=1), st.lists(st.integers(1, 99999), min_size=1), min_size=1))
def test_shapes_are_read_as_the_provider_reads_them(shapes):
    text = ", ".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())
    options = replace(PLAIN, **{f"trt_{kind}_shapes": text for kind in ("min", "opt", "max")})
    assert given_shapes(options) == {name: (tuple(shape),) * 3 for name, shape in shapes.items()}
    (_, settings), *_ = provider_chain("tensorrt", options, "1.23.2")
    assert as_the_provider_reads(settings["trt_profile_opt_shapes"]) == shapes


# -- caches ----------------------------------------------------------------------------------


def test_engines_are_kept_apart_by_all_that_changes_them(tmp_path, monkeypatch):
    """The provider's own names come from the graph, so that new weights in it would run the engine of the old."""
    model, root, folders, timings = tmp_path / "model.onnx", tmp_path / "deep" / "cache", [], set()
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    monkeypatch.setattr(provider_cache, "gpu_name", lambda: "NVIDIA Orin")

    def add(settings=None):
        found = cache_settings(str(root), model, settings or {"device_id": "0"}, "1.31.1")
        assert json.dumps([found["trt_engine_cache_enable"], found["trt_timing_cache_enable"]]) == '["True", "True"]'
        folders.append(found["trt_engine_cache_path"])
        timings.add(found["trt_timing_cache_path"])

    model.write_bytes(b"one")
    add()
    add({"device_id": "1"})
    assert folders[0] == folders[1], "two equal GPUs share engines"
    add({"trt_builder_optimization_level": "5"})
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    add()
    monkeypatch.setattr(provider_cache, "gpu_name", lambda: "NVIDIA A30")
    add()
    assert len(timings) == 1
    model.write_bytes(b"two")
    add()
    assert len(set(folders)) == 5 and len(timings) == 2
    assert all((root / folder).is_dir() for folder in folders), "the provider makes one level of folders only"


def test_gpus_of_several_models_share_no_engines(tmp_path, monkeypatch):
    """Of such a machine no name is known, and the provider tells compute capabilities apart only."""
    monkeypatch.setattr(provider_cache, "gpu_name", lambda: "")
    (tmp_path / "m.onnx").write_bytes(b"one")
    found = [cache_settings(str(tmp_path), tmp_path / "m.onnx", {"device_id": n}, "1.31.1") for n in "01"]
    assert found[0]["trt_engine_cache_path"] != found[1]["trt_engine_cache_path"]


def test_timings_beside_the_engines_before_1_17(tmp_path):
    """Whose provider refuses the option for another place."""
    (tmp_path / "m.onnx").write_bytes(b"one")
    old, new = (cache_settings(str(tmp_path / "c"), tmp_path / "m.onnx", {}, v) for v in ("1.16.3", "1.17.1"))
    assert new.keys() - old.keys() == {"trt_timing_cache_path"} and old["trt_timing_cache_enable"] == "True"
    assert old["trt_engine_cache_path"].startswith(new["trt_timing_cache_path"])


@pytest.mark.parametrize("root", ["~nobody-of-this-name/c", "a\0b"])
def test_a_cache_in_a_place_that_there_cannot_be(scale, root):
    """Of which Python says RuntimeError and ValueError."""
    with pytest.raises(CacheError, match="engines cannot be made in .*: .*set runtime.options.cache_dir"):
        cache_settings(root, scale, {}, "1.23.0")


def test_a_cache_that_cannot_be_made(tmp_path, gpu, scale):
    (tmp_path / "file").write_text("")
    gpu(OnGpu)
    options = dataclasses.replace(PLAIN, cache_dir=str(tmp_path / "file"))
    with pytest.raises(CacheError, match="engines cannot be made in .*: .*set runtime.options.cache_dir"):
        OnnxRuntime(options).load(scale, LoadRequest("tensorrt", threads=1))
    OnnxRuntime(options).load(scale, LoadRequest("cuda", threads=1))


@pytest.mark.parametrize("cache_dir", ["", "none"])
def test_without_a_cache_engines_are_built_at_every_load(gpu, scale, cache_dir):
    made = gpu(OnGpu)
    OnnxRuntime(replace(PLAIN, cache_dir=cache_dir)).load(scale, LoadRequest("tensorrt", threads=1))
    assert "trt_engine_cache_enable" not in made[0]._chain[0][1]
