"""How a file's tensors correspond to ours: names, layouts, ranks, types, and how keypoints are given.

The card says what the file does not (``docs/models.md``); the file's own shapes and types say the rest: an axis of
length 1 in front, scalars as (1,), float16, int32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ..errors import DataError, ModelFileError, NonFiniteError
from ..runtimes.base import Session, TensorSpec
from .card import ModelCard
from .contract import MAPS, TENSORS
from .layouts import KEYPOINTS, LAYOUTS, Convention
from .stop_rule import NEVER
from .tensors import FLOATS, INPUTS, OPTIONAL, RANKS, WHOLE, check_spec


class Binding:
    """The tensors of a session by our names.

    Args:
        where: the file, for messages.
    Attributes:
        card: as given.
        inputs, outputs: specs of the file's tensors by our names.
    Raises:
        ModelFileError: the card does not fit the file; names the tensor and the field of the card.
    """

    def __init__(self, session: Session, card: ModelCard, where: str = ""):
        self._session, self.card = session, card
        self._where = where or card.name
        self._inputs = self._tied("inputs", session.inputs, card.inputs)  # ours -> the file's name
        self._outputs = self._tied("outputs", session.outputs, card.outputs)
        self.inputs = {ours: session.inputs[theirs] for ours, theirs in self._inputs.items()}
        self.outputs = {ours: session.outputs[theirs] for ours, theirs in self._outputs.items()}
        self._convention = self._read_convention()
        self._check_layouts()
        for name, spec in self.inputs.items():
            self._check("inputs", name, self._inputs[name], spec, INPUTS[card.role].get(name))
        for name, spec in self.outputs.items():
            ranks = None if self._rank(name) is None else (self._rank(name),)
            self._check("outputs", name, self._outputs[name], spec, ranks)

    def require(self, inputs: Iterable[str] = (), outputs: Iterable[str] = ()) -> None:
        """Raises ModelFileError where the file lacks one of these tensors, or takes an input besides.

        None given: those of the card's role.
        """
        role = self.card.role
        inputs = set(inputs) or set(INPUTS[role])
        outputs = set(outputs) or set(MAPS if role == "features" and self.dense else TENSORS[role])
        for kind, wanted, has, spare in (
            ("inputs", inputs, set(self.inputs), OPTIONAL),
            ("outputs", outputs, set(self.outputs), set()),
        ):
            if wanted - has - spare or (kind == "inputs" and has - wanted - set(NEVER)):
                raise ModelFileError(
                    f"{self._where}: a {role} model needs {kind} {sorted(wanted)}, it has {sorted(has)}: if they are "
                    f"the same by other names, tie these in '{kind}' of its card ('vslam-features models info' "
                    "proposes one)"
                )

    @property
    def dense(self) -> bool:
        """True where the descriptors are maps (C, h, w): by their layout, else by the shape in the file."""
        if self.card.role == "features":
            return "descriptors" in self.outputs and "keypoints" not in self.outputs
        if "descriptors0" in self.card.layouts:
            return True
        shape = self.inputs["descriptors0"].shape if "descriptors0" in self.inputs else None
        return shape is not None and (len(shape) == 4 or (len(shape) == 3 and shape[0] not in (1, None)))

    def map_shape(self, name: str) -> tuple[int, int, int] | None:
        """(C, h, w) of a map that goes in or comes out, None where the file does not fix it."""
        shape, layout = {**self.outputs, **self.inputs}[name].shape, self.card.layouts.get(name, "chw")
        if shape is None or None in shape[-LAYOUTS[layout].file_rank :]:
            return None
        if layout == "tokens":
            rows = next(n for n in range(math.isqrt(shape[-2]), 0, -1) if shape[-2] % n == 0)
            return (shape[-1], rows, shape[-2] // rows)
        return (shape[-1], *shape[-3:-1]) if layout == "hwc" else tuple(shape[-3:])

    def channels(self, name: str) -> int | None:
        """Length of one descriptor of an input or output, None where the file does not fix it."""
        shape = {**self.outputs, **self.inputs}[name].shape
        chw = self.dense and self.card.layouts.get(name, "chw") == "chw"
        return shape[-3 if chw else -1] if shape else None

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The session's run by our names, also those of the outputs of a NonFiniteError.

        Raises as ``Session.run``; DataError, naming the tensor, for inputs that the file cannot take.
        """
        theirs = self._to_file(inputs)
        try:
            return self._to_ours(self._session.run(theirs), inputs)
        except NonFiniteError as error:
            error.outputs = self._to_ours(error.outputs, inputs)
            raise

    # -- running ---------------------------------------------------------------------------------

    def _to_file(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {n: np.array(v, np.float32) for n, v in NEVER.items() if n in self.inputs} | inputs
        given = {n: v for n, v in given.items() if n in self.inputs or n not in OPTIONAL}
        if set(given) != set(self.inputs):
            raise DataError(f"model inputs: expected {sorted(self.inputs)}, got {sorted(given)}")
        out = {}
        for name, spec in self.inputs.items():
            value = given[name]
            if name.startswith("keypoints"):
                value = self._convention.to_file(value, *self._sizes(name, inputs))
            layout = LAYOUTS[self.card.layouts[name]] if name in self.card.layouts else None
            if layout is not None and value.ndim < layout.rank:
                raise DataError(f"{self._named(name)} takes a dense map (C, h, w) in its layout, got {value.shape}")
            value = value if layout is None else layout.to_file(value)
            out[self._inputs[name]] = self._cast(name, self._fitted(name, value, spec), spec)
        return out

    def _to_ours(self, outputs: dict[str, np.ndarray], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What no rule of ours fits stays as it is: the contract of the role tells what is wrong with it."""
        out = {}
        for name, theirs in self._outputs.items():
            value = outputs[theirs]
            layout = self.card.layouts.get(name)
            rank = self._rank(name)
            if layout is not None:
                rank = LAYOUTS[layout].file_rank
            while rank is not None and value.ndim > rank and value.shape[0] == 1:
                value = value[0]
            if layout is not None and value.ndim == rank:
                try:
                    value = LAYOUTS[layout].to_ours(value, inputs)
                except ValueError as error:
                    raise ModelFileError(
                        f"{self._where}: output '{theirs}': {error}: see 'layouts' of its card"
                    ) from error
            if name in FLOATS and value.dtype.kind == "f":
                value = value.astype(np.float32, copy=False)
            elif name in WHOLE and value.dtype.kind == "i":
                value = value.astype(np.int64, copy=False)
            if name == "keypoints" and value.ndim == 2:
                value = self._convention.to_ours(value, *self._sizes(name, inputs))
            out[name] = value
        return out

    def _sizes(self, name: str, inputs) -> tuple:
        """(width, height) of the image of a keypoint tensor, and of the picture that the descriptor model saw."""
        if self._convention.needs_no_size:
            return None, None
        steps = self.card.preprocessing
        if name == "keypoints":
            return np.array(inputs["image"].shape[:-3:-1], np.float64), None
        size = inputs.get(f"image_size{name[-1]}")
        if size is None:
            raise DataError(f"{self._named(name)} is given as '{self.card.keypoints}': image_size{name[-1]} is needed")
        return np.asarray(size, np.float64).reshape(2), np.array([steps.width, steps.height], np.float64)

    def _fitted(self, name: str, value: np.ndarray, spec: TensorSpec) -> np.ndarray:
        """With as many axes as the file has, and of its shape."""
        if spec.shape is None:
            return value
        shape, wanted = value.shape, tuple("?" if s is None else s for s in spec.shape)
        while value.ndim < len(spec.shape):
            value = value[None]
        while value.ndim > len(spec.shape) and value.shape[0] == 1:
            value = value[0]
        if value.ndim != len(spec.shape) or any(s not in (None, v) for s, v in zip(spec.shape, value.shape)):
            raise DataError(
                f"{self._named(name)}: expected shape {wanted}, got {shape}: if it is another tensor or layout, say so "
                "in 'inputs' or 'layouts' of the card"
            )
        return value

    def _cast(self, name: str, value: np.ndarray, spec: TensorSpec) -> np.ndarray:
        """In the file's type, if the value survives: whole numbers unchanged, floats without overflow."""
        if value.dtype == spec.dtype:
            return value
        with np.errstate(over="ignore", invalid="ignore"):
            cast = value.astype(spec.dtype)
        both = value.dtype.kind == spec.dtype.kind == "f"
        if np.isfinite(cast).all() or not np.isfinite(value).all() if both else np.array_equal(cast, value):
            return cast
        raise DataError(f"{self._named(name)} is {spec.dtype}, which does not hold the {value.dtype} values given")

    def _named(self, name: str) -> str:
        theirs = self._inputs[name]
        return f"{self._where}: model input '{theirs}'" + ("" if theirs == name else f" (our '{name}')")

    # -- checks of the card ----------------------------------------------------------------------

    def _tied(self, kind: str, specs: dict[str, TensorSpec], names: dict[str, str]) -> dict[str, str]:
        """Our name -> the file's, of all tensors of the file; those that the card does not name have their own."""
        names = {ours: theirs for ours, theirs in names.items() if theirs in specs or ours not in OPTIONAL}
        for ours, theirs in names.items():
            if theirs not in specs:
                raise ModelFileError(
                    f"{self._where}: '{kind}' of the card ties our '{ours}' to '{theirs}', the file has "
                    f"{', '.join(map(repr, sorted(specs)))}"
                )
        if len(set(names.values())) < len(names):
            raise ModelFileError(f"{self._where}: '{kind}' of the card ties two of ours to one tensor: {names}")
        others = [name for name in specs if name not in names.values()]
        hidden = [name for name in others if name in names]
        if hidden and kind == "inputs":  # an output that nobody reads does no harm
            raise ModelFileError(
                f"{self._where}: the file has an input '{hidden[0]}' that is not our '{hidden[0]}': say in 'inputs' of "
                "the card what it is"
            )
        return {**names, **{name: name for name in others if name not in hidden}}

    def _read_convention(self) -> Convention:
        name, steps = self.card.keypoints or "pixels", self.card.preprocessing
        if name not in KEYPOINTS:
            raise ModelFileError(f"{self._where}: keypoints: '{name}' is none of {', '.join(KEYPOINTS)}")
        if KEYPOINTS[name].of_model and not (steps.width and self.card.role == "matcher"):
            raise ModelFileError(
                f"{self._where}: keypoints: '{name}' needs width, height and kernel of the features model in "
                "'preprocessing' of the matcher's card"
            )
        return KEYPOINTS[name]

    def _check_layouts(self) -> None:
        for name, layout in self.card.layouts.items():
            if layout not in LAYOUTS:
                raise ModelFileError(f"{self._where}: layouts: {name}: '{layout}' is none of {', '.join(LAYOUTS)}")
            if name not in self.inputs and name not in self.outputs:
                known = ", ".join([*self.inputs, *self.outputs])
                raise ModelFileError(f"{self._where}: layouts: no tensor is our '{name}', there are {known}")
            if not name.startswith(LAYOUTS[layout].tensors):
                kinds = " and ".join(LAYOUTS[layout].tensors)
                raise ModelFileError(f"{self._where}: layouts: {name}: '{layout}' is a layout of {kinds}")

    def _rank(self, output: str) -> int | None:
        return (3 if self.dense else 2) if output == "descriptors" else RANKS.get(output)

    def _check(self, field: str, name: str, theirs: str, spec: TensorSpec, ranks: tuple[int, ...] | None) -> None:
        if ranks is not None and name in self.card.layouts:
            ranks = (LAYOUTS[self.card.layouts[name]].file_rank,)
        check_spec(field, name, theirs, spec, ranks, self._where)
