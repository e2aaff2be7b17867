"""What ``doctor`` says of the camera topics, where a ROS graph is up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import Config
from .check import FAIL, OK, WARN, Check
from .doctor_child import Child, ChildError

LISTEN_S = 2.0
# Mostly 0.2 s. Where the first announcements are lost, on a busy machine, the next ones come after 3 s.
DISCOVERY_S = 4.5
_OLD_S, _AHEAD_S = 1.0, 0.1  # of a stamp against the clock


@dataclass(frozen=True)
class Topics:
    """Names that were given on purpose; empty: what the running front-end reads, or what there is one of.

    ``node``: name of the front-end.
    """

    image: str = ""
    camera_info: str = ""
    pose: str = ""
    node: str = "frontend"


def start_probe(config: Config, topics: Topics) -> Child:
    """A child that imports rclpy and, where that is well, listens to the topics."""
    names = {"image": topics.image, "camera_info": topics.camera_info}
    if config.pose_type != "none":
        names["pose"] = topics.pose
    asked = {
        "node": topics.node,
        "topics": {label: name if not name or name.startswith("/") else f"/{name}" for label, name in names.items()},
        "pose_type": config.pose_type,
        "compressed": config.image_transport == "compressed",
        "reliable": config.image_qos == "reliable",
        "rectified": config.rectified,
        "max_value": config.image_max_value,
        "listen_s": LISTEN_S,
        "discovery_s": DISCOVERY_S,
    }
    return Child("vslam_features.ros.topic_probe:main", asked)


def check_topics(config: Config, topics: Topics, probe: Child | None) -> Iterator[Check]:
    """The running front-end, and each topic that it reads or would read."""
    if probe is None:
        return
    try:
        facts = probe.result()
    except ChildError:
        return  # the line ros has said so
    if "nodes" not in facts:
        return
    yield from _frontend(facts, topics)
    named = any((topics.image, topics.camera_info, topics.pose))
    if not facts["nodes"] and not named:
        yield Check(OK, "topics", "no other node is up: camera topics are looked at while a camera runs")
        return
    if not facts["nodes"]:
        fix = "start the camera driver; the same ROS_DOMAIN_ID, RMW_IMPLEMENTATION and user for both"
        yield Check(WARN, "topics", "no other node is up", fix)
        return
    stamps_are_old = bool(facts["clock"])
    for label, found in facts["topics"].items():
        yield _topic(label, found, config, stamps_are_old)
    if "image" not in facts["topics"]:
        yield _no_image(facts)
    elif "camera_info" not in facts["topics"] and facts["topics"]["image"]["received"]:
        fix = "give --camera-info-topic; without calibration matches are verified less strictly, and no poses are found"
        yield Check(WARN, "camera_info", "no topic brings one: images are processed uncalibrated", fix)


def _frontend(facts: dict, topics: Topics) -> Iterator[Check]:
    """What a running front-end says of itself in the diagnostics."""
    if not facts["frontends"]:
        return
    name = facts["frontends"][0]
    if len(facts["frontends"]) > 1:
        fix = "two of one name publish over each other: end one, or give it a namespace"
        yield Check(WARN, "front-end", f"{len(facts['frontends'])} run: {', '.join(facts['frontends'])}", fix)
    if not facts["statuses"]:
        yield Check(WARN, "front-end", f"{name} runs, but sends no diagnostics", f"ros2 lifecycle get {name}")
        return
    level, status, message = max((level, status, message) for status, (level, message) in facts["statuses"].items())
    if level == 0:
        yield Check(OK, "front-end", f"{name} runs; all {len(facts['statuses'])} of its diagnostics are OK")
    else:
        state = FAIL if level == 2 else WARN
        yield Check(state, "front-end", f"{status}: {message}", "ros2 topic echo /diagnostics shows the figures")


def _no_image(facts: dict) -> Check:
    if facts["images"]:
        names = ", ".join(facts["images"][:6])
        return Check(WARN, "image", f"several topics bring images: {names}", "name one: --image-topic TOPIC")
    fix = (
        "start the camera driver; if it runs: the same ROS_DOMAIN_ID and RMW_IMPLEMENTATION, and 'ros2 topic list' in "
        "the same shell; image_transport raw or compressed, as it publishes"
    )
    return Check(WARN, "image", f"{len(facts['nodes'])} nodes are up, none publishes images", fix)


def _topic(label: str, found: dict, config: Config, played: bool) -> Check:
    name, qos = found["name"], config.image_qos
    wrong = [kind for kind in found["types"] if not kind.endswith(f"/{found['expected']}")]
    if not found["publishers"]:
        fix = f"check the name: ros2 topic list; launch with {label}:=TOPIC, or start what publishes it"
        return Check(WARN, label, f"{name}: nobody publishes", fix)
    if wrong:
        setting = {"image": "image_transport", "pose": "pose_type"}.get(label, "the topic")
        text = f"{name}: brings {', '.join(wrong)}, expected {found['expected']}"
        return Check(FAIL, label, text, f"correct {setting}, or choose another topic")
    if qos == "reliable" and found["best_effort"]:
        text = f"{name}: the publisher is best effort, image_qos asks for reliable: nothing comes from it"
        return Check(FAIL, label, text, "set image_qos to sensor_data, which takes both")
    if not found["received"]:
        fix = (
            "'ros2 topic hz' in the same shell: if that is silent too, look at the lines fast dds and shm, and let "
            "camera and front-end run as the same user (shared memory of another user cannot be opened)"
        )
        text = f"{name}: {found['publishers']} publisher(s), but no message in {LISTEN_S:g} s"
        return Check(WARN, label, text, fix)
    rate = f", {found['rate_hz']:.1f} Hz" if "rate_hz" in found else f", {found['received']} in {LISTEN_S:g} s"
    if problem := found.get("problem"):
        fix = {"image": "docs/images.md lists what is decoded", "camera_info": "calibrate, or correct the driver"}
        return Check(
            FAIL if label == "image" else WARN, label, f"{name}{rate}: {problem}", fix.get(label, "correct it")
        )
    text = f"{name}: {found['what']}{rate}, frame '{found['frame_id']}'"
    if problem := _stamp_problem(found, played):
        fix = "stamps are matched with poses and kept in the map: let the driver stamp with the time of exposure"
        return Check(WARN, label, f"{text}; {problem}", fix)
    if label == "image" and found["publishers"] > 1:
        return Check(
            WARN, label, f"{text}; {found['publishers']} publishers", "two cameras on one topic make no sequence"
        )
    return Check(OK, label, f"{text}, {found['age_s'] * 1e3:.0f} ms old" if not played else text)


def _stamp_problem(found: dict, played: bool) -> str:
    """``played``: time comes from /clock, so that stamps need not be of now."""
    if not found["stamp_ns"]:
        return "stamps are 0"
    if found["backward"]:
        return f"{found['backward']} of {found['received']} stamps are not later than the one before"
    if played or -_AHEAD_S <= found["age_s"] <= _OLD_S:
        return ""
    if found["age_s"] < 0:
        return f"stamps are {-found['age_s']:.1f} s ahead of this machine's clock"
    return f"stamps are {found['age_s']:.1f} s old"
