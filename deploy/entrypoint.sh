#!/bin/bash
# Entry point of the images: the environment of ROS and of this package, then whatever is to run.
. "/opt/ros/${ROS_DISTRO}/setup.bash"
. /opt/vslam_ws/install/setup.bash
exec "$@"
