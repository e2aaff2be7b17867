"""Files for robots: what the unit, the images and ``docs/deployment.md`` name exists, and their commands parse."""

from __future__ import annotations

import configparser
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

from vslam_features.cli.main import build_parser
from vslam_features.config import Config

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "vslam-features.service"
PAGE = ROOT / "docs" / "deployment.md"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
LAUNCH = (ROOT / "launch" / "frontend.launch.py").read_text()
WORKSPACE = "/opt/vslam_ws/src/vslam_features/"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)  # names may come twice
    parser.optionxform = str
    parser.read(UNIT)
    return parser


def environment() -> dict[str, str]:
    lines = (DEPLOY / "vslam-features.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def launch_arguments(launch_file: str = "frontend.launch.py") -> set[str]:
    text = (ROOT / "launch" / launch_file).read_text()
    return set(re.findall(r'DeclareLaunchArgument\(\s*"(\w+)"', text))


def code_blocks(page: Path) -> str:
    """All shell code of a page, with continued lines joined."""
    return "\n".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)).replace("\\\n", " ")


# -- systemd ---------------------------------------------------------------------------------------


def test_the_unit_stops_the_node_before_anybody_kills_it():
    service = unit()["Service"]
    waits = [int(re.search(rf'{name}="(\d+)"', LAUNCH)[1]) for name in ("sigterm_timeout", "sigkill_timeout")]
    assert int(service["TimeoutStopSec"]) > sum(waits) and waits[0] >= 30
    assert service["KillSignal"] == "SIGINT" and service["KillMode"] == "mixed"  # SIGTERM to launch leaves the node
    assert service["Restart"] == "on-failure" and unit()["Install"]["WantedBy"] == "multi-user.target"
    # Else the signal goes to the shell; and launch takes the node for one that a terminal has told to stop.
    assert "exec ros2 launch --noninteractive" in service["ExecStart"]


def test_the_unit_needs_no_root_and_keeps_maps():
    service = unit()["Service"]
    assert service["User"] == service["Group"] == "vslam" and service["NoNewPrivileges"] == "yes"
    assert service["StateDirectory"] == service["CacheDirectory"] == "vslam_features"
    text = UNIT.read_text()
    assert "VSLAM_FEATURES_STATE=%S/vslam_features" in text and "VSLAM_FEATURES_CACHE=%C/vslam_features" in text
    for takes_away in ("PrivateIPC", "PrivateDevices", "MemoryDenyWriteExecute"):  # shared memory, GPU, CUDA
        assert takes_away not in service
    assert {"network-online.target", "time-sync.target"} <= set(unit()["Unit"]["After"].split())


def test_the_environment_file_has_what_the_unit_asks_for():
    asked, given = set(re.findall(r"\$\{(\w+)\}", unit()["Service"]["ExecStart"])), environment()
    assert asked and asked <= set(given)
    assert unit()["Service"]["EnvironmentFile"] == "/etc/vslam_features/vslam-features.env"
    assert (ROOT / "launch" / given["VSLAM_LAUNCH"]).is_file()
    assert (DEPLOY / Path(given["VSLAM_PARAMS"]).name).is_file()
    arguments = {part.partition(":=")[0] for part in given["VSLAM_LAUNCH_ARGS"].split()} | {"params_file"}
    assert arguments <= launch_arguments(given["VSLAM_LAUNCH"])


def test_the_command_of_the_unit_becomes_the_launch(tmp_path):
    """As systemd runs it, with stand-ins for ROS: it fills in the variables, and bash splits the further arguments."""
    given = {**environment(), "VSLAM_WORKSPACE": str(tmp_path)}
    (tmp_path / "install").mkdir()
    (tmp_path / "install" / "setup.bash").write_text("")
    (tmp_path / "setup.bash").write_text(f"export PATH={tmp_path}/bin:$PATH\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ros2").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "bin" / "ros2").chmod(0o755)
    line = re.sub(r"\$\{(\w+)\}", lambda found: given[found[1]], unit()["Service"]["ExecStart"])
    line = line.replace(f"/opt/ros/{given['ROS_DISTRO']}/setup.bash", f"{tmp_path}/setup.bash")
    said = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=20).stdout.split()
    assert said[:4] == ["launch", "--noninteractive", "vslam_features", "frontend.launch.py"] and len(said) == 7
    assert said[4] == "params_file:=/etc/vslam_features/robot.yaml" and said[5].startswith("image:=/")


