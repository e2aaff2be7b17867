"""Resize kernels and normalisation: against the filter's definition in float64, against Pillow, and as identity."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from helpers import image
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vslam_features.artifacts import resize
from vslam_features.artifacts.preprocessing import CHANNELS, KERNELS, Preprocessing
from vslam_features.errors import DataError, PluginError

GREY = image(48, 64)
RGB = np.dstack([image(48, 64, seed=s) for s in (1, 2, 3)])
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ROUNDING = 1e-3  # of 255: sums in f32


def triangle(n_in: int, n_out: int) -> np.ndarray:
    """(n_out, n_in) f64 weights, pixel by pixel from the definition: centres at half pixels, support max(1, scale)."""
    scale = n_in / n_out
    support = max(1.0, scale)
    out = np.zeros((n_out, n_in))
    for i in range(n_out):
        for j in range(n_in):
            distance = abs((j + 0.5) - (i + 0.5) * scale) / support
            out[i, j] = 1 - distance if distance < 1 else 0
        out[i] /= math.fsum(out[i])
    return out


def by_definition(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """(C, height, width) f64."""
    planes = np.moveaxis(np.atleast_3d(picture), 2, 0).astype(np.float64)
    return triangle(picture.shape[0], height) @ planes @ triangle(picture.shape[1], width).T


def by_pillow_in_floats(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """(C, height, width) f32; Pillow's mode F does not round."""
    planes = np.moveaxis(np.atleast_3d(picture), 2, 0).astype(np.float32)
    return np.stack([np.asarray(Image.fromarray(p).resize((width, height), Image.BILINEAR)) for p in planes])


def noise(width: int, height: int, channels: int, seed: int) -> np.ndarray:
    """Pixels without any relation: the worst that a filter can meet."""
    shape = (height, width, 3) if channels == 3 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


SIZES = st.tuples(st.integers(1, 70), st.integers(1, 70))
PICTURES = st.builds(
    noise, st.integers(1, 70), st.integers(1, 70), channels=st.sampled_from([1, 3]), seed=st.integers(0, 2**32 - 1)
)


# -- antialias -------------------------------------------------------------------------------


@given(PICTURES, SIZES)
@settings(max_examples=80, deadline=None)
def test_antialias_is_its_definition(picture, size):
    out = resize.antialias(picture, *size)
    assert out.dtype == np.float32 and out.shape == (picture.ndim if picture.ndim == 3 else 1, *size[::-1])
    assert np.abs(out - by_definition(picture, *size)).max() < ROUNDING


@given(PICTURES, SIZES)
@settings(max_examples=200, deadline=None)
def test_antialias_is_what_pillow_computes_in_floats(picture, size):
    assert np.abs(resize.antialias(picture, *size) - by_pillow_in_floats(picture, *size)).max() < ROUNDING


@pytest.mark.parametrize(
    "size_in, size_out",
    [
        ((640, 480), (322, 322)),  # MegaLoc
        ((752, 480), (322, 322)),
        ((1241, 376), (322, 322)),  # narrower and lower
        ((320, 240), (322, 322)),  # larger, a little
        ((100, 900), (322, 322)),  # wider and lower
        ((322, 322), (322, 322)),
        ((3001, 2), (3, 2003)),
        ((1, 1), (322, 322)),
        ((322, 322), (1, 1)),
        ((20000, 3), (2, 2)),  # products of weights that are in parts
    ],
)
def test_sizes_that_occur_and_extreme_ones(size_in, size_out):
    picture = noise(*size_in, 3, seed=7)
    out = resize.antialias(picture, *size_out)
    assert out.shape == (3, *size_out[::-1])
    assert np.abs(out - by_pillow_in_floats(picture, *size_out)).max() < ROUNDING


def test_of_one_size_the_image_stays_as_it_is():
    assert np.abs(resize.antialias(RGB, 64, 48) - np.moveaxis(RGB, 2, 0)).max() < ROUNDING


