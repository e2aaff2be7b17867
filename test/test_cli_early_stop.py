"""``vslam-features match --early-stop-decay``: what is printed and drawn of each layer, and what is an error."""

import json
import re

import cv2
import numpy as np
import pytest
from matcher_graph import Matcher as Network
from model_helpers import (
    DIM,
    TINY,
    _tiny_cache,  # noqa: F401 (fixtures)
    card,
    command,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
)
from skimage import data
from stop_helpers import CHECKED, stopping

from vslam_features.matching.learned import LighterGlue
from vslam_features.replay.pictures import with_layer_scores

pytestmark = pytest.mark.usefixtures("tiny")
NETWORK = Network(seed=3, dim=DIM)
NETWORK.weights["in"] *= 8  # descriptors of length 1 then match with scores that a host keeps


@pytest.fixture
def pair(tmp_path):
    """Two files of pictures that overlap, and the arguments that choose the tiny models."""
    cat = data.chelsea()[..., ::-1]
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file, picture in zip(files, (cat[:, :400], cat[:, 30:430])):
        cv2.imwrite(str(file), picture)
    sets = [f"--set={name}={value}" for name, value in TINY.items()]
    return [*map(str, files), *sets]


@pytest.fixture
def glue(tmp_path):
    """The option that chooses a matcher that stops early."""
    own = card("matcher", "glue", layers=9, early_stop_layers=CHECKED)
    return f"--set=matcher.options.model={save(stopping(NETWORK), own, tmp_path / 'glue.onnx')}"


def shown(capsys, *args):
    assert command("match", *args) == 0
    return capsys.readouterr().out


def test_each_layer_is_shown_and_where_it_stopped(pair, glue, tmp_path, capsys):
    plain = json.loads(shown(capsys, *pair, glue, "--early-stop-decay", "1", "--json"))
    assert plain["stopped_after_layer"] == 0 and [k for k, _ in plain["layer_scores"]] == [2, 4, 6, 8]
    assert [limit for _, limit in plain["layer_limits"]] == [0, 0, 0, 0]
    scores = dict(plain["layer_scores"])
    lowest = min(scores, key=scores.get)  # of no decay it stops at the first below, which is there or before
    least = (scores[lowest] + min([s for k, s in scores.items() if k < lowest], default=1.0)) / 2
    given = ["--early-stop-decay", "0", "--min-covisibility", str(least)]
    r = json.loads(shown(capsys, *pair, glue, *given, "--json"))
    stopped = next(k for k, s in scores.items() if s < least)
    assert (r["status"], r["stopped_after_layer"], r["num_matches"]) == ("stopped_early", stopped, 0)
    assert r["covisibility"] == pytest.approx(scores[stopped], abs=1e-6)
    assert [k for k, _ in r["layer_scores"]] == [k for k in scores if k <= stopped]
    assert [limit for _, limit in r["layer_limits"]] == pytest.approx([least] * 4, rel=1e-6)

    text = shown(capsys, *pair, glue, *given, "--viz", str(tmp_path / "stopped.png"))
    assert text.startswith("stopped_early: 0 inliers of 0 matches") and f"covisibility {scores[stopped]:.3f}" in text
    assert f"after layer {stopped}: {scores[stopped]:.3f}, limit {least:.3f}: stopped" in text
    for k in CHECKED[CHECKED.index(stopped) + 1 :]:
        assert f"after layer {k}: not run, limit {least:.3f}" in text
    assert "did not stop" not in text
    text = shown(
        capsys, *pair, glue, *"--early-stop-decay 0.5 --min-covisibility 0 --viz".split(), str(tmp_path / "not.png")
    )
    assert "did not stop early, and with limits of 0 it cannot" in text and "limit 0.000" in text
    pictures = [cv2.imread(str(tmp_path / name)) for name in ("stopped.png", "not.png")]
    assert pictures[0].shape == pictures[1].shape and (pictures[0] != pictures[1]).any()


