"""Small models, engines of them by the fake TensorRT, and sessions of these engines."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnxruntime
import spox.opset.ai.onnx.v18 as op
from onnx import TensorProto, helper
from spox import Tensor, argument, build

from vslam_features.artifacts.card import ModelCard
from vslam_features.runtimes import trt_library
from vslam_features.runtimes.base import LoadRequest
from vslam_features.runtimes.engine_file import BuildFacts, EngineHeader, write
from vslam_features.runtimes.trt import TensorRt
from vslam_features.runtimes.trt_session import TensorRtSession

CARD = ModelCard("matcher", "tiny", "CC0-1.0", source_sha256="ab" * 32)
ON_GPU = LoadRequest("cuda")


def similarity():
    """Inner products of the rows of a and b, and which row of b is nearest to each of a: sizes N and M, maybe 0."""
    a, b = (argument(Tensor(np.float32, (1, n, 8))) for n in "NM")
    products = op.matmul(a, op.transpose(b, perm=[0, 2, 1]))
    column = op.expand(op.const(np.float32(-99)), op.concat([op.shape(a, end=2), _i64(1)], axis=0))
    padded = op.concat([products, column], axis=2)  # for b without rows
    nearest = op.arg_max(padded, axis=2, keepdims=0)
    return build({"a": a, "b": b}, {"products": products, "nearest": nearest})


SIMILARITY = {"a": [[1, 0, 8], [1, 5, 8], [1, 40, 8]], "b": [[1, 0, 8], [1, 5, 8], [1, 40, 8]]}


def kept():
    """The positive numbers of x, how many, and where: their number depends on values."""
    x = argument(Tensor(np.float32, ("N",)))
    at = op.non_zero(op.greater(x, op.const(np.float32(0))))
    rows = op.transpose(at, perm=[1, 0])
    return build({"x": x}, {"kept": op.gather_nd(x, rows), "at": at, "doubled": op.mul(x, op.const(np.float32(2)))})


KEPT = {"x": [[0], [8], [64]]}


def types():
    """An output of every type that arrays and TensorRT share, and inputs of most."""
    half = argument(Tensor(np.float16, (2, "N")))
    count, flag = argument(Tensor(np.int64, ("N",))), argument(Tensor(np.bool_, ("N",)))
    small = argument(Tensor(np.int32, ()))
    return build(
        {"half": half, "count": count, "flag": flag, "small": small},
        {
            "halves": op.add(half, half),
            "counts": op.add(count, op.const(np.int64(1) << 40)),
            "flags": op.not_(flag),
            "smalls": op.neg(small),
            "bytes": op.cast(flag, to=np.uint8),
        },
    )


TYPES = {"half": [[2, 1], [2, 4], [2, 9]], "count": [[1], [4], [9]], "flag": [[1], [4], [9]]}


def first_rows():
    """The first n rows of x: TensorRT needs the value of n on the host, to know the shape."""
    x, n = argument(Tensor(np.float32, ("N", 4))), argument(Tensor(np.int64, (1,)))
    return build({"x": x, "n": n}, {"rows": op.mul(op.slice(x, _i64(0), n, _i64(0)), op.const(np.float32(3)))})


FIRST_ROWS = {"x": [[1, 4], [9, 4], [32, 4]], "n": [[0], [4], [32]]}


def branching():
    """x, doubled where its sum is positive."""
    x = argument(Tensor(np.float32, ("N",)))
    positive = op.greater(op.reduce_sum(x, keepdims=0), op.const(np.float32(0)))
    (y,) = op.if_(
        positive,
        then_branch=lambda: [op.mul(x, op.const(np.float32(2)))],
        else_branch=lambda: [op.identity(x)],
    )
    return build({"x": x}, {"y": y})


BRANCHING = {"x": [[1], [4], [16]]}


def logarithm():
    """Of x: not finite where x is not positive."""
    x = argument(Tensor(np.float32, (4,)))
    return build({"x": x}, {"y": op.log(x)})


def in_bf16():
    """Gives bf16, for which numpy has no type."""
    x, y = (helper.make_tensor_value_info(*v, [4]) for v in (("x", TensorProto.FLOAT), ("y", TensorProto.BFLOAT16)))
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=8)


def engine_bytes(machine, model, profiles) -> bytes:
    """An engine by the calls of TensorRT's Python API. Profiles of 0-d and 1-d inputs that shapes depend on: values."""
    trt, logger = machine.trt, trt_library.load().logger  # the first logger of a process is that of all
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    assert trt.OnnxParser(network, logger).parse(model.SerializeToString())
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    shape_tensors = {
        network.get_input(i).name for i in range(network.num_inputs) if network.get_input(i).is_shape_tensor
    }
    for name, shapes in profiles.items():
        (profile.set_shape_input if name in shape_tensors else profile.set_shape)(name, *shapes)
    assert config.add_optimization_profile(profile) == 0
    return bytes(builder.build_serialized_network(network, config))


def place_engine(path: Path, machine, model, profiles, **facts) -> Path:
    """An engine file for the fake machine; ``facts`` replace those of its header."""
    gpu = machine.cuda.cudaGetDeviceProperties(0)[1]
    driver, cuda = (f()[1] for f in (machine.cuda.cudaDriverGetVersion, machine.cuda.cudaRuntimeGetVersion))
    header = BuildFacts(
        key="k",
        gpu=gpu.name.decode(),
        capability=f"{gpu.major}.{gpu.minor}",
        driver=f"{driver // 1000}.{driver % 1000 // 10}",
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        tensorrt=machine.trt.__version__,
        source="tiny.onnx",
        source_sha256="",
        built_from_sha256="",
        precision="fp32",
        typing="strong",
        has_if=any(node.op_type == "If" for node in model.graph.node),
        profiles=profiles,
    )
    with open(path, "wb") as file:
        header = EngineHeader(CARD.to_dict(), dataclasses.replace(header, **facts))
        write(file, header, engine_bytes(machine, model, profiles))
    return path


def open_session(path: Path, request=ON_GPU, **options) -> TensorRtSession:
    """A session of an engine file."""
    return TensorRt(TensorRt.Options(**options)).load(path, request)


def expected(model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What ONNX Runtime computes."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs)))


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Names, types, shapes and all numbers."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def rows(rng, count: int) -> np.ndarray:
    return rng.standard_normal((1, count, 8)).astype(np.float32)


def _i64(*values):
    return op.const(np.array(values, np.int64))
