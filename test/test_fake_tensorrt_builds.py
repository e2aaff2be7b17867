"""The rules of TensorRT that the fake keeps: what a build takes, and what it says no to."""

import pytest
from fake_engines import ROWS, branches, build_engine, doubled, errors, typed
from onnx import TensorProto, helper

VERSIONS = ("10.3.0", "10.13.3.9", "11.4.0.106")


def strong(trt) -> int:
    """Flags of a strongly typed network: bit 1 in 10, bit 0 in 11."""
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


@pytest.mark.parametrize(
    "three",
    [((2, 4), (1, 4), (8, 4)), ((1, 4), (9, 4), (8, 4)), ((1, 4), (2, 4, 1), (8, 4)), ((-1, 4), (2, 4), (8, 4))],
)
def test_a_profile_that_is_out_of_order_is_a_runtime_error(fake_tensorrt, three):
    profile = fake_tensorrt.trt.Builder(fake_tensorrt.trt.Logger()).create_optimization_profile()
    with pytest.raises(RuntimeError, match="inconsistent with other"):
        profile.set_shape("a", *three)
    assert profile.get_shape("a") == []


@pytest.mark.parametrize(
    "shapes, said",
    [
        ({}, "no optimization profile has been defined"),
        ({"b": ROWS["a"]}, "no input of the network: b"),
        ({"a": ((1, 5), (2, 5), (8, 5))}, "do not fit"),
    ],
)
def test_no_engine_comes_of_a_profile_that_does_not_fit(fake_tensorrt, shapes, said):
    made = build_engine(fake_tensorrt, doubled(), shapes)
    assert made.parsed and made.plan is None and said in errors(made)


def test_files_that_are_no_models_are_listed_as_errors(fake_tensorrt, tmp_path):
    made = build_engine(fake_tensorrt, b"<html>")
    assert not made.parsed and made.parser.num_errors == 1 and "Failed to parse" in made.parser.get_error(0).desc()
    assert made.parser.parse_from_file(str(tmp_path / "none.onnx")) is False
    assert "Failed to open" in made.parser.get_error(1).desc() and made.parser.get_error(2) is None
    det = typed(
        helper.make_node("Det", ["a"], ["y"], name="/d/Det"),
        inputs={"a": (TensorProto.FLOAT, (4, 4))},
        outputs={"y": (TensorProto.FLOAT, ())},
    )
    wrong = build_engine(fake_tensorrt, det).parser.get_error(0)
    assert (wrong.node_name(), wrong.node_operator(), wrong.code().name) == ("/d/Det", "Det", "UNSUPPORTED_NODE")


