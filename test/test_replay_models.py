"""Learned models in a replay: what metrics and the report say of those that ran, failed, or were not there."""

import json
import re
from pathlib import Path

import pytest
from helpers import T0, image
from model_helpers import (
    TINY,
    _tiny_cache,  # noqa: F401 (fixtures)
    card,
    features_model,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
    tiny_config,
)
from test_replay import assert_self_contained, made_log, stable

from vslam_features.artifacts.store import content_sha256, model_path
from vslam_features.cli.demo import _models, _problems
from vslam_features.cli.replay import _exit_code
from vslam_features.config import Config
from vslam_features.replay.metrics import metrics
from vslam_features.replay.report import judge, write_report
from vslam_features.replay.run_log import ModelRecord, PairRecord
from vslam_features.replay.runner import replay
from vslam_features.replay.source import Source
from vslam_features.types import Frame, PairKind, Status

FAKE = {"runtime__name": "fake", "loops__enabled": False}
NAN_IN_PAIR_3 = {**FAKE, "runtime__options__only": "tiny-matcher", "runtime__options__nan_calls": "3"}


class Views(Source):
    """Overlapping views of one picture."""

    def __init__(self, count=8):
        super().__init__(Path("views"), Config())
        self._count = count

    def __len__(self):
        return self._count

    def __iter__(self):
        wall = image(200, 500)
        for i in range(self._count):
            self.position = i
            yield Frame(T0 + i * 10**8, "cam", wall[:, 20 * i : 20 * i + 260].copy())

    def describe(self):
        return {"name": self.name}


def run(rate=0.0, **values):
    return replay(Views(), tiny_config(**values), rate=rate)


def track_statuses(log):
    return [p.status for p in log.pairs if p.kind == PairKind.TRACK]


def page(log, tmp_path):
    """The report as text without markup, each run of spaces as one."""
    html = write_report(tmp_path / "report.html", log, metrics(log)).read_text()
    assert_self_contained(html)
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]+>", " ", html, flags=re.DOTALL))


def test_metrics_say_what_each_model_ran_on_and_who_verified_it(tiny, tmp_path):  # noqa: F811
    log = run()
    numbers = metrics(log)
    features, matcher, globals_ = numbers["engines"]
    assert [e["role"] for e in numbers["engines"]] == ["features", "matcher", "global"]
    assert features["name"] == "tiny-features" and features["runtime"].startswith("onnxruntime")
    assert (features["precision"], features["linked"], features["note"]) == ("fp32", True, "")
    assert features["verified"].startswith("passed on ") and features["device"]
    assert features["runs"] == globals_["runs"] == 8 and matcher["runs"] == numbers["pairs"] >= 7
    for engine in numbers["engines"]:
        assert not any(engine[n] for n in ("non_finite", "errors", "empty", "recovered", "lost", "last_fault"))
    assert numbers["provenance"]["instead"] == "" and judge(log, numbers).level == "good"
    text = page(log, tmp_path)
    assert "What went wrong" not in text and "tiny-matcher matcher fp32 onnxruntime" in text


def test_runs_with_faults_give_equal_metrics_at_any_rate(tiny):  # noqa: F811
    """Incidents are kept by time, so that their number is none of what repeats."""
    values = {**FAKE, "runtime__options__only": "tiny-matcher", "runtime__options__nan_calls": "all"}
    first = metrics(run(**values))
    assert first["engines"][1]["non_finite"] == 7 and first["provenance"]["run"]["incidents"]["tiny-matcher"] == 1
    assert "incidents" not in first["engines"][1]
    for rate in (0.0, 5.0):
        assert stable(metrics(run(rate, **values))) == stable(first)
    json.dumps(first, allow_nan=False)


