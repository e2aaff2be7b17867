"""Which shapes TensorRT builds a model's engine for: by options, by its card, else by what its role takes.

An engine serves the shapes between the smallest and the largest of its profile. What is dynamic is read from the file;
what a run must give in equal lengths (keypoints and their descriptors, axes of one name) is equal here.

``max_keypoints`` of a features model says how many rows come out. It sets K of TopK, so that TensorRT takes it for a
shape tensor and wants a profile of its *values*. ``image_size0``, ``min_covisibility`` and their like are plain data of
fixed shape and need none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import ConfigError, ModelFileError, VslamFeaturesError
from ..runtimes.onnx_inputs import GraphInput, read_inputs
from .card import ModelCard
from .shapes import Profile, parse_profiles, parse_shapes
from .tensors import OPTIONAL

Range = tuple[int, int, int]  # of one axis: min, opt, max
_Axis = tuple[str, int]  # our name of a tensor, axis counted from the last, -1

KEYPOINTS: Range = (1, 1024, 4096)
# TopK of TensorRT gives at most 3840 elements
# (https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/operators/TopK.html).
MAX_KEYPOINTS: Range = (1, 1024, 3840)
HEIGHT: Range = (96, 480, 1024)
WIDTH: Range = (96, 640, 1280)
CELLS: Range = (8, 64, 160)  # of a dense map, a side
_CHANNELS = {"rgb": (3, 3, 3), "grey": (1, 1, 1), "any": (1, 1, 3)}
_VALUES = {"max_keypoints": MAX_KEYPOINTS}
# Who says how long an axis is; the first that speaks is believed.
_FILE, _OPTION, _CARD, _ROLE = range(4)


def profiles_of(path: Path, card: ModelCard, overrides: str = "") -> dict[str, Profile]:
    """Profiles of the dynamic inputs of an ONNX file, and of those that are shape tensors, by the *file's* names.

    Args:
        overrides: text for ``shapes.parse_profiles``, by our names or the file's; comes before the card's ``shapes``.
            Axes in front that are 1 may be left out.
    Raises:
        ConfigError: ``overrides`` do not fit the file, or contradict one another; names the tensor.
        ModelFileError: the same of the card; no ONNX file; or an axis of which nobody says how long it is.
    """
    inputs = read_inputs(path)
    names = _tied(path, card, inputs)
    found = {ours: inputs[theirs] for ours, theirs in names.items()}
    lengths: dict[_Axis, tuple[int, Range]] = {}
    for level, given in ((_CARD, _of_card(path, card)), (_OPTION, parse_profiles(overrides))):
        for name, profile in given.items():
            ours = _known(name, names, level, path)
            dims = _fitted(profile, found[ours], _told(level, path, name))
            lengths |= {(ours, axis - len(dims)): (level, r) for axis, r in enumerate(dims)}
    _unknown_ranks(path, found, lengths)
    for ours, tensor in found.items():
        for axis, length in _fixed(ours, tensor):
            lengths.setdefault((ours, axis), (_FILE, (length,) * 3))
        for axis, default in _defaults(ours, tensor, card).items():
            lengths.setdefault((ours, axis), (_ROLE, default))
    for group in _groups(found, card):
        _agree(group, lengths, path)
    return {
        names[ours]: _profile(path, ours, tensor, lengths) for ours, tensor in found.items() if _wants(ours, tensor)
    }


def _wants(ours: str, tensor: GraphInput) -> bool:
    return tensor.dynamic or _is_value(ours, tensor)


def _is_value(ours: str, tensor: GraphInput) -> bool:
    """Whether TensorRT wants to know what it holds."""
    return ours in _VALUES and tensor.dims in ((), (1,)) and tensor.dtype is not None and tensor.dtype.kind in "iu"


def _tied(path: Path, card: ModelCard, inputs: Mapping[str, GraphInput]) -> dict[str, str]:
    """Our name -> the file's, as ``Binding`` ties them."""
    tied = {ours: theirs for ours, theirs in card.inputs.items() if theirs in inputs or ours not in OPTIONAL}
    if missing := [theirs for theirs in tied.values() if theirs not in inputs]:
        there = ", ".join(map(repr, sorted(inputs)))
        raise ModelFileError(f"{path}: 'inputs' of the card names '{missing[0]}', the file has {there}")
    return tied | {name: name for name in inputs if name not in tied.values() and name not in tied}


