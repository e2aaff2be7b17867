"""The models that have a name: who made them, under what licence, and where their weights come from.

``models/registry.yaml`` ships with the package and documents the format. The files in ``$VSLAM_FEATURES_MODELS`` (a
path list like ``$PATH``) are read after it, and an entry of a later file replaces that of the same name.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union

import yaml

from ..errors import ConfigError, ModelFileError
from ..share import share_path
from .card import ROLES, ModelCard

VARIABLE = "VSLAM_FEATURES_MODELS"
SCHEMA = 2
# Defaults of plug-ins that have no entry, for too little is known of the files. Name -> what tells more.
_BROUGHT = dict.fromkeys(("flexglue", "flexglue-matcher"), "docs/flexglue.md")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCHEMES = ("https://", "http://", "file://")


@dataclass(frozen=True)
class DistributionSource:
    """A file inside a wheel of a package index; ``member`` is its path there, ``wheel`` the wheel's file name."""

    distribution: str
    version: str
    member: str
    wheel: str
    wheel_sha256: str


@dataclass(frozen=True)
class UrlSource:
    """A file behind an http, https or file URL."""

    url: str


@dataclass(frozen=True)
class PathSource:
    """A file on this machine; ``~`` and environment variables are expanded when it is looked for."""

    path: str


Source = Union[DistributionSource, UrlSource, PathSource]


@dataclass(frozen=True)
class SourceFile:
    """One file by content, and where it can be had, best source first. ``size`` in bytes.

    Of a file that the user brings there are no sources and no size (0), but the ``page`` that has it.
    """

    file: str
    sha256: str
    size: int
    sources: tuple[Source, ...]
    page: str = ""


@dataclass(frozen=True)
class ModelEntry:
    """One model of the registry.

    Args:
        role: ``features``, ``matcher`` or ``global``.
        licence: SPDX identifier of the weights.
        weights: what is fetched: the weights that the recipe builds the model from, or the ready model file. Of a model
            that is exported: the published weights, which the user brings.
        features_model: name of the features that a matcher takes.
        recipe: name of the network's builder; else empty.
        early_stop_layers: of a matcher with a recipe: it is made to stop after these, ascending; else empty.
        export: name of the exporter (``models export``) of a model whose weights are not fetched; else empty.
        card: of a ready file.
        origin: the registry file that the entry is in.
    """

    name: str
    role: str
    version: str
    licence: str
    homepage: str
    weights: SourceFile
    paper: str = ""
    features_model: str = ""
    recipe: str = ""
    early_stop_layers: tuple[int, ...] = ()
    export: str = ""
    card: ModelCard | None = None
    origin: Path = Path()

    def how_to_get(self, precision: str = "fp32") -> str:
        """What brings the model's file, for messages."""
        if self.export:
            return (
                f"download {self.weights.file} from {self.weights.page} and run 'vslam-features models export "
                f"{self.export} --weights {self.weights.file}' (docs/{self.export}.md)"
            )
        variant = "" if precision == "fp32" else f" --precision {precision}"
        return f"run 'vslam-features models fetch {self.name}{variant}'"


def load_catalogue(paths: Sequence[str | Path] | None = None) -> dict[str, ModelEntry]:
    """All models by name: of the shipped registry and of ``$VSLAM_FEATURES_MODELS``, or of ``paths`` alone.

    Raises ConfigError that lists every problem of every file.
    """
    if paths is None:
        own = [Path(p).expanduser() for p in os.environ.get(VARIABLE, "").split(os.pathsep) if p]
        paths = [share_path("models/registry.yaml"), *own]
    entries: dict[str, ModelEntry] = {}
    problems: list[str] = []
    for path in paths:
        entries |= _read(Path(path), problems)
    if problems:
        raise ConfigError("model registry: " + "; ".join(problems))
    return entries


def find_entry(name: str) -> ModelEntry:
    """The model of this name. Raises ConfigError with the closest names where there is none."""
    entries = load_catalogue()
    if name not in entries and name in _BROUGHT:
        raise ConfigError(
            f"the model '{name}' is not on this machine: its files are brought by you, see {_BROUGHT[name]}; name "
            f"one by its path, or in a registry file of your own ({VARIABLE})"
        )
    if name not in entries:
        close = difflib.get_close_matches(name, entries, n=3)
        known = f"is {' or '.join(close)} meant?" if close else f"there are {', '.join(sorted(entries))};"
        raise ConfigError(f"no model is named '{name}': {known} A registry file of your own is named in {VARIABLE}")
    return entries[name]


