"""The front-end on a Looper stereo camera with VIO: frontend.launch.py with its topics and parameters."""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

TOPICS = {
    "image": "/camera/camera/infra1/image_rect_raw",
    "camera_info": "/camera/camera/infra1/camera_info",
    "pose": "/camera/camera/vio_image",
}


def generate_launch_description():
    """See the module docstring; ``ros2 launch vslam_features looper.launch.py --show-args``."""
    share = FindPackageShare("vslam_features")
    parameters = PathJoinSubstitution([share, "config", "looper.yaml"])
    arguments = [
        DeclareLaunchArgument("params_file", default_value=parameters, description="Parameters of the front-end."),
        DeclareLaunchArgument("use_sim_time", default_value="false", description="Take time from /clock."),
        DeclareLaunchArgument("namespace", default_value="", description="Namespace of the nodes and topics."),
        DeclareLaunchArgument("map_path", default_value="", description="Map file; empty: as params_file says."),
        DeclareLaunchArgument("mode", default_value="", description="mapping or localization; empty: as params_file."),
        DeclareLaunchArgument("rviz", default_value="false", description="Start RViz, too."),
        DeclareLaunchArgument("bag", default_value="", description="Recording or image folder to play; empty: none."),
        *(DeclareLaunchArgument(name, default_value=topic) for name, topic in TOPICS.items()),
    ]
    names = ("params_file", "use_sim_time", "namespace", "map_path", "mode", "rviz", "bag", *TOPICS)
    generic = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(PathJoinSubstitution([share, "launch", "frontend.launch.py"])),
        launch_arguments={name: LaunchConfiguration(name) for name in names}.items(),
    )
    return LaunchDescription([*arguments, generic])
