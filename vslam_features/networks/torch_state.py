"""State dicts of torch networks: from files, checked tensor by tensor, and a network that holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from ..errors import WeightsError
from .weights import read_tensors

_NAMED = 5  # keys that a message names of each kind

Network = TypeVar("Network", bound=nn.Module)
Hint = Callable[[dict[str, np.ndarray], bool], str]


def without_values(make: Callable[[], Network]) -> Network:
    """A network whose parameters have shapes only.

    What nn.Module would draw takes seconds at a released size, and the caller's random numbers.
    """
    with torch.device("meta"):
        return make()


def with_state(model: Network, state: dict[str, torch.Tensor]) -> Network:
    """A network without values that takes these tensors for its own, ready to run."""
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def load_state(model: Network, name: str, path: str | Path, hint: Hint) -> Network:
    """A network without values, with the weights of a ``.safetensors`` file or of a state dict as ``.pth``.

    Floats of half precision become float32.

    Args:
        name: of the network. hint: of the file's tensors, and whether shapes differ: what else the file may be, and
            which one to take.
    Raises:
        WeightsError: the file cannot be read, is of another network (keys or shapes differ) or has NaN or infinity.
    """
    tensors = read_tensors(path)
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    _require(name, path, expected, tensors, hint)
    state = {}
    for key in expected:
        value = tensors.pop(key).astype(np.float32, copy=False)
        if not np.isfinite(value).all():
            raise WeightsError(f"{path}: {key} has NaN or infinity; the file is damaged or its training diverged")
        state[key] = torch.from_numpy(value)
    return with_state(model, state)


def _require(name: str, path: str | Path, expected: dict[str, tuple], tensors: dict[str, np.ndarray], hint: Hint):
    missing = [key for key in expected if key not in tensors]
    unexpected = [key for key in tensors if key not in expected]
    shapes = [
        f"{key} {tensors[key].shape}, expected {shape}"
        for key, shape in expected.items()
        if key in tensors and tensors[key].shape != shape
    ]
    types = [
        f"{key} {tensors[key].dtype}, expected a float"
        for key in expected
        if key in tensors and tensors[key].dtype.kind != "f"
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes, "of another type": types}
    problems = [f"{len(k)} {kind} ({_few(k)})" for kind, k in kinds.items() if k]
    if problems:
        raise WeightsError(
            f"{path} is not the weights of {name} ({len(expected)} tensors): {'; '.join(problems)}. "
            f"{hint(tensors, bool(shapes))}"
        )


def _few(names: list[str]) -> str:
    # Names of a file that others made: escaped, so that none of them moves the cursor of a terminal.
    shown = [name[:120].encode("unicode_escape").decode() for name in names[:_NAMED]]
    return ", ".join(shown) + (", ..." if len(names) > _NAMED else "")