def test_an_edge_becomes_the_ramp_that_one_can_compute_by_hand():
    """Half the size: weights 1, 3, 3, 1 over 8; at the border 3, 3, 1 over 7."""
    row = np.array([[0, 0, 80, 80, 80, 80]], np.uint8)
    assert resize.antialias(row, 3, 1)[0, 0] == pytest.approx([80 / 7, 80 * 7 / 8, 80], abs=1e-4)


def test_views_are_taken_and_not_changed():
    wide = np.dstack([noise(128, 48, 1, s) for s in (1, 2, 3)])
    before = wide.copy()
    for view in (wide[:, ::2], wide[::-1], wide[5:, 3:, ::-1], wide[..., 1]):
        for name, kernel in resize.KERNELS.items():
            whole = np.ascontiguousarray(view)
            assert np.array_equal(np.stack(kernel(view, 20, 30)), np.stack(kernel(whole, 20, 30))), name
    assert np.array_equal(wide, before)


def test_cached_weights_are_not_mixed_up():
    """One cache serves both axes: their blocks differ."""
    for picture in (noise(50, 50, 1, 1), noise(50, 20, 1, 2), noise(20, 50, 1, 3), noise(50, 50, 1, 4)):
        for size in ((20, 20), (50, 20), (20, 50)):
            assert np.abs(resize.antialias(picture, *size)[0] - by_definition(picture, *size)[0]).max() < ROUNDING


# -- pillow ----------------------------------------------------------------------------------


@given(PICTURES, SIZES)
@settings(max_examples=100, deadline=None)
def test_pillow_is_within_one_level_of_the_definition(picture, size):
    """It rounds twice: half a level after the rows, which the columns average, and half a level after these."""
    out = np.stack(resize.pillow(picture, *size))
    assert out.dtype == np.uint8
    assert np.abs(out - by_definition(picture, *size)).max() <= 1 + ROUNDING


def test_pillow_is_pillow():
    expected = np.asarray(Image.fromarray(RGB).resize((30, 20), Image.BILINEAR))
    assert np.array_equal(np.stack(resize.pillow(RGB, 30, 20), axis=-1), expected)


def test_a_missing_pillow_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(PluginError, match="'pillow' needs Pillow, which is not installed: pip install pillow"):
        Preprocessing("rgb", 32, 32, "pillow").apply(RGB)
    assert Preprocessing("rgb", 32, 32, "antialias").apply(RGB).shape == (1, 3, 32, 32)


# -- every kernel ----------------------------------------------------------------------------

EACH = pytest.mark.parametrize("kernel", resize.KERNELS)


@EACH
@given(PICTURES, SIZES, st.sampled_from(CHANNELS))
@settings(max_examples=60, deadline=None)
def test_values_are_finite_and_between_those_of_the_image(kernel, picture, size, channels):
    tensor = Preprocessing(channels, *size, kernel).apply(picture)
    planes = 1 if channels == "grey" or (channels == "any" and picture.ndim == 2) else 3
    assert tensor.shape == (1, planes, *size[::-1]) and tensor.dtype == np.float32 and tensor.flags.c_contiguous
    assert np.isfinite(tensor).all()
    assert picture.min() / 255 - 1e-5 <= tensor.min() and tensor.max() <= picture.max() / 255 + 1e-5


@EACH
@given(st.integers(0, 255), SIZES, SIZES)
@settings(max_examples=60, deadline=None)
def test_a_plain_image_stays_plain(kernel, level, size_in, size_out):
    tensor = Preprocessing("grey", *size_out, kernel).apply(np.full(size_in, level, np.uint8))
    assert np.abs(tensor * 255 - level).max() < ROUNDING


@EACH
@given(PICTURES, SIZES)
@settings(max_examples=40, deadline=None)
def test_colours_are_resized_each_as_a_grey_image(kernel, picture, size):
    colours = np.dstack([np.atleast_3d(picture)[..., 0], *(noise(*picture.shape[1::-1], 1, s) for s in (1, 2))])
    together = Preprocessing("rgb", *size, kernel).apply(colours)[0]
    alone = np.stack([Preprocessing("grey", *size, kernel).apply(np.ascontiguousarray(c))[0, 0]
                      for c in np.moveaxis(colours, 2, 0)])  # fmt: skip
    assert np.abs(together - alone).max() * 255 <= (ROUNDING if kernel == "antialias" else 1.01)


