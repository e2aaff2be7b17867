"""The groups of the configuration: documented, checked fields (see ``config.py``)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .options import option, plugin_name, plugin_options


@dataclass(frozen=True)
class FeaturesConfig:
    """Local features."""

    name: str = plugin_name("features", "xfeat", "Feature plug-in.")
    max_keypoints: int = option(2048, "Keypoints kept an image, best first.", low=1, high=100_000)
    long_side: int = option(
        640, "Images are searched at this long side in pixels (never enlarged); 0: native size.", low=0, high=16384
    )
    fp16: str = option(
        "lossless",
        "Keyframe descriptors in fp16: only if the round trip is exact, always, or never.",
        choices=("lossless", "always", "never"),
    )
    options: dict = plugin_options("features")


@dataclass(frozen=True)
class MatcherConfig:
    """Correspondences between two images."""

    name: str = plugin_name(
        "matcher", "lighterglue", "Matcher plug-in; where only the features are set, the one that suits them."
    )
    options: dict = plugin_options("matcher")


@dataclass(frozen=True)
class GeometryConfig:
    """Verification of correspondences by two-view geometry."""

    solver: str = option(
        "auto", "Robust solver; auto takes poselib where it is installed.", choices=("auto", "poselib", "opencv")
    )
    threshold_px: float = option(
        1.0, "Inlier threshold, pixels of the searched image (see features.long_side).", low=0.05, high=50.0
    )
    min_inliers: int = option(15, "Fewer inliers than this verify nothing.", low=5, high=10_000)
    min_inlier_ratio: float = option(0.15, "Smaller inlier shares of the matches verify nothing.", low=0.0, high=1.0)
    max_iterations: int = option(10_000, "Most RANSAC iterations.", low=10, high=1_000_000)
    confidence: float = option(0.9999, "RANSAC confidence.", low=0.5, high=0.999999)
    check_degenerate: bool = option(True, "Look for a second pose that explains a calibrated pair as well.")
    seed: int = option(0, "Seed of the solver: the same seed gives the same result.", low=0, high=2**31 - 1)


@dataclass(frozen=True)
class KeyframesConfig:
    """Which frames become keyframes."""

    every: int = option(0, "Each n-th frame is a keyframe; 0: by motion as below.", low=0, high=100_000)
    translation_m: float = option(0.3, "With a pose: new keyframe after this translation.", low=0.0, high=1e4)
    rotation_deg: float = option(10.0, "With a pose: new keyframe after this rotation.", low=0.0, high=180.0)
    min_shared_ratio: float = option(
        0.6,
        "Without a pose: new keyframe when fewer keypoints match the last one than this share of the matches that "
        "the first frame after it had.",
        low=0.0,
        high=1.0,
    )
    parallax_ratio: float = option(
        0.05,
        "Without a pose: new keyframe when matches moved by this share of the image diagonal (median).",
        low=0.0,
        high=1.0,
    )
    max_interval_s: float = option(
        5.0, "After this time a fifth of the motion makes a new keyframe; 0: never.", low=0.0, high=1e6
    )
    match_last: int = option(1, "A new keyframe is matched with this many keyframes before it.", low=1, high=50)


@dataclass(frozen=True)
class RetrievalConfig:
    """Recognition of places by a global descriptor."""

    name: str = plugin_name("global", "vlad", "Global descriptor plug-in.")
    options: dict = plugin_options("global")
    index: str = plugin_name(
        "index",
        "flat",
        "Index plug-in, both exact; faiss takes half the memory (17 KB a keyframe with megaloc, flat 34 KB).",
    )
    top_k: int = option(5, "Candidates retrieved for a keyframe.", low=1, high=1000)
    min_similarity: float = option(-1.0, "Candidates of smaller cosine are left out.", low=-1.0, high=1.0)
    exclude_s: float = option(10.0, "Keyframes younger than this are no candidates.", low=0.0, high=1e6)
    exclude_frames: int = option(
        0, "Candidates are at least this many keyframes older (for stamps that are not time).", low=0, high=1_000_000
    )


@dataclass(frozen=True)
class LoopsConfig:
    """Verification of loop candidates."""

    enabled: bool = option(True, "Search for loops at all.")
    verify: int = option(3, "The best n candidates are verified by matching and geometry.", low=1, high=1000)
    min_inliers: int = option(0, "Fewer inliers verify no loop; 0: as the matcher needs.", low=0, high=10_000)
    min_inlier_share: float = option(
        -1.0,
        "Without a pose: inliers on a smaller share of the keypoints (as look-alike places have) verify no loop; "
        "-1: as the matcher needs.",
        low=-1.0,
        high=1.0,
    )
    place_radius: int = option(
        10, "Keyframes no further apart than this (in count) are the same place.", low=1, high=1_000_000
    )
    ambiguity_ratio: float = option(
        0.8, "Ambiguous when a different place has this share of the best one's inliers.", low=0.0, high=1.0
    )
    consensus: int = option(
        2,
        "Without a pose: a loop is confirmed when this many keyframes of the last consensus_window agree.",
        low=1,
        high=100,
    )
    consensus_window: int = option(3, "Consecutive keyframes looked at for the consensus.", low=1, high=100)
    pose_gate_m: float = option(
        3.0, "With poses: loops longer than this plus the drift below are impossible; 0: no gate.", low=0.0, high=1e6
    )
    pose_gate_deg: float = option(
        20.0, "With poses: a loop whose rotation differs more from odometry is not confirmed.", low=0.0, high=180.0
    )
    pose_gate_drift: float = option(0.05, "Odometry drift allowed for, metres a metre travelled.", low=0.0, high=1.0)

    def resolved(self, loop_inliers: int, loop_share: float) -> LoopsConfig:
        """The same with what the matcher needs (``Matcher.loop_inliers``, ``loop_share``) where it is left to it."""
        inliers = self.min_inliers or loop_inliers
        share = self.min_inlier_share if self.min_inlier_share >= 0 else loop_share
        return replace(self, min_inliers=inliers, min_inlier_share=share)


@dataclass(frozen=True)
class RuntimeConfig:
    """What runs the learned models."""

    name: str = plugin_name("runtime", "onnxruntime", "Runtime plug-in; fake injects faults for tests.")
    device: str = option(
        "cpu",
        "Where: cpu; with onnxruntime also cuda, tensorrt, coreml, openvino; with openvino also gpu, npu, auto; "
        "tensorrt takes cuda only. A number picks one of several: cuda:1.",
    )
    precision: str = option(
        "fp32", "Variant of the models that is loaded, as built by models build.", choices=("fp32", "fp16")
    )
    strict: bool = option(
        True, "Refuse to start where the device is not to be had; false: run on the CPU instead, and say so."
    )
    threads: int = option(0, "Threads of a model; 0: all cores.", low=0, high=1024)
    fallback: str = option(
        "reference",
        "What repeats a run that failed: reference is the fp32 model on ONNX Runtime's CPU without graph optimisation.",
        choices=("reference", "none"),
    )
    options: dict = plugin_options("runtime")


@dataclass(frozen=True)
class ModelsConfig:
    """Which model files may run, and what is watched while they do."""

    if_missing: str = option(
        "classical",
        "Where the file of a model is not on this machine: go on with sift, nearest and vlad, with a warning, or stop.",
        choices=("classical", "error"),
    )
    allow_unverified: bool = option(
        False, "Run models that failed the comparison with their reference. Their results are worth what they are."
    )
    gate_s: float = option(
        120.0, "Most seconds that the comparison of a model with its reference takes at start.", low=1.0, high=1e5
    )
    zero_matches: int = option(
        1,
        "After so many keyframes in a row without any match to the one before, though both images look alike, or "
        "images in a row without a keypoint, though they have texture, the fallback is asked; 0: never.",
        low=0,
        high=1000,
    )
    alike: float = option(
        0.75, "Two images look alike from this correlation of the parts of their thumbnails on.", low=0.0, high=1.0
    )
    incidents: int = option(20, "Inputs of failed runs kept as files; 0: none.", low=0, high=10_000)
    incidents_mb: float = option(100.0, "Most megabytes that they take.", low=0.0, high=1e6)


@dataclass(frozen=True)
class MapConfig:
    """How the map is kept (which one: map_path and mode below)."""

    cache_mb: int = option(
        128, "Megabytes of keyframes that are kept in memory; older ones are read from the file.", low=1, high=100_000
    )
    queue: int = option(64, "Keyframes that may wait for the disk; beyond, new ones wait.", low=1, high=10_000)
    keep_sessions: int = option(
        5, "With an empty map_path: files of earlier runs that are kept beside the one of now.", low=0, high=1_000_000
    )
