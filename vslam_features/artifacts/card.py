"""Model cards: what a model file is, written once, inside the file or beside it.

An ONNX file carries its card as JSON under the metadata key ``vslam_features``,
an engine in its header; a file that others made gets a sidecar
``<file>.card.yaml`` with the same fields. ``docs/models.md`` is the reference
of the fields.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ..errors import ConfigError, ModelFileError
from ..runtimes import engine_file
from ..runtimes.onnx_header import read_metadata
from ..types import ModelIdentity
from .file_kind import FileKind, require_kind
from .preprocessing import Preprocessing
from .shapes import parse_shapes

METADATA_KEY = "vslam_features"
# 2: self_check; mean, std and more kernels of the preprocessing. 3: keypoints, layouts, patches. 4: shapes. A card that
# uses none of these is written as 1, and older versions read it; of a newer one they say that they must be updated.
SCHEMA = 4
_KERNELS_OF_1 = ("none", "area", "linear")
_OF_3 = ("keypoints", "layouts", "patches")
_OF_4 = ("shapes",)
ROLES = ("features", "matcher", "global")
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
_KINDS = {str: "a text", int: "a whole number", tuple: "a list", Preprocessing: "a mapping"}


@dataclass(frozen=True)
class ModelCard:
    """What a model file is.

    Args:
        role: ``features``, ``matcher`` or ``global``.
        name: of the model, e.g. ``xfeat``.
        licence: SPDX identifier of the weights.
        source_sha256: of the weights that it was made from; what identity rests on where golden outputs prove it.
            Empty for files of unknown making.
        precision: that the model computes in.
        version: of the released weights.
        features_model: name of the features that a matcher takes.
        preprocessing: how an image becomes the model's input.
        inputs, outputs: our tensor name -> the file's, where they differ.
        layers: of a matcher; ``early_stop_layers``: those after which it may stop.
        tools: what wrote the file, name -> version.
        self_check: figures of the checks that the file passed when it was written, label -> text; for people.
        keypoints: how the file takes keypoints, a name of ``binding.KEYPOINTS``; empty: pixels, as they come.
        layouts: our tensor name -> layout of the file's tensor, a name of ``binding.LAYOUTS``, where it is not ours.
        patches: what was done to the graph after it was made, in order.
        shapes: our tensor name -> smallest, usual and largest shape of the file's tensor, as ``shapes.parse_shapes``
            reads them: what an engine is built for.
    """

    role: str
    name: str
    licence: str
    source_sha256: str = ""
    precision: str = "fp32"
    version: str = ""
    features_model: str = ""
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    layers: int = 0
    early_stop_layers: tuple[int, ...] = ()
    tools: dict[str, str] = field(default_factory=dict)
    self_check: dict[str, str] = field(default_factory=dict)
    keypoints: str = ""
    layouts: dict[str, str] = field(default_factory=dict)
    patches: tuple[str, ...] = ()
    shapes: dict[str, str] = field(default_factory=dict)
    schema: int = 1

    def __post_init__(self):
        steps = self.preprocessing
        of_2 = self.self_check or steps.mean or steps.std or steps.kernel not in _KERNELS_OF_1
        of_3, of_4 = (any(getattr(self, name) for name in names) for names in (_OF_3, _OF_4))
        if of_2 or of_3 or of_4:
            object.__setattr__(self, "schema", 4 if of_4 else 3 if of_3 else 2)

    @property
    def emulated(self) -> bool:
        """Whether the file imitates another precision in float32, to predict what a device computes: none to build."""
        return any("emulated" in patch.split() for patch in self.patches)

    def to_dict(self) -> dict:
        """Plain JSON values."""
        values = {n: list(v) if isinstance(v, tuple) else v for n, v in dataclasses.asdict(self).items()}
        values["preprocessing"] = self.preprocessing.to_dict()
        return {n: v for n, v in values.items() if v or n not in ("self_check", *_OF_3, *_OF_4)}

    def to_json(self) -> str:
        """The text that goes into ONNX metadata."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, values: object, where: str) -> ModelCard:
        """Raises ModelFileError that names ``where`` and every problem."""
        if not isinstance(values, dict):
            raise ModelFileError(f"{where}: a model card is a mapping, got {type(values).__name__}")
        schema = values.get("schema", 1)
        if type(schema) is not int or not 1 <= schema <= SCHEMA:
            raise ModelFileError(
                f"{where}: the card has schema {schema!r}, this version reads 1 to {SCHEMA}: update vslam_features"
            )
        hints, known = typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
        problems = [f"unknown field '{n}'" for n in sorted(set(values) - set(known), key=str)]
        missing = [n for n, f in known.items() if n not in values and _required(f)]
        problems += [f"field '{n}' is missing" for n in missing]
        given = {n: v for n, v in values.items() if n in known}
        if "preprocessing" in given and isinstance(given["preprocessing"], dict):
            given["preprocessing"] = Preprocessing.from_dict(given["preprocessing"], problems)
        for name in ("early_stop_layers", "patches"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        for name, value in given.items():
            kind = typing.get_origin(hints[name]) or hints[name]
            members = value.items() if isinstance(value, dict) else ()
            texts = all(isinstance(k, str) and isinstance(v, str) for k, v in members)
            if not isinstance(value, kind) or isinstance(value, bool) or not texts:
                problems.append(f"{name}: expected {_KINDS.get(kind, 'texts by name')}, got {value!r}")
        for name, choices in (("role", ROLES), ("precision", PRECISIONS)):
            if isinstance(given.get(name), str) and given[name] not in choices:
                problems.append(f"{name}: '{given[name]}' is not one of {', '.join(choices)}")
        layers, stops = given.get("layers", 0), given.get("early_stop_layers", ())
        if isinstance(layers, int) and layers < 0:
            problems.append(f"layers: expected a number of layers, got {layers}")
        if isinstance(stops, tuple) and any(type(n) is not int or n < 1 for n in stops):
            problems.append(f"early_stop_layers: expected numbers of layers, from 1, got {list(stops)}")
        elif isinstance(stops, tuple) and list(stops) != sorted(set(stops)):
            problems.append(f"early_stop_layers: expected ascending numbers, got {list(stops)}")
        elif isinstance(stops, tuple) and stops and isinstance(layers, int) and 0 < layers <= stops[-1]:
            problems.append(f"early_stop_layers: {stops[-1]} is not below the number of layers ({layers})")
        patches = given.get("patches", ())
        if isinstance(patches, tuple) and not all(isinstance(patch, str) for patch in patches):
            problems.append(f"patches: expected texts, got {list(patches)}")
        shapes = given.get("shapes", {})
        for name, text in shapes.items() if isinstance(shapes, dict) else ():
            try:
                parse_shapes(str(text))
            except ConfigError as error:
                problems.append(f"shapes: {name}: {error}")
        if problems:
            raise ModelFileError(f"{where}: not a valid model card: {'; '.join(problems)}; see docs/models.md")
        return cls(**given)


def read_card(path: Path) -> ModelCard:
    """The card of a model file; a sidecar, which a user wrote, comes before what is inside.

    Raises ModelFileError where the file is no model, or has no card, or a wrong one.
    """
    path = Path(path)
    sidecar = sidecar_path(path)
    if sidecar.is_file():
        try:
            values = yaml.safe_load(sidecar.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:  # ValueError: dates, numbers, UTF-8
            raise ModelFileError(f"{sidecar}: cannot be read as YAML: {error}") from error
        return ModelCard.from_dict(values, str(sidecar))
    if path.suffix == engine_file.SUFFIX:
        require_kind(path, FileKind.TENSORRT_ENGINE, FileKind.UNKNOWN)  # a Git LFS pointer is called by its name
        return ModelCard.from_dict(engine_file.read_header(path).card, str(path))
    try:
        text = read_metadata(path).get(METADATA_KEY) if path.suffix == ".onnx" else None
    except ModelFileError:
        require_kind(path, FileKind.ONNX, FileKind.CUT_ONNX, FileKind.UNKNOWN)  # a pointer or a page, by its name
        raise
    if text is None:
        raise ModelFileError(
            f"{path}: has no model card, so its inputs and outputs are unknown: write {sidecar.name} beside it "
            "(docs/models.md lists the fields)"
        )
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of too many digits too
        raise ModelFileError(f"{path}: the model card inside is not JSON: {error}") from error
    return ModelCard.from_dict(values, str(path))


def sidecar_path(path: Path) -> Path:
    """Where the card of a file without one is looked for."""
    return path.with_name(path.name + ".card.yaml")


def set_aside_sidecar(path: Path) -> Path | None:
    """Rename a card beside a file that is about to be replaced by one with a card of its own; where it is now, if any.

    It is that of another file of this name, or a user's: kept, but not used.
    """
    sidecar = sidecar_path(path)
    if not sidecar.is_file():
        return None
    return sidecar.replace(sidecar.with_name(sidecar.name + ".old"))


def identity(card: ModelCard, sha256: str) -> ModelIdentity:
    """What makes features of a model comparable with others; ``sha256``: of the weights that it is known to compute."""
    return ModelIdentity(card.role, card.name, sha256, card.preprocessing.id)


def _required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
