"""The values of a matcher's graph that are scores of its layers, found by the form of their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from ..errors import ConfigError

LAYER, INDEX = "{layer}", "{index}"


def find_scores(model: ir.Model, pattern: str, num_layers: int) -> dict[int, str]:
    """Layer, from 1 to ``num_layers`` -> name of the value that has the pattern's name for it.

    Args:
        pattern: a name with ``{layer}`` in place of the number of the layer, from 1, or ``{index}`` where the file
            counts from 0.
    Raises:
        ConfigError: the pattern has neither, no value has such a name, or the names count from the other number; the
            message has patterns that would do.
    """
    if LAYER not in pattern and INDEX not in pattern:
        raise ConfigError(f"scores '{pattern}': expected a name with {LAYER} (from 1) or {INDEX} (from 0) in it")
    there = {value.name for node in model.graph for value in node.outputs}
    names = {k: pattern.replace(LAYER, str(k)).replace(INDEX, str(k - 1)) for k in range(1, num_layers + 1)}
    found = {k: name for k, name in names.items() if name in there}
    if not found:
        raise ConfigError(
            f"graph '{model.graph.name}' has no values named '{pattern}', for scores of layers; {_advice(model)}"
        )
    # Off by one, a score would be taken for that of the layer after, or before.
    from_0, *from_1 = [pattern.replace(LAYER, str(k)).replace(INDEX, str(k)) in there for k in (0, 1, 2)]
    if from_0 and LAYER in pattern or INDEX in pattern and not from_0 and all(from_1):
        right = pattern.replace(LAYER, INDEX) if from_0 else pattern.replace(INDEX, LAYER)
        raise ConfigError(
            f"scores '{pattern}': graph '{model.graph.name}' counts them from {0 if from_0 else 1}: write '{right}'"
        )
    return found


def score_patterns(model: ir.Model) -> dict[str, list[int]]:
    """Patterns that two values at least of one float have names of -> the numbers in them.

    First those whose numbers count from 0 or 1, the most of them before others.
    """
    model = model.clone()
    ShapeInferencePass()(model)
    found = defaultdict(set)
    for value in (value for node in model.graph for value in node.outputs):
        one = value.shape is not None and all(size == 1 for size in value.shape)
        if one and value.name and value.dtype is not None and value.dtype.is_floating_point():
            for pattern, number in _patterns(value.name):
                found[pattern].add(number)
    several = {pattern: sorted(numbers) for pattern, numbers in found.items() if len(numbers) > 1}
    likely = sorted(several, key=lambda p: (not _counts(several[p]), -len(several[p]), len(p), p))
    return {p.replace("{}", INDEX if 0 in several[p] else LAYER): several[p] for p in likely}


def _patterns(name: str) -> Iterator[tuple[str, int]]:
    """Patterns of a name, with ``{}`` for a number: one place of it, or all where there are several."""
    places = list(re.finditer(r"\d+", name))
    for number in {place[0] for place in places}:
        equal = [place.span() for place in places if place[0] == number]
        for chosen in [[span] for span in equal] + [equal] * (len(equal) > 1):
            pattern = name
            for start, end in reversed(chosen):
                pattern = f"{pattern[:start]}{{}}{pattern[end:]}"
            yield pattern, int(number)


def _advice(model: ir.Model, most: int = 5) -> str:
    patterns = score_patterns(model)
    if not patterns:
        return "nor any values of one float with a number in their names: export it with the scores of its layers"
    shown = [f"'{p}' for {_brief(numbers)}" for p, numbers in list(patterns.items())[:most]]
    more = f" and {len(patterns) - most} more" if len(patterns) > most else ""
    return f"values of one float with a number in their names: {', '.join(shown)}{more}"


def _brief(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if _counts(numbers) else ", ".join(map(str, numbers))


def _counts(numbers: list[int]) -> bool:
    return numbers[0] in (0, 1) and numbers == list(range(numbers[0], numbers[-1] + 1))
