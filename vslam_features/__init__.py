"""vslam_features: the visual front-end of a SLAM system that never fails silently."""

__version__ = "0.1.0"
