"""What imports what: the core needs no ROS, no torch and no onnx, and arrows go down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vslam_features"
BLOCKED = (
    *"rclpy torch onnx onnx_ir spox onnxruntime openvino tensorrt sensor_msgs rosbags matplotlib".split(),
    *"safetensors faiss cuda".split(),
)

# Rows of the picture in docs/architecture.md, from the bottom. A module may import from lower rows and, where no circle
# comes of it, from its own.
LEVELS = [
    [
        *"errors registry image_headers distortion camera images options parameter_file pickle_machine".split(),
        *"config config_groups types share half".split(),
    ],
    "geometry two_view plane_pose solvers pose_track".split(),
    ["runtimes"],
    ["artifacts"],
    "engine health models reference gate_pairs classical".split(),
    "features matching retrieval maps keyframes loops odometry_gate empty_guard stages".split(),
    "frontend session_files running_map".split(),
    ["map_keeper"],
    ["exchange"],
    ["graph"],
    ["networks"],
    ["export"],
    ["engines"],
    ["replay"],
    ["cli", "ros"],
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
CORE_LEVEL = LEVEL["map_keeper"]


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if part(p) not in ("__init__", "__main__")]


CORE = [p for p in modules() if LEVEL.get(part(p), 99) <= CORE_LEVEL]


def imported(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, also inside functions."""
    package = ["vslam_features", *path.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{a.name}" for a in node.names}
    return names


def test_every_module_has_a_level():
    assert {part(p) for p in modules()} - set(LEVEL) == set(), "add the new part to LEVELS and docs/architecture.md"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_go_down_only(path):
    own = part(path)
    for name in imported(path):
        names = name.split(".")
        if names[0] != "vslam_features" or len(names) < 2 or names[1] not in LEVEL:
            continue
        assert LEVEL[names[1]] <= LEVEL[own], f"{own} imports {name}, which is above it"


def test_parts_do_not_import_each_other_in_circles():
    graph = {}
    for path in modules():
        below = {n.split(".")[1] for n in imported(path) if n.startswith("vslam_features.")}
        graph.setdefault(part(path), set()).update(below & set(LEVEL) - {part(path)})

    def walk(name, seen):
        assert name not in seen, " -> ".join([*seen, name])
        for other in graph.get(name, ()):
            walk(other, [*seen, name])

    for name in graph:
        walk(name, [])


@pytest.mark.parametrize("path", CORE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_core_names_no_heavy_library(path):
    # Each in the one file that wraps it, and imported where it is used.
    own = {"runtimes": {"onnxruntime", "openvino", "tensorrt", "cuda"}, "retrieval": {"faiss"}}
    assert not {n.split(".")[0] for n in imported(path)} & set(BLOCKED) - own.get(part(path), set())


@pytest.mark.parametrize(
    "tool, users",
    [
        ("networks", ["export", "cli"]),
        ("graph", ["networks", "export", "engines", "cli"]),
        ("export", ["cli"]),
        ("engines", ["cli"]),
    ],
)
def test_what_makes_models_stands_apart(tool, users):
    """Nothing that runs them imports it, and of commands only those that build or export models."""
    found = {p for p in modules() if any(n.startswith(f"vslam_features.{tool}") for n in imported(p))}
    assert {part(p) for p in found} <= {tool, *users}
    commands = {p.stem for p in found if part(p) == "cli"}
    assert all(name.startswith("model") for name in commands), commands
    assert tool != "networks" or commands  # the names are those of this package


def test_the_core_imports_and_runs_with_them_blocked():
    names = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for p in CORE]
    program = f"""
import importlib, sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
for name in {names!r}:
    importlib.import_module(name)
import numpy as np
from vslam_features import registry
from vslam_features.config import Config
from vslam_features.frontend import FrontEnd
from vslam_features.types import Frame
for role in ("features", "matcher", "global", "index"):
    for name in registry._BUILTIN[role]:
        registry.get(role, name)
image = np.random.default_rng(0).integers(0, 256, (120, 160), np.uint8)
for i in range(2):
    tracked, loops = FrontEnd(Config()).process(Frame(i, "cam", image))
assert tracked.keyframe is not None and loops is not None and not tracked.faults
print("done")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0 and result.stdout == "done\n", result.stderr
