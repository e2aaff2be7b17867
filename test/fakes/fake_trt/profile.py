"""IOptimizationProfile: the range of shapes and of shape values that an engine is built for."""

from __future__ import annotations

from .dims import Dims, integer, text, volume
from .graph_facts import Tensor


class IOptimizationProfile:
    """Ranges by the name of the input."""

    def __init__(self):
        self.extra_memory_target = 1.0
        self._shapes: dict[str, list[tuple[int, ...]]] = {}
        self._values: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, input, min, opt, max):
        """Raises RuntimeError where the three do not fit together; the documentation says ValueError."""
        shapes = [tuple(Dims(each)) for each in (min, opt, max)]
        _check(shapes, "Shape provided for {} is inconsistent with other shapes.")
        if any(size < 0 for size in shapes[0]):
            raise RuntimeError("Shape provided for min is inconsistent with other shapes.")
        self._shapes[text(input)] = shapes

    def get_shape(self, input):
        return [Dims(each) for each in self._shapes.get(text(input), [])]

    def set_shape_input(self, input, min, opt, max):
        """Raises RuntimeError where the three do not fit together."""
        values = [tuple(integer(value) for value in each) for each in (min, opt, max)]
        _check(values, "{} input provided for shape tensor is inconsistent with other inputs.")
        self._values[text(input)] = values

    def get_shape_input(self, input):
        return [list(each) for each in self._values.get(text(input), [])]

    def __bool__(self):
        return True  # what is inconsistent was not taken

    def _misses(self, inputs: list[Tensor]) -> list[str]:
        """What an engine of these inputs finds wrong, in the words of the library."""
        wrong = []
        known = {each.name: each for each in inputs}
        for name in [*self._shapes, *self._values]:
            if name not in known:
                wrong.append(f"Profile contains dimensions for a tensor that is no input of the network: {name}")
        for each in inputs:
            shapes = self._shapes.get(each.name)
            if each.is_shape and each.name not in self._values:
                wrong.append(f"Shape tensor {each.name} has no values in the optimization profile.")
            elif each.is_shape and len(self._values[each.name][0]) != volume(each.shape):
                wrong.append(f"Shape tensor {each.name} has {volume(each.shape)} values, not as many as the profile.")
            if not each.is_shape and each.name in self._values:
                wrong.append(f"{each.name} is no shape tensor: it takes no values in an optimization profile.")
            if shapes is None and -1 in each.shape:
                wrong.append(f"Dynamic input {each.name} is missing dimensions in the optimization profile.")
            for shape in shapes or []:
                if len(shape) != len(each.shape) or any(a not in (-1, b) for a, b in zip(each.shape, shape)):
                    wrong.append(f"Dimensions {shape} of {each.name} in the profile do not fit {tuple(each.shape)}.")
        return wrong


def _check(three: list[tuple[int, ...]], text: str) -> None:
    low, middle, high = three
    for name, less, more in (("opt", low, middle), ("max", middle, high)):
        if len(less) != len(more) or any(a > b for a, b in zip(less, more)):
            raise RuntimeError(text.format(name))
