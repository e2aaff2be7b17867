"""The front-end on any camera.

ros2 launch vslam_features frontend.launch.py image:=/camera/image_rect camera_info:=/camera/camera_info
"""

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
from launch.substitutions import EnvironmentVariable, LaunchConfiguration, PathJoinSubstitution, PythonExpression
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackageShare


def generate_launch_description():
    """See the module docstring; ``ros2 launch vslam_features frontend.launch.py --show-args``."""
    share = FindPackageShare("vslam_features")
    default = PathJoinSubstitution([share, "config", "default.yaml"])
    profile = PathJoinSubstitution([share, "config", "fastdds.xml"])
    arguments = [
        DeclareLaunchArgument("params_file", default_value=default, description="Parameters of the front-end (YAML)."),
        DeclareLaunchArgument("use_sim_time", default_value="false", description="Take time from /clock."),
        DeclareLaunchArgument("namespace", default_value="", description="Namespace of the nodes and topics."),
        DeclareLaunchArgument("map_path", default_value="", description="Map file; empty: as params_file says."),
        DeclareLaunchArgument("rviz", default_value="false", description="Start RViz, too."),
        DeclareLaunchArgument("bag", default_value="", description="Recording or image folder to play; empty: none."),
        DeclareLaunchArgument("image", default_value="image", description="Image topic."),
        DeclareLaunchArgument("camera_info", default_value="camera_info", description="CameraInfo topic."),
        DeclareLaunchArgument("pose", default_value="pose", description="Pose or odometry topic (see pose_type)."),
    ]
    player = Node(
        package="vslam_features",
        executable="player_node",
        name="player",
        namespace=LaunchConfiguration("namespace"),
        parameters=[{"path": LaunchConfiguration("bag")}],
        output="screen",
        condition=IfCondition(PythonExpression(["'", LaunchConfiguration("bag"), "' != ''"])),
    )
    rviz = Node(
        package="rviz2",
        executable="rviz2",
        arguments=["-d", PathJoinSubstitution([share, "config", "frontend.rviz"])],
        parameters=[{"use_sim_time": LaunchConfiguration("use_sim_time")}],
        condition=IfCondition(LaunchConfiguration("rviz")),
    )
    # 64 MB of shared memory: with the default of 512 KB larger images are late or lost.
    large_images = SetEnvironmentVariable(
        "FASTDDS_DEFAULT_PROFILES_FILE", EnvironmentVariable("FASTDDS_DEFAULT_PROFILES_FILE", default_value=profile)
    )
    return LaunchDescription([*arguments, large_images, OpaqueFunction(function=_frontend), player, rviz])


def _frontend(context):
    """The node itself; in a function, since an empty ``map_path`` must not override the one in ``params_file``."""
    parameters = [LaunchConfiguration("params_file"), {"use_sim_time": LaunchConfiguration("use_sim_time")}]
    map_path = LaunchConfiguration("map_path").perform(context)
    if map_path:
        parameters.append({"map_path": map_path})
    frontend = Node(
        package="vslam_features",
        executable="frontend_node",
        name="frontend",
        namespace=LaunchConfiguration("namespace"),
        parameters=parameters,
        remappings=[(name, LaunchConfiguration(name)) for name in ("image", "camera_info", "pose")],
        output="screen",
    )
    # Without its front-end there is nothing left to do, and a supervisor should notice.
    ended = OnProcessExit(target_action=frontend, on_exit=[EmitEvent(event=Shutdown(reason="the front-end ended"))])
    return [frontend, RegisterEventHandler(ended)]
