"""Plug-ins by role and name, built in or from entry points.

Roles: ``features``, ``matcher``, ``global`` (global descriptors), ``index``,
``runtime``.
A package adds its own with an entry point in the group
``vslam_features.<role>`` whose value is the class. Each class has a nested
dataclass ``Options`` (its parameters, see ``options.option``).
"""

from __future__ import annotations

import dataclasses
import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from .errors import PluginError

_BUILTIN = {
    "features": {
        "sift": "vslam_features.features.sift:Sift",
        "orb": "vslam_features.features.orb:Orb",
        "xfeat": "vslam_features.features.learned:XFeat",
        "aliked": "vslam_features.features.learned:Aliked",
        "flexglue": "vslam_features.features.dense:FlexGlue",
    },
    "matcher": {
        "nearest": "vslam_features.matching.nearest:Nearest",
        "lighterglue": "vslam_features.matching.learned:LighterGlue",
        "lightglue": "vslam_features.matching.learned:LightGlue",
        "flexglue": "vslam_features.matching.flexglue:FlexGlue",
    },
    "global": {
        "vlad": "vslam_features.retrieval.vlad:Vlad",
        "effnet_cov": "vslam_features.retrieval.learned:EffNetCov",
        "megaloc": "vslam_features.retrieval.learned:MegaLoc",
    },
    "index": {
        "flat": "vslam_features.retrieval.flat:Flat",
        "faiss": "vslam_features.retrieval.faiss_index:Faiss",
    },
    "runtime": {
        "onnxruntime": "vslam_features.runtimes.ort:OnnxRuntime",
        "openvino": "vslam_features.runtimes.ov:OpenVino",
        "tensorrt": "vslam_features.runtimes.trt:TensorRt",
        "fake": "vslam_features.runtimes.fake:Fake",
    },
}


@cache
def _external(role: str) -> dict[str, EntryPoint]:
    return {e.name: e for e in entry_points(group=f"vslam_features.{role}")}


def names(role: str) -> list[str]:
    """Names that exist for a role. Raises PluginError for an unknown role."""
    if role not in _BUILTIN:
        raise PluginError(f"unknown plug-in role '{role}'; known: {', '.join(_BUILTIN)}")
    return sorted({**_BUILTIN[role], **_external(role)})


def get(role: str, name: str) -> type:
    """The class of a plug-in, imported on first use. Raises PluginError with the choices or the cause."""
    if name not in names(role):
        raise PluginError(f"unknown {role} plug-in '{name}'; choose one of: {', '.join(names(role))}")
    try:
        if name in _BUILTIN[role]:
            module, _, attribute = _BUILTIN[role][name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        cls = _external(role)[name].load()
        cls.Options()
    except Exception as error:  # an import runs foreign code, which may fail in any way
        raise PluginError(
            f"{role} plug-in '{name}' cannot be loaded: {type(error).__name__}: {error}; install what it needs"
        ) from error
    if not dataclasses.is_dataclass(cls.Options):
        raise PluginError(f"{role} plug-in '{name}': {cls.__name__}.Options must be a dataclass with defaults")
    return cls