def _read(path: Path, problems: list[str]) -> dict[str, ModelEntry]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        problems.append(f"{path}: cannot be read as YAML: {error}")
        return {}
    if not isinstance(data, dict) or not isinstance(data.get("models"), list):
        problems.append(f"{path}: expected the keys 'schema' and 'models' (a list)")
        return {}
    if data.get("schema") != SCHEMA:
        problems.append(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA}")
        return {}
    if unknown := set(data) - {"schema", "models"}:
        problems.append(f"{path}: unknown keys {', '.join(sorted(map(str, unknown)))}")
    entries: dict[str, ModelEntry] = {}
    for index, values in enumerate(data["models"]):
        named = values.get("name") if isinstance(values, dict) else None
        where = f"{path}: model {named or f'number {index + 1}'}"
        before = len(problems)
        entry = _entry(values, where, path, problems)
        if entry is None or len(problems) > before:
            continue
        if entry.name in entries:
            problems.append(f"{where}: the name is there twice")
        entries[entry.name] = entry
    return entries


_TEXTS = {"name": True, "role": True, "version": True, "licence": True, "homepage": True}
_TEXTS |= {"paper": False, "features_model": False, "recipe": False, "export": False}


def _entry(values: Any, where: str, path: Path, problems: list[str]) -> ModelEntry | None:
    texts = _texts(values, _TEXTS, ("weights", "file", "card", "early_stop_layers"), where, problems)
    if texts is None:
        return None
    if not _NAME.fullmatch(texts["name"]):
        problems.append(f"{where}: a name has letters, digits, '.', '_' and '-' only, for files are named after it")
    if texts["role"] not in ROLES:
        problems.append(f"{where}: role {texts['role']!r} is not one of {', '.join(ROLES)}")
    if (texts["role"] == "matcher") != bool(texts["features_model"]):
        problems.append(f"{where}: 'features_model' belongs to a matcher, and to nothing else")
    kinds = ({"recipe", "weights"}, {"file", "card"}, {"export", "weights"})
    if (given := {k for k in ("recipe", "export", "weights", "file", "card") if values.get(k)}) not in kinds:
        problems.append(
            f"{where}: give either 'recipe' and 'weights', or, for a ready model, 'file' and 'card', or, for one that "
            "is exported from weights of the user, 'export' and 'weights'"
        )
        return None
    if texts["export"]:
        weights = _brought_file(values["weights"], where, problems)
    else:
        weights = _source_file(values["weights" if texts["recipe"] else "file"], where, path.parent, problems)
    if weights is None:
        return None
    ready = "card" in given
    card = _card(values["card"], texts, where, problems) if ready else None
    if card is not None:  # the file was made from nothing else that is known
        card = replace(card, source_sha256=card.source_sha256 or weights.sha256)
    if ready and not weights.file.endswith(".onnx"):
        problems.append(f"{where}: a ready model is an .onnx file, got {weights.file}")
    layers = _layers(values.get("early_stop_layers", []), texts, where, problems)
    return ModelEntry(**texts, early_stop_layers=layers, weights=weights, card=card, origin=path)


def _layers(values: Any, texts: dict[str, str], where: str, problems: list[str]) -> tuple[int, ...]:
    """The layers that a matcher is to stop after; which of them it has is for its recipe to say."""
    numbers = isinstance(values, list) and all(type(v) is int and v > 0 for v in values)
    if not numbers or values != sorted(set(values)):
        problems.append(f"{where}: 'early_stop_layers' is {values!r}, expected ascending numbers of layers, from 1")
        return ()
    if values and not (texts["role"] == "matcher" and texts["recipe"]):
        problems.append(f"{where}: 'early_stop_layers' belongs to a matcher that is built here, by a recipe")
    return tuple(values)


