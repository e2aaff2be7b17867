"""Documented, checked fields: what configuration groups and plug-in options are made of."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import field, fields

from . import registry

Scalar = typing.Union[bool, int, float, str]


def option(default, doc: str, *, low: float = -math.inf, high: float = math.inf, choices: tuple[str, ...] = ()):
    """A documented dataclass field with a range (numbers) or choices (strings)."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "choices": choices})


def plugin_name(role: str, default: str, doc: str):
    """A field that names a plug-in of a role."""
    return field(default=default, metadata={"doc": doc, "role": role})


def plugin_options(role: str):
    """A field that holds the options of the plug-in that the group's ``name`` chooses."""
    return field(default_factory=dict, metadata={"doc": f"Options of the chosen {role} plug-in.", "options_of": role})


def check(group, prefix: str = "") -> list[str]:
    """Validate a dataclass of such fields and its groups in place (int to float, options filled in); all problems."""
    problems: list[str] = []
    hints = typing.get_type_hints(type(group))
    for f in fields(group):
        value, name, m = getattr(group, f.name), prefix + f.name, f.metadata
        if dataclasses.is_dataclass(value):
            problems += check(value, name + ".")
        elif "options_of" in m:
            _check_options(group, f, name, problems)
        else:
            checked = _check_value(name, value, hints[f.name], m, problems)
            object.__setattr__(group, f.name, checked)
    return problems


def _check_options(group, f, name: str, problems: list[str]) -> None:
    role = f.metadata["options_of"]
    if group.name not in registry.names(role):
        return  # reported with the name itself
    cls = registry.get(role, group.name).Options
    known = {o.name: o for o in fields(cls)}
    given = getattr(group, f.name)
    unknown = sorted(set(given) - set(known))
    if unknown:
        problems.append(f"{name}: {role} '{group.name}' has no option {unknown}; it has {sorted(known) or 'none'}")
        return
    hints, default = typing.get_type_hints(cls), cls()
    full = {
        n: _check_value(f"{name}.{n}", given.get(n, getattr(default, n)), hints[n], o.metadata, problems)
        for n, o in known.items()
    }
    object.__setattr__(group, f.name, full)


def _check_value(name: str, value, kind: type, meta, problems: list[str]):
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            value = float(value)  # also of a numpy scalar
        except OverflowError:
            value = math.inf if value > 0 else -math.inf
    choices = registry.names(meta["role"]) if "role" in meta else meta.get("choices", ())
    if isinstance(value, bool) and "yes" in choices:
        value = "yes" if value else "no"  # YAML 1.1 reads a bare yes as true
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        problems.append(f"{name}: expected {kind.__name__}, got {type(value).__name__} ({value!r})")
        return value
    if choices and value not in choices:
        problems.append(f"{name}: '{value}' is not one of {', '.join(choices)}")
    if kind in (int, float) and not meta.get("low", -math.inf) <= value <= meta.get("high", math.inf):
        problems.append(f"{name}: {value} is outside [{meta.get('low', -math.inf)}, {meta.get('high', math.inf)}]")
    return value
