"""``doctor``: what of this machine fits, what does not, and what to do."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from ..config import Config
from ..errors import ConfigError, PluginError
from . import (
    doctor_libraries,
    doctor_machine,
    doctor_maps,
    doctor_models,
    doctor_profile,
    doctor_ros,
    doctor_runtimes,
    doctor_topics,
    doctor_transport,
)
from .check import FAIL, OK, WARN, Check
from .common import add_config_arguments, load_config
from .doctor_child import Child, ChildError

LIMIT_S = 70.0  # of one check, more than any of its children is given


def add_parser(subparsers) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this installation and machine",
        description="Check libraries, ROS, models, files and resources; each line says what to do.",
        epilog="example: vslam-features doctor\n"
        "         vslam-features doctor --params-file robot.yaml --image-topic /camera/image_raw\n"
        "The exit code is 1 if a line is FAIL, else 0: with WARN all works, but not as well as it could (--json tells\n"
        "the worst state).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    group = parser.add_argument_group("camera topics (default: those of the running front-end, or the only ones)")
    group.add_argument("--image-topic", default="", metavar="TOPIC")
    group.add_argument("--camera-info-topic", default="", metavar="TOPIC")
    group.add_argument("--pose-topic", default="", metavar="TOPIC", help="looked at where pose_type is not none")
    group.add_argument("--node", default="frontend", metavar="NAME", help="name of the front-end's node (%(default)s)")
    add_config_arguments(parser)


def run(args) -> int:
    """Print all checks."""
    checks = list(examine(args))
    worst = max((c.state for c in checks), key=(OK, WARN, FAIL).index)
    if args.json:
        print(json.dumps({"state": worst, "checks": [asdict(c) for c in checks]}))
    else:
        for c in checks:
            print(f"{c.state:<5} {c.name:<13} {c.text}")
            if c.fix:
                print(f"{'':<19} -> {c.fix}")
        count = sum(c.state != OK for c in checks)
        print("all is well" if not count else f"{count} of {len(checks)} lines want attention")
    return 1 if worst == FAIL else 0


@dataclass(frozen=True)
class Patient:
    """What is examined. The children run from the beginning, beside the other checks.

    ``sessions``: runtime -> child, None where its library is not installed. ``ros``: None where rclpy is not there.
    """

    config: Config
    topics: doctor_topics.Topics
    sessions: dict[str, Child | None]
    gpu: Child
    ros: Child | None

    def children(self) -> Iterator[Child]:
        """All of them."""
        yield from filter(None, (*self.sessions.values(), self.gpu, self.ros))

    def gpu_facts(self) -> dict:
        """What the child found; nothing where it gave no answer, which its own line says."""
        try:
            return self.gpu.result()
        except ChildError:
            return {}


def examine(args) -> Iterator[Check]:
    """All checks; one that breaks, or does not end, is a FAIL of its own."""
    config, line = _configuration(args)
    yield line
    if config is None:
        for name in _OF_ANY_MACHINE:
            yield from _limited(name, _CHECKS[name], None)
        return
    topics = doctor_topics.Topics(args.image_topic, args.camera_info_topic, args.pose_topic, args.node)
    with contextlib.ExitStack() as ended:
        patient = Patient(
            config,
            topics,
            {name: doctor_runtimes.start_session(name, config) for name in ("onnxruntime", "openvino")},
            doctor_runtimes.start_gpu(config, doctor_models.configured_models(config)),
            doctor_topics.start_probe(config, topics) if doctor_ros.has_rclpy() else None,
        )
        for child in patient.children():
            ended.callback(child.end)
        for name, check in _CHECKS.items():
            yield from _limited(name, check, patient)


def _configuration(args) -> tuple[Config | None, Check]:
    """The configuration, or the default one where it is broken: the rest of the machine is looked at all the same.

    None where not even that can be had, for want of a library that plug-ins need.
    """
    name = "configuration"
    try:
        config, given = load_config(args)
    except ConfigError as error:
        return Config(), Check(FAIL, name, str(error), "correct it; what follows is of the default configuration")
    except PluginError as error:
        return None, Check(FAIL, name, str(error), "see the lines below; what needs a configuration is left out")
    r = config.runtime
    text = f"{args.config or 'the default'}{f', {len(given)} values of its own' if given else ''}: "
    text += (
        f"{config.features.name} + {config.matcher.name} + {config.retrieval.name} on {r.name} {r.device} {r.precision}"
    )
    return config, Check(OK, name, text)


def _limited(name: str, check: Callable[[Patient], Iterator[Check]], patient: Patient | None) -> list[Check]:
    """What a check says. In a thread, since a disk or a driver that does not answer cannot be interrupted."""
    found: list[Check] = []

    def work() -> None:
        try:
            for line in check(patient):
                found.append(line)
        except Exception as error:  # a doctor must not die of what it looks for
            fix = "the lines above may say why; else reinstall vslam_features"
            found.append(Check(FAIL, name, f"the check failed: {type(error).__name__}: {error}", fix))

    thread = threading.Thread(target=work, name=f"doctor {name}", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if thread.is_alive():
        fix = "a disk, a network folder or a driver does not answer: look at the system's log (dmesg)"
        return [*found, Check(FAIL, name, f"no answer within {LIMIT_S:g} s", fix)]
    return found


def _rmw() -> str:
    return os.environ.get("RMW_IMPLEMENTATION", "")


_CHECKS: dict[str, Callable[[Patient], Iterator[Check]]] = {
    "python": lambda p: doctor_libraries.check_python(),
    "numpy": lambda p: doctor_libraries.check_numpy(),
    "opencv": lambda p: doctor_libraries.check_opencv(),
    "poselib": lambda p: doctor_libraries.check_poselib(),
    "rosbags": lambda p: doctor_libraries.check_rosbags(),
    "codebooks": lambda p: doctor_libraries.check_codebooks(),
    "self test": lambda p: doctor_libraries.check_pipeline(),
    "machine": lambda p: doctor_machine.check_machine(),
    "jetson": lambda p: doctor_machine.check_jetson(),
    "clock": lambda p: doctor_machine.check_clock(),
    "onnxruntime": lambda p: doctor_runtimes.check_onnxruntime(p.config, p.sessions["onnxruntime"], p.gpu),
    "openvino": lambda p: doctor_runtimes.check_openvino(p.config, p.sessions["openvino"], p.gpu),
    "gpu": lambda p: doctor_runtimes.check_gpu(p.config, p.gpu),
    "tensorrt": lambda p: doctor_runtimes.check_tensorrt(p.config, p.gpu),
    "models": lambda p: doctor_models.check_models(
        p.config, doctor_runtimes.versions(p.sessions, p.gpu), p.gpu_facts()
    ),
    "folders": lambda p: doctor_maps.check_folders(p.config),
    "map": lambda p: doctor_maps.check_map(p.config),
    "ros": lambda p: doctor_ros.check_ros(p.ros),
    "discovery": lambda p: doctor_ros.check_discovery(),
    "fast dds": lambda p: doctor_profile.check_profile(_rmw()),
    "shm": lambda p: doctor_transport.check_shared_memory(_rmw(), doctor_profile.segment_bytes()),
    "sockets": lambda p: doctor_transport.check_socket_buffers(_rmw(), doctor_ros.localhost_only()),
    "topics": lambda p: doctor_topics.check_topics(p.config, p.topics, p.ros),
}
# Need no patient, and no library but Python's own.
_OF_ANY_MACHINE = "python numpy opencv poselib rosbags machine jetson clock".split() + ["discovery", "fast dds", "shm"]