def test_systemd_accepts_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    shutil.copy(UNIT, tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / UNIT.name)], capture_output=True, text=True, timeout=60
    )
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert not [line for line in ours if "Unknown" in line or "Failed to parse" in line or "Invalid" in line], ours


def test_the_parameters_for_robots_are_parameters():
    config = Config.load(DEPLOY / "robot.yaml")
    assert (config.runtime.name, config.runtime.device, config.models.if_missing) == ("tensorrt", "cuda", "error")
    assert config.map_path.startswith("/var/lib/vslam_features/")


# -- images ----------------------------------------------------------------------------------------


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments), with comments left out and continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    found = [line.partition(" ") for line in "\n".join(lines).replace("\\\n", " ").splitlines()]
    return [(name, rest.strip()) for name, _, rest in found]


def ignored(name: str) -> bool:
    patterns = [p for p in (ROOT / ".dockerignore").read_text().split("\n") if p and not p.startswith("#")]
    parts = Path(name).parts
    return any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for pattern in patterns for part in parts[:1])


def installs(path: Path) -> str:
    return " ".join(rest for name, rest in instructions(path) if name == "RUN")


@pytest.fixture(params=DOCKERFILES, ids=lambda p: p.suffix)
def dockerfile(request) -> Path:
    return request.param


def test_there_is_an_image_for_each():
    assert [p.suffix for p in DOCKERFILES] == [".jetson", ".x86"]
    assert all(ignored(name) for name in (".git", "test", ".venv-export", "out"))


def test_an_image_begins_with_a_base_and_ends_without_root(dockerfile):
    found = instructions(dockerfile)
    names = [name for name, _ in found]
    known = set("ARG FROM SHELL ENV RUN WORKDIR COPY VOLUME USER STOPSIGNAL ENTRYPOINT CMD".split())
    assert set(names) <= known and names[:2] == ["ARG", "FROM"] and names.count("FROM") == 1
    values = dict(reversed(found))
    assert found[0][1].startswith("BASE=") and ":latest" not in found[0][1] and ":" in found[0][1]
    assert values["USER"] == "vslam" and values["STOPSIGNAL"] == "SIGINT"


def test_what_an_image_copies_and_starts_exists(dockerfile):
    found = instructions(dockerfile)
    for source in (rest.split()[0] for name, rest in found if name == "COPY"):
        assert (ROOT / source).exists()
    for name in ("deploy/entrypoint.sh", "package.xml", "setup.py", "vslam_features", "launch", "config", "models"):
        assert (ROOT / name).exists() and not ignored(name), name
    values = dict(found)
    entry = yaml.safe_load(values["ENTRYPOINT"])[0]
    assert entry.startswith(WORKSPACE) and os.access(ROOT / entry.removeprefix(WORKSPACE), os.X_OK)
    command = yaml.safe_load(values["CMD"])
    assert command[:4] == ["ros2", "launch", "--noninteractive", "vslam_features"]
    assert (ROOT / "launch" / command[4]).is_file()


