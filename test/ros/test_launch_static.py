"""Launch and parameter files: what can be checked without launch, and what launch itself says where it is there."""

import ast
import importlib.util
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from vslam_features.config import Config, parameters
from vslam_features.parameter_file import flatten

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_FILES = sorted((ROOT / "launch").glob("*.launch.py"))
ARGUMENTS = {"params_file", "use_sim_time", "namespace", "map_path", "mode", "rviz", "bag"}
PARAMETER_FILES = ["default.yaml", "looper.yaml", "realsense.yaml"]


def test_default_yaml_equals_the_defaults_and_has_every_parameter():
    data = yaml.safe_load((ROOT / "config" / "default.yaml").read_text())["/**"]["ros__parameters"]
    assert Config.load(ROOT / "config" / "default.yaml") == Config()
    assert list(flatten(data)) == [p.name for p in parameters()]


def test_generated_files_are_up_to_date():
    spec = importlib.util.spec_from_file_location("make_parameter_docs", ROOT / "tools" / "make_parameter_docs.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    hint = "run python tools/make_parameter_docs.py"
    assert (ROOT / "config" / "default.yaml").read_text() == tool.default_yaml(Config()), hint
    assert tool.table(Config()) in (ROOT / "docs" / "topics.md").read_text(), hint


@pytest.mark.parametrize("name", PARAMETER_FILES)
def test_parameter_files_hold_declared_parameters_of_the_right_type(name):
    config = Config.load(ROOT / "config" / name)  # raises on unknown names, types and ranges
    assert name == "default.yaml" or config != Config()


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda p: p.name)
def test_launch_file_arguments_imports_and_paths(path):
    tree = ast.parse(path.read_text())
    modules = {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    modules |= {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert modules <= {"launch", "launch_ros", "os"}, "launch files import nothing heavy"
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert strings >= ARGUMENTS
    for name in strings:
        folder = {"yaml": "config", "xml": "config", "rviz": "config", "py": "launch"}.get(name.rpartition(".")[2])
        if folder and "." in name and " " not in name:
            assert (ROOT / folder / name).is_file(), name
    scripts = (ROOT / "setup.py").read_text()
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "executable"):
        assert call.value.value == "rviz2" or f'"{call.value.value} = vslam_features.ros.' in scripts


def test_package_xml_names_what_is_imported():
    root = ElementTree.parse(ROOT / "package.xml").getroot()
    named = {e.text for e in root if e.tag.endswith("depend")}
    packages = set()
    for path in (ROOT / "vslam_features" / "ros").glob("*.py"):
        for n in ast.walk(ast.parse(path.read_text())):
            if isinstance(n, ast.ImportFrom) and not n.level:
                packages.add(n.module.split(".")[0])
            elif isinstance(n, ast.Import):
                packages |= {a.name.split(".")[0] for a in n.names}
    ros = {p for p in packages if p.endswith(("_msgs", "_srvs", "_interfaces")) or p in ("rclpy", "cv_bridge")}
    assert ros | {"message_filters", "launch", "launch_ros"} <= named
    assert root.find("export/build_type").text == "ament_python"


def test_looper_topics():
    text = (ROOT / "launch" / "looper.launch.py").read_text()
    for topic in ("infra1/image_rect_raw", "infra1/camera_info", "vio_image"):
        assert f'"/camera/camera/{topic}"' in text


def test_fastdds_profile():
    root = ElementTree.parse(ROOT / "config" / "fastdds.xml").getroot()
    space = "{http://www.eprosima.com}"
    assert [e.text for e in root.iter(f"{space}segment_size")] == [str(64 * 1024 * 1024)]


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda p: p.name)
def test_launch_description_is_built(path):
    pytest.importorskip("launch.actions", reason="launch is not on PyPI")
    pytest.importorskip("launch_ros.actions", reason="launch_ros is not on PyPI")
    from launch.launch_description_sources import get_launch_description_from_python_launch_file

    description = get_launch_description_from_python_launch_file(str(path))
    arguments = {a.name for a in description.get_launch_arguments(conditional_inclusion=True)}
    assert arguments >= ARGUMENTS


