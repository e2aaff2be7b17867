"""Parameters in YAML: a plain file, or one for ROS with ``ros__parameters``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from .errors import ConfigError
from .options import Scalar


def declared_by_ros(name: str) -> bool:
    """Whether rclpy itself declares a parameter of this dotted name, in every node."""
    return name.partition(".")[0] in ("use_sim_time", "start_type_description_service", "qos_overrides")


def read_parameters(path) -> dict[str, Scalar]:
    """The dotted names and values that a YAML file sets, plain or with ``ros__parameters``.

    Of a ROS parameter file the sections that apply to the node ``frontend``
    are taken, the later ones on top of the earlier ones, as ROS does it. Where
    there is only the section of another node, that is meant. What belongs to
    the node rather than to the front end (``use_sim_time``, ...) is left out.

    Raises:
        ConfigError: naming the file.
    """
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"configuration {path}: cannot be read: {error}") from error
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise ConfigError(f"configuration {path}: expected a mapping at the top, got {type(data).__name__}")
    sections = list(_ros_sections(data))
    if not sections:
        return flatten(data)
    values = {}
    for name, section in _sections_of_the_front_end(path, sections):
        if not isinstance(section, dict):
            kind = type(section).__name__
            raise ConfigError(f"configuration {path}: expected a mapping below {name}: ros__parameters, got {kind}")
        values.update(flatten(section))
    return {n: v for n, v in values.items() if n != "autostart" and not declared_by_ros(n)}


_NODE = "frontend"


def _ros_sections(data: dict, name: str = "") -> Iterator[tuple[str, object]]:
    """(node name, parameters) of a ROS parameter file in file order; namespaces may be nested keys."""
    for key, value in data.items():
        if key == "ros__parameters":
            yield name or "/", {} if value is None else value
        elif isinstance(value, dict):
            yield from _ros_sections(value, f"{name}/{str(key).strip('/')}")


def _sections_of_the_front_end(path: Path, sections: list[tuple[str, object]]) -> list[tuple[str, object]]:
    names = [name for name, _ in sections]
    own = {n for n in names if n.endswith(f"/{_NODE}") and "*" not in n}  # also in a namespace
    ours = own | {"/**", "/*", f"/**/{_NODE}"}.intersection(names)
    if not ours and len(set(names)) == 1:
        return sections
    if len(own) > 1 or not ours:
        raise ConfigError(
            f"configuration {path}: expected parameters of one front end, below /** or /{_NODE}, got sections of "
            f"{', '.join(names)}; keep the one that is meant in a file of its own"
        )
    return [s for s in sections if s[0] in ours]


def flatten(data: dict, prefix: str = "") -> dict[str, Scalar]:
    """Nested dicts to dotted names."""
    out = {}
    for key, value in data.items():
        if isinstance(value, dict):
            out.update(flatten(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value
    return out
