"""A matcher of nine layers, its pairs of images, and the surgery proved to be standard."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from matcher_graph import Matcher

from vslam_features.graph.early_stop import add_early_stop
from vslam_features.runtimes.ov import shared_core

DECAYS, THRESHOLDS = (0, 0.2, 0.5, 1), (0, 0.3, 0.6, 0.8, 0.95)
SHIPPED, EVERY, ONE = (2, 4, 6, 8), tuple(range(1, 9)), (4,)
SIZES = ((40, 30), (17, 50), (1, 1), (64, 64), (5, 90), (33, 32))
SCORES = {k: f"score_{k}" for k in range(1, 10)}
MATCHER = Matcher(seed=7)  # each check of EVERY stops some pair, no score is within 1e-3 of its limit
PLAIN = MATCHER.graph()


def patched(model, layers, num_layers=9, scores=None, **options):
    """The surgery, proved to be standard, and what it says was done."""
    options = {"like": ("descriptors0", 0), "force": True} | options
    done = add_early_stop(
        ir.from_proto(model),
        scores or {k: f"score_{k}" for k in range(1, num_layers + 1)},
        layers,
        num_layers,
        **options,
    )
    proto = ir.to_proto(done.model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    return proto, done


def feed(pair, threshold, decay=None):
    inputs = pair | {"min_covisibility": np.array(threshold, np.float32)}
    return inputs if decay is None else inputs | {"early_stop_decay": np.array(decay, np.float32)}


def pairs():
    return [MATCHER.pair(m, n, seed, overlap=seed % 2 == 0) for seed, (m, n) in enumerate(SIZES)]


def ort_session(model, level="ORT_ENABLE_ALL", profile=None):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def openvino_runner(model):
    pytest.importorskip("openvino")
    core = shared_core()
    compiled = core.compile_model(
        core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    return lambda inputs: [np.array(value) for value in compiled(inputs).values()]


def scopes(proto):
    """The main graph and the branches of the added Ifs that go on, from the outside in; nodes by scope."""
    found = [proto.graph]
    while True:
        stop = [node for node in found[-1].node if node.name.startswith("early_stop_if_")]
        if not stop:
            return found
        found.append(next(a.g for a in stop[0].attribute if a.name == "then_branch"))
