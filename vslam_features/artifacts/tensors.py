"""Our tensors: which a role has, of what type, and with how many axes."""

from __future__ import annotations

from ..errors import ModelFileError
from ..runtimes.base import TensorSpec
from .stop_rule import NEVER

_SIDES = (0, 1)
# Inputs of a role by our names -> ranks that a file may have beside ours, whose axes of length 1 are left out.
INPUTS = {
    "features": {"image": (4, 3), "max_keypoints": (1, 0)},
    "global": {"image": (4, 3)},
    "matcher": {
        **{f"{name}{i}": ranks for name, ranks in (("keypoints", (2,)), ("image_size", (1,))) for i in _SIDES},
        **{f"descriptors{i}": (3, 2) for i in _SIDES},
        "min_covisibility": (0,),
        "early_stop_decay": (0,),
    },
}
# A file need not take these; a matcher that takes those of ``NEVER`` gets them where the caller gives none.
OPTIONAL = {"max_keypoints", "image_size0", "image_size1", *NEVER}
FLOATS = (
    *("image", "keypoints", "descriptors", "scores", "descriptor"),
    *("mscores0", "covisibility_score", "layer_scores"),
)
WHOLE = ("matches0", "stopped_after_layer")
RANKS = {
    **{"keypoints": 2, "scores": 1, "descriptor": 1, "matches0": 1, "mscores0": 1, "layer_scores": 1},
    **{"covisibility_score": 0, "stopped_after_layer": 0},
}


def check_spec(field: str, name: str, theirs: str, spec: TensorSpec, ranks: tuple[int, ...] | None, where: str) -> None:
    """Raises ModelFileError where a tensor of a file cannot be ours, as far as its type and shape say.

    Args:
        field: ``inputs`` or ``outputs``. name, theirs: our name and the file's.
        ranks: numbers of axes that it may have, without axes of length 1 in front; None: any.
        where: the file, for messages.
    """
    text = f"{where}: {field[:-1]} '{theirs}', our '{name}', is {spec.dtype} {spec.shape}"
    kinds = "f" if name.rstrip("01") in FLOATS or name in FLOATS else "i" if name in WHOLE else "fiub"
    if spec.dtype.kind not in kinds:
        expected = "floats" if kinds == "f" else "whole numbers"
        raise ModelFileError(f"{text}, expected {expected}: see '{field}' of its card")
    if spec.shape is None or ranks is None:
        return
    extra = len(spec.shape) - max(ranks)
    if len(spec.shape) < min(ranks) or any(s not in (1, None) for s in spec.shape[: max(extra, 0)]):
        axes = " or ".join(map(str, ranks))
        raise ModelFileError(f"{text}, expected {axes} axes: see '{field}' and 'layouts' of its card")
    if name.startswith("keypoints"):
        if spec.shape[-1] not in (2, None):
            raise ModelFileError(f"{text}, expected x and y in the last axis: see '{field}' of its card")
        if field == "inputs" and spec.shape[-2] is not None:
            raise ModelFileError(
                f"{text}: it takes exactly {spec.shape[-2]} keypoints an image, and images have any number: export "
                "it with a dynamic number of keypoints"
            )