def test_a_fault_that_was_made_good_is_fair_and_told(tiny, tmp_path):  # noqa: F811
    log = run(**NAN_IN_PAIR_3)
    assert track_statuses(log) == [Status.FAULT_RECOVERED if i == 3 else Status.OK for i in range(1, 8)]
    numbers = metrics(log)
    engine = numbers["engines"][1]
    counts = {n: engine[n] for n in ("runs", "non_finite", "errors", "empty", "recovered", "lost")}
    assert counts == {"runs": 7, "non_finite": 1, "errors": 0, "empty": 0, "recovered": 1, "lost": 0}
    assert numbers["statuses"] == {"ok": 6, "fault_recovered": 1} and numbers["non_finite"] == 0
    assert numbers["faults"] == {} and "not finite" in engine["last_fault"]
    verdict = judge(log, numbers)
    assert (verdict.level, verdict.title) == ("fair", "Complete, with faults that the fallback made good")
    assert "Model tiny-matcher failed in 1 of 7 runs; the fallback made 1 good, 0 are lost." in verdict.lines
    text = page(log, tmp_path)
    assert "Model tiny-matcher: 1 failed run (1 not finite, 0 errors, 0 empty where images look alike); " in text
    assert "1 made good by the fallback, 0 lost, 1 incident file kept" in text
    assert "1 of 300 in &#39;mscores0&#39;" in text and "fault_recovered" in text
    row = re.search(r"tiny-matcher matcher fp32 .*? passed on .*? \d{4}-\d\d-\d\d (\d+) (\d+) (\d+) (\d+) ", text)
    assert row and row.groups() == ("7", "1", "1", "0")


def test_a_fault_that_is_lost_is_bad(tiny, tmp_path):  # noqa: F811
    log = run(**NAN_IN_PAIR_3, runtime__fallback="none")
    assert track_statuses(log)[2] is Status.NON_FINITE and not log.fault_counts
    numbers = metrics(log)
    assert (numbers["engines"][1]["lost"], numbers["non_finite"]) == (1, 1)
    assert judge(log, numbers).level == "bad" and judge(log, numbers).title == "Finished with faults"
    assert "0 made good by the fallback, 1 lost" in page(log, tmp_path)


def test_features_that_are_lost_cost_the_frame_and_are_bad(tiny, tmp_path):  # noqa: F811
    values = {**FAKE, "runtime__options__only": "tiny-features", "runtime__options__error_calls": "4"}
    log = run(**values, runtime__fallback="none")
    numbers = metrics(log)
    assert (numbers["frames"], numbers["keyframes"], numbers["faults"]) == (8, 7, {"describe": 1})
    assert (numbers["engines"][0]["errors"], numbers["engines"][0]["lost"]) == (1, 1)
    assert judge(log, numbers).level == "bad"
    text = page(log, tmp_path)
    assert "1 fault in stage describe" in text and "injected error in call 4" in text


def test_no_match_between_images_that_look_alike_is_a_fault(tiny, tmp_path):  # noqa: F811
    values = {**FAKE, "runtime__options__only": "tiny-matcher", "runtime__options__zero_calls": "5"}
    log = run(**values)
    assert track_statuses(log)[4] is Status.FAULT_RECOVERED
    engine = metrics(log)["engines"][1]
    assert (engine["empty"], engine["recovered"], engine["lost"]) == (1, 1, 0)
    assert "1 empty where images look alike" in page(log, tmp_path)


def test_a_model_that_is_not_verified_is_told(tiny, tmp_path):  # noqa: F811
    save(features_model(seed=3), card("features", "tiny-features", precision="fp16"))
    half = {"runtime.precision": "fp16", "models.allow_unverified": True, "loops.enabled": False}
    values = {n: v for n, v in TINY.items() if not n.startswith(("matcher", "retrieval"))}
    log = replay(Views(), Config.from_flat({**values, **half, "matcher.name": "nearest"}))
    numbers = metrics(log)
    assert numbers["engines"][0]["linked"] is False and numbers["engines"][0]["precision"] == "fp16"
    assert judge(log, numbers).title == "Complete, with models that are not verified"
    assert judge(log, numbers).level == "fair"
    assert "Model tiny-features runs unverified: failed: " in page(log, tmp_path)
    assert '<td class="wrong">failed: ' in (tmp_path / "report.html").read_text()


def test_another_device_than_the_one_asked_for_is_told(tiny, tmp_path):  # noqa: F811
    log = run(runtime__device="cuda", runtime__strict=False)
    note = metrics(log)["engines"][0]["note"]
    assert "cuda" in note and "CPU" in metrics(log)["engines"][0]["runtime"]
    text = page(log, tmp_path)
    assert "What went wrong" in text and f"Model tiny-features: {note}".replace("'", "&#39;") in text


