"""Local feature plug-ins: an image in, keypoints and descriptors out."""