@pytest.mark.parametrize(
    ("distro", "given", "wanted"),
    [
        ("humble", {}, ["FASTDDS", "FASTRTPS"]),
        ("jazzy", {"FASTDDS_DEFAULT_PROFILES_FILE": "mine.xml"}, ["FASTRTPS"]),
        ("kilted", {}, ["FASTDDS"]),
        ("kilted", {"FASTDDS_DEFAULT_PROFILES_FILE": "mine.xml"}, []),
    ],
)
def test_fastdds_profile_is_set_under_the_names_of_the_distribution(monkeypatch, distro, given, wanted):
    pytest.importorskip("launch.actions", reason="launch is not on PyPI")
    pytest.importorskip("launch_ros.actions", reason="launch_ros is not on PyPI")
    from launch import LaunchContext
    from launch.utilities import perform_substitutions

    for name in ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"ROS_DISTRO": distro, **given}.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("frontend_launch", ROOT / "launch" / "frontend.launch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    context = LaunchContext()
    actions = module._large_images(context)
    assert [perform_substitutions(context, a.name).partition("_")[0] for a in actions] == wanted
    if given and wanted:
        assert perform_substitutions(context, actions[0].value) == "mine.xml"


RUN = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource

path, *arguments = sys.argv[1:]
source = PythonLaunchDescriptionSource(path)
arguments = [tuple(a.split(":=", 1)) for a in arguments]
service = LaunchService()
service.include_launch_description(
    LaunchDescription([IncludeLaunchDescription(source, launch_arguments=arguments)])
)
sys.exit(service.run())
"""


def launched(file, arguments, domain, folder):
    """A running launch of the installed package; skips where launch or the package is not there."""
    pytest.importorskip("launch.actions", reason="launch is not on PyPI")
    pytest.importorskip("launch_ros.actions", reason="launch_ros is not on PyPI")
    from ament_index_python.packages import PackageNotFoundError, get_package_share_directory
    from ros_helpers import Process, environment

    try:
        share = Path(get_package_share_directory("vslam_features"))
    except PackageNotFoundError:
        pytest.skip("the package is not installed (colcon build, then source install/setup.bash)")
    script = folder / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), str(share / "launch" / file), *arguments]
    return Process(command, environment(domain, folder / "log"), folder)


def wait_for(process, text):
    end = time.monotonic() + 30
    while text not in process.output and time.monotonic() < end:
        time.sleep(0.1)
    assert text in process.output, process.output


@pytest.mark.slow
def test_launch_runs_the_nodes(domain, tmp_path):
    from vslam_features.replay.bag_writer import write_bag

    pytest.importorskip("rclpy")
    from ros_helpers import sequence

    bag = write_bag(tmp_path / "bag", sequence(4))
    with launched("looper.launch.py", [f"bag:={bag}"], domain, tmp_path) as process:
        wait_for(process, "12 messages played")
        time.sleep(0.5)
        assert process.stop() == 0
    assert "image: /camera/camera/infra1/image_rect_raw" in process.output
    assert process.output.count("process has finished cleanly") == 2
    assert "Traceback" not in process.output


@pytest.mark.slow
def test_launch_plays_an_image_folder_to_any_camera(domain, tmp_path):
    images = tmp_path / "2024"
    images.mkdir()
    for i in range(3):
        cv2.imwrite(str(images / f"{i}.png"), np.full((48, 64), 50 * i, np.uint8))
    with launched("realsense.launch.py", [f"bag:={images}"], domain, tmp_path) as process:
        wait_for(process, "3 messages played")
        assert process.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("params_file:=/nope.yaml", "params_file: /nope.yaml is not a file"),
        ("rviz:=maybe", '"maybe" is not valid'),
        ("map_path:=/no/such/x.vmap", "the front-end ended with exit code 1"),
    ],
)
def test_launch_fails_visibly(domain, tmp_path, argument, text):
    with launched("looper.launch.py", [argument], domain, tmp_path) as process:
        assert process.wait() == 1
    assert text in process.output and "Traceback" not in process.output
