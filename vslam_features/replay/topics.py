"""Which topics of a recording to read: found by type and name, or a clear question to the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import BagError

IMAGE = "sensor_msgs/msg/Image"
COMPRESSED = "sensor_msgs/msg/CompressedImage"
CAMERA_INFO = "sensor_msgs/msg/CameraInfo"
POSE = "geometry_msgs/msg/PoseStamped"
ODOMETRY = "nav_msgs/msg/Odometry"

Topics = dict[str, tuple[str, int]]  # name -> (type, message count)


@dataclass(frozen=True)
class Chosen:
    """Names of the topics to read, None for those that are not there.

    ``info_each_image``: camera_info comes along with the images rather than once.
    ``remarks``: what the user should know about the choice.
    """

    image: str
    camera_info: str | None
    pose: str | None
    info_each_image: bool = False
    remarks: list[str] = field(default_factory=list)


def choose_topics(
    path: Path,
    topics: Topics,
    image: str | None = None,
    camera_info: str | None = None,
    pose: str | None = None,
    use_pose: bool = True,
) -> Chosen:
    """Choose from ``topics`` what was not given. Raises BagError that lists the candidates and the option."""
    remarks: list[str] = []
    image = _given(path, topics, image, (IMAGE, COMPRESSED), "--image-topic") or _find_image(path, topics)
    camera_info = _given(path, topics, camera_info, (CAMERA_INFO,), "--camera-info-topic")
    if camera_info is None:
        camera_info = _sibling_info(topics, image)
        if camera_info is None:
            remarks.append(f"no camera_info beside {image}: uncalibrated")
    if not use_pose:
        pose = None
    else:
        pose = _given(path, topics, pose, (POSE, ODOMETRY), "--pose-topic")
        if pose is None:
            found = [n for n, (kind, count) in topics.items() if kind in (POSE, ODOMETRY) and count]
            if len(found) == 1:
                pose = found[0]
            elif found:
                remarks.append(f"several pose topics, none used ({', '.join(sorted(found))}): choose with --pose-topic")
    each = camera_info is not None and 2 * topics[camera_info][1] >= topics[image][1]
    return Chosen(image, camera_info, pose, each, remarks)


def _find_image(path: Path, topics: Topics) -> str:
    every = {n: v for n, v in topics.items() if v[0] in (IMAGE, COMPRESSED)}
    found = {n for n, (_, count) in every.items() if count and "depth" not in n.lower()}
    # Of one stream recorded twice the raw one is read.
    found -= {n for n in found if topics[n][0] == COMPRESSED and _base(n) in found}
    if len(found) == 1:
        return found.pop()
    if found:
        raise BagError(f"{path}: {len(found)} image topics, choose one with --image-topic:\n{_table(topics, found)}")
    listed = every or topics
    what = "no image topic with messages" + (" other than depth" if any(c for _, c in every.values()) else "")
    raise BagError(f"{path}: {what}; expected {IMAGE} or {COMPRESSED}, got:\n{_table(topics, listed)}")


def _given(path: Path, topics: Topics, name: str | None, kinds: tuple[str, ...], option: str) -> str | None:
    if not name:
        return None
    fitting = [n for n, (kind, _) in topics.items() if kind in kinds]
    if name not in topics or topics[name][0] not in kinds:
        got = f"is of type {topics[name][0]}" if name in topics else "is not in the recording"
        raise BagError(
            f"{path}: {option} {name} {got}; expected {' or '.join(kinds)}, there are:\n"
            f"{_table(topics, fitting or topics)}"
        )
    if not topics[name][1]:
        raise BagError(f"{path}: {option} {name} has no messages; there are:\n{_table(topics, fitting)}")
    return name


def _sibling_info(topics: Topics, image: str) -> str | None:
    """The camera_info in the namespace of the image topic, as image_transport defines it."""
    name = _base(image).rpartition("/")[0] + "/camera_info"
    return name if topics.get(name, ("", 0))[0] == CAMERA_INFO and topics[name][1] else None


def _base(image: str) -> str:
    return image.removesuffix("/compressed")


def _table(topics: Topics, names) -> str:
    rows = [f"  {n}  ({topics[n][0]}, {topics[n][1]} messages)" for n in sorted(names)]
    return "\n".join(rows) or "  (no topics)"
