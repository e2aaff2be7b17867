"""What ``doctor`` says of ROS, the Fast DDS profile, shared memory and sockets."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from doctor_helpers import Answer, module, only
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vslam_features.cli import doctor_profile, doctor_ros, doctor_topics, doctor_transport
from vslam_features.config import Config

SHIPPED = Path(__file__).parents[1] / "config" / "fastdds.xml"
VARIABLES = (
    "ROS_DISTRO ROS_DOMAIN_ID ROS_AUTOMATIC_DISCOVERY_RANGE ROS_LOCALHOST_ONLY ROS_STATIC_PEERS RMW_IMPLEMENTATION "
    "FASTDDS_DEFAULT_PROFILES_FILE FASTRTPS_DEFAULT_PROFILES_FILE"
).split()
MB = 1 << 20


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


# -- rclpy -----------------------------------------------------------------------------------------


def test_no_ros_is_a_warning():
    state, text, fix = only(doctor_ros.check_ros(None))
    assert state == "WARN" and "rclpy is not there" in text and "source /opt/ros" in fix


@pytest.mark.parametrize(
    "facts, state, said, remedy",
    [
        ({"missing": [], "rmw": "rmw_fastrtps_cpp"}, "OK", "rclpy runs (jazzy, rmw_fastrtps_cpp)", ""),
        ({"import_error": "ImportError: _rclpy.so"}, "FAIL", "cannot be imported: ImportError", "Python that ROS was"),
        ({"missing": ["nav_msgs", "std_srvs"]}, "FAIL", "nav_msgs, std_srvs", "ros-jazzy-nav-msgs ros-jazzy-std-srvs"),
        ({"missing": [], "init_error": "domain 999"}, "FAIL", "cannot start: domain 999", "ROS_DOMAIN_ID"),
        ("topic_probe: crashed with SIGSEGV", "FAIL", "crashed with SIGSEGV", "ros2 topic list"),
        (
            "topic_probe: Expected RMW implementation",
            "FAIL",
            "Expected RMW",
            "ros-jazzy-rmw-fastrtps-cpp, or unset RMW",
        ),
    ],
    ids=["well", "of another Python", "no messages", "no start", "crash", "no middleware"],
)
def test_each_fault_of_ros_is_told_apart(facts, state, said, remedy, monkeypatch):
    monkeypatch.setenv("ROS_DISTRO", "jazzy")
    found = only(doctor_ros.check_ros(Answer(facts)))
    assert found[0] == state and said in found[1] and remedy in found[2]


def test_a_distribution_that_is_not_supported(monkeypatch):
    monkeypatch.setenv("ROS_DISTRO", "foxy")
    state, text, fix = only(doctor_ros.check_ros(Answer({"missing": [], "rmw": "rmw_fastrtps_cpp"})))
    assert state == "WARN" and "foxy" in text and "humble" in fix


@pytest.mark.parametrize("broken, key", [("rclpy", "import_error"), ("nav_msgs", "missing")])
def test_the_probe_finds_what_cannot_be_imported(broken, key, tmp_path, monkeypatch):
    pytest.importorskip("rclpy")
    module(tmp_path, broken, "raise ImportError('built for another Python')", monkeypatch)
    probe = doctor_topics.start_probe(Config(), doctor_topics.Topics())
    try:
        facts = probe.result(30.0)
    finally:
        probe.end()
    wanted = "ImportError: built for another Python" if key == "import_error" else ["nav_msgs"]
    assert facts[key] == wanted and "nodes" not in facts


# -- discovery -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables, state, said",
    [
        ({}, "OK", "domain 0, the local network"),
        ({"ROS_DOMAIN_ID": "42", "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}, "OK", "domain 42, this machine only"),
        ({"ROS_LOCALHOST_ONLY": "1", "ROS_DISTRO": "humble"}, "OK", "this machine only"),
        ({"ROS_DOMAIN_ID": "233"}, "FAIL", "ROS_DOMAIN_ID=233"),
        ({"ROS_DOMAIN_ID": "robot"}, "FAIL", "ROS_DOMAIN_ID=robot"),
        ({"ROS_DOMAIN_ID": "150"}, "WARN", "domain 150"),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "OFF"}, "WARN", "no process finds another"),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "LAN"}, "WARN", "unknown range"),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST", "ROS_DISTRO": "humble"}, "WARN", "the local network"),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "SUBNET", "ROS_LOCALHOST_ONLY": "1"}, "WARN", "overrides"),
    ],
)
def test_who_finds_whom(variables, state, said, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = only(doctor_ros.check_discovery())
    assert found[0] == state and said in found[1]


# -- Fast DDS --------------------------------------------------------------------------------------


def profile(text: str, path: Path, monkeypatch, name: str = "FASTDDS_DEFAULT_PROFILES_FILE"):
    path.write_text(text)
    monkeypatch.setenv(name, str(path))
    return only(doctor_profile.check_profile(""))


def test_the_shipped_profile_gives_64_mb(monkeypatch):
    monkeypatch.setenv("FASTDDS_DEFAULT_PROFILES_FILE", str(SHIPPED))
    state, text, _ = only(doctor_profile.check_profile("rmw_fastrtps_cpp"))
    assert state == "OK" and text.startswith("64.0 MB") and doctor_profile.segment_bytes() == 64 * MB


def test_no_profile(monkeypatch):
    state, text, fix = only(doctor_profile.check_profile(""))
    assert state == "WARN" and "no profile" in text and f"export FASTDDS_DEFAULT_PROFILES_FILE={SHIPPED} " in fix
    monkeypatch.setenv("ROS_DISTRO", "humble")
    assert "export FASTRTPS_DEFAULT_PROFILES_FILE=" in only(doctor_profile.check_profile(""))[2]


def test_humble_reads_the_old_name_only(monkeypatch):
    monkeypatch.setenv("FASTDDS_DEFAULT_PROFILES_FILE", str(SHIPPED))
    monkeypatch.setenv("ROS_DISTRO", "humble")
    assert only(doctor_profile.check_profile(""))[0] == "WARN"
    monkeypatch.setenv("FASTRTPS_DEFAULT_PROFILES_FILE", str(SHIPPED))
    assert only(doctor_profile.check_profile(""))[0] == "OK"


def test_a_profile_that_is_not_there(monkeypatch):
    monkeypatch.setenv("FASTDDS_DEFAULT_PROFILES_FILE", "/nowhere/fastdds.xml")
    state, text, fix = only(doctor_profile.check_profile(""))
    assert state == "FAIL" and "/nowhere/fastdds.xml cannot be read: No such file" in text
    assert "FASTDDS_DEFAULT_PROFILES_FILE" in fix and doctor_profile.segment_bytes() == 64 * MB  # as launch sets it


@pytest.mark.parametrize(
    "change, state, said",
    [
        (lambda t: "<html><body>Sign in", "FAIL", "is not XML"),
        (lambda t: "", "FAIL", "is not XML"),
        (lambda t: t.replace('is_default_profile="true"', ""), "FAIL", "nothing uses it"),
        (lambda t: t.replace("<type>SHM</type>", "<type>TCPv4</type>"), "FAIL", "no shared memory"),
        (lambda t: t.replace("<transport_id>large_shared_memory</transport_id>", "", 2), "FAIL", "no shared memory"),
        (lambda t: t.replace("67108864", "64 MB"), "FAIL", "'64 MB'"),
        (lambda t: t.replace("67108864", "1048576"), "WARN", "1.0 MB"),
        (lambda t: t.replace("<segment_size>67108864</segment_size>", ""), "WARN", "0.5 MB"),
        (
            lambda t: t.replace("http://www.eprosima.com", "http://www.eprosima.com/XMLSchemas/fastRTPS_Profiles"),
            "OK",
            "64",
        ),
    ],
    ids="page empty no-default no-shm unused no-number small unset old-namespace".split(),
)
def test_a_profile_that_does_not_do_it(change, state, said, tmp_path, monkeypatch):
    found = profile(change(SHIPPED.read_text()), tmp_path / "p.xml", monkeypatch)
    assert found[0] == state and said in found[1] and str(tmp_path) in found[1]


def test_another_middleware_needs_no_profile_and_no_shared_memory():
    assert only(doctor_profile.check_profile("rmw_cyclonedds_cpp"))[:2] == ("OK", "not in use (rmw_cyclonedds_cpp)")
    assert only(doctor_transport.check_shared_memory("rmw_cyclonedds_cpp", 64 * MB, Path("/nowhere")))[0] == "OK"


# -- shared memory and sockets ---------------------------------------------------------------------


def disk(total: int, free: int):
    """What ``os.statvfs`` says, in blocks of 4 KB."""
    return lambda path: os.statvfs_result((4096, 4096, total >> 12, free >> 12, free >> 12, 9, 9, 9, 0, 255))


@pytest.mark.parametrize(
    "total, free, state, said",
    [
        (64, 64, "FAIL", "none can have it (Docker gives 64 MB)"),
        (100, 100, "FAIL", "not both of camera and front-end"),
        (4096, 50, "WARN", "the next one gets none"),
        (200, 200, "WARN", "too little for 4"),
        (1024, 900, "OK", "900 MB of 1024 MB free"),
    ],
)
def test_shared_memory(total, free, state, said, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", disk(total * MB, free * MB))
    found = only(doctor_transport.check_shared_memory("", 64 * MB, tmp_path))
    assert found[0] == state and said in found[1]
    assert state == "OK" or "--shm-size=1g" in found[2]


def test_small_segments_need_little(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", disk(64 * MB, 60 * MB))
    assert only(doctor_transport.check_shared_memory("", MB // 2, tmp_path))[0] == "OK"


def test_what_dead_processes_left_is_counted(tmp_path, monkeypatch):
    (tmp_path / "fastdds_0123456789abcdef").write_bytes(b"x" * (3 * MB))
    (tmp_path / "of_others").write_bytes(b"x" * MB)
    held = sum(p.stat().st_blocks * 512 for p in tmp_path.glob("fastdds*")) / MB
    monkeypatch.setattr(os, "statvfs", disk(4096 * MB, 10 * MB))
    _, text, fix = only(doctor_transport.check_shared_memory("", 64 * MB, tmp_path))
    assert f"({held:.1f} MB of it in files of Fast DDS)" in text and "fastdds shm clean" in fix


def test_no_shared_memory_at_all(tmp_path):
    state, text, _ = only(doctor_transport.check_shared_memory("", 64 * MB, tmp_path / "none"))
    assert state == "FAIL" and "no shared memory" in text


@pytest.mark.parametrize(
    "most, rmw, only_here, state",
    [
        (212_992, "", False, "WARN"),
        (212_992, "", True, "OK"),
        (212_992, "rmw_cyclonedds_cpp", True, "WARN"),
        (2**31 - 1, "rmw_cyclonedds_cpp", False, "OK"),
    ],
)
def test_socket_buffers(most, rmw, only_here, state, tmp_path):
    (tmp_path / "rmem_max").write_text(f"{most}\n")
    found = only(doctor_transport.check_socket_buffers(rmw, only_here, tmp_path / "rmem_max"))
    assert found[0] == state and (state == "OK" or "sysctl -w net.core.rmem_max" in found[2])
    assert not list(doctor_transport.check_socket_buffers("", False, tmp_path / "hidden"))


# -- topics, of what a probe may find --------------------------------------------------------------

IMAGE = {
    "name": "/cam/image", "publishers": 1, "types": ["sensor_msgs/msg/Image"], "expected": "Image", "best_effort": 1,
    "received": 60, "rate_hz": 30.0, "stamp_ns": 10**18, "age_s": 0.01, "backward": 0, "frame_id": "cam",
    "what": "640x480 mono8",
}  # fmt: skip


def graph(image: dict | None = None, **facts) -> dict[str, tuple[str, str, str]]:
    """Lines by name, of a graph with a camera whose image topic is ``image``."""
    topics = (
        {} if image is None else {"image": image, "camera_info": {**IMAGE, "name": "/cam/info", "expected": "Image"}}
    )
    base = {"nodes": ["/camera"], "frontends": [], "statuses": {}, "clock": 0, "images": [], "topics": topics}
    found = doctor_topics.check_topics(Config(), doctor_topics.Topics(), Answer({**base, **facts}))
    return {c.name: (c.state, c.text, c.fix) for c in found}


@pytest.mark.parametrize(
    "change, state, said",
    [
        ({}, "OK", "30.0 Hz, frame 'cam', 10 ms old"),
        ({"received": 0}, "WARN", "1 publisher(s), but no message in 2 s"),
        ({"publishers": 2}, "WARN", "2 publishers"),
        ({"stamp_ns": 0}, "WARN", "stamps are 0"),
        ({"backward": 3}, "WARN", "3 of 60 stamps are not later"),
        ({"age_s": 7.5}, "WARN", "stamps are 7.5 s old"),
        ({"age_s": -2.0}, "WARN", "2.0 s ahead"),
        ({"problem": "image: encoding '8UC5' is unknown"}, "FAIL", "8UC5"),
    ],
    ids="well silent two zero backward old ahead encoding".split(),
)
def test_an_image_topic(change, state, said):
    found = graph({**IMAGE, **change})["image"]
    assert found[0] == state and said in found[1] and (state == "OK" or found[2])


def test_stamps_of_a_recording_are_its_own():
    assert graph({**IMAGE, "age_s": 1e8}, clock=1)["image"][0] == "OK"


def test_several_cameras_and_none():
    state, text, fix = graph(images=["/left/image", "/right/image"])["image"]
    assert state == "WARN" and "/left/image, /right/image" in text and "--image-topic" in fix
    state, text, fix = graph()["image"]
    assert state == "WARN" and "1 nodes are up, none publishes images" in text and "ROS_DOMAIN_ID" in fix


@pytest.mark.parametrize(
    "statuses, state, said",
    [
        ({"frontend: inputs": [0, "receiving"], "frontend: map": [0, ""]}, "OK", "all 2 of its diagnostics are OK"),
        ({"frontend: inputs": [1, "no camera_info yet"], "frontend: map": [0, ""]}, "WARN", "no camera_info yet"),
        ({"frontend: map": [2, "disk full"], "frontend: inputs": [1, "silent"]}, "FAIL", "frontend: map: disk full"),
        ({}, "WARN", "sends no diagnostics"),
    ],
)
def test_a_running_front_end_says_how_it_is(statuses, state, said):
    found = graph(IMAGE, frontends=["/frontend"], statuses=statuses)["front-end"]
    assert found[0] == state and said in found[1]


def test_two_front_ends():
    checks = doctor_topics.check_topics(
        Config(), doctor_topics.Topics(),
        Answer({"nodes": ["/frontend"], "frontends": ["/frontend", "/b/frontend"], "statuses": {}, "clock": 0,
                "images": [], "topics": {}}),
    )  # fmt: skip
    assert any(c.state == "WARN" and "2 run: /frontend, /b/frontend" in c.text for c in checks)


@given(st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_profile_that_says_what_it_is(content):
    with tempfile.NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        Path(file.name).write_bytes(content)
        patch.setenv("FASTDDS_DEFAULT_PROFILES_FILE", file.name)
        assert only(doctor_profile.check_profile(""))[0] == "FAIL"
        assert doctor_profile.segment_bytes() == 64 * MB