def _card(values: Any, texts: dict[str, str], where: str, problems: list[str]) -> ModelCard | None:
    """The card of a ready file; what the entry says is not said again in it."""
    shared = {key: texts[key] for key in ("role", "name", "licence", "version", "features_model")}
    if isinstance(values, dict) and (twice := sorted(set(values) & set(shared))):
        problems.append(f"{where}: {', '.join(twice)} stand in the entry and are not repeated in its card")
        return None
    try:
        return ModelCard.from_dict({**values, **shared} if isinstance(values, dict) else values, f"{where}: card")
    except ModelFileError as error:
        problems.append(str(error))
        return None


def _brought_file(values: Any, where: str, problems: list[str]) -> SourceFile | None:
    """The published weights of a model that is exported: what they are, and the page that has them."""
    texts = _texts(values, {"file": True, "sha256": True, "page": True}, (), where, problems)
    if texts is None:
        return None
    _check_file(texts, where, problems)
    return SourceFile(texts["file"], texts["sha256"], 0, (), texts["page"])


def _check_file(texts: dict[str, str], where: str, problems: list[str]) -> None:
    if not _NAME.fullmatch(texts["file"]):
        problems.append(f"{where}: file {texts['file']!r} is not a bare file name")
    if not _SHA256.fullmatch(texts["sha256"]):
        problems.append(f"{where}: sha256 {texts['sha256']!r} is not 64 lower-case hexadecimal digits")


def _source_file(values: Any, where: str, folder: Path, problems: list[str]) -> SourceFile | None:
    texts = _texts(values, {"file": True, "sha256": True}, ("size", "sources"), where, problems)
    if texts is None:
        return None
    _check_file(texts, where, problems)
    size = values.get("size")
    if type(size) is not int or size <= 0:
        problems.append(f"{where}: size {size!r} is not a number of bytes")
    listed = values.get("sources")
    if not isinstance(listed, list) or not listed:
        problems.append(f"{where}: 'sources' is not a list of at least one source")
        return None
    sources = [_source(s, f"{where}: source {i + 1}", folder, problems) for i, s in enumerate(listed)]
    return SourceFile(texts["file"], texts["sha256"], size, tuple(s for s in sources if s))


_KINDS = {"distribution": DistributionSource, "url": UrlSource, "path": PathSource}


def _source(values: Any, where: str, folder: Path, problems: list[str]) -> Source | None:
    kinds = [k for k in _KINDS if isinstance(values, dict) and k in values]
    if len(kinds) != 1:
        problems.append(f"{where}: expected one of the keys {', '.join(_KINDS)}, got {values!r}")
        return None
    kind = _KINDS[kinds[0]]
    before = len(problems)
    texts = _texts(values, dict.fromkeys(kind.__annotations__, True), (), where, problems)
    if texts is None or len(problems) > before:
        return None
    if kind is UrlSource and not texts["url"].startswith(_SCHEMES):
        problems.append(f"{where}: url {texts['url']!r} does not begin with one of {', '.join(_SCHEMES)}")
    if kind is PathSource and not texts["path"].startswith(("~", "$")):
        return PathSource(str(folder / texts["path"]))
    if kind is DistributionSource:
        if not _SHA256.fullmatch(texts["wheel_sha256"]):
            problems.append(f"{where}: wheel_sha256 is not 64 lower-case hexadecimal digits")
        # These become arguments of pip.
        for key in ("distribution", "version", "wheel"):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", texts[key]):
                problems.append(f"{where}: {key} {texts[key]!r} is not valid")
    return kind(**texts)


def _texts(
    values: Any, names: dict[str, bool], others: Sequence[str], where: str, problems: list[str]
) -> dict[str, str] | None:
    """The text fields of a mapping, name -> required; "" for a missing one. None where it is no mapping."""
    if not isinstance(values, dict):
        problems.append(f"{where}: expected a mapping, got {type(values).__name__}")
        return None
    for key in sorted(set(values) - set(names) - set(others), key=str):
        close = difflib.get_close_matches(str(key), [*names, *others], n=1)
        problems.append(f"{where}: unknown key '{key}'" + (f", is '{close[0]}' meant?" if close else ""))
    texts = {}
    for name, required in names.items():
        value = values.get(name, "" if not required else None)
        if isinstance(value, str) and (value or not required):
            texts[name] = value
            continue
        texts[name] = ""
        if value is None or value == "":
            problems.append(f"{where}: '{name}' is missing")
        else:
            problems.append(f"{where}: '{name}' is {value!r}, expected text: put it in quotes")
    return texts