def _of_card(path: Path, card: ModelCard) -> dict[str, Profile]:
    try:
        return {name: parse_shapes(text) for name, text in card.shapes.items()}
    except ConfigError as error:
        raise ModelFileError(f"{path}: shapes of the card: {error}") from error


def _told(level: int, path: Path, name: str) -> tuple[type[VslamFeaturesError], str]:
    """The error that says what is wrong with shapes, and how its message begins."""
    if level == _OPTION:
        return ConfigError, f"shapes: '{name}' of {path.name}"
    return ModelFileError, f"{path}: shapes of the card: '{name}'" if level == _CARD else f"{path}: its input '{name}'"


def _known(name: str, names: Mapping[str, str], level: int, path: Path) -> str:
    if name in names:
        return name
    for ours, theirs in names.items():
        if theirs == name:
            return ours
    error, where = _told(level, path, name)
    raise error(f"{where} is no input, it has {', '.join(names)}")


def _fitted(profile: Profile, tensor: GraphInput, told: tuple[type[VslamFeaturesError], str]) -> list[Range]:
    """An entry an axis of the file's tensor; of a shape tensor, one for what it holds."""
    (error, where), given = told, profile.axes
    if tensor.dims is None:
        return given
    if not tensor.dynamic and tensor.dtype is not None and tensor.dtype.kind in "iu" and tensor.dims in ((), (1,)):
        if len(given) != 1:
            raise error(f"{where} holds one number, got {profile}: expected MIN,OPT,MAX of it")
        return given
    dims = [(1, 1, 1)] * (len(tensor.dims) - len(given)) + given
    shape = "x".join(str(d or "?") for d in tensor.dims)
    if len(dims) != len(tensor.dims) or any(isinstance(d, int) and r != (d,) * 3 for d, r in zip(tensor.dims, dims)):
        raise error(f"{where} is {shape} in the file, got {profile}")
    return dims


def _unknown_ranks(path: Path, found: Mapping[str, GraphInput], lengths: Mapping[_Axis, tuple[int, Range]]) -> None:
    for ours, tensor in found.items():
        if tensor.dims is None and (ours, -1) not in lengths:
            raise ModelFileError(
                f"{path}: the file does not say how many axes its input '{ours}' has: give its shapes in 'shapes' of "
                "the card"
            )


def _fixed(ours: str, tensor: GraphInput) -> Iterator[tuple[int, int]]:
    """Axis and length, where the file fixes it; nothing of a shape tensor, whose lengths are no part of the profile."""
    if not _is_value(ours, tensor):
        for axis, dim in enumerate(tensor.dims or ()):
            if isinstance(dim, int):
                yield axis - len(tensor.dims), dim


def _defaults(ours: str, tensor: GraphInput, card: ModelCard) -> dict[int, Range]:
    """Axis -> what the role takes, as far as it says."""
    if _is_value(ours, tensor):
        return {-1: _VALUES[ours]}
    stem, rank = ours.rstrip("01"), len(tensor.dims or ())
    ranges: dict[int, Range] = {}
    if ours == "image":
        steps = card.preprocessing
        height = (steps.height,) * 3 if steps.height else HEIGHT
        width = (steps.width,) * 3 if steps.width else WIDTH
        order = (height, width, _CHANNELS[steps.channels])
        order = order if card.layouts.get(ours) == "hwc" else (order[2], *order[:2])
        ranges = dict(zip((-3, -2, -1), order))
    elif stem == "keypoints":
        ranges = {-2: KEYPOINTS, -1: (2, 2, 2)}
    elif stem == "descriptors" and not _is_map(ours, tensor, card):
        ranges = {-2: KEYPOINTS}
    elif stem == "descriptors" and card.layouts.get(ours) == "tokens":
        ranges = {-2: tuple(n * n for n in CELLS)}
    elif stem == "descriptors":
        ranges = dict.fromkeys((-3, -2) if card.layouts.get(ours) == "hwc" else (-2, -1), CELLS)
    least = min(ranges, default=0)
    return {axis: r for axis, r in ranges.items() if -axis <= rank} | dict.fromkeys(range(-rank, least), (1, 1, 1))