def test_an_image_installs_extras_and_ros_packages_that_there_are(dockerfile):
    text = installs(dockerfile)
    arguments = dict(rest.split("=", 1) for name, rest in instructions(dockerfile) if name == "ARG")
    (extras,) = re.findall(r"src/vslam_features\[([^\]]+)\]", text)
    names = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], extras).split(",")
    setup = (ROOT / "setup.py").read_text()
    known = set(re.findall(r'^        "([\w-]+)": ', setup[setup.index("extras_require") :], re.M))
    assert set(names) <= known and len({"cpu", "cuda"} & set(names)) == 1  # the two overwrite each other
    declared = {e.text for e in ET.parse(ROOT / "package.xml").getroot() if e.tag.endswith("depend")}
    packages = re.findall(r'"ros-\$\{ROS_DISTRO\}-([\w-]+)"', text)
    assert {name.replace("-", "_") for name in packages} - {"ros_base"} <= declared
    # ros-base brings the rest of what the node imports (REP 2001).
    base = "rclpy builtin_interfaces rcl_interfaces lifecycle_msgs sensor_msgs std_msgs std_srvs geometry_msgs "
    base += "rosgraph_msgs"
    messages = {name for name in declared if name.endswith(("_msgs", "_srvs", "_interfaces"))} | {"rclpy"}
    assert messages <= {*base.split(), *(name.replace("-", "_") for name in packages)}


def test_libraries_of_an_image_fit_the_numpy_of_ros(dockerfile):
    assert "'numpy<2'" in installs(dockerfile) and "'opencv-python-headless<4.12'" in installs(dockerfile)


def test_the_state_of_an_image_is_what_is_mounted(dockerfile):
    found = instructions(dockerfile)
    volumes = [yaml.safe_load(rest) for name, rest in found if name == "VOLUME"][0]
    settings = dict(part.split("=", 1) for name, rest in found if name == "ENV" for part in rest.split())
    assert {settings["VSLAM_FEATURES_STATE"], settings["VSLAM_FEATURES_CACHE"]} == set(volumes)
    page = code_blocks(PAGE)
    assert all(f":{volume}" in page for volume in volumes) and f"-f deploy/{dockerfile.name}" in page


def test_the_entry_point_passes_arguments_on_as_they_are(tmp_path):
    text = (DEPLOY / "entrypoint.sh").read_text()
    for name in ("/opt/ros/${ROS_DISTRO}", "/opt/vslam_ws/install"):
        text = text.replace(name, str(tmp_path))
    (tmp_path / "setup.bash").write_text("")
    command = ["bash", "-c", text, "entrypoint", "printf", "%s|", "a b", "c"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=20).stdout == "a b|c|"


# -- the page --------------------------------------------------------------------------------------


def commands() -> list[str]:
    """Each ``vslam-features`` command of the page's code and tables."""
    text = PAGE.read_text()
    found = re.findall(r"(?:^|\s)vslam-features ((?:models|doctor|map|replay)\b[^\n#]*)", code_blocks(PAGE), re.M)
    return [*found, *(c for c in re.findall(r"`vslam-features ([^`]+)`", text) if "..." not in c)]


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_page_parse(command, capsys):
    try:
        args = build_parser().parse_args(shlex.split(command))
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    assert callable(args.run)


def test_the_page_has_the_commands_that_a_robot_needs():
    words = {" ".join(command.split()[:2]) for command in commands()}
    assert {"models fetch", "models build", "models collect", "models verify"} <= words
    assert any(command.startswith("doctor --params-file") for command in commands())


def test_files_and_anchors_that_the_page_names_exist():
    text = PAGE.read_text()
    for name in set(re.findall(r"deploy/[\w.-]+\w", text)):
        assert (ROOT / name).is_file(), name
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        page = (PAGE.parent / path).resolve()
        assert page.is_file(), target
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
        slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
        assert not anchor or anchor in slugs, target


def test_launch_arguments_of_the_page_are_declared():
    for line in code_blocks(PAGE).splitlines():
        if found := re.search(r"ros2 launch (?:--noninteractive )?vslam_features (\S+)", line):
            assert set(re.findall(r"(\w+):=", line)) <= launch_arguments(found[1]), line


def test_doctor_says_what_the_page_shows():
    """Words of the shown output that are fixed: the page is made anew where they change."""
    code = "".join(p.read_text() for p in (ROOT / "vslam_features" / "cli").glob("doctor*.py"))
    shown = (
        "none is asked for",
        "(Docker gives 64 MB)",
        "the library has it, the machine has no",
        "overwrite each other",
        "what follows is of the default configuration",
        "--shm-size=1g",
    )
    assert not [words for words in shown if words not in code or words not in PAGE.read_text()]
