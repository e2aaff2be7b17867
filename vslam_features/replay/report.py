"""``report.html``: one self-contained file that says in plain words and pictures how a run went."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2
import numpy as np
import yaml

from ..types import PairKind, Status
from . import pictures, plots
from .files import write_whole
from .run_log import PLACES, KeyframeRecord, MatchPoints, PairRecord, RunLog, encode_jpeg

# What a status means, and what to do about it.
MEANING = {
    Status.OK: ("Geometry confirms that both images see the same scene.", ""),
    Status.NO_KEYPOINTS: (
        "One of the images has no keypoints: black, white, blurred or blank.",
        "Look at exposure and lens; lower the detector's threshold.",
    ),
    Status.NO_MATCHES: ("Keypoints, but none correspond.", "Different places, or too large a change of view or light."),
    Status.TOO_FEW_INLIERS: (
        "Correspondences, but too few agree on one motion.",
        "Normal for look-alike candidates. Between consecutive keyframes: too little overlap, blur or texture.",
    ),
    Status.DEGENERATE: (
        "A second motion explains the matches about as well.",
        "Planes and forward motion do this; the matches are usable, the relative pose is not.",
    ),
    Status.NOT_COVISIBLE: ("The matcher says that the images see different places.", ""),
    Status.STOPPED_EARLY: ("The matcher gave up early, as it saw no common place.", ""),
    Status.AMBIGUOUS: (
        "Verified, but another place looks as good, or too few keyframes agree yet.",
        "Not used as a loop. More keyframes, or a pose topic, settle it.",
    ),
    Status.NON_FINITE: (
        "NaN or infinity in a model's output.",
        "A fault of the model on its runtime: 'models verify' with the incident files shows it; take another runtime "
        "or precision.",
    ),
    Status.BACKEND_ERROR: ("A stage failed with an error.", "See the faults above."),
    Status.FAULT_RECOVERED: (
        "The model failed; the fallback repeated the run, and geometry confirms the result.",
        "Check the runtime: 'models verify' with the incident files shows the fault.",
    ),
}


# What --map-mode is, in words.
MAP_MODES = {
    "new": "new: made in this run",
    "continue": "continue: a session was added",
    "localize": "localize: only read; keyframes of this run are not in it",
}


@dataclass(frozen=True)
class Verdict:
    """``level``: good, fair or bad; ``title`` in a few words; ``lines`` in whole sentences."""

    level: str
    title: str
    lines: list[str]


def judge(log: RunLog, numbers: dict) -> Verdict:
    """The run in plain words.

    Bad: incomplete, results lost to faults, false loops, or a map that is not whole. Fair: faults that were made good,
    models that are not verified, many weak pairs, or no place of the map recognised. Else good.
    """
    track = numbers["by_kind"].get("track", {"pairs": 0, "statuses": {}})
    good = sum(track["statuses"].get(s.label, 0) for s in (Status.OK, Status.FAULT_RECOVERED, Status.DEGENERATE))
    share = good / track["pairs"] if track["pairs"] else 1.0
    located = numbers.get("relocalisation")
    images = f"{log.frames} of {many(log.expected, 'image')} processed"
    if not log.expected_known:
        images = f"{many(log.frames, 'image')} processed of a damaged input"
    lines = [f"{images}; {len(log.keyframes)} became {_be(len(log.keyframes), 'a keyframe', 'keyframes')}."]
    if track["pairs"]:
        pairs = many(track["pairs"], "pair")
        lines.append(f"{good} of {pairs} of consecutive keyframes {_be(good, 'is', 'are')} connected ({share:.0%}).")
    lines.append(_located(log, located) if located else _closed(log, numbers["loops"]))
    if log.map is not None:
        lines.append(_mapped(numbers["map"]))
    for e in log.engines:
        if e.faults:
            lines.append(
                f"Model {e.name} failed in {e.faults} of {many(e.runs, 'run')}; the fallback made {e.recovered} good, "
                f"{e.lost} {_be(e.lost, 'is', 'are')} lost."
            )
    truth = numbers.get("loop_truth")
    if truth and truth["queries"]:
        lines.append(
            f"Against the true revisits: recall@1 {truth['recall_at_1']:.1%}, recall@5 {truth['recall_at_5']:.1%} of "
            f"{many(truth['queries'], 'query', 'queries')}; verified true loops: {truth['queries_with_loop']}; "
            f"false loops: {len(truth['false_loops'])}."
        )
    if not log.frames:
        return Verdict("bad", "Nothing was processed", lines)
    if log.incomplete:
        return Verdict("bad", "Partial: the input was not read whole", lines)
    if log.fault_counts or numbers["non_finite"] or any(e.lost for e in log.engines):
        return Verdict("bad", "Finished with faults", lines)
    if log.map is not None and log.map.problems:
        return Verdict("bad", "The map is not whole", lines)
    if truth and truth["false_loops"]:
        return Verdict("bad", "False loops", lines)
    if any(e.faults for e in log.engines):
        return Verdict("fair", "Complete, with faults that the fallback made good", lines)
    if not all(e.linked for e in log.engines):
        return Verdict("fair", "Complete, with models that are not verified", lines)
    if share < 0.9:
        return Verdict("fair", "Complete, with weak links between keyframes", lines)
    if located and not located["keyframes"]:
        return Verdict("fair", "Complete, but no place of the map was recognised", lines)
    return Verdict("good", "Complete", lines)


def _closed(log: RunLog, loops: dict) -> str:
    if not log.candidates:
        return "No earlier place was retrieved, so no loop was tried."
    closing = len({i for i, _ in loops["pairs"]})
    return (
        f"{many(closing, 'keyframe')} closed a loop ({many(loops['verified'], 'verified pair')} of "
        f"{loops['attempted']} tried); {many(loops['ambiguous'], 'pair')} {_be(loops['ambiguous'], 'is', 'are')} "
        f"ambiguous, {loops['gated']} {_be(loops['gated'], 'was', 'were')} impossible by odometry."
    )


def _located(log: RunLog, located: dict) -> str:
    if not log.candidates:
        return "No place of the map was retrieved, so none was tried."
    n, every = located["keyframes"], many(len(log.keyframes), "keyframe")
    first = f", the first in image {located['first'][1]}" if n else ""
    return (
        f"{n} of {every} {_be(n, 'was', 'were')} recognised in the map ({located['share']:.0%}){first}: "
        f"{many(located['verified'], 'verified pair')} of {located['attempted']} tried; "
        f"{many(located['ambiguous'], 'pair')} {_be(located['ambiguous'], 'is', 'are')} ambiguous."
    )


def _mapped(m: dict) -> str:
    before, added = many(m["keyframes_before"], "keyframe"), m["keyframes_after"] - m["keyframes_before"]
    if m["mode"] == "localize":
        return f"The map {m['name']} has {before} and was only read."
    if m["mode"] == "new":
        return f"The map {m['name']} is new, with {many(m['keyframes_after'], 'keyframe')}."
    joined = many(m["loops_with_older_sessions"], "verified pair")
    return (
        f"The map {m['name']} had {before}; session {m['session']} added {added} and is joined to the older ones by "
        f"{joined}."
    )


def many(n: int, word: str, words: str = "") -> str:
    """``1 pair``, ``2 pairs``."""
    return f"{n} {word if n == 1 else words or word + 's'}"


def _be(n: int, one: str, more: str) -> str:
    return one if n == 1 else more


def write_report(path: Path, log: RunLog, numbers: dict) -> Path:
    """Write the report of a run whose ``metrics`` are ``numbers``; all or nothing. Raises OSError."""
    template = (resources.files("vslam_features") / "replay" / "report.html.j2").read_text(encoding="utf-8")
    # The page must open anywhere: everything is inline, nothing is fetched.
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["many"] = many
    html = environment.from_string(template).render(**_context(log, numbers))
    write_whole(Path(path), html.encode())
    return Path(path)


def _context(log: RunLog, numbers: dict) -> dict:
    safe = jinja2.utils.markupsafe.Markup
    track = [p for p in log.pairs if p.kind == PairKind.TRACK]
    consecutive = [p for i, p in enumerate(track) if i == 0 or p.kf_id != track[i - 1].kf_id]
    places, recognised = ("places", "recognised places") if log.localises else ("loops", "verified loops")
    n = numbers
    return {
        "name": log.source.get("name", "run"),
        "source": {k: v for k, v in log.source.items() if v is not None},
        "verdict": judge(log, numbers),
        "incomplete": log.incomplete,
        "map": log.map,
        "map_mode": MAP_MODES.get(log.map.mode, "") if log.map else "",
        "joined": n["map"]["loops_with_older_sessions"] if log.map else 0,
        "first_id": log.first_id,
        "localises": log.localises,
        "instead": log.instead,
        "engines": log.engines,
        "skipped": log.skipped,
        "notes": log.notes,
        "examples": log.examples,
        "faults": log.faults,
        "fault_counts": log.fault_counts,
        "summary": [
            ("images", n["frames"], f"of {log.expected}" if log.expected_known else "the input is damaged"),
            ("keyframes", n["keyframes"], ""),
            ("matches a pair", _number(n["by_kind"].get("track", n)["matches_median"]), "median, consecutive"),
            ("inliers a pair", _number(n["by_kind"].get("track", n)["inliers_median"]), "median, consecutive"),
            *_places(n),
            ("an image takes", *_frame_ms(n)),
        ]
        if log.frames
        else [],
        "timeline": safe(plots.timeline(consecutive)),
        "matrix": safe(plots.loop_matrix(log)),
        "has_descriptors": bool(log.descriptors),
        "trajectory": safe(plots.trajectory(log)),
        "statuses": _statuses(log),
        "groups": [
            ("Worst pairs of consecutive keyframes", "worst", _pictures(log, "worst")),
            (f"Clearest {recognised}", "loops", _pictures(log, "loops")),
            (f"Ambiguous {places}", "ambiguous", _pictures(log, "ambiguous")),
        ],
        "latencies": [
            (stage, _ms(v["p50"]), _ms(v["p95"]), _ms(max(log.latency_ms[stage])), len(log.latency_ms[stage]),
             safe(plots.sparkline(log.latency_ms[stage], log.latency_frame[stage], log.frames)))
            for stage, v in sorted(n["latency_ms"].items(), key=lambda item: _ORDER.get(item[0], 50))
        ],
        "truth": n.get("loop_truth"),
        "models": log.models,
        "libraries": n["provenance"]["libraries"],
        "version": n["provenance"]["version"],
        "run": log.run,
        "config": yaml.safe_dump(log.config, sort_keys=False) if log.config else "",
    }  # fmt: skip


_STAGES = ("describe", "match", "keyframe", "global", "retrieve", "verify")
_ORDER = {name: i for i, name in enumerate(_STAGES)} | {"frame": 99}


def _places(numbers: dict) -> list[tuple]:
    """Cards of what was recognised."""
    if located := numbers.get("relocalisation"):
        share = "-" if located["share"] is None else f"{located['share']:.0%}"
        what = [("relocalised", share, f"{located['keyframes']} of {many(numbers['keyframes'], 'keyframe')}")]
        return [*what, ("ambiguous", located["ambiguous"], "not used")]
    loops = numbers["loops"]
    return [
        ("verified loops", loops["verified"], f"of {loops['attempted']} tried"),
        ("ambiguous", loops["ambiguous"], "not used"),
    ]


def _statuses(log: RunLog) -> list[tuple]:
    """(status, track pairs, other pairs, meaning, advice) of those that occurred, most frequent first."""
    counts = {s: [0, 0] for s in Status}
    for pair in log.pairs:
        counts[pair.status][pair.kind in PLACES] += 1
    rows = [(s.label, *c, *MEANING[s]) for s, c in counts.items() if any(c)]
    return sorted(rows, key=lambda row: -(row[1] + row[2]))


def _pictures(log: RunLog, group: str) -> list[dict]:
    own = {k.id: k for k in log.keyframes}
    out = []
    for pair, points in log.pictured(group):
        now = own[pair.kf_id]
        ref = own.get(pair.ref_kf_id) or log.older.get(pair.ref_kf_id)
        out.append(_picture(pair, points, now, ref or KeyframeRecord(pair.ref_kf_id, 0, "", -1, now.image_size, 0)))
        out[-1]["older"] = pair.ref_kf_id < log.first_id
        if ref is None:  # a recorder of topics never sees keyframes of the map
            out[-1]["keypoints"] = f"{now.num_keypoints} keypoints"
    return out


def _picture(pair: PairRecord, points: MatchPoints, now: KeyframeRecord, ref: KeyframeRecord) -> dict:
    images, scaled = [], []
    for keyframe, p in ((now, points.points), (ref, points.ref_points)):
        image = pictures.decode_jpeg(keyframe.picture, keyframe.image_size)
        scale = np.array([image.shape[1], image.shape[0]]) / np.array(keyframe.image_size, np.float64)
        images.append(image)
        scaled.append((p + 0.5) * scale - 0.5)
    canvas = pictures.side_by_side(*images, *scaled, points.inliers, height=320)
    return {
        "data": base64.b64encode(encode_jpeg(canvas, 78)).decode(),
        "pair": pair,
        "status": pair.status.label,
        "ratio": "" if pair.inlier_ratio is None else f"{pair.inlier_ratio:.0%}",
        "keypoints": f"{now.num_keypoints} and {ref.num_keypoints} keypoints",
        "drawn": len(points.points),
    }


def _frame_ms(numbers: dict) -> tuple[str, str]:
    latency = numbers["latency_ms"]
    for name, what in (("frame", "median"), ("image to keyframe", "till its keyframe came, median")):
        if name in latency:
            return f"{_ms(latency[name]['p50'])} ms", f"{what}; p95 {_ms(latency[name]['p95'])}"
    return "-", "not measured"


def _number(value) -> str:
    return "-" if value is None else f"{value:g}"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
