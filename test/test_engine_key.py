"""The key of an engine: whatever it depends on is in it, and what differs is told in words."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vslam_features.artifacts.engine_key import PATCHES, EngineWish, differences

WISH = EngineWish(
    "a" * 64, "fp16", "strong", {"keypoints0": [[1, 2], [512, 2], [2048, 2]]}, dict(PATCHES), "Orin", "8.7", "12.6",
    "10.3.0", {"workspace_mb": 0, "optimisation_level": 3},
)  # fmt: skip
# What becomes of the robot or the model, and what is said of it.
CHANGES = {
    "the ONNX file has changed": {"source_sha256": "b" * 64},
    "GPU NVIDIA RTX 3060, was Orin": {"gpu": "NVIDIA RTX 3060"},
    "compute capability 8.6, was 8.7": {"capability": "8.6"},
    "driver 12.8, was 12.6": {"driver": "12.8"},
    "TensorRT 10.13.3, was 10.3.0": {"tensorrt": "10.13.3"},
    "precision fp32, was fp16": {"precision": "fp32"},
    "typing weak, was strong": {"typing": "weak"},
    "patch cumsum 2, was 1": {"patches": {**PATCHES, "cumsum": 2}},
    "patch cumsum none, was 1": {"patches": {"attention": PATCHES["attention"]}},
    "shapes of keypoints0 1x2 512x2 4096x2, was 1x2 512x2 2048x2": {
        "profiles": {"keypoints0": [[1, 2], [512, 2], [4096, 2]]}
    },
    "option workspace_mb 1024, was 0": {"options": {"workspace_mb": 1024, "optimisation_level": 3}},
}


def header(wish: EngineWish) -> dict:
    """As an engine that was built for a wish has it."""
    return {**wish.facts(), "key": wish.key()}


@pytest.mark.parametrize("text", CHANGES)
def test_each_change_is_another_key_and_is_told(text):
    changed = replace(WISH, **CHANGES[text])
    assert changed.key() != WISH.key()
    assert differences(header(WISH), changed) == [text]


def test_every_field_is_covered():
    assert {name for change in CHANGES.values() for name in change} == {f.name for f in fields(EngineWish)}


@given(st.sets(st.sampled_from(list(CHANGES))))
def test_several_changes_are_all_told(texts):
    values = {}
    for text in texts:
        values.update(CHANGES[text])
    changed = replace(WISH, **values)
    told = differences(header(WISH), changed)
    assert (changed.key() == WISH.key()) == (not texts) == (not told)
    fields_changed = {name for text in texts for name in CHANGES[text]}
    assert len(told) == len(fields_changed)


def test_the_order_of_names_changes_nothing():
    turned = replace(WISH, patches=dict(reversed(PATCHES.items())), options=dict(reversed(WISH.options.items())))
    assert turned.key() == WISH.key() and not differences(header(WISH), turned)


def test_shapes_as_tuples_are_the_same_shapes():
    tuples = replace(WISH, profiles={"keypoints0": ((1, 2), (512, 2), (2048, 2))})
    assert tuples.key() == WISH.key()


@pytest.mark.parametrize("values", [{}, {"key": "0" * 64}, {**header(WISH), "key": "0" * 64}, {"patches": None}])
def test_a_header_that_says_too_little_never_fits(values):
    assert differences(values, WISH)
