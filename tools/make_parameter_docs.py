"""Write what follows from the configuration classes: config/default.yaml and the table in docs/topics.md.

Run it after a change in ``vslam_features/config.py``; ``--check`` only tells (exit code 1) whether it is needed.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import yaml

from vslam_features.config import Config, Parameter, parameters
from vslam_features.replay.image_source import FOLDER_DEFAULTS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ", ".join(f"{name} {value:g}" for name, value in FOLDER_DEFAULTS.items())
YAML_HEAD = f"""\
# All parameters with their defaults: ros2 run vslam_features frontend_node --ros-args --params-file <this file>,
# or vslam-features replay ... --config <this file>. Copy what you change; the rest keeps these defaults.
# Folders of images have defaults of their own ({FOLDERS}):
# they replace a value here that equals its default; --set decides in any case.
# Made by tools/make_parameter_docs.py from vslam_features/config.py.
/**:
  ros__parameters:
    # Node only: false leaves configure and activate to a lifecycle manager.
    # autostart: true
"""
BEGIN, END = "<!-- parameters: begin -->", "<!-- parameters: end -->"


def default_yaml(config: Config) -> str:
    """The parameter file: each parameter with its description and limits."""
    out, group = [YAML_HEAD], ()
    for p in parameters(config):
        *path, leaf = p.name.split(".")
        for depth, name in enumerate(path):
            if tuple(path[: depth + 1]) != group[: depth + 1]:
                doc = _group_doc(config, path[: depth + 1])
                out.append(f"\n{_indent(depth)}# {doc}\n" if depth == 0 else f"{_indent(depth)}# {doc}\n")
                out.append(f"{_indent(depth)}{name}:\n")
        if not path and group:
            out.append("\n")
        group = tuple(path)
        indent = _indent(len(path))
        out.append(f"{indent}# {p.doc}{_limits(p)}\n{indent}{leaf}: {_scalar(p.default)}\n")
    return "".join(out)


def table(config: Config) -> str:
    """The parameter table in Markdown."""
    rows = ["| parameter | type | default | range or choices | meaning |", "|---|---|---|---|---|"]
    for p in parameters(config):
        limits = _limits(p).strip(" []") or "-"
        rows.append(f"| `{p.name}` | {type(p.default).__name__} | `{_scalar(p.default)}` | {limits} | {p.doc} |")
    return "\n".join(rows)


def _group_doc(config: Config, path: list[str]) -> str:
    if len(path) == 1:
        return type(getattr(config, path[0])).__doc__
    group = getattr(config, path[0])
    return f"Options of {group.name}."


def _indent(depth: int) -> str:
    return "  " * (depth + 2)


def _limits(p: Parameter) -> str:
    if p.choices:
        return f" [{', '.join(p.choices)}]"
    if math.isfinite(p.low) and math.isfinite(p.high):
        return f" [{p.low:g} to {p.high:g}]"
    return ""


def _scalar(value) -> str:
    return yaml.safe_dump(value).removesuffix("\n").removesuffix("\n...") if value != "" else '""'


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    config = Config()
    topics = ROOT / "docs" / "topics.md"
    text = topics.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    wanted = {
        ROOT / "config" / "default.yaml": default_yaml(config),
        topics: f"{before}{BEGIN}\n{table(config)}\n{END}{rest.partition(END)[2]}",
    }
    stale = [p for p, new in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != new]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run python tools/make_parameter_docs.py", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
