"""The one typed configuration: these classes = ``config/default.yaml`` = the dotted ROS parameters.

``Config.load(path)`` reads a plain YAML file or a ROS parameter file
(``/**: ros__parameters:``); ``Config.from_flat({"matcher.name": ...})`` reads
dotted parameters. Both validate the whole before anything is applied: unknown
names, wrong types, values out of range and unknown plug-ins are one
:class:`~vslam_features.errors.ConfigError` that names the valid choices, for a
name the closest ones. An int where a float is meant is taken.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import yaml

from . import registry
from .config_groups import (
    FeaturesConfig,
    GeometryConfig,
    KeyframesConfig,
    LoopsConfig,
    MapConfig,
    MatcherConfig,
    ModelsConfig,
    RetrievalConfig,
    RuntimeConfig,
)
from .errors import ConfigError
from .options import Scalar, check, option
from .parameter_file import flatten, read_parameters


@dataclass(frozen=True)
class Config:
    """Everything one can set. Groups are dotted in ROS (``matcher.name``)."""

    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    matcher: MatcherConfig = field(default_factory=MatcherConfig)
    geometry: GeometryConfig = field(default_factory=GeometryConfig)
    keyframes: KeyframesConfig = field(default_factory=KeyframesConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    loops: LoopsConfig = field(default_factory=LoopsConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    map: MapConfig = field(default_factory=MapConfig)
    threads: int = option(0, "OpenCV threads; 0: all cores.", low=0, high=1024)
    # Inputs: how images, calibration and poses come in (node and bag replay).
    image_transport: str = option("raw", "Subscribe to image or image/compressed.", choices=("raw", "compressed"))
    image_qos: str = option("sensor_data", "QoS of image and camera_info.", choices=("sensor_data", "reliable"))
    image_max_value: int = option(
        0,
        "Sample that becomes white in 16-bit images, e.g. 1023 or 4095 of 10 and 12-bit cameras; 0: 65535.",
        low=0,
        high=65535,
    )
    rectified: str = option(
        "auto",
        "Images are rectified (use P) or raw (use K, D); auto: by '_rect' in the topic.",
        choices=("auto", "yes", "no"),
    )
    pose_type: str = option("none", "Message type of the pose topic.", choices=("none", "pose", "odometry"))
    pose_of: str = option(
        "camera",
        "The pose is that of the camera (optical frame), or of a body at an unknown offset: then loops are checked "
        "against odometry by distance and angle only.",
        choices=("camera", "body"),
    )
    sync: str = option(
        "exact",
        "Pair image and pose inputs by exact (interpolated) or approximate stamps.",
        choices=("exact", "approximate"),
    )
    sync_slop_s: float = option(0.02, "Largest stamp difference for sync: approximate.", low=1e-6, high=10.0)
    map_path: str = option(
        "",
        "Map file: continued, or made where there is none; may be set while the node is active, for the services. "
        "Empty: a new file for each run, in the state folder.",
    )
    mode: str = option(
        "mapping",
        "Keyframes are added to the map, or its places are only recognised and the file never changes.",
        choices=("mapping", "localization"),
    )

    def __post_init__(self):
        problems = check(self)
        if not problems and self.loops.consensus > self.loops.consensus_window:
            problems.append(
                f"loops.consensus: {self.loops.consensus} keyframes can never agree within loops.consensus_window "
                f"{self.loops.consensus_window}; raise the window"
            )
        if problems:
            raise ConfigError("configuration: " + "; ".join(problems))

    # -- reading ---------------------------------------------------------------------------

    @classmethod
    def load(cls, path) -> Config:
        """Read a YAML file, plain or with ``ros__parameters``. Raises ConfigError naming the file."""
        values = read_parameters(path)
        try:
            return cls.from_flat(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_flat(cls, values: dict[str, Scalar], base: Config | None = None) -> Config:
        """Dotted names to a Config, on top of ``base`` (default: the defaults). ConfigError lists all problems."""
        base = base or cls()
        known, unknown = base.flat(), []
        groups: dict[str, dict] = {}
        names = {f.name for f in fields(cls)}
        for name, value in values.items():
            group, _, rest = name.partition(".")
            if value is None and group in names and rest in ("", "options") and name not in known:
                continue  # a group with nothing below it in YAML
            # Options of a plug-in that is not chosen yet are checked with the choice.
            option_of_plugin = rest.startswith("options.") and hasattr(getattr(base, group, None), "options")
            if name not in known and not (group in names and option_of_plugin):
                unknown.append(unknown_parameter(name, known))
            elif not rest:
                groups[name] = value
            elif rest.startswith("options."):
                groups.setdefault(group, {}).setdefault("options", {})[rest[len("options.") :]] = value
            else:
                groups.setdefault(group, {})[rest] = value
        _follow_features(base, groups)
        changes = {}
        for name, value in groups.items():
            old = getattr(base, name)
            if not dataclasses.is_dataclass(old):
                changes[name] = value
                continue
            if hasattr(old, "options"):
                same_plugin = value.get("name", old.name) == old.name
                value = {**value, "options": {**(old.options if same_plugin else {}), **value.get("options", {})}}
            changes[name] = dataclasses.replace(old, **value)
        if unknown:
            unknown.append("config/default.yaml lists all names")
        try:
            config = dataclasses.replace(base, **changes)
        except ConfigError as error:
            raise ConfigError("; ".join([str(error), *unknown])) from error
        if unknown:
            raise ConfigError("configuration: " + "; ".join(unknown))
        return config

    def with_values(self, **dotted: Scalar) -> Config:
        """A changed copy; double underscores stand for dots: ``with_values(keyframes__every=1)``."""
        return Config.from_flat({k.replace("__", "."): v for k, v in dotted.items()}, base=self)

    def is_rectified(self, image_topic: str) -> bool:
        """Whether the images of a topic are rectified, as ``rectified`` says."""
        return self.rectified == "yes" or (self.rectified == "auto" and "_rect" in image_topic)

    # -- writing ---------------------------------------------------------------------------

    def to_dict(self) -> dict:
        """Nested plain dict, plug-in options filled in."""
        return dataclasses.asdict(self)

    def flat(self) -> dict[str, Scalar]:
        """Dotted names to values, as the ROS parameters are."""
        return flatten(self.to_dict())

    def to_yaml(self) -> str:
        """YAML text that ``load`` reads back to an equal Config."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def _follow_features(base: Config, groups: dict[str, dict]) -> None:
    """A matcher that nobody chose is the one that suits the features: learned matchers take those they learned.

    Options of the matcher that are given are meant for that one.
    """
    features, old = groups.get("features", {}).get("name"), base.features.name
    if "name" in groups.get("matcher", {}) or features == old or not {features, old} <= set(_names()):
        return
    if base.matcher.name == _matcher_of(old):
        groups.setdefault("matcher", {})["name"] = _matcher_of(features)


