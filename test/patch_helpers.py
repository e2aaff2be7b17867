"""A small matcher of the contract, as a file with a card, for the commands that patch it."""

from __future__ import annotations

from dataclasses import replace

import onnx
from matcher_graph import Matcher
from onnx import TensorProto, helper

from vslam_features.artifacts.card import METADATA_KEY, ModelCard

MATCHER = Matcher(layers=5, dim=64, seed=3)
CARD = ModelCard("matcher", "small", "CC0-1.0", "a" * 64, layers=5, tools={"maker": "1"}, self_check={"sum": "1.0"})


def plain_graph(matcher: Matcher = MATCHER) -> onnx.ModelProto:
    """The matcher with the keypoints that the contract asks for, which it does not read."""
    model = matcher.graph()
    for i, n in enumerate("MN"):
        model.graph.input.append(helper.make_tensor_value_info(f"keypoints{i}", TensorProto.FLOAT, [n, 2]))
    return model


PLAIN = plain_graph()


def saved(model: onnx.ModelProto, path, card=None):
    model_ = onnx.ModelProto()
    model_.CopyFrom(model)
    if card is not None:
        helper.set_model_props(model_, {METADATA_KEY: card.to_json()})
    path.write_bytes(model_.SerializeToString())
    return path


def older(path) -> bytes:
    """The content of a file that an earlier patch made, which a new one may replace."""
    return saved(PLAIN, path, replace(CARD, patches=("early-stop 2",))).read_bytes()