@pytest.mark.parametrize(
    "args, words",
    [
        (["--early-stop-decay", "1"], "cannot stop early, or its card does not tell after which layers: choose one"),
        (["--early-stop-decay", "0.5"], "options.early_stop_decay is 0.5, but .* has no input 'early_stop_decay'"),
        (["--min-covisibility", "0.7"], "options.min_covisibility is 0.7, but .* no output 'covisibility_score'"),
        (["--min-covisibility", "DEFAULT"], r"--min-covisibility: matcher lighterglue \(tiny-matcher\) has no covisib"),
        (["--early-stop-decay", "0.5", "--matcher", "nearest"], "--early-stop-decay: matcher nearest has no covis"),
        (["--min-covisibility", "0.5", "--matcher", "nearest"], "--min-covisibility: matcher nearest has no covisib"),
        (["--early-stop-decay", "1.5"], "matcher.options.early_stop_decay"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_do_is_an_error(args, words, pair, capsys):
    args = [str(LighterGlue.Options().min_covisibility) if text == "DEFAULT" else text for text in args]
    pair = [a for a in pair if "nearest" not in args or not a.startswith("--set=matcher")]
    assert command("match", *pair, *args) == 1
    assert re.search(words, capsys.readouterr().err.replace("\n", " "))


def test_a_matcher_that_tells_nothing_shows_nothing(pair, capsys):
    assert "covisibility" not in shown(capsys, *pair)
    r = json.loads(shown(capsys, *pair, "--json"))
    assert (r["covisibility"], r["stopped_after_layer"], r["layer_scores"], r["layer_limits"]) == (None, 0, [], [])


def test_of_a_model_that_does_not_tell_nothing_is_claimed(pair, tmp_path, capsys):
    """As of released files: their stops are pairs of too small covisibility."""
    model = stopping(NETWORK)
    for name in ("stopped_after_layer", "layer_scores"):
        model.graph.output.remove(next(o for o in model.graph.output if o.name == name))
    own = card("matcher", "glue", layers=9, early_stop_layers=CHECKED)
    glue = f"--set=matcher.options.model={save(model, own, tmp_path / 'glue.onnx')}"
    text = shown(capsys, *pair, glue, "--early-stop-decay", "0", "--min-covisibility", "1")
    assert text.startswith("not_covisible") and "whether it stopped early is not known" in text
    assert "after layer 2: not told, limit 1.000" in text and "did not stop" not in text and "not run" not in text
    text = shown(capsys, *pair, glue, "--early-stop-decay", "0.9", "--min-covisibility", "0.001")
    assert "did not stop early" in text and "after layer 2: not told" in text and not text.startswith("not_covisible")


# -- the picture -----------------------------------------------------------------------------------

LIMITS = ((2, 0.25), (4, 0.5), (6, 0.75))
GREEN, RED, TRACK = (0, 200, 120), (255, 70, 70), (60, 64, 72)


def runs(picture, colour) -> list[tuple[int, int]]:
    """Rows of pixels of a colour, those of one bar together: (first row, most in a row)."""
    counts = (picture == colour).all(axis=2).sum(axis=1)
    starts = np.flatnonzero(np.diff(np.r_[0, counts > 0].astype(int)) == 1)
    return [(int(i), int(counts[i : i + 5].max())) for i in starts]


@pytest.mark.parametrize("width", [700, 1600])
def test_bars_are_as_long_as_the_scores(width):
    image = np.zeros((50, width, 3), np.uint8)
    picture = with_layer_scores(image, LIMITS, ((2, 1.0), (4, 0.4)))
    bars = picture[: len(picture) - 50]
    assert (picture[-50:] == image).all() and picture.shape[1] == width
    (top, full), (second, reached) = *runs(bars, GREEN), *runs(bars, RED)
    third = max(start for start, length in runs(bars, TRACK))
    assert top < second < third
    assert reached / full == pytest.approx(0.4, abs=0.02) and full > width / 2
    assert not (bars[third:] == GREEN).all(axis=2).any() and not (bars[third:] == RED).all(axis=2).any()


def test_a_limit_of_0_and_a_score_beyond_1_are_drawn_inside():
    picture = with_layer_scores(np.zeros((5, 5, 3), np.uint8), ((2, 0.0), (4, 1.0)), ((2, 0.0), (4, 1.0005)))
    ((_, length),) = runs(picture, GREEN)  # of nothing none, of all as long as the bar
    assert picture.shape[1] == 320 and length == max(n for _, n in runs(picture, TRACK)) and not runs(picture, RED)
