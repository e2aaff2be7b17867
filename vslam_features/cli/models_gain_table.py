"""The gain table in words and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..export.text_table import aligned
from ..replay.gain import Overlap, PairScores, Row

_NAMED = 8


def facts(card, runtime: str, args, views, scores, rows, configured, plain: str, times) -> dict:
    """Plain JSON values of all that was found; the pairs themselves are in the CSV."""
    ran = [pair for pair in scores if pair.ran]
    what = f"{len(views)} keyframes of {args.map.name}" if args.map else f"{len(views)} images"
    costs = {} if times is None else times.costs
    return {
        "title": f"{card.name} on {runtime}, {len(scores)} pairs of {what}",
        "model": card.name,
        "runtime": runtime,
        "layers": card.layers,
        "checked_layers": list(card.early_stop_layers),
        "views": len(views),
        "all_pairs": len(views) * (len(views) - 1) // 2,
        "pairs": len(scores),
        "pairs_without_scores": _statuses(pair for pair in scores if not pair.ran),
        "verified": sum(pair.verified for pair in ran),
        "truth": args.truth and str(args.truth),
        "scenes": args.scenes,
        "known": {kind.name.lower(): sum(p.overlap is kind for p in ran) for kind in Overlap},
        "verified_apart": sum(pair.verified and pair.overlap is Overlap.APART for pair in ran),
        "plain": plain,
        "times": {
            str(layer): {"pairs": c.pairs, "ms": round(c.ms, 3), "plain_ms": round(c.plain_ms, 3)}
            for layer, c in costs.items()
        },
        "timed_pairs_that_stopped_elsewhere": 0 if times is None else times.strays,
        "configured": configured and [configured.min_covisibility, configured.decay],
        "rows": [row.to_dict() for row in rows],
        "notes": list(views.notes),
    }


def table(result: dict, rows: Sequence[Row], scores: Sequence[PairScores], out: Path | None) -> str:
    """The table, what its columns mean, and the lost pairs by name."""
    layers = result["checked_layers"]
    marked, apart = result["truth"] is not None, result["scenes"]
    head = ["min_cov", "decay", "stopped", *(f"after {layer}" for layer in layers), "passing", "verify"]
    head += ["marked"] * marked + ["apart"] * apart + ["lost", "of verified", "time"]
    lines = [head]
    for row in rows:
        star = "*" if result["configured"] == [row.setting.min_covisibility, row.setting.decay] else ""
        cells = [
            f"{row.setting.min_covisibility:g}{star}",
            f"{row.setting.decay:g}",
            _percent(row.num_stopped, row.pairs),
        ]
        cells += [str(row.stopped[layer]) for layer in layers]
        cells += [f"{len(row.hasty)} ({_percent(len(row.hasty), row.pairs)})", str(_count(row.hasty, verified=True))]
        cells += [str(_count(row.hasty, Overlap.MARKED))] * marked + [str(_count(row.hasty, Overlap.APART))] * apart
        cells += [str(len(row.lost)), _percent(len(row.lost), row.verified)]
        lines.append([*cells, "-" if row.time is None else f"{row.time - 1:+.1%}"])
    return "\n".join([*_before(result), "", aligned(lines), "", *_after(result), *_lost(rows, out)])


def _before(r: dict) -> list[str]:
    some = f", evenly chosen of {r['all_pairs']}" if r["pairs"] < r["all_pairs"] else ""
    lines = [f"{r['title']}{some}"]
    lines.append(f"  {r['layers']} layers, checked after {', '.join(map(str, r['checked_layers']))}")
    lines.append(f"  verified by geometry without a stop: {r['verified']}")
    if r["truth"]:
        lines.append(
            f"  marked as overlapping in {r['truth']}: {r['known']['marked']}; the other pairs may overlap too"
        )
    if r["scenes"]:
        wrong = f"; {r['verified_apart']} of them verify, wrongly" if r["verified_apart"] else ""
        lines.append(f"  apart, of different scenes, known not to overlap: {r['known']['apart']}{wrong}")
    if r["pairs_without_scores"]:
        counts = ", ".join(f"{count} {status}" for status, count in r["pairs_without_scores"].items())
        lines.append(f"  left out, the matcher gave no scores: {counts}")
    return [*lines, *(f"  note: {note}" for note in r["notes"])]


def _after(r: dict) -> list[str]:
    lines = [
        "passing: stopped, although the score at the end would pass min_cov (min_covisibility); of these, how many "
        "verify" + ", are marked" * bool(r["truth"]) + ", are apart" * r["scenes"],
        "lost: pairs that verify without a stop, and do not get that far with it or fail min_cov at the end",
    ]
    if r["configured"]:
        lines.append("*: as configured")
    if r["times"]:
        figures = [
            f"{'no stop' if layer == '0' else f'stop after {layer}'} {c['ms']:.1f}, plain {c['plain_ms']:.1f} "
            f"({c['pairs']} pairs)"
            for layer, c in r["times"].items()
        ]
        lines.append(f"time: of the matcher over all pairs, against {r['plain']}")
        lines.append(f"  measured in turns, medians in ms: {'; '.join(figures)}")
    if strays := r["timed_pairs_that_stopped_elsewhere"]:
        lines.append(f"  {strays} of the timed pairs stopped elsewhere than their scores say: they lie at a limit")
    return lines


def _lost(rows: Sequence[Row], out: Path | None) -> list[str]:
    """The verified pairs that each setting loses, by name, the first few of each."""
    lines = []
    for row in (row for row in rows if row.lost):
        names = ", ".join(" - ".join(pair.names) + _remark(pair) for pair in row.lost[:_NAMED])
        more = len(row.lost) - _NAMED
        lines.append(f"  {row.setting}: {names}" + (f", and {more} more" if more > 0 else ""))
    if not lines:
        return ["no verified pair is lost"]
    where = f"all in {out}" if out else "all with --out or --json"
    return [f"verified pairs that are lost at min_cov/decay ({where}):", *lines]


def _remark(pair: PairScores) -> str:
    return "" if pair.overlap is Overlap.UNKNOWN else f" ({pair.overlap.value})"


def _count(pairs: Sequence[PairScores], kind: Overlap | None = None, verified: bool = False) -> int:
    return sum((kind is None or p.overlap is kind) and (p.verified or not verified) for p in pairs)


def _percent(count: int, of: int) -> str:
    return f"{count / of:.2%}" if of else "-"


def _statuses(pairs) -> dict[str, int]:
    counts: dict[str, int] = {}
    for pair in pairs:
        counts[pair.status.label] = counts.get(pair.status.label, 0) + 1
    return counts
