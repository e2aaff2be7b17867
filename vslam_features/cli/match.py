"""``match A B``: what two images have in common."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from .common import add_camera_argument, add_config_arguments, load_config, read_camera
from .match_text import no_stop, text

_PICTURES = (".png", ".jpg", ".jpeg")


def add_parser(subparsers) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "match",
        help="match two images and say why the result is what it is",
        description="Match image A with image B and verify by two-view geometry.",
        epilog="example: vslam-features match a.png b.png --viz matches.png --camera 525,525,319.5,239.5\n"
        "The exit code is 0 whenever the command ran; read the status for the result.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("image0", type=Path, metavar="A", help="current image")
    parser.add_argument("image1", type=Path, metavar="B", help="reference image")
    parser.add_argument("--viz", type=Path, metavar="OUT.png", help="write a picture of the matches (.png or .jpg)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--features", metavar="NAME", help="feature plug-in, e.g. sift or orb")
    parser.add_argument("--matcher", metavar="NAME", help="matcher plug-in, e.g. nearest")
    parser.add_argument(
        "--early-stop-decay",
        type=float,
        metavar="D",
        help="of a matcher that stops early: show the score of each checked layer, and stop with this decay (1: never) "
        "as for a loop candidate; without this option and the next no pair is rejected",
    )
    parser.add_argument(
        "--min-covisibility", type=float, metavar="S", help="of a matcher with a covisibility score: the least one"
    )
    add_camera_argument(parser)
    parser.add_argument("--camera-b", metavar="K.yaml|FX,FY,CX,CY", help="calibration of B where it is another camera")
    add_config_arguments(parser)


def run(args) -> int:
    """Match, print, draw. Raises the package's errors."""
    from ..frontend import FrontEnd
    from ..types import Frame, Status

    _check_picture_path(args.viz)
    chosen = {"features.name": args.features, "matcher.name": args.matcher}
    args.set[:0] = [f"{name}={value}" for name, value in chosen.items() if value]  # options are those of the chosen
    config, _ = load_config(args)
    config = _with_limits(config, args)
    camera = read_camera(args.camera)
    sides = (args.image0, camera), (args.image1, read_camera(args.camera_b, "--camera-b") or camera)
    frames = [Frame(i, "camera", *_read(*side, config)) for i, side in enumerate(sides)]
    front_end = FrontEnd(config.with_values(loops__enabled=False))
    config, limits = front_end.config, front_end.matcher.matcher.stop_limits
    _check_limits(front_end, args)
    start = time.perf_counter()
    features = [front_end.extract(frame) for frame in frames]
    cameras = [frame.camera for frame in frames]
    overlapping = args.early_stop_decay is None and args.min_covisibility is None  # two images are to be matched
    matches = front_end.matcher.match(*features, *cameras, overlapping=overlapping)
    if matches.status is Status.NO_MATCHES:  # one pair: there are no others to tell whether that is probable
        doubt = "no match between two images"
        again = front_end.matcher.match_again(*features, *cameras, doubt=doubt, overlapping=overlapping)
        matches = matches if again is None else again
    elapsed_ms = (time.perf_counter() - start) * 1e3
    result = {
        "status": matches.status.label,
        "image0": str(args.image0),
        "image1": str(args.image1),
        "image_size0": list(frames[0].image_size),
        "image_size1": list(frames[1].image_size),
        "num_keypoints0": len(features[0]),
        "num_keypoints1": len(features[1]),
        "num_matches": len(matches),
        "num_inliers": matches.num_inliers,
        "inlier_ratio": round(matches.num_inliers / len(matches), 4) if len(matches) else None,
        "covisibility": matches.covisibility,
        "stopped_after_layer": matches.stopped_after_layer,
        "layer_scores": [list(pair) for pair in matches.layer_scores],
        "layer_limits": [list(pair) for pair in limits],
        "rejects": not overlapping,
        "model": matches.model,
        "calibrated": all(frame.camera is not None for frame in frames),
        "pose": _pose(matches.pose),
        "hypotheses": [_pose(pose) for pose in matches.hypotheses],
        "features": config.features.name,
        "matcher": config.matcher.name,
        "runtime": matches.runtime,
        "instead": front_end.warning,
        "notes": [h.note for h in front_end.models.health() if h.note],
        "elapsed_ms": round(elapsed_ms, 3),
        "match_ms": round(matches.elapsed_ms, 3),
        "detail": matches.detail or _too_dark(sides, features, config),
    }
    if args.viz:
        _draw(args.viz, frames, features, matches, result)
    print(json.dumps(result, allow_nan=False) if args.json else text(result, args.viz))
    return 0


