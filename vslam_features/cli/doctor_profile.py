"""What ``doctor`` says of the Fast DDS profile: whether images get the shared memory that they need."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError
from ..share import share_path
from .check import FAIL, OK, WARN, Check

# What Fast DDS gives a participant by itself, less than one 1280x720 colour image (measured: docs/deployment.md).
DEFAULT_SEGMENT = 512 << 10
SHIPPED_SEGMENT = 64 << 20
_ENOUGH = 16 << 20
_NEW, _OLD = "FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE"


def profile_variable() -> str:
    """The variable that is read: Humble and Jazzy bring Fast DDS 2, which knows the old name only."""
    return _OLD if os.environ.get("ROS_DISTRO") in ("humble", "jazzy") else _NEW


def segment_bytes() -> int:
    """Bytes of shared memory that each participant takes: as our launch files set it, where no profile works."""
    path = _profile()
    try:
        return _segment(path or share_path("config/fastdds.xml"))
    except (OSError, ValueError, ConfigError):
        return SHIPPED_SEGMENT


def check_profile(rmw: str) -> Iterator[Check]:
    """The profile; nothing where another middleware is in use. ``rmw``: its name, empty where it is the default."""
    if rmw and "fastrtps" not in rmw:
        yield Check(OK, "fast dds", f"not in use ({rmw})")
        return
    variable, path = profile_variable(), _profile()
    shipped = _shipped()
    if path is None:
        text = (
            f"no profile: with {DEFAULT_SEGMENT >> 10} KB of shared memory images over 0.5 MB are slow and may be lost"
        )
        fix = f"export {variable}={shipped} (our launch files and demo do it for what they start; cameras need it, too)"
        yield Check(WARN, "fast dds", text, fix)
        return
    try:
        segment = _segment(path)
    except OSError as error:
        text = f"the profile {path} cannot be read: {error.strerror or error}"
        yield Check(FAIL, "fast dds", text, f"correct {variable}, or set it to {shipped}")
    except ValueError as error:
        yield Check(FAIL, "fast dds", f"the profile {path} {error}", f"correct it, or set {variable} to {shipped}")
    else:
        text = f"{segment / 2**20:.1f} MB of shared memory a participant, by {path}"
        fix = "" if segment >= _ENOUGH else f"raise segment_size to 67108864, or set {variable} to {shipped}"
        yield Check(WARN if fix else OK, "fast dds", text, fix)


def _shipped() -> str:
    try:
        return str(share_path("config/fastdds.xml"))
    except ConfigError:  # an installation without its files, which other lines tell
        return "<share>/vslam_features/config/fastdds.xml"


def _profile() -> Path | None:
    text = os.environ.get(profile_variable()) or os.environ.get(_OLD)  # Fast DDS 3 takes the old name, and warns
    return Path(text) if text else None


def _segment(path: Path) -> int:
    """Bytes of the shared-memory transport that the default participant of a profile uses.

    Raises OSError; ValueError, which says what the file is instead of a profile that sets one.
    """
    try:
        root = ElementTree.fromstring(path.read_bytes())
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # the latter two: of an encoding
        raise ValueError(f"is not XML: {error}; Fast DDS ignores it, but for a line in its log") from error
    for element in root.iter():  # each version of the schema has a namespace of its own
        element.tag = element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
    transports = {}
    for found in root.iter("transport_descriptor"):
        transports[_text(found, "transport_id")] = (_text(found, "type"), _text(found, "segment_size"))
    defaults = [p for p in root.iter("participant") if p.get("is_default_profile", "").lower() in ("true", "1")]
    if not defaults:
        raise ValueError('has no <participant is_default_profile="true">, so that nothing uses it')
    used = {(e.text or "").strip() for e in defaults[0].iter("transport_id")}
    sizes = [size for name, (kind, size) in transports.items() if kind == "SHM" and name in used]
    if not sizes:
        if _builtin_shared_memory(defaults[0]):
            return DEFAULT_SEGMENT
        raise ValueError("gives the default participant no shared memory: images go by UDP, late and with losses")
    if not sizes[0]:
        return DEFAULT_SEGMENT
    if not sizes[0].isdecimal():
        raise ValueError(f"has a segment_size of {sizes[0]!r}, expected bytes, such as 67108864")
    return int(sizes[0])


def _text(element, name: str) -> str:
    return (element.findtext(name) or "").strip()


def _builtin_shared_memory(participant) -> bool:
    """Whether the transports that Fast DDS brings itself stay in use, among them shared memory."""
    found = next(participant.iter("useBuiltinTransports"), None)
    return found is None or (found.text or "").strip().lower() != "false"
