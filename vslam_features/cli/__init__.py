"""The ``vslam-features`` command."""
