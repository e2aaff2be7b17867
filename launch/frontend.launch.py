"""The front-end on any camera.

ros2 launch vslam_features frontend.launch.py image:=/camera/image_rect camera_info:=/camera/camera_info
"""

import os

from launch import LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    OpaqueFunction,
    RegisterEventHandler,
    SetEnvironmentVariable,
)
from launch.conditions import IfCondition
from launch.event_handlers import OnProcessExit
from launch.events import Shutdown
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

SHARE = FindPackageShare("vslam_features")
YES_NO = ["true", "false", "True", "False"]
TOPICS = ("image", "camera_info", "pose")


def generate_launch_description():
    """See the module docstring; ``ros2 launch vslam_features frontend.launch.py --show-args``."""
    default = PathJoinSubstitution([SHARE, "config", "default.yaml"])
    arguments = [
        DeclareLaunchArgument("params_file", default_value=default, description="Parameters of the front-end (YAML)."),
        DeclareLaunchArgument(
            "use_sim_time", default_value="false", choices=YES_NO, description="Take time from /clock."
        ),
        DeclareLaunchArgument("namespace", default_value="", description="Namespace of the nodes and topics."),
        DeclareLaunchArgument("map_path", default_value="", description="Map file; empty: as params_file says."),
        DeclareLaunchArgument("mode", default_value="", description="mapping or localization; empty: as params_file."),
        DeclareLaunchArgument("rviz", default_value="false", choices=YES_NO, description="Start RViz, too."),
        DeclareLaunchArgument("bag", default_value="", description="Recording or image folder to play; empty: none."),
        DeclareLaunchArgument("image", default_value="image", description="Image topic."),
        DeclareLaunchArgument("camera_info", default_value="camera_info", description="CameraInfo topic."),
        DeclareLaunchArgument("pose", default_value="pose", description="Pose or odometry topic (see pose_type)."),
    ]
    rviz = Node(
        package="rviz2",
        executable="rviz2",
        arguments=["-d", PathJoinSubstitution([SHARE, "config", "frontend.rviz"])],
        parameters=[{"use_sim_time": LaunchConfiguration("use_sim_time")}],
        condition=IfCondition(LaunchConfiguration("rviz")),
    )
    functions = [OpaqueFunction(function=f) for f in (_large_images, _frontend, _player)]
    return LaunchDescription([*arguments, *functions, rviz])


def _large_images(context):
    """64 MB of shared memory, unless a profile is set: with the default of 512 KB larger images are late or lost."""
    new, old = "FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE"
    profile = os.environ.get(new) or os.environ.get(old) or PathJoinSubstitution([SHARE, "config", "fastdds.xml"])
    # Humble and Jazzy bring Fast DDS 2, which knows the old name; later ones warn of it.
    names = (new, old) if os.environ.get("ROS_DISTRO") in ("humble", "jazzy") else (new,)
    return [SetEnvironmentVariable(name, profile) for name in names if not os.environ.get(name)]


def _frontend(context):
    """The node itself; in a function, since an empty argument must not override what ``params_file`` says."""
    params_file = LaunchConfiguration("params_file").perform(context)
    if not os.path.isfile(params_file):  # launch_ros would go on with the defaults
        raise RuntimeError(f"params_file: {params_file} is not a file; see config/default.yaml for one")
    parameters = [params_file, {"use_sim_time": LaunchConfiguration("use_sim_time")}]
    for name in ("map_path", "mode"):
        if LaunchConfiguration(name).perform(context):
            parameters.append({name: _text(name)})
    frontend = Node(
        package="vslam_features",
        executable="frontend_node",
        name="frontend",
        namespace=LaunchConfiguration("namespace"),
        parameters=parameters,
        remappings=_remappings(),
        output="screen",
        # With 5 and 5 s, launch's own, a slow disk would cost the keyframes that still wait for it.
        sigterm_timeout="60",
        sigkill_timeout="15",
    )
    return [frontend, RegisterEventHandler(OnProcessExit(target_action=frontend, on_exit=_ended))]


def _ended(event, context):
    """Without its front-end there is nothing left to do, and a supervisor should notice by the exit code."""
    if event.returncode != 0 and not context.is_shutdown:
        raise RuntimeError(f"the front-end ended with exit code {event.returncode}")
    return [EmitEvent(event=Shutdown(reason="the front-end ended"))]


def _player(context):
    """Plays ``bag``, where it is given; images of a folder come on the topic that the front-end listens to."""
    if not LaunchConfiguration("bag").perform(context):
        return []
    player = Node(
        package="vslam_features",
        executable="player_node",
        name="player",
        namespace=LaunchConfiguration("namespace"),
        parameters=[{"path": _text("bag")}],
        remappings=_remappings(),
        output="screen",
    )
    return [player]


def _text(name):
    """An argument as text, whatever YAML would make of it (``bag:=2024``)."""
    return ParameterValue(LaunchConfiguration(name), value_type=str)


def _remappings():
    return [(name, LaunchConfiguration(name)) for name in TOPICS]