def mixed() -> bytes:
    """A MatMul of float and BF16: an error in a strongly typed network, cast in a weakly typed one."""
    return typed(
        helper.make_node("Cast", ["a"], ["b"], "to_bf16", to=TensorProto.BFLOAT16),
        helper.make_node("MatMul", ["a", "b"], ["y"], "mixed"),
        inputs={"a": (TensorProto.FLOAT, (4, 4))},
        outputs={"y": (TensorProto.FLOAT, (4, 4))},
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_types_that_do_not_agree_are_refused_where_the_network_is_strongly_typed(fake_tensorrt, version):
    fake_tensorrt.use(tensorrt=version)
    made = build_engine(fake_tensorrt, mixed(), network_flags=strong(fake_tensorrt.trt))
    assert not made.parsed and "MatMul" in errors(made)
    weak = build_engine(fake_tensorrt, mixed())
    assert weak.parsed is not version.startswith("11.")  # where every network is strongly typed


@pytest.mark.parametrize("flag", ["FP16", "BF16", "OBEY_PRECISION_CONSTRAINTS"])
def test_a_strongly_typed_network_takes_no_flag_of_precision(fake_tensorrt, flag):
    made = build_engine(fake_tensorrt, doubled(), ROWS, flags=[flag], network_flags=strong(fake_tensorrt.trt))
    assert made.parsed and made.plan is None and f"{flag} is not allowed in a strongly typed network" in errors(made)
    assert build_engine(fake_tensorrt, doubled(), ROWS, flags=[flag]).plan is not None


def test_precisions_of_layers_need_their_flag_and_one_that_obeys(fake_tensorrt):
    from fake_trt.plan import unpack

    trt = fake_tensorrt.trt
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    layer = next(each for each in made.network if each.type == trt.LayerType.ELEMENTWISE)
    assert layer.name == "Mul_0" and not layer.precision_is_set and layer.precision == trt.float32
    layer.precision = trt.bfloat16
    assert made.build() is None and "the flag BF16 is not set" in errors(made)
    made.config.set_flag(trt.BuilderFlag.BF16)
    assert unpack(bytes(made.build()))[0]["layer_precisions"] == {}
    made.config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    assert unpack(bytes(made.build()))[0]["layer_precisions"] == {"Mul_0": "BF16"}
    typed_network = build_engine(fake_tensorrt, doubled(), ROWS, network_flags=strong(trt))
    typed_network.network.get_layer(1).precision = trt.bfloat16
    assert not typed_network.network.get_layer(1).precision_is_set and "strongly typed" in errors(made)


def test_bf16_needs_a_gpu_that_has_it(fake_tensorrt):
    fake_tensorrt.use(gpu="Tesla T4;7.5;12.6")
    made = build_engine(fake_tensorrt, doubled(), ROWS, flags=["BF16"])
    assert made.plan is None and "BF16 is not supported" in errors(made)
    assert build_engine(fake_tensorrt, doubled(), ROWS, flags=["FP16"]).plan is not None


@pytest.mark.parametrize("version, rows, fine", [("10.3.0", 3, True), ("10.3.0", 2, False), ("10.13.3.9", 2, True)])
def test_branches_of_other_shapes_are_refused_before_10_11(fake_tensorrt, version, rows, fine):
    fake_tensorrt.use(tensorrt=version)
    made = build_engine(fake_tensorrt, branches(rows))
    assert made.parsed is fine
    if not fine:
        assert "IIfConditionalOutputLayer inputs must have the same shape" in made.parser.get_error(0).desc()


def test_a_timing_cache_is_of_one_version_and_one_gpu(fake_tensorrt):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    assert made.config.get_timing_cache() is None
    cache = made.config.create_timing_cache(b"")
    empty = bytes(cache.serialize())
    assert made.config.set_timing_cache(cache, False) and made.build() is not None
    content = bytes(made.config.get_timing_cache().serialize())
    assert len(content) > len(empty)
    assert made.config.create_timing_cache(content[:-3]) is None and "damaged" in errors(made)
    fake_tensorrt.use(gpu="NVIDIA RTX 3060;8.6;12.8")
    config = build_engine(fake_tensorrt, doubled(), ROWS).config
    foreign = config.create_timing_cache(content)
    assert config.set_timing_cache(foreign, False) is False and config.set_timing_cache(foreign, True)
    fake_tensorrt.use(tensorrt="11.4.0.106")
    assert build_engine(fake_tensorrt, doubled(), ROWS).config.create_timing_cache(content) is None


@pytest.mark.parametrize("ends", ["never", "says so", "exception"])
def test_a_monitor_hears_of_the_phases_and_can_end_the_build(fake_tensorrt, ends):
    trt, heard = fake_tensorrt.trt, []

    class Monitor(trt.IProgressMonitor):
        def phase_start(self, phase_name, parent_phase, num_steps):
            heard.append((phase_name, parent_phase))

        def step_complete(self, phase_name, step):
            if ends == "exception":
                raise ValueError("in the monitor")
            return ends == "never"

        def phase_finish(self, phase_name):
            heard.append((phase_name,))

    made = build_engine(fake_tensorrt, doubled(), ROWS)
    made.config.progress_monitor = Monitor()
    assert (made.build() is not None) is (ends == "never")
    root = heard[0][0]
    assert heard[0] == (root, None) and heard[1][1] == root and heard[-1] == (root,)
    assert ("cancelled" in errors(made)) is (ends != "never")
