"""What a front-end goes on with where the files of learned models are not on the machine."""

from __future__ import annotations

import contextlib
import importlib.util
from importlib import resources
from pathlib import Path

from . import registry
from .artifacts.cache import cache_folder
from .artifacts.card import read_card
from .artifacts.catalogue import find_entry
from .artifacts.engine_maker import has_source
from .artifacts.store import SUFFIXES, locate
from .config import Config
from .errors import ModelError, ModelMissingError, VslamFeaturesError

# Classical plug-ins need no file.
CLASSICAL = {"features.name": "sift", "matcher.name": "nearest", "retrieval.name": "vlad"}


def available(config: Config) -> tuple[Config, str]:
    """The configuration that can run here, and a warning where it is not the one that was asked for.

    Raises ModelMissingError where files are missing and ``models.if_missing`` is ``error``, or where a file that the
    configuration names by its path is missing: whoever names a file does not mean another method.
    """
    groups, used = _groups(config), used_models(config)
    for model in (m for models in used.values() for m in models):
        if Path(model).suffix in SUFFIXES and _missing(model, config):
            locate(model, config.runtime.precision)
    missing = {name: [m for m in models if _missing(m, config)] for name, models in used.items()}
    missing = {name: models for name, models in missing.items() if models}
    if not missing:
        return config, ""
    problem = _problem(list(dict.fromkeys(m for models in missing.values() for m in models)), config)
    if config.models.if_missing == "error":
        raise ModelMissingError(problem)
    keep = set(missing) == {"retrieval"} and _has_codebook(config)
    replaced = [] if keep else ["features", "matcher"]
    if "retrieval" in missing:
        replaced.append("retrieval")
    values = {f"{n}.name": CLASSICAL[f"{n}.name"] for n in replaced}
    wanted = " + ".join(groups[n].name for n in replaced)
    text = (
        f"running {' + '.join(values.values())} instead of {wanted}: {problem} "
        "(models.if_missing: error makes this an error)"
    )
    return Config.from_flat(values, base=config), text


def used_models(config: Config) -> dict[str, list[str]]:
    """Models that a front-end of a configuration opens, by the group that names them."""
    groups = _groups(config).items()
    return {name: _models_of(group) for name, group in groups if name != "retrieval" or config.loops.enabled}


def _groups(config: Config) -> dict:
    return {"features": config.features, "matcher": config.matcher, "retrieval": config.retrieval}


def _models_of(group) -> list[str]:
    """Models that a plug-in opens: its own, and that of the plug-in which finds its keypoints."""
    detector = group.options.get("detector")
    options = [group.options]
    if detector in registry.names("features"):
        options.append(vars(registry.get("features", detector).Options()))
    return [o["model"] for o in options if "model" in o]


def _has_codebook(config: Config) -> bool:
    """Whether VLAD can describe these features."""
    model = config.features.options.get("model")
    try:
        name = read_card(locate(model, config.runtime.precision)).name if model else config.features.name
    except ModelError:
        return False
    return (resources.files("vslam_features") / "codebooks" / f"vlad_{name}.npz").is_file()


def _missing(model: str, config: Config) -> bool:
    """Whether a model cannot be opened for want of its file or of the library that runs it."""
    if _library_missing(config) and Path(model).suffix != ".engine":  # engines run on TensorRT
        return True
    if config.runtime.name == "tensorrt" and Path(model).suffix not in (".engine", ".xml"):
        with contextlib.suppress(VslamFeaturesError):  # of a machine that runs no engine: told when it is opened
            return not has_source(model, config.runtime)
    try:
        locate(model, config.runtime.precision)
    except ModelMissingError:
        return True
    return False


def _library_missing(config: Config) -> bool:
    """Whether the default runtime is asked for and its library is not installed.

    A runtime or device that somebody chose is no default: where it is missing, that is an error when it is loaded.
    """
    default = (config.runtime.name, config.runtime.device) == ("onnxruntime", "cpu")
    return default and importlib.util.find_spec("onnxruntime") is None


def _problem(models: list[str], config: Config) -> str:
    """Why these models cannot be opened, and what brings them, in one sentence."""
    if _library_missing(config):
        return "onnxruntime is not installed: run \"pip install 'vslam_features[cpu]'\""
    if len(models) > 1 and not any(find_entry(m).export for m in models):
        precision = config.runtime.precision
        variant = "" if precision == "fp32" else f" --precision {precision}"
        return (
            f"models {', '.join(models)} ({precision}) are not on this machine (looked in {cache_folder('models')}): "
            f"run 'vslam-features models fetch {' '.join(models)}{variant}'"
        )
    problems = []
    for model in models:
        try:
            locate(model, config.runtime.precision)
        except ModelMissingError as error:
            problems.append(str(error))
    return "; ".join(problems)