@EACH
def test_grey_is_repeated_for_rgb(kernel):
    one, three = (Preprocessing(c, 31, 22, kernel, *v).apply(GREY)[0] for c, v in (("grey", ()), ("rgb", (MEAN, STD))))
    expected = (one[0] - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
    assert np.abs(three - expected).max() < 1e-5


# -- channels, and OpenCV's kernels -----------------------------------------------------------


def luma(rgb):
    """Rec. ITU-R BT.601-7, section 2.5.1, rounded to whole grey levels."""
    return np.rint(rgb @ np.array([0.299, 0.587, 0.114]))


@pytest.mark.parametrize(
    "channels, picture, expected",
    [
        ("any", GREY, GREY[None]),
        ("any", RGB, np.moveaxis(RGB, 2, 0)),
        ("rgb", GREY, np.stack([GREY] * 3)),
        ("rgb", RGB, np.moveaxis(RGB, 2, 0)),
        ("grey", GREY, GREY[None]),
        ("grey", RGB, luma(RGB)[None]),
    ],
)
def test_channels_and_range(channels, picture, expected):
    out = Preprocessing(channels).apply(picture)
    assert out.dtype == np.float32 and out.flags.c_contiguous and out.shape == (1, *expected.shape)
    assert np.abs(out[0] * 255 - expected).max() < (1.01 if channels == "grey" and picture is RGB else 1e-4)
    assert out.min() >= 0 and out.max() <= 1


def test_area_is_the_mean_of_the_pixels_covered():
    out = Preprocessing("grey", 16, 12, "area").apply(GREY)
    mean = GREY.reshape(12, 4, 16, 4).mean(axis=(1, 3))
    assert out.shape == (1, 1, 12, 16) and np.abs(out[0, 0] * 255 - mean).max() <= 0.51


def test_linear_interpolates_between_pixel_centres():
    """x_in = (x_out + 0.5) W_in / W_out - 0.5, clamped to the border."""
    out = Preprocessing("any", 96, 72, "linear").apply(GREY)[0, 0] * 255
    y, x = (np.clip((np.arange(n) + 0.5) / 1.5 - 0.5, 0, n / 1.5 - 1) for n in (72, 96))
    y0, x0 = (np.minimum(np.floor(v).astype(int), int(n / 1.5) - 2) for v, n in ((y, 72), (x, 96)))
    fy, fx = (y - y0)[:, None], x - x0
    g = GREY.astype(np.float64)
    rows = g[y0] * (1 - fy) + g[y0 + 1] * fy
    expected = rows[:, x0] * (1 - fx) + rows[:, x0 + 1] * fx
    assert np.abs(out - expected).max() < 1.01


def test_input_images_are_not_changed_and_views_are_taken():
    wide = image(48, 128)
    view = wide[:, ::2]
    before = wide.copy()
    assert np.array_equal(Preprocessing("rgb").apply(view)[0, 1], view * np.float32(1 / 255))
    assert np.array_equal(wide, before)


@pytest.mark.parametrize(
    "wrong", [GREY.astype(np.float32), GREY[..., None], np.dstack([GREY] * 4), GREY[0], RGB.astype(np.uint16)]
)
def test_other_images_are_refused(wrong):
    with pytest.raises(DataError, match="expected uint8"):
        Preprocessing().apply(wrong)


def test_the_id_tells_steps_apart():
    sizes = [(0, 0, "none"), (64, 48, "area"), (64, 48, "linear"), (48, 64, "area")]
    assert len({Preprocessing(c, *s).id for c in CHANNELS for s in sizes}) == len(CHANNELS) * len(sizes)


def test_grey_is_converted_before_the_resize():
    expected = cv2.resize(cv2.cvtColor(RGB, cv2.COLOR_RGB2GRAY), (20, 10), interpolation=cv2.INTER_AREA)
    assert np.array_equal(Preprocessing("grey", 20, 10, "area").apply(RGB)[0, 0], expected * np.float32(1 / 255))


# -- mean and std ----------------------------------------------------------------------------


def test_mean_and_std_are_taken_off_a_channel_each():
    """As torchvision: scaled to [0, 1] first."""
    for kernel, size in (("none", (0, 0)), ("antialias", (20, 30)), ("area", (20, 30))):
        plain = Preprocessing("rgb", *size, kernel).apply(RGB)[0].astype(np.float64)
        expected = (plain - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
        assert np.abs(Preprocessing("rgb", *size, kernel, MEAN, STD).apply(RGB)[0] - expected).max() < 2e-6


def test_either_may_be_missing():
    plain = Preprocessing("grey").apply(GREY)
    assert Preprocessing("grey", mean=(0.5,)).apply(GREY) == pytest.approx(plain - 0.5, abs=1e-6)
    assert Preprocessing("grey", std=(0.25,)).apply(GREY) == pytest.approx(plain * 4, abs=1e-6)


def test_models_without_them_get_the_bits_that_they_always_got():
    expected = np.moveaxis(cv2.resize(RGB, (32, 24), interpolation=cv2.INTER_AREA), 2, 0) * np.float32(1 / 255)
    assert np.array_equal(Preprocessing("rgb", 32, 24, "area").apply(RGB)[0], expected)
    assert np.array_equal(Preprocessing("any").apply(GREY)[0, 0], GREY * np.float32(1 / 255))


# -- identity and the card -------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps, text",
    [
        # In maps and records of released models: these never change.
        (Preprocessing(), "any"),
        (Preprocessing("rgb"), "rgb"),
        (Preprocessing("grey"), "grey"),
        (Preprocessing("rgb", 320, 256, "area"), "rgb-320x256-area"),
        (Preprocessing("grey", 64, 48, "linear"), "grey-64x48-linear"),
        (Preprocessing("rgb", 322, 322, "pillow"), "rgb-322x322-pillow"),
        (
            Preprocessing("rgb", 322, 322, "antialias", MEAN, STD),
            "rgb-322x322-antialias-mean0.485,0.456,0.406-std0.229,0.224,0.225",
        ),
        (Preprocessing("grey", mean=(1,)), "grey-mean1.0"),
        (Preprocessing("grey", std=(1.0,)), "grey-std1.0"),
        (Preprocessing("grey", mean=(-0.0,)), "grey-mean0.0"),
    ],
)
def test_ids_are_frozen(steps, text):
    assert steps.id == text


NUMBERS = st.floats(-1e6, 1e6) | st.integers(-1000, 1000)


@st.composite
def cards(draw):
    """Preprocessing of a valid card."""
    values = {"channels": draw(st.sampled_from(CHANNELS))}
    if draw(st.booleans()):
        size = {"width": draw(st.integers(1, 16384)), "height": draw(st.integers(1, 16384))}
        values |= size | {"kernel": draw(st.sampled_from(KERNELS[1:]))}
    n = {"rgb": 3, "grey": 1, "any": 0}[values["channels"]]
    if draw(st.booleans()):
        values["mean"] = draw(st.lists(NUMBERS, min_size=n, max_size=n))
    if draw(st.booleans()):
        values["std"] = draw(st.lists(st.floats(1e-6, 1e6), min_size=n, max_size=n))
    return values


def read(values: dict) -> tuple[Preprocessing, list[str]]:
    problems = []
    return Preprocessing.from_dict(values, problems), problems


@given(cards(), cards())
def test_a_card_is_read_as_written_and_its_id_tells_it_from_others(one, other):
    a, b = read(one)[0], read(other)[0]
    assert read(one)[1] == [] and read(a.to_dict()) == (a, [])
    assert all(
        (getattr(a, n) or None) == (tuple(v) or None if isinstance(v, list) else v or None) for n, v in one.items()
    )
    assert (a.id == b.id) == (a == b)


@given(cards())
@settings(deadline=None)
def test_whatever_a_valid_card_says_gives_finite_numbers(values):
    steps = read({n: v for n, v in values.items() if n not in ("width", "height", "kernel")})[0]
    assert np.isfinite(steps.apply(RGB)).all()


@pytest.mark.parametrize(
    "values, said",
    [
        ({"channels": "rgb", "mean": 0.5}, "preprocessing.mean: expected numbers from -1e+06 to 1e+06, got 0.5"),
        ({"channels": "rgb", "mean": "abc"}, "preprocessing.mean: expected numbers from -1e+06 to 1e+06, got 'abc'"),
        ({"channels": "rgb", "mean": None}, "preprocessing.mean: expected numbers"),
        (
            {"channels": "rgb", "mean": [0.5]},
            "preprocessing.mean: 3 values go with channels rgb, 1 with grey, got [0.5]",
        ),
        ({"channels": "grey", "std": [1, 1, 1]}, "preprocessing.std: 3 values go with channels rgb, 1 with grey"),
        ({"channels": "any", "mean": [0.5]}, "preprocessing.mean: 3 values go with channels rgb, 1 with grey"),
        ({"channels": ["rgb"], "mean": [0.5]}, "preprocessing.channels: ['rgb'] is not one of any, rgb, grey"),
        ({"channels": "grey", "mean": [float("nan")]}, "preprocessing.mean: expected numbers"),
        ({"channels": "grey", "mean": [float("inf")]}, "preprocessing.mean: expected numbers"),
        ({"channels": "grey", "mean": [10**400]}, "preprocessing.mean: expected numbers"),
        ({"channels": "grey", "mean": [True]}, "preprocessing.mean: expected numbers"),
        ({"channels": "grey", "mean": ["0.5"]}, "preprocessing.mean: expected numbers"),
        ({"channels": "grey", "mean": [[0.5]]}, "preprocessing.mean: expected numbers"),
        ({"channels": "grey", "std": [0]}, "preprocessing.std: expected numbers from 1e-06 to 1e+06, got [0]"),
        ({"channels": "grey", "std": [-0.2]}, "preprocessing.std: expected numbers from 1e-06 to 1e+06, got [-0.2]"),
        ({"channels": "grey", "std": [1e-300]}, "preprocessing.std: expected numbers"),
        ({"channels": "grey", "std": [float("inf")]}, "preprocessing.std: expected numbers"),
        ({"kernel": "bicubic"}, "'bicubic' is not one of none, area, linear, pillow, antialias"),
        ({"kernel": "antialias"}, "width, height and kernel go together"),
        ({"means": [0.5]}, "preprocessing: unknown field 'means'"),
    ],
)
def test_a_wrong_card_is_told(values, said):
    steps, problems = read(values)
    assert steps == Preprocessing() and any(said in p for p in problems), problems


@EACH
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0, 3)])
def test_images_without_pixels_are_refused(kernel, shape):
    with pytest.raises(DataError, match="expected uint8"):
        Preprocessing("rgb", 8, 8, kernel).apply(np.empty(shape, np.uint8))


def test_the_benchmark_runs_and_its_exit_code_is_its_verdict(tmp_path):
    benchmark = Path(__file__).parents[1] / "benchmarks" / "preprocessing.py"
    command = [sys.executable, benchmark, "--rounds", "4", "--threads", "1", "2", "--json", tmp_path / "figures.json"]
    environment = os.environ | {"PYTHONPATH": str(benchmark.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert list(found["threads"]) == ["1", "2"]
    for rows in found["threads"].values():
        assert list(rows) == ["area", "linear", "pillow", "antialias"]
        assert all(row["ms"] > 0 and row["ratio"]["median"] > 0 for row in rows.values())
        assert rows["area"]["ratio"]["median"] == 1
    assert set(found["criteria"]) == {"antialias", "pillow"}
    # How fast the machine is just now is not this test's affair.
    assert done.returncode == int(max(found["criteria"].values()) > found["limit"]), done.stderr
