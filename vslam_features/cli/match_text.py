"""The result of ``match`` in words."""

from __future__ import annotations

import math
from pathlib import Path


def text(r: dict, viz: Path | None) -> str:
    """Several lines for people; ``r``: what ``--json`` prints."""
    share = f" ({r['inlier_ratio']:.0%})" if r["inlier_ratio"] is not None else ""
    lines = [f"{r['status']}: {r['num_inliers']} inliers of {r['num_matches']} matches{share}"]
    lines[0] += f", {r['model']}" if r["model"] else ""
    lines[0] += f"; {r['detail']}" if r["detail"] else ""
    for i in "01":
        width, height = r[f"image_size{i}"]
        lines.append(f"  {r[f'image{i}']}: {width}x{height}, {r[f'num_keypoints{i}']} keypoints")
    lines.append(f"  {r['features']} + {r['matcher']} on {r['runtime']}, {r['elapsed_ms']:.0f} ms")
    lines += _covisibility_text(r)
    if r["calibrated"] and r["status"] in ("ok", "fault_recovered", "degenerate"):
        lines.append(f"  pose of A in B: {_pose_text(r)}")
    if viz:
        lines.append(f"  picture: {viz}")
    return "\n".join(lines)


def _covisibility_text(r: dict) -> list[str]:
    """What the matcher says of covisibility, after each layer that it checks."""
    if r["covisibility"] is None:
        return []
    lines, scores = [f"  covisibility {r['covisibility']:.3f}"], dict(r["layer_scores"])
    stopped = r["stopped_after_layer"]
    for layer, limit in r["layer_limits"]:
        missing = "not run" if 0 < stopped < layer else "not told"
        score = f"{scores[layer]:.3f}" if layer in scores else missing
        stop = ": stopped" if layer == stopped else ""
        lines.append(f"    after layer {layer}: {score}, limit {limit:.3f}{stop}")
    if r["layer_limits"] and not r["stopped_after_layer"]:
        lines.append(f"    {no_stop(r)}")
    return lines


def no_stop(r: dict) -> str:
    """Why it did not stop early. Without an option of rejection it could not; loop candidates can."""
    limits, scores = r["layer_limits"], dict(r["layer_scores"])
    if not any(limit for _, limit in limits):
        return "did not stop early, and with limits of 0 it cannot"
    if r["rejects"] and r["status"] == "not_covisible" and not scores:
        return "whether it stopped early is not known: the model does not tell"
    if r["rejects"]:
        return "did not stop early"
    if len(scores) < len(limits):
        return "whether a loop candidate would stop early is not known: the model does not tell all scores"
    after = next((layer for layer, limit in limits if scores[layer] < limit), 0)
    return f"a loop candidate would {f'stop after layer {after}' if after else 'not stop early'}"


def _pose_text(r: dict) -> str:
    """The pose in words, or why there is none."""
    pose, count = r["pose"], len(r["hypotheses"])
    if pose and not any(pose["t"]):
        R = pose["R"]
        # By the sine as well: the cosine alone loses half of the digits near no rotation.
        sine = math.hypot(R[2][1] - R[1][2], R[0][2] - R[2][0], R[1][0] - R[0][1])
        degrees = math.degrees(math.atan2(sine, R[0][0] + R[1][1] + R[2][2] - 1))
        return f"pure rotation by {degrees:.2f} degrees"
    if pose:
        t = ", ".join(f"{v:.3f}" for v in pose["t"])
        return f"t = ({t}){'' if pose['scale_known'] else ', direction only'}"
    if r["status"] == "degenerate":
        if not count:
            return "none, the inliers lie on a line, which determines no motion"
        return f"none, {count} motions explain the matches about equally well"
    return f"none, a plane determines no single pose: {count} {'hypothesis' if count == 1 else 'hypotheses'}"
