"""Matcher plug-ins: two sets of features in, correspondences out."""
