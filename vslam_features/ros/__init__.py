"""ROS 2 nodes and message codecs. Only this package imports rclpy."""
