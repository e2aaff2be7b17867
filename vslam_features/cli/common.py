"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ..config import Config, Parameter, parameters
from ..errors import CameraError, ConfigError
from ..parameter_file import read_parameters

if TYPE_CHECKING:
    from ..camera import Camera


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """``--config``, which ROS calls a ``--params-file``, and ``--set``."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config", "--params-file", type=Path, metavar="FILE", help="YAML file, plain or with ros__parameters"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one dotted value on top, e.g. --set matcher.options.ratio=0.9 (repeatable)",
    )


def layer_numbers(text: str) -> list[int]:
    """The type of an argument that lists layers, ``2,4,6,8``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected layers as 2,4,6,8, got '{text}'") from None


def load_config(args) -> tuple[Config, frozenset[str]]:
    """The configuration and the dotted names that were given on purpose. Raises ConfigError."""
    config, given = Config(), {}
    if args.config:
        config = Config.load(args.config)
        given = dict.fromkeys(_names_in(args.config))
    values = {}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {text}: expected NAME=VALUE, e.g. --set keyframes.every=1")
        values[name.strip()] = value.strip()
    known = {p.name: p for p in parameters(_with_plugins(config, values))}
    values = {name: _value(name, text, known.get(name)) for name, text in values.items()}
    return Config.from_flat(values, base=config), frozenset(given) | frozenset(values)


def _with_plugins(config: Config, texts: dict[str, str]) -> Config:
    """The configuration with the plug-ins that are named, whose options decide what type a value has."""
    for name in [n for n in texts if n.endswith(".name")]:
        try:
            config = Config.from_flat({name: texts[name]}, base=config)
        except ConfigError:
            continue  # told with all the other problems
    return config


def _value(name: str, text: str, parameter: Parameter | None):
    """What was typed, read as YAML; as it stands where a text is wanted and YAML sees a number, a date or nothing."""
    wants_text = parameter is not None and isinstance(parameter.default, str)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        if not wants_text:
            raise ConfigError(f"--set {name}={text}: the value is no YAML: {error}") from error
        return text
    if isinstance(value, bool) and wants_text and "yes" in parameter.choices:
        return value  # true is as good as yes
    return text if wants_text and not isinstance(value, str) else value


def add_camera_argument(parser: argparse.ArgumentParser) -> None:
    """``--camera``."""
    parser.add_argument(
        "--camera",
        metavar="K.yaml|FX,FY,CX,CY",
        help="calibration: four numbers in pixels of the images, or a ROS camera_info YAML file",
    )


def read_camera(text: str | None, option: str = "--camera") -> Camera | tuple[float, float, float, float] | None:
    """A Camera from a calibration file, or (fx, fy, cx, cy) in pixels. Raises CameraError that names the ``option``."""
    from ..camera import Camera  # needs OpenCV, without which doctor runs and says so

    if not text:
        return None
    if "," in text and not Path(text).exists():
        try:
            fx, fy, cx, cy = (float(part) for part in text.split(","))
        except ValueError:
            raise CameraError(f"{option} {text}: expected four numbers FX,FY,CX,CY, or a YAML file") from None
        # Here rather than at each image: the run would go through the whole input and skip all of it.
        if not all(map(math.isfinite, (fx, fy, cx, cy))) or min(fx, fy) <= 0:
            raise CameraError(f"{option} {text}: expected finite numbers FX,FY,CX,CY in pixels, FX and FY above 0")
        return fx, fy, cx, cy
    try:
        data = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CameraError(f"{option} {text}: cannot be read: {error}") from error
    try:
        D = data.get("distortion_coefficients", {"data": []})["data"]
        return Camera(
            int(data["image_width"]),
            int(data["image_height"]),
            _matrix(data["camera_matrix"]["data"]),
            D,
            data.get("distortion_model", "plumb_bob"),
        )
    except CameraError as error:
        raise CameraError(f"{option} {text}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CameraError(
            f"{option} {text}: expected image_width, image_height, camera_matrix.data (9 numbers) and, where "
            f"distorted, distortion_model and distortion_coefficients.data; {type(error).__name__}: {error}"
        ) from error


def open_input(args, config: Config, explicit: frozenset[str]):
    """The recording or folder of images of a command, by its options; ``explicit``: as of ``load_config``.

    Raises as ``replay.open_source.open_source``.
    """
    from ..replay.open_source import open_source

    return open_source(
        args.input,
        config,
        image_topic=args.image_topic,
        camera_info_topic=args.camera_info_topic,
        pose_topic=args.pose_topic,
        use_pose=args.use_pose,
        camera=read_camera(args.camera),
        fps=args.fps,
        explicit=explicit,
    )


def _matrix(values) -> list[list[float]]:
    a, b, c, d, e, f, g, h, i = (float(v) for v in values)
    return [[a, b, c], [d, e, f], [g, h, i]]


def _names_in(path: Path) -> list[str]:
    """Names that the file sets to another value than the default: a copy of default.yaml chooses nothing."""
    default = Config().flat()
    return [name for name, value in read_parameters(path).items() if name not in default or value != default[name]]


def output_folder(out: Path, names: Sequence[str]) -> Path:
    """Make the folder of ``--out`` and remove files of these names that an earlier run left, before the work begins.

    Raises ConfigError.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "may not be written to")
        for name in names:  # a new one beside an old other would be taken for one run
            (out / name).unlink(missing_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"--out {out}: is a file or lies in one; expected a folder, give another name") from None
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}; choose another folder") from error
    return out


def count(text: str) -> int:
    """Argument type: a whole number, 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 0, got {text}")
    return value


def not_negative(text: str) -> float:
    """Argument type: a finite number, 0 or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {text}")
    return value


def positive(text: str) -> float:
    """Argument type: a finite number above 0."""
    if not_negative(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text}")
    return float(text)
