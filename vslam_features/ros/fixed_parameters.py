"""Parameters that a node reads once, at its start: typed, described, and none misspelt."""

from __future__ import annotations

from collections.abc import Mapping

from rcl_interfaces.msg import ParameterDescriptor
from rclpy.node import Node

from ..config import unknown_parameter
from ..errors import ConfigError
from ..parameter_file import declared_by_ros

_EXPECTED = {
    bool: "true or false",
    int: "an int",
    float: "a number",
    str: "a text (in quotes where it looks like a number or like true)",
    list: "a list of texts",
}


def read_fixed_parameters(node: Node, parameters: Mapping[str, tuple]) -> dict:
    """Declare ``{name: (default, description)}`` read-only; the values. An int where a float is meant is taken.

    Args:
        node: made without declaring its overrides.
        parameters: a list as default means a list of texts; an empty one may be given.
    Raises:
        ConfigError: an unknown name or a wrong type.
    """
    # Not by declaring whatever was given: rclpy has no type for an empty list and raises on it.
    given = {name: p.value for name, p in node._parameter_overrides.items() if not declared_by_ros(name)}
    for name in given:
        if name not in parameters:
            raise ConfigError(f"{unknown_parameter(name, parameters)}; known: {', '.join(parameters)}")
    values = {name: _typed(name, given.get(name, default), default) for name, (default, _) in parameters.items()}
    for name, (_, doc) in parameters.items():
        shown = values[name] or [""] if isinstance(values[name], list) else values[name]
        node.declare_parameter(name, shown, ParameterDescriptor(description=doc, read_only=True), ignore_override=True)
    return values


def _typed(name: str, value, default):
    kind = type(default)
    if kind is float and type(value) is int:
        return float(value)
    if kind is list:
        value = [] if value is None else value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
    elif type(value) is kind:
        return value
    raise ConfigError(f"{name}: expected {_EXPECTED[kind]}, got {'nothing' if value is None else repr(value)}")