def _is_map(ours: str, tensor: GraphInput, card: ModelCard) -> bool:
    """As ``Binding.dense`` tells."""
    dims = tensor.dims or ()
    return ours in card.layouts or len(dims) == 4 or (len(dims) == 3 and isinstance(dims[0], int) and dims[0] != 1)


def _groups(found: Mapping[str, GraphInput], card: ModelCard) -> list[set[_Axis]]:
    """Axes that are equally long in every run: those of one name, and those of keypoints and their descriptors."""
    groups: dict[str, set[_Axis]] = {}
    for ours, tensor in found.items():
        rank, stem = len(tensor.dims or ()), ours.rstrip("01")
        for axis, dim in enumerate(tensor.dims or ()):
            if isinstance(dim, str) and dim:
                groups.setdefault(f"name {dim}", set()).add((ours, axis - rank))
        if rank >= 2 and (stem == "keypoints" or (stem == "descriptors" and not _is_map(ours, tensor, card))):
            groups.setdefault(f"count {ours[len(stem) :]}", set()).add((ours, -2))
    merged: list[set[_Axis]] = []
    for group in groups.values():
        touching = [other for other in merged if other & group]
        merged = [other for other in merged if other not in touching] + [group.union(*touching)]
    return merged


def _agree(group: set[_Axis], lengths: dict[_Axis, tuple[int, Range]], path: Path) -> None:
    """All axes of a group become what the first of file, options, card and role says of one of them.

    What the role says of several is narrowed to what fits them all, as of a picture whose sides have one name.
    """
    known = sorted((lengths[axis], axis) for axis in group if axis in lengths)
    if not known:
        return
    (level, wanted), (first, _) = known[0]
    if level == _ROLE:
        low, usual, high = zip(*(r for (_, r), _ in known))
        wanted = (max(low), max(*low, min(usual)), min(high))
    for (other_level, r), (name, axis) in known if level != _ROLE or wanted[1] > wanted[2] else ():
        if r != wanted and (other_level == level or (level == _FILE and other_level != _ROLE)):
            error, where = _told(other_level, path, name)
            raise error(f"{where} axis {axis} goes {r}, but '{first}' {wanted}, and a run gives them in equal lengths")
    for axis in group:
        lengths[axis] = (level, wanted)


def _profile(path: Path, ours: str, tensor: GraphInput, lengths: Mapping[_Axis, tuple[int, Range]]) -> Profile:
    if _is_value(ours, tensor):
        return Profile(*((n,) for n in lengths[ours, -1][1]), values=True)
    rank = len(tensor.dims) if tensor.dims is not None else sum(name == ours for name, _ in lengths)
    axes = [lengths.get((ours, axis)) for axis in range(-rank, 0)]
    if None in axes:
        example = "x".join(str(r[1][1]) if r else "?" for r in axes)
        raise ModelFileError(
            f"{path}: nobody says how long axis {axes.index(None)} of its input '{ours}' is: give "
            f"'{ours}: MIN,OPT,MAX', each as {example}, in 'shapes' of the card"
        )
    try:
        return Profile(*zip(*(r for _, r in axes)))
    except ConfigError as error:  # an axis that the file fixes at 0
        raise ModelFileError(f"{path}: no engine can be built for its input '{ours}': {error}") from error