def test_without_models_it_is_said_what_runs_instead(own_cache, tmp_path):  # noqa: F811
    log = replay(Views(), Config().with_values(keyframes__every=1, features__max_keypoints=300))
    numbers = metrics(log)
    assert numbers["engines"] == [] and numbers["provenance"]["config"]["features"]["name"] == "sift"
    assert numbers["provenance"]["instead"].startswith("running sift + nearest instead of xfeat + lighterglue: ")
    text = page(log, tmp_path)
    assert "Not what was configured: running sift + nearest instead" in text and "models fetch xfeat" in text
    assert "What each learned model ran on" not in text
    assert _models(numbers) == log.instead


def test_another_file_of_the_same_name_has_other_features(tiny):  # noqa: F811
    before = metrics(run())["provenance"]["models"]["features"]
    path = model_path("tiny-features", "fp32")
    old = content_sha256(path)
    save(features_model(seed=5), card("features", "tiny-features", source_sha256="0" * 64))
    assert content_sha256(path) != old and metrics(run())["provenance"]["models"]["features"] != before


# -- by hand -------------------------------------------------------------------------------------


def record(name="m", **fields) -> ModelRecord:
    return ModelRecord("matcher", name, "fp32", "onnxruntime CPU", "a CPU", "passed on 8 pairs", **fields)


@pytest.mark.parametrize(
    ("engines", "level", "line"),
    [
        ([], "good", ""),
        ([record(runs=9)], "good", ""),
        ([record(runs=9, errors=1, recovered=1)], "fair", "Model m failed in 1 of 9 runs; the fallback made 1 good"),
        ([record(runs=1, empty=1, recovered=1)], "fair", "Model m failed in 1 of 1 run; "),
        ([record(runs=9, errors=2, recovered=1, lost=1)], "bad", "made 1 good, 1 is lost."),
        ([record("a", runs=9), record("b", runs=9, non_finite=3, lost=3)], "bad", "Model b failed in 3 of 9 runs"),
        ([record(runs=9, linked=False)], "fair", ""),
    ],
)
def test_verdicts(engines, level, line, tmp_path):
    log = made_log()
    log.add_pair(PairRecord(PairKind.TRACK, Status.OK, 1, 0, 50, 40))
    log.engines = engines
    verdict = judge(log, metrics(log))
    assert verdict.level == level
    assert any(line in text for text in verdict.lines) if line else not any("Model" in text for text in verdict.lines)
    assert ("What went wrong" in page(log, tmp_path)) == (level != "good")


def test_what_a_model_says_is_no_markup(tmp_path):
    log = made_log()
    log.engines = [record("<b>x", runs=2, errors=1, lost=1, note="<i>", last_fault="<script>alert(1)</script>")]
    log.instead = "<u>"
    html = write_report(tmp_path / "r.html", log, metrics(log)).read_text()
    assert not re.search(r"<b>x|<i>|<u>|<script", html) and "&lt;script&gt;" in html


PROGRESS = {"received": 9, "processed": 9, "dropped": 0, "missing": 0, "not_searched": 0}


def numbers_of(*engines, instead=""):
    log = made_log(n=9)
    log.engines, log.instead = list(engines), instead
    return {**metrics(log), "loop_truth": {"queries": 0, "queries_with_loop": 0, "false_loops": []}}


def test_a_demo_with_lost_runs_fails_and_names_the_models():
    assert _problems(PROGRESS, numbers_of(record(runs=9, errors=1, recovered=1)), 9) == []
    lost = record("xfeat", runs=9, non_finite=2, lost=2, last_fault="NaN in 'scores'")
    assert _problems(PROGRESS, numbers_of(record(), lost), 9) == [
        "xfeat: 2 runs of the model are lost: NaN in 'scores'"
    ]
    text = _models(numbers_of(record("xfeat", recovered=2), record("lighterglue", recovered=1)))
    assert text == "xfeat + lighterglue on onnxruntime CPU; 3 runs repeated"
    assert _models(numbers_of()) == "none, all plug-ins are classical"
    assert _models(numbers_of(instead="running sift")) == "running sift"


def test_the_replay_command_fails_where_runs_are_lost(capsys):
    good, lost = made_log(), made_log()
    good.engines, lost.engines = [record(errors=1, recovered=1)], [record(errors=2, lost=2, last_fault="it burns")]
    assert _exit_code(good) == 0 and capsys.readouterr().err == ""
    assert _exit_code(lost) == 3 and "2 runs of the models are lost: it burns" in capsys.readouterr().err
