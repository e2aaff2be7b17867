"""The configuration as ROS parameters: declared with descriptions and ranges, checked as a whole.

Wrong values given at start do not end the constructor: they are kept as
problems and fail ``config()``, which the node calls at configure, where the
user sees all of them at once and can set them right.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.node import Node

from .. import config as configuration
from ..config import Config, Parameter
from ..errors import ConfigError, VslamFeaturesError
from ..parameter_file import declared_by_ros

_GROUPS = ("features", "matcher", "retrieval", "runtime")
"""Those that name a plug-in and have its options."""

WHILE_ACTIVE = {"map_path"}
"""Those that may change while the node processes frames: services use them."""


class Parameters:
    """Declares and reads the parameters of a node; mirrors ``config/default.yaml`` one to one.

    Args:
        node: made with ``automatically_declare_parameters_from_overrides=True``,
            so that a misspelt override is seen rather than ignored.
        active: whether the node processes frames now; then all changes but those of ``WHILE_ACTIVE`` are rejected.
    """

    def __init__(self, node: Node, active: Callable[[], bool]):
        self._node, self._active = node, active
        self._declaring = True
        self._problems: dict[str, str] = {}
        given = {name: p.value for name, p in node.get_parameters_by_prefix("").items()}
        given = {name: value for name, value in given.items() if not declared_by_ros(name)}
        self.autostart = self._declare_autostart(given.pop("autostart", True))
        self._chosen = set(given)
        self._known = self._leaves(self._plugins(given))
        for p in self._known.values():
            self._declare(p, self._checked(p, given[p.name]) if p.name in given else p.default)
        known = ["autostart", *self._known]
        for name in given:
            if name not in known:
                self._problems.setdefault(name, configuration.unknown_parameter(name, known))
        self._declaring = False
        node.add_on_set_parameters_callback(self._on_set)

    def config(self) -> Config:
        """The whole configuration. Raises ConfigError naming every problem and the valid choices."""
        self._follow_plugins()
        if self._problems:
            unknown = any(text.startswith("unknown") for text in self._problems.values())
            names = ["config/default.yaml lists all names"] if unknown else []
            raise ConfigError("; ".join([*self._problems.values(), *names]))
        return self._config({})

    def _config(self, changes: dict) -> Config:
        old, chosen = self._base, self._chosen_with(changes)
        values = {name: self._node.get_parameter(name).value for name in self._known} | changes
        # What nobody chose is left to the configuration, in which the matcher follows the features.
        return Config.from_flat({n: v for n, v in values.items() if n in chosen}, base=old)

    def _chosen_with(self, changes: dict) -> set[str]:
        """Names whose values somebody chose. Options of another plug-in start anew."""
        kept = self._chosen
        for group in _GROUPS:
            if changes.get(f"{group}.name", (was := self._node.get_parameter(f"{group}.name").value)) != was:
                kept = {n for n in kept if not n.startswith(f"{group}.options.")}
        return kept | set(changes)

    # -- declaring -------------------------------------------------------------------------

    def _plugins(self, given: dict) -> Config:
        """A configuration with the plug-ins that were asked for, as far as they exist."""
        config = Config()
        for name in (*(f"{group}.name" for group in _GROUPS), "retrieval.index"):
            if name in given:
                try:
                    config = Config.from_flat({name: given[name]}, base=config)
                except VslamFeaturesError as error:
                    self._problems[name] = str(error)
                    # whether its options are right cannot be told without it
                    options = name.replace(".name", ".options.")
                    self._problems |= {n: "" for n in given if n.startswith(options) and options != name}
        self._problems = {n: text for n, text in self._problems.items() if text}
        self._base = config
        return config

    def _leaves(self, config: Config) -> dict[str, Parameter]:
        return {p.name: p for p in configuration.parameters(config)}

    def _checked(self, p: Parameter, value):
        """The value in the parameter's type, or the default and a noted problem."""
        try:
            return Config.from_flat({p.name: value}, base=self._base).flat()[p.name]
        except VslamFeaturesError as error:
            self._problems[p.name] = str(error)
            return p.default

    def _declare(self, p: Parameter, value) -> None:
        if self._node.has_parameter(p.name):
            self._node.undeclare_parameter(p.name)
        self._node.declare_parameter(p.name, value, _descriptor(p), ignore_override=True)

    def _declare_autostart(self, value) -> bool:
        if not isinstance(value, bool):
            self._problems["autostart"] = f"autostart: expected true or false, got {value!r}"
            value = True
        if self._node.has_parameter("autostart"):
            self._node.undeclare_parameter("autostart")
        text = "Configure and activate at once; false leaves it to a lifecycle manager."
        self._node.declare_parameter(
            "autostart", value, ParameterDescriptor(description=text, read_only=True), ignore_override=True
        )
        return value

    def _follow_plugins(self) -> None:
        """Exchange the declared options where another plug-in was chosen since."""
        config = self._config({})
        leaves = self._leaves(config)
        others = [g for g in _GROUPS if getattr(config, g).name != getattr(self._base, g).name]
        self._declaring = True
        for name in set(self._known) - set(leaves):
            self._node.undeclare_parameter(name)
        for name, leaf in leaves.items():
            group, _, rest = name.partition(".")
            # Also those of the same name: the model of another plug-in is another one.
            if name not in self._known or (group in others and (rest == "name" or rest.startswith("options."))):
                self._declare(leaf, leaf.default)
        self._declaring = False
        self._base, self._known = config, leaves

    # -- changing --------------------------------------------------------------------------

    def _on_set(self, changed: list) -> SetParametersResult:
        changes = {p.name: p.value for p in changed if p.name in self._known}
        if self._declaring or not changes:
            return SetParametersResult(successful=True)
        if self._active() and (fixed := sorted(set(changes) - WHILE_ACTIVE)):
            reason = f"{', '.join(fixed)} cannot change while the node is active: deactivate it, set, activate again"
            return SetParametersResult(successful=False, reason=reason)
        try:
            self._config(changes)
        except VslamFeaturesError as error:
            return SetParametersResult(successful=False, reason=str(error))
        for name in changes:
            group = name.removesuffix("name") + "options."  # another plug-in: nobody asks for the old one's options
            self._problems = {n: t for n, t in self._problems.items() if n != name and not n.startswith(group)}
        self._chosen = self._chosen_with(changes)
        return SetParametersResult(successful=True)


def _descriptor(p: Parameter) -> ParameterDescriptor:
    finite = math.isfinite(p.low) and math.isfinite(p.high)
    is_float = isinstance(p.default, float)
    descriptor = ParameterDescriptor(
        description=p.doc,
        additional_constraints=f"One of: {', '.join(p.choices)}." if p.choices else "",
        # rclpy would refuse 1 for 1.0 and yes for "yes"; the configuration converts and checks the type itself.
        dynamic_typing=is_float or "yes" in p.choices,
    )
    if finite and is_float:
        descriptor.floating_point_range = [FloatingPointRange(from_value=p.low, to_value=p.high, step=0.0)]
    elif finite and type(p.default) is int:
        descriptor.integer_range = [IntegerRange(from_value=int(p.low), to_value=int(p.high), step=1)]
    return descriptor
