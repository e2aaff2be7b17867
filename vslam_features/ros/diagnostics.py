"""``/diagnostics``: what the node does, once a second, as ``node: subcomponent``."""

from __future__ import annotations

from collections.abc import Callable

from diagnostic_msgs.msg import DiagnosticArray

from ..frontend import FrontEnd
from ..running_map import MapStatus
from ..types import Status
from .diagnostic_report import ERROR, OK, WARN, Report
from .inputs import Inputs, Topic
from .map_diagnostics import MapDiagnostics
from .model_diagnostics import ModelDiagnostics
from .pairing import Pairing
from .pipeline import Pipeline
from .statistics import PAIR_STAGES, Stage, Statistics

SILENT_S = 2.0
"""An input without a message for longer than this is reported."""

STAGES = ("decode", "describe", "match", "global", "retrieve", "verify")
"""Always reported; other stages once they have run or failed."""

EMPTY_RATIO = 0.5
"""A larger share of track pairs without a match is reported."""


class Diagnostics:
    """Builds the reports of a configured node; remembers the last counts to tell what is new."""

    def __init__(self, name: str, statistics: Statistics, frontend: FrontEnd, map_status: Callable[[], MapStatus]):
        self._name, self._statistics, self._frontend, self._map_status = name, statistics, frontend, map_status
        self._map, self._models = MapDiagnostics(), ModelDiagnostics()
        self._last: dict[str, int] = {}

    def message(
        self, stamp, state: str, pairing: Pairing, pipeline: Pipeline, inputs: Inputs | None
    ) -> DiagnosticArray:
        """All statuses. ``stamp``: a Time message; ``state``: of the lifecycle; ``inputs`` None: not active."""
        with self._statistics.lock:
            reports = [
                self._inputs(state, inputs),
                self._frames(pairing, pipeline),
                *map(self._stage, STAGES),
                self._map.report(self._map_status(), self._statistics, pipeline.keyframes.counts),
                *self._models.reports(self._frontend.models.health(), self._frontend.warning),
            ]
            reports += map(self._stage, sorted(set(self._statistics.stages) - set(STAGES)))
        return _array(stamp, self._name, reports)

    def _new(self, key: str, value: int) -> int:
        """Increase since the last message; topics count anew with each activation."""
        last, self._last[key] = self._last.get(key, 0), value
        return value - last if value >= last else value

    def _inputs(self, state: str, inputs: Inputs | None) -> Report:
        report = Report("inputs", "receiving" if inputs else f"not subscribed: {state}")
        report.add(state=state, paused=bool(inputs and inputs.paused))
        for topic in inputs.topics if inputs else []:
            publishers = inputs.publishers(topic)
            self._check(report, topic, publishers)
            report.add(
                **{
                    f"{topic.label}.topic": topic.name,
                    f"{topic.label}.qos": topic.qos,
                    f"{topic.label}.publishers": publishers,
                    f"{topic.label}.received": topic.received,
                    f"{topic.label}.rate_hz": topic.rate.value(),
                    f"{topic.label}.silent_s": topic.silent_s(),
                    f"{topic.label}.incompatible_qos": topic.incompatible,
                    f"{topic.label}.rejected": topic.rejected,
                }
            )
        if inputs and inputs.paused:
            report.found(OK, "paused: images are ignored until ~/pause is called with false")
        if inputs and inputs.other_body:
            report.found(WARN, inputs.other_body)
        return report

    def _check(self, report: Report, topic: Topic, publishers: int) -> None:
        where = f"{topic.name} ({publishers} publishers, we ask for {topic.qos})"
        silent = topic.silent_s() > SILENT_S
        if self._new(f"{topic.label}.incompatible", topic.incompatible) or (
            topic.incompatible and publishers and silent
        ):
            report.found(ERROR, f"{topic.label}: a publisher's QoS does not fit on {where}")
        if topic.label == "camera_info" and topic.last is None:
            report.found(WARN, f"no camera_info yet on {where}: uncalibrated")
        elif silent:
            hint = "; check the remapping" if publishers == 0 else ""
            level = ERROR if topic.label == "image" else WARN
            report.found(level, f"{topic.label}: nothing for {topic.silent_s():.0f} s on {where}{hint}")
        if self._new(f"{topic.label}.rejected", topic.rejected):
            report.found(WARN, f"{topic.label}: {topic.last_error}")

    def _frames(self, pairing: Pairing, pipeline: Pipeline) -> Report:
        s, slot, counts = self._statistics, pipeline.frames.counts, pairing.counts
        report = Report("frames", "keeping up")
        report.add(
            received=slot.received + counts.out_of_order + pairing.pending,
            processed=slot.processed,
            dropped=slot.dropped + counts.out_of_order,
            waiting=slot.waiting + pairing.pending,
            missing=counts.missing,
            gaps=counts.gaps,
            out_of_order=counts.out_of_order,
            resets=s.resets,
            jumps_back=counts.jumps,
            rate_hz=s.frame_rate.value(),
            uncalibrated=s.uncalibrated,
            without_pose=s.without_pose,
            info_inexact=counts.info_inexact,
            pose_resets=pairing.pose_resets,
        )
        together = self._new("together", counts.together)
        if new := self._new("dropped", slot.dropped):
            late = "complete at once with newer ones, since camera_info or pose came late"
            report.found(WARN, f"{new} images dropped: {late if together else 'too slow for the image rate'}")
        if new := self._new("out_of_order", counts.out_of_order):
            report.found(WARN, f"{new} images dropped: their stamps do not go on from those before")
        if new := self._new("missing", counts.missing):
            report.found(WARN, f"{new} images missing in the input")
        if self._new("gaps", counts.gaps):
            report.found(WARN, f"a gap of {counts.last_gap_s:.0f} s between the stamps of two images")
        if new := self._new("says_uncalibrated", s.says_uncalibrated):
            report.found(WARN, f"{new} images without calibration: camera_info says uncalibrated (K is 0)")
        if new := self._new("pose_missing", counts.pose_missing):
            report.found(WARN, f"{new} images without a pose")
        if new := self._new("pose_rejected", counts.pose_rejected):
            report.found(WARN, f"{new} images without a pose: an error in the synchroniser, see the log")
        if new := self._new("pose_resets", pairing.pose_resets):
            report.found(WARN, f"poses began anew {new} times: another frame_id, or a jump back in time")
        if new := self._new("resets", s.resets):
            report.found(WARN, f"{new} resets: the keyframes were forgotten")
        return report

    def _stage(self, name: str) -> Report:
        stage = self._statistics.stages.get(name, Stage())
        report = Report(name, "running" if stage.runs else "not used yet")
        plugin, runtime = self._plugin(name)
        report.add(
            plugin=plugin,
            runtime=runtime,
            runs=stage.runs,
            latency_p50_ms=stage.percentile(50),
            latency_p95_ms=stage.percentile(95),
            faults=stage.faults,
            last_fault=stage.last_fault,
        )
        if name in PAIR_STAGES:
            ratio, statuses = self._statistics.zero_match_ratio(name), self._statistics.pair_statuses(name)
            report.add(zero_match_ratio=ratio, non_finite=statuses[Status.NON_FINITE])
            report.add(**{f"status.{s.label}": n for s, n in sorted(statuses.items())})
            if name == "match" and ratio > EMPTY_RATIO:
                report.found(WARN, f"{ratio:.0%} of the latest pairs have no match")
        new_runs, new = self._new(f"{name}.runs", stage.runs), self._new(f"{name}.faults", stage.faults)
        if new:
            report.found(ERROR if new >= new_runs else WARN, f"{new} faults, the last: {stage.last_fault}")
        return report

    def _plugin(self, stage: str) -> tuple[str, str]:
        """Name and active runtime of what runs in a stage."""
        f, c = self._frontend, self._frontend.config
        if stage == "describe":
            return c.features.name, f.features.runtime
        if stage in ("match", "verify"):
            return c.matcher.name, f.matcher.matcher.runtime
        if stage in ("global", "retrieve") and f.global_descriptor is not None:
            return (
                (c.retrieval.name, f.global_descriptor.runtime)
                if stage == "global"
                else (c.retrieval.index, f.index.runtime)
            )
        return "", ""


def starting_message(stamp, name: str, text: str) -> DiagnosticArray:
    """What a node that is being configured is busy with."""
    report = Report("models", text)
    report.add(state="configuring")
    return _array(stamp, name, [report])


def failed_message(stamp, name: str, text: str) -> DiagnosticArray:
    """Why a node could not be configured: of its models, what is wrong with which, and the next step."""
    report = Report("models", "")
    report.found(ERROR, text)
    report.add(state="failed")
    return _array(stamp, name, [report])


def _array(stamp, name: str, reports: list[Report]) -> DiagnosticArray:
    out = DiagnosticArray(status=[r.message(name) for r in reports])
    out.header.stamp = stamp
    return out
