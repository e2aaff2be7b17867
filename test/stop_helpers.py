"""Matchers that stop early behind the plug-in: models made by the surgery for ONNX Runtime, and sessions that lie."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import onnx
import onnx_ir as ir
from helpers import features
from matcher_graph import Matcher as Network
from model_helpers import Opened, card, engine, save

from vslam_features.artifacts.binding import Binding
from vslam_features.graph.early_stop import add_early_stop
from vslam_features.matching.learned import LearnedMatcher, LighterGlue
from vslam_features.runtimes.base import Session, TensorSpec

CHECKED = (2, 4, 6, 8)
NETWORK = Network(seed=7)  # whose scores are nowhere near their limits, see early_stop_helpers
CARD = card("matcher", "glue", layers=9, early_stop_layers=CHECKED)
PLAIN = card("matcher", "glue", layers=9)


def with_keypoints(model: onnx.ModelProto) -> onnx.ModelProto:
    """The network looks at descriptors only; the file of a matcher takes keypoints as well."""
    infos = [onnx.helper.make_tensor_value_info(f"keypoints{i}", 1, [n, 2]) for i, n in enumerate("MN")]
    model.graph.input.extend(infos)
    return model


def stopping(network: Network, checked: tuple[int, ...] = CHECKED) -> onnx.ModelProto:
    scores = {k: f"score_{k}" for k in range(1, 10)}
    made = add_early_stop(ir.from_proto(network.graph()), scores, checked, 9, like=("descriptors0", 0))
    return with_keypoints(ir.to_proto(made.model))


@cache
def _stopping() -> bytes:
    return stopping(NETWORK).SerializeToString()


def early_stop_model(*left_out: str) -> onnx.ModelProto:
    model = onnx.load_from_string(_stopping())
    for name in left_out:
        model.graph.output.remove(next(o for o in model.graph.output if o.name == name))
    return model


def plain_model(*left_out: str) -> onnx.ModelProto:
    model = with_keypoints(NETWORK.graph())
    for name in (*left_out, *(f"score_{k}" for k in range(1, 10))):
        model.graph.output.remove(next(o for o in model.graph.output if o.name == name))
    return model


def matcher_of(tmp_path, model=None, own=CARD, least=0.0, decay=1.0, fallback=None, **faults) -> LighterGlue:
    path = save(model or early_stop_model(), own, tmp_path / "glue.onnx")
    options = LighterGlue.Options("any", 0.0, least, decay)
    return LighterGlue(options, Opened(engine(path, tmp_path / "incidents", fallback, **faults)))


def sides(m, n, seed):
    pair = NETWORK.pair(m, n, seed, overlap=seed % 2 == 0)
    return pair, [features(pair[f"descriptors{i}"]) for i in (0, 1)]


class Lying(Session):
    """Another session whose outputs are changed by ``lie(outputs, inputs)``; ``more``: outputs that are added."""

    def __init__(self, inner: Session, lie, **more: TensorSpec):
        self._inner, self._lie = inner, lie
        self.inputs, self.outputs, self.active = inner.inputs, {**inner.outputs, **more}, inner.active

    def _run(self, inputs):
        return self._lie(self._inner._run(inputs), inputs)


def lying(matcher: LearnedMatcher, lie, own=None, **more) -> LearnedMatcher:
    """The matcher with a session that lies."""
    e = matcher.engine
    e.session = Lying(e.session, lie, **more)
    e.model = replace(e.model, card=own or e.model.card)
    e.binding = Binding(e.session, e.model.card, str(e.model.path))
    return matcher