def _with_limits(config, args):
    """The configuration with the options of rejection that were given. Raises ConfigError where there are none."""
    import dataclasses

    from .. import registry
    from ..errors import ConfigError

    given = {"early_stop_decay": args.early_stop_decay, "min_covisibility": args.min_covisibility}
    given = {name: value for name, value in given.items() if value is not None}
    has = {f.name for f in dataclasses.fields(registry.get("matcher", config.matcher.name).Options)}
    for name in set(given) - has:
        raise ConfigError(
            f"--{name.replace('_', '-')}: matcher {config.matcher.name} has no covisibility score: choose one that "
            "has with --matcher, e.g. lighterglue"
        )
    return config.from_flat({f"matcher.options.{name}": value for name, value in given.items()}, base=config)


def _check_limits(front_end, args) -> None:
    """Raises ConfigError where the matcher that runs cannot follow the options of rejection that were given."""
    from ..errors import ConfigError

    matcher, chosen = front_end.matcher.matcher, front_end.config.matcher
    lacks = ""
    if args.min_covisibility is not None and not matcher.has_covisibility:
        lacks = "--min-covisibility: {} has no covisibility score"
    elif args.early_stop_decay is not None and not matcher.stop_limits:
        lacks = "--early-stop-decay: {} cannot stop early, or its card does not tell after which layers"
    if lacks:
        name = f"matcher {chosen.name} ({chosen.options.get('model', 'without a model')})"
        hint = f"choose one that does, see 'vslam-features models list'; {front_end.warning}".removesuffix("; ")
        raise ConfigError(f"{lacks.format(name)}: {hint}")


def _read(path: Path, camera, config):
    from ..replay.image_source import camera_for, read_any_image

    image = read_any_image(path, config.image_max_value or None)
    return image, camera_for(camera, (image.shape[1], image.shape[0]))


def _too_dark(sides, features, config) -> str:
    """Why an image of 16 bit has no keypoints: cameras of 10 or 12 bit fill the lowest ones, which 8 bit drop."""
    import cv2

    for (path, _), found in zip(sides, features):
        if len(found) or config.image_max_value:
            continue
        samples = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        if samples is not None and samples.dtype == "uint16" and 0 < samples.max() < 16384:
            return (
                f"{path} has 16 bit a sample and none above {samples.max()}, so it is dark; "
                f"say what is white: --set image_max_value={samples.max()}"
            )
    return ""


def _pose(pose) -> dict | None:
    """Camera A in camera B; the translation is a direction unless the scale is known."""
    if pose is None:
        return None
    return {"R": pose.R.round(9).tolist(), "t": pose.t.round(9).tolist(), "scale_known": pose.scale_known}


def _check_picture_path(path: Path | None) -> None:
    """Complain before the work rather than after it."""
    import os

    from ..errors import ImageError

    if path is None:
        return
    if path.suffix.lower() not in _PICTURES:
        raise ImageError(f"--viz {path}: expected a name that ends in {' or '.join(_PICTURES)}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ImageError(f"--viz {path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise ImageError(f"--viz {path}: the folder {folder} cannot be written; choose another one")


def _draw(path: Path, frames, features, matches, r: dict) -> None:
    from ..replay.files import write_whole
    from ..replay.pictures import encode, side_by_side, with_header, with_layer_scores

    points = [f.keypoints[matches.pairs[:, i]] for i, f in enumerate(features)]
    canvas = side_by_side(frames[0].image, frames[1].image, *points, matches.inliers)
    if r["layer_scores"]:
        canvas = with_layer_scores(canvas, r["layer_limits"], r["layer_scores"])
    share = f" ({r['inlier_ratio']:.0%})" if r["inlier_ratio"] is not None else ""
    header = [
        f"{r['status']}: {r['num_inliers']} inliers of {r['num_matches']} matches{share}",
        f"{r['features']} + {r['matcher']}, {r['num_keypoints0']} and {r['num_keypoints1']} keypoints, "
        f"{r['model'] or 'no model'}",
    ]
    if r["covisibility"] is not None:
        stop = f"stopped after layer {r['stopped_after_layer']}" if r["stopped_after_layer"] else no_stop(r)
        header.append(f"covisibility {r['covisibility']:.3f}{f', {stop}' if r['layer_limits'] else ''}")
    write_whole(path, encode(with_header(canvas, header), path.suffix.lower()))
