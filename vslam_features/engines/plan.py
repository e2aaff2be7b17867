"""How an engine is built: the types, flags, shapes and layer precisions that TensorRT is asked for, and why.

All of it is decided before TensorRT is called, from what its version can do, so that it can be printed and compared
without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..artifacts.engine_key import EngineWish
from ..artifacts.engine_source import EngineSource
from ..artifacts.shapes import Profile
from ..runtimes.trt_library import Capabilities

# TF32 has the mantissa of half precision, also in the parts of an fp16 model that are kept in float32 for their digits.
_CLEARED = ("TF32",)


@dataclass(frozen=True)
class BuildPlan:
    """What is asked of the builder, by the names of its API.

    Args:
        version: of TensorRT. typing: ``strong`` or ``weak``. precision: of the engine.
        network_flags: of ``NetworkDefinitionCreationFlag``. flags, cleared: of ``BuilderFlag``, set and cleared.
        layer_type: ``bf16`` or ``fp32``, in which the layers of ``layers`` compute and what they give out; weak only.
        layers: names of ONNX nodes.
        profiles: name of the file's tensor -> shapes, or values of a shape tensor.
        workspace_mb: most memory of the device for a layer's work, MiB; 0: all of it.
        optimisation_level: 0 to 5 of the builder.
        reasons: for the choices, in words.
    """

    version: str
    typing: str
    precision: str
    network_flags: tuple[str, ...]
    flags: tuple[str, ...]
    cleared: tuple[str, ...]
    layer_type: str
    layers: tuple[str, ...]
    profiles: Mapping[str, Profile]
    workspace_mb: int
    optimisation_level: int
    reasons: tuple[str, ...]

    def lines(self) -> list[str]:
        """The plan for people."""
        asked = [*self.network_flags, *self.flags, *(f"no {flag}" for flag in self.cleared)]
        text = [f"TensorRT {self.version}, {self.precision}, {self.typing}ly typed: {', '.join(asked)}"]
        text += [f"  {reason}" for reason in self.reasons]
        if self.layers:
            text.append(f"  {len(self.layers)} layers of attention in {self.layer_type}: {_few(self.layers)}")
        for name, p in self.profiles.items():
            what = "values" if p.values else "shapes"
            text.append(f"  {what} of {name}: {p}")
        workspace = f"{self.workspace_mb} MiB" if self.workspace_mb else "as much as there is"
        text.append(f"  workspace {workspace}, optimisation level {self.optimisation_level}")
        return text


def make_plan(
    source: EngineSource,
    wish: EngineWish,
    profiles: Mapping[str, Profile],
    layers: tuple[str, ...],
    core_type: str,
    able: Capabilities,
) -> BuildPlan:
    """The plan for a source. ``layers``: nodes of its cores of attention, for a weakly typed engine, and their type."""
    weak = source.typing == "weak"
    flags = []
    if weak:
        flags += ["FP16"] * (source.precision != "fp32")
        # Only where a layer is set to it: the flag lets TensorRT take it elsewhere, too.
        flags += ["BF16"] * (bool(layers) and core_type == "bf16")
        flags += ["OBEY_PRECISION_CONSTRAINTS"] * bool(layers)
    # 11 types all networks strongly; its flag of that name says nothing any more.
    network = () if weak or not able.weakly_typed else ("STRONGLY_TYPED",)
    reasons = (*source.reasons, *([] if weak or network else [f"TensorRT {able.version} knows no other typing"]))
    options = wish.options
    return BuildPlan(
        able.version, source.typing, source.precision, network, tuple(flags), _CLEARED,
        core_type if weak and layers else "", layers if weak else (), dict(profiles),
        int(options["workspace_mb"]), int(options["optimisation_level"]), reasons,
    )  # fmt: skip


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
