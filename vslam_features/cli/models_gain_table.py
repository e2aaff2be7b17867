"""The gain table in words and as JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..artifacts.card import ModelCard
from ..export.text_table import aligned
from ..replay.gain import Bar, Overlap, PairScores, Row, Setting
from ..replay.gain_runs import Times

_NAMED = 8


@dataclass(frozen=True)
class Gain:
    """All that was found.

    Args:
        views: what was matched, in words. all_pairs: of those; ``pairs`` may be fewer.
        rows: one a setting; ``configured``: that of the configuration, None where it does not stop.
        bar: what counts as verified.
        plain: what times are compared with, in words. times: None where none were measured.
        truth: the loop matrix. scenes: folders are known to be apart.
    """

    card: ModelCard
    runtime: str
    views: str
    all_pairs: int
    pairs: Sequence[PairScores]
    rows: Sequence[Row]
    configured: Setting | None
    bar: Bar
    plain: str
    times: Times | None
    truth: Path | None
    scenes: bool
    notes: Sequence[str]

    @property
    def title(self) -> str:
        """One line."""
        return f"{self.card.name} on {self.runtime}, {len(self.pairs)} pairs of {self.views}"

    def to_dict(self) -> dict:
        """Plain JSON values; the pairs themselves are in the CSV."""
        ran, times = [pair for pair in self.pairs if pair.ran], self.times
        return {
            "title": self.title,
            "model": self.card.name,
            "runtime": self.runtime,
            "layers": self.card.layers,
            "checked_layers": list(self.card.early_stop_layers),
            "all_pairs": self.all_pairs,
            "pairs": len(self.pairs),
            "pairs_without_scores": dict(Counter(pair.status.label for pair in self.pairs if not pair.ran)),
            "verified": sum(pair.verified for pair in ran),
            "verified_means": str(self.bar),
            "truth": self.truth and str(self.truth),
            "scenes": self.scenes,
            "known": {kind.name.lower(): sum(pair.overlap is kind for pair in ran) for kind in Overlap},
            "verified_apart": sum(pair.verified and pair.overlap is Overlap.APART for pair in ran),
            "plain": self.plain,
            "times": {
                str(layer): {"pairs": cost.pairs, "ms": round(cost.ms, 3), "plain_ms": round(cost.plain_ms, 3)}
                for layer, cost in (times.costs if times else {}).items()
            },
            "timed_pairs_that_stopped_elsewhere": times.strays if times else 0,
            "configured": self.configured and [self.configured.min_covisibility, self.configured.decay],
            "rows": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
        }


def table(gain: Gain, out: Path | None) -> str:
    """The table, what its columns mean, and the lost pairs by name. ``out``: the folder where all is written."""
    layers, marked, apart = gain.card.early_stop_layers, gain.truth is not None, gain.scenes
    head = ["min_cov", "decay", "stopped", *(f"after {layer}" for layer in layers), "passing", "verify"]
    head += ["marked"] * marked + ["apart"] * apart + ["lost", "of verified", "time"]
    lines = [head]
    for row in gain.rows:
        star = "*" if row.setting == gain.configured else ""
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
    result = gain.to_dict()
    return "\n".join([*_before(result), "", aligned(lines), "", *_after(result), *_lost(gain.rows, out)])


def _before(r: dict) -> list[str]:
    some = f", evenly chosen of {r['all_pairs']}" if r["pairs"] < r["all_pairs"] else ""
    lines = [f"{r['title']}{some}"]
    lines.append(f"  {r['layers']} layers, checked after {', '.join(map(str, r['checked_layers']))}")
    lines.append(f"  verified without a stop ({r['verified_means']}): {r['verified']}")
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
        "lost: pairs that verify without a stop and are rejected: by the stop alone ('verify'), the rest by min_cov",
    ]
    if r["configured"]:
        lines.append("*: as configured")
    if r["times"]:
        figures = [
            f"{'no stop' if layer == '0' else f'stop after {layer}'} {c['ms']:.1f}, plain {c['plain_ms']:.1f} "
            f"(n = {c['pairs']})"
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
