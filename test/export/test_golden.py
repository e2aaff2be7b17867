"""The golden outputs that ship are what the published packages give for the pictures that ship."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
make_golden = pytest.importorskip("make_golden")

from vslam_features import registry  # noqa: E402
from vslam_features.artifacts import cases, golden  # noqa: E402
from vslam_features.artifacts.card import ModelCard  # noqa: E402
from vslam_features.artifacts.gate import run_gate  # noqa: E402
from vslam_features.artifacts.gate_table import table  # noqa: E402
from vslam_features.networks.recipes import RECIPES  # noqa: E402
from vslam_features.networks.weights import read_tensors  # noqa: E402
from vslam_features.runtimes.base import LoadRequest  # noqa: E402

MATCHERS = [name for name, model in make_golden.MODELS.items() if model[0] == "matcher"]


@pytest.fixture(scope="module", params=list(make_golden.MODELS))
def upstream(request):
    """Card, function of the published package, and its file of weights."""
    role, _, _, source, preprocessing, load = make_golden.MODELS[request.param]
    if request.param == "effnet_cov":
        pytest.importorskip("efficientnet_lite_pytorch")
    run, weights = load()
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    card = ModelCard(role, request.param, "", sha256, preprocessing=preprocessing, features_model=source)
    return card, run


def test_golden_outputs_belong_to_the_published_weights(upstream):
    card, _ = upstream
    assert golden.golden_for(card) is not None


def test_upstream_gives_the_golden_outputs(upstream):
    card, run = upstream
    found = cases.shipped_cases(card)
    assert [case.name for case in found] == list(make_golden.MODELS[card.name][1])
    report = run_gate(run, found, card)
    assert report.passed, table(report)
    assert sum(row.evidence for row in report.rows) >= len(found) - 1  # not of two different places
    for row in report.rows:
        # fp16 descriptors are off by 2^-11 at most; all else is equal but for the order of summing.
        limits = {"descriptors": 3e-4}
        assert all(figures.rms < limits.get(name, 2e-5) for name, figures in row.comparison.tensors.items())


@pytest.mark.parametrize("upstream", MATCHERS, indirect=True)
def test_matches_are_plenty_where_the_places_are_the_same(upstream):
    card, _ = upstream
    for case in cases.shipped_cases(card):
        (outputs,) = case.expected
        matches = ((outputs["matches0"] >= 0) & (outputs["mscores0"] > 0.1)).sum()
        assert (matches < 30) if case.name == "two-places" else (matches > 40), (case.name, matches)
        assert outputs["matches0"].max() < len(case.runs[0]["keypoints1"])
        assert np.isfinite(outputs["mscores0"]).all()


# -- our graphs ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def graph(request, upstream, tmp_path_factory):
    """Card and file of our graph of the same weights."""
    card, _ = upstream
    weights = make_golden.MODELS[card.name][5]()[1]
    model = RECIPES[card.name].build(read_tensors(weights), request.param)
    path = tmp_path_factory.mktemp("graphs") / f"{card.name}.{request.param}.onnx"
    path.write_bytes(model.SerializeToString())
    return replace(card, precision=request.param), path


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_our_graphs_pass_the_gate(graph, runtime):
    card, path = graph
    assert card.preprocessing == RECIPES[card.name].preprocessing or card.role == "matcher"
    session = registry.get("runtime", runtime)().load(path, LoadRequest(threads=2))
    report = run_gate(session.run, cases.shipped_cases(card), card)
    assert report.passed, table(report)
    assert report.reference == "golden"
