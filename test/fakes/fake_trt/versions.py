"""Which TensorRT the fake is, from ``VSLAM_FAKE_TENSORRT``, and what that version has."""

from __future__ import annotations

import os

VERSION = os.environ.get("VSLAM_FAKE_TENSORRT", "10.13.3.9")
RELEASE = tuple(int(part) for part in VERSION.split(".")[:2])
ELEVEN = RELEASE >= (11, 0)


def since(*release: int) -> bool:
    """True where this version is that one or a later one."""
    return RELEASE >= release


def _numbered(names: str, skip: tuple[int, ...] = ()) -> dict[str, int]:
    numbers = (n for n in range(1000) if n not in skip)
    return dict(zip(names.split(), numbers))


_BUILDER_10 = {
    "FP16": 0, "BF16": 17, "INT8": 1, "DEBUG": 2, "GPU_FALLBACK": 3, "REFIT": 4, "DISABLE_TIMING_CACHE": 5, "TF32": 6,
    "SPARSE_WEIGHTS": 7, "SAFETY_SCOPE": 8, "OBEY_PRECISION_CONSTRAINTS": 9, "PREFER_PRECISION_CONSTRAINTS": 10,
    "DIRECT_IO": 11, "REJECT_EMPTY_ALGORITHMS": 12, "VERSION_COMPATIBLE": 13, "EXCLUDE_LEAN_RUNTIME": 14, "FP8": 15,
    "ERROR_ON_TIMING_CACHE_MISS": 16, "DISABLE_COMPILATION_CACHE": 18, "WEIGHTLESS": 19, "STRIP_PLAN": 19,
    "REFIT_IDENTICAL": 20, "WEIGHT_STREAMING": 21, "INT4": 22, "REFIT_INDIVIDUAL": 23,
}  # fmt: skip
_BUILDER_11 = {
    "DEBUG": 2, "GPU_FALLBACK": 3, "REFIT": 4, "DISABLE_TIMING_CACHE": 5, "EDITABLE_TIMING_CACHE": 26, "TF32": 6,
    "SPARSE_WEIGHTS": 7, "SAFETY_SCOPE": 8, "DIRECT_IO": 11, "VERSION_COMPATIBLE": 12, "EXCLUDE_LEAN_RUNTIME": 13,
    "ERROR_ON_TIMING_CACHE_MISS": 15, "DISABLE_COMPILATION_CACHE": 17, "STRIP_PLAN": 18, "REFIT_IDENTICAL": 19,
    "WEIGHT_STREAMING": 20, "REFIT_INDIVIDUAL": 22, "STRICT_NANS": 23, "MONITOR_MEMORY": 24,
    "DISTRIBUTIVE_INDEPENDENCE": 27,
}  # fmt: skip


def builder_flags() -> dict[str, int]:
    """11.0 took away the precisions and closed the gaps, so that the numbers of the others changed."""
    if ELEVEN:
        return _BUILDER_11
    extra = {"STRICT_NANS": 24, "MONITOR_MEMORY": 25, "FP4": 26, "EDITABLE_TIMING_CACHE": 27}
    extra |= {"DISTRIBUTIVE_INDEPENDENCE": 28}
    return _BUILDER_10 | (extra if since(10, 13) else {})


def network_flags() -> dict[str, int]:
    """11.0 knows no explicit batch any more: STRONGLY_TYPED is bit 0 there, and bit 1 before."""
    if ELEVEN:
        return _numbered("STRONGLY_TYPED PREFER_JIT_PYTHON_PLUGINS PREFER_AOT_PYTHON_PLUGINS")
    names = "EXPLICIT_BATCH STRONGLY_TYPED PREFER_JIT_PYTHON_PLUGINS PREFER_AOT_PYTHON_PLUGINS"
    return _numbered(names if since(10, 13) else "EXPLICIT_BATCH STRONGLY_TYPED")


def data_types() -> dict[str, int]:
    """By number: types of elements."""
    names = "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64 INT4"
    return _numbered(names + (" FP4 E8M0" if since(10, 13) else ""))


def preview_features() -> dict[str, int]:
    """11.0 took away the first."""
    names = "ALIASED_PLUGIN_IO_10_03 RUNTIME_ACTIVATION_RESIZE_10_10"
    if ELEVEN:
        return _numbered(names)
    return _numbered(
        f"PROFILE_SHARING_0806 {names}" if since(10, 13) else "PROFILE_SHARING_0806 ALIASED_PLUGIN_IO_10_03"
    )


def hardware_levels() -> dict[str, int]:
    """On which other GPUs an engine may run."""
    return _numbered("NONE AMPERE_PLUS" + (" SAME_COMPUTE_CAPABILITY" if since(10, 13) else ""))


def layer_types() -> dict[str, int]:
    """By number: kinds of layers."""
    names = (
        "CONVOLUTION CAST ACTIVATION POOLING LRN SCALE SOFTMAX DECONVOLUTION CONCATENATION ELEMENTWISE PLUGIN UNARY "
        "PADDING SHUFFLE REDUCE TOPK GATHER MATRIX_MULTIPLY RAGGED_SOFTMAX CONSTANT IDENTITY PLUGIN_V2 SLICE SHAPE "
        "PARAMETRIC_RELU RESIZE TRIP_LIMIT RECURRENCE ITERATOR LOOP_OUTPUT SELECT FILL QUANTIZE DEQUANTIZE CONDITION "
        "CONDITIONAL_INPUT CONDITIONAL_OUTPUT SCATTER EINSUM ASSERTION ONE_HOT NON_ZERO GRID_SAMPLE NMS "
        "REVERSE_SEQUENCE NORMALIZATION PLUGIN_V3"
    )
    return _numbered(names + (" SQUEEZE UNSQUEEZE CUMULATIVE" if since(10, 13) else ""))
