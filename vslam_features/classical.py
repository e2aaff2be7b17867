"""What a front-end goes on with where the files of learned models are not on the machine."""

from __future__ import annotations

import importlib.util

from .artifacts.store import locate
from .config import Config
from .errors import ModelMissingError

# Classical plug-ins need no file.
CLASSICAL = {"features.name": "sift", "matcher.name": "nearest", "retrieval.name": "vlad"}


def available(config: Config) -> tuple[Config, str]:
    """The configuration that can run here, and a warning where it is not the one that was asked for.

    Raises ModelMissingError where files are missing and ``models.if_missing`` is ``error``.
    """
    groups = {"features": config.features, "matcher": config.matcher, "retrieval": config.retrieval}
    missing = {}
    for name, group in groups.items():
        if "model" in group.options and (name != "retrieval" or config.loops.enabled):
            if problem := _problem(group.options["model"], config):
                missing[name] = problem
    if not missing:
        return config, ""
    if config.models.if_missing == "error":
        raise ModelMissingError("; ".join(dict.fromkeys(missing.values())))
    replaced = ["retrieval"] if set(missing) == {"retrieval"} else ["features", "matcher"]
    if "retrieval" in missing:
        replaced = list(dict.fromkeys([*replaced, "retrieval"]))
    values = {f"{n}.name": CLASSICAL[f"{n}.name"] for n in replaced}
    wanted = " + ".join(groups[n].name for n in replaced)
    text = (
        f"running {' + '.join(values.values())} instead of {wanted}: {'; '.join(dict.fromkeys(missing.values()))} "
        "(models.if_missing: error makes this an error)"
    )
    return Config.from_flat(values, base=config), text


def _problem(model: str, config: Config) -> str:
    """Why a model cannot be opened for want of a file or a library; empty where it can."""
    library = {"onnxruntime": "onnxruntime", "openvino": "openvino"}.get(config.runtime.name)
    if library and importlib.util.find_spec(library) is None:
        extra = {"onnxruntime": "cpu", "openvino": "openvino"}[library]
        return f"{library} is not installed: run \"pip install 'vslam_features[{extra}]'\""
    try:
        locate(model, config.runtime.precision)
    except ModelMissingError as error:
        return str(error)
    return ""
