"""A small matcher with attention, as files in the cache that engines are built from, and machines to build for."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import onnx
from graph_helpers import half_of
from matcher_graph import Matcher
from patch_helpers import plain_graph, saved

from vslam_features.artifacts.card import ModelCard
from vslam_features.artifacts.engine_source import EngineOrder, order_engine
from vslam_features.artifacts.store import model_path
from vslam_features.runtimes.cuda import Gpu
from vslam_features.runtimes.trt import TensorRt
from vslam_features.runtimes.trt_library import Capabilities

LAYERS = 2
CORES = 4 * LAYERS  # self and cross attention of two images
CARD = ModelCard("matcher", "small", "CC0-1.0", "a" * 64, layers=LAYERS)
ORIN = Gpu(0, "Orin", "8.7", "12.6", "12.6", 7620)
T4 = Gpu(0, "Tesla T4", "7.5", "12.6", "12.6", 15360)
DEFAULTS = dataclasses.asdict(TensorRt.Options())
SHAPES = "keypoints0: 1x2,256x2,600x2; keypoints1: 1x2,256x2,600x2"


def graph(precision: str = "fp32", seed: int = 3) -> onnx.ModelProto:
    """Of a matcher whose weights the seed decides."""
    return onnx.load_from_string(_serialised(precision, seed))


@cache
def _serialised(precision: str, seed: int) -> bytes:
    model = plain_graph(Matcher(layers=LAYERS, dim=64, seed=seed, sharpness=20))
    return (model if precision == "fp32" else half_of(model)[0]).SerializeToString()


def place(*precisions: str, seed: int = 3, source: str = CARD.source_sha256) -> list[Path]:
    """The matcher in the cache, under the name ``small``."""
    paths = []
    for precision in precisions:
        path = model_path("small", precision)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = replace(CARD, precision=precision, source_sha256=source)
        paths.append(saved(graph(precision, seed), path, made))
    return paths


def order(model: str = "small", precision: str = "fp32", version: str = "10.13.3", gpu: Gpu = ORIN, **options):
    """What is wanted, on a machine that need not be there."""
    found: EngineOrder = order_engine(model, precision, {**DEFAULTS, **options}, able(version), gpu)
    return found


def able(version: str) -> Capabilities:
    """Of a version of TensorRT."""
    return Capabilities.assumed(version)


def attention_nodes(path: Path) -> set[str]:
    """Names of the Softmax nodes of a file and of the products before and after each, by following its edges."""
    model = onnx.load(path)
    makers = {name: node for node in model.graph.node for name in node.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    found = set()
    for softmax in (node for node in model.graph.node if node.op_type == "Softmax"):
        before, after = makers[softmax.input[0]], readers[softmax.output[0]]
        while before.op_type != "MatMul":
            before = makers[before.input[0]]
        if any(node.op_type == "MatMul" for node in after):  # a Softmax of matches averages nothing
            found |= {softmax.name, before.name, *(node.name for node in after if node.op_type == "MatMul")}
    return found


def with_trtexec(machine, monkeypatch) -> None:
    """Put the stand-in for trtexec on the PATH, run by this Python."""
    import os
    import sys

    from fake_machine import FAKES

    folders = [str(FAKES / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    assert shutil.which("trtexec") == str(FAKES / "bin" / "trtexec")