def _names() -> list[str]:
    return registry.names("features")


def _matcher_of(features: str) -> str:
    return getattr(registry.get("features", features), "default_matcher", "nearest")


@dataclass(frozen=True)
class Parameter:
    """A documented leaf of the configuration, for ROS descriptors and documents."""

    name: str
    default: Scalar
    doc: str
    low: float
    high: float
    choices: tuple[str, ...]


def parameters(config: Config | None = None) -> list[Parameter]:
    """All leaves of ``config`` (with the options of its plug-ins), in file order."""
    config = config or Config()
    out: list[Parameter] = []

    def leaf(name, f, value):
        m = f.metadata
        choices = tuple(registry.names(m["role"])) if "role" in m else m.get("choices", ())
        out.append(Parameter(name, value, m.get("doc", ""), m.get("low", -math.inf), m.get("high", math.inf), choices))

    for f in fields(config):
        group = getattr(config, f.name)
        if not dataclasses.is_dataclass(group):
            leaf(f.name, f, group)
            continue
        for g in fields(group):
            value = getattr(group, g.name)
            if "options_of" in g.metadata:
                for o in fields(registry.get(g.metadata["options_of"], group.name).Options):
                    leaf(f"{f.name}.options.{o.name}", o, value[o.name])
            else:
                leaf(f"{f.name}.{g.name}", g, value)
    return out


def unknown_parameter(name: str, known: Iterable[str]) -> str:
    """What to say of a name that is none, with those that may have been meant."""
    leaf = name.rpartition(".")[2]  # the group forgotten is the most common slip
    close = [k for k in known if k.rpartition(".")[2] == leaf] or difflib.get_close_matches(name, known)
    hint = f" (did you mean {' or '.join(close[:3])}?)" if close else ""
    return f"unknown parameter '{name}'{hint}"
