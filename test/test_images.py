"""images.py against Pillow, formulas written out here and hand-made bytes."""

import array
import io
import re
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vslam_features import images
from vslam_features.errors import ImageError
from vslam_features.images import (
    ENCODINGS,
    decode,
    decode_compressed,
    read_image,
    resize_long_side,
    thumbnail,
    to_grey,
)

RGB = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
GREY = RGB[..., 0]


def smooth(height: int = 48, width: int = 64) -> np.ndarray:
    y, x = np.mgrid[:height, :width] / 8.0
    return np.stack([127 + 100 * np.sin(x), 127 + 100 * np.cos(y), 127 + 100 * np.sin(x + y)], -1).astype(np.uint8)


def raw(samples: np.ndarray, padding: int = 0, big: bool = False) -> dict:
    """Arguments of ``decode`` for samples (H, W) or (H, W, C)."""
    height, width = samples.shape[:2]
    rows = samples.astype(samples.dtype.newbyteorder(">" if big else "<")).reshape(height, -1).view(np.uint8)
    rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=0xA5)
    return dict(data=rows.tobytes(), width=width, height=height, step=rows.shape[1], is_bigendian=big)


def encoded(image: np.ndarray, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, kind, **options)
    return buffer.getvalue()


# -- raw encodings -----------------------------------------------------------------------------

COLOUR_ORDERS = {"rgb": [0, 1, 2], "bgr": [2, 1, 0], "rgba": [0, 1, 2, 3], "bgra": [2, 1, 0, 3]}


@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("order", COLOUR_ORDERS)
def test_colour_8_bit(order, padding):
    samples = np.dstack([RGB, np.full(GREY.shape, 77, np.uint8)])[..., COLOUR_ORDERS[order]]
    np.testing.assert_array_equal(decode(**raw(samples, padding), encoding=order + "8"), RGB)


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("order", COLOUR_ORDERS)
def test_colour_16_bit_scales_the_full_range(order, big):
    samples = np.dstack([RGB, np.full(GREY.shape, 77, np.uint8)])[..., COLOUR_ORDERS[order]].astype(np.uint16) * 257
    np.testing.assert_array_equal(decode(**raw(samples, 3, big), encoding=order + "16"), RGB)


def test_opencv_type_names_are_grey_and_bgr():
    np.testing.assert_array_equal(decode(**raw(GREY, 3), encoding="8UC1"), GREY)
    np.testing.assert_array_equal(decode(**raw(RGB[..., ::-1]), encoding="8UC3"), RGB)
    bgra = np.dstack([RGB[..., ::-1], GREY])
    np.testing.assert_array_equal(decode(**raw(bgra), encoding="8UC4"), RGB)


@pytest.mark.parametrize("big", [False, True])
def test_mono16_by_hand(big):
    samples = np.array([[0, 128, 129, 257, 65535, 4095]], np.uint16)
    # 128 / 257 = 0.498 and 129 / 257 = 0.502
    assert decode(**raw(samples, 1, big), encoding="mono16").tolist() == [[0, 0, 1, 1, 255, 16]]
    assert decode(**raw(samples, 1, big), encoding="mono16", max_value=4095).tolist() == [[0, 8, 8, 16, 255, 255]]


@pytest.mark.parametrize("big", [False, True])
def test_counts_and_floats_need_their_white(big):
    counts, floats = np.array([[0, 500, 1000, 2000]], np.uint16), np.array([[-1, 0.5, np.nan, np.inf]], np.float32)
    for samples, encoding in ((counts, "16UC1"), (floats, "32FC1")):
        with pytest.raises(ImageError, match=f"{encoding} has no brightness scale.*max_value"):
            decode(**raw(samples, 0, big), encoding=encoding)
    assert decode(**raw(counts, 2, big), encoding="16UC1", max_value=1000).tolist() == [[0, 128, 255, 255]]
    assert decode(**raw(floats, 3, big), encoding="32FC1", max_value=1).tolist() == [[0, 128, 0, 255]]
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ImageError, match="max_value must be positive"):
            decode(**raw(counts), encoding="16UC1", max_value=bad)


def mosaic(image: np.ndarray, pattern: str) -> np.ndarray:
    """What a sensor sees whose first row alternates pattern[0], pattern[1], and its second pattern[2], pattern[3]."""
    out = np.empty(image.shape[:2], image.dtype)
    for i, letter in enumerate(pattern):
        out[i // 2 :: 2, i % 2 :: 2] = image[i // 2 :: 2, i % 2 :: 2, "rgb".index(letter)]
    return out


@pytest.mark.parametrize("size", [(2, 2), (2, 5), (3, 3), (7, 4), (48, 64), (47, 63)])
@pytest.mark.parametrize("pattern", ["rggb", "bggr", "gbrg", "grbg"])
def test_bayer_patterns_give_the_colour_back(pattern, size):
    flat = np.broadcast_to(np.array([200, 100, 50], np.uint8), (*size, 3))
    np.testing.assert_array_equal(decode(**raw(mosaic(flat, pattern), 3), encoding=f"bayer_{pattern}8"), flat)
    for big in (False, True):
        samples = mosaic(flat, pattern).astype(np.uint16) * 257
        np.testing.assert_array_equal(decode(**raw(samples, 3, big), encoding=f"bayer_{pattern}16"), flat)


@pytest.mark.parametrize("pattern", ["rggb", "bggr", "gbrg", "grbg"])
def test_bayer_of_a_smooth_picture(pattern):
    out = decode(**raw(mosaic(smooth(), pattern)), encoding=f"bayer_{pattern}8")
    assert np.abs(out.astype(int) - smooth())[2:-2, 2:-2].max() <= 4


def bt601(y, u, v) -> np.ndarray:
    """RGB of limited-range ITU-R BT.601, as V4L2 and OpenCV define it."""
    y, u, v = 1.164383 * (np.float64(y) - 16), np.float64(u) - 128, np.float64(v) - 128
    return np.clip(np.stack([y + 1.596027 * v, y - 0.391762 * u - 0.812968 * v, y + 2.017232 * u], -1), 0, 255)


@pytest.mark.parametrize("names, order", [(("uyvy", "yuv422"), "uyvz"), (("yuyv", "yuv422_yuy2"), "yuzv")])
def test_yuv_422(names, order):
    rng = np.random.default_rng(1)
    y, u, v = rng.integers(60, 180, (4, 6)), rng.integers(90, 160, (4, 3)), rng.integers(90, 160, (4, 3))
    planes = {"y": y[:, ::2], "z": y[:, 1::2], "u": u, "v": v}
    samples = np.stack([planes[letter] for letter in order], -1).astype(np.uint8).reshape(4, 6, 2)
    expected = bt601(y, u.repeat(2, 1), v.repeat(2, 1))
    for name in names:
        assert np.abs(decode(**raw(samples, 3), encoding=name) - expected).max() <= 1.5


@pytest.mark.parametrize("name, order", [("nv12", [0, 1]), ("nv21", [1, 0])])
def test_yuv_420(name, order):
    rng = np.random.default_rng(2)
    y, uv = rng.integers(60, 180, (4, 6)), rng.integers(90, 160, (2, 3, 2))
    rows = np.vstack([y, uv[..., order].reshape(2, 6)]).astype(np.uint8)
    u, v = (uv[..., i].repeat(2, 0).repeat(2, 1) for i in (0, 1))
    out = decode(**{**raw(rows, 5), "height": 4}, encoding=name)
    assert np.abs(out - bt601(y, u, v)).max() <= 1.5


def test_views_are_read_only_and_copies_are_not_views():
    data = bytearray(GREY.tobytes())
    image = decode(data, 8, 6, "mono8", 8)
    data[0] ^= 0xFF
    assert image[0, 0] == GREY[0, 0] ^ 0xFF and not image.flags.writeable
    with pytest.raises(ValueError):
        image[0, 0] = 1
    padded = raw(GREY, 4)
    padded["data"] = bytearray(padded["data"])
    image = decode(**padded, encoding="mono8")
    padded["data"][0] ^= 0xFF
    assert image[0, 0] == GREY[0, 0] and image.flags.c_contiguous


@pytest.mark.parametrize(
    "wrap", [bytes, bytearray, memoryview, lambda b: array.array("B", b), lambda b: np.frombuffer(b, np.uint8)]
)
def test_every_kind_of_bytes_without_the_last_padding(wrap):
    arguments = raw(GREY, 4)
    arguments["data"] = wrap(arguments["data"][:-4])
    np.testing.assert_array_equal(decode(**arguments, encoding="mono8"), GREY)


GOOD = raw(GREY)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(width=0), "width must be positive"),
        (dict(height=-1), "height must be positive"),
        (dict(step=0), "step must be positive"),
        (dict(width=8.0), "width must be an integer"),
        (dict(width=2**31, height=2**31, step=2**31), "pixels"),
        (dict(step=7), "step 7 is too small, 8 pixels of mono8 take 8 bytes"),
        (dict(data=GOOD["data"][:-1]), "data is too short, .* takes 48 bytes, got 47"),
        (dict(data=b""), "too short"),
        (dict(step=2**40), "too short"),
        (dict(data=None), "data must be contiguous bytes, got NoneType"),
        (dict(data=[1, 2]), "data must be contiguous bytes"),
        (dict(data=np.zeros(48, np.float32)), "data must be contiguous bytes"),
        (dict(data=np.zeros(96, np.uint8)[::2]), "data must be contiguous bytes"),
        (dict(encoding="mono9"), "unknown encoding 'mono9'; known: mono8, mono16"),
        (dict(encoding="nv12", width=7), "multiples"),
        (dict(encoding="uyvy", width=3, step=6), "multiples"),
        (dict(encoding="bayer_rggb8", width=1), "2x2"),
    ],
)
def test_malformed_images_are_refused(changes, message):
    with pytest.raises(ImageError, match=message):
        decode(**{**GOOD, "encoding": "mono8", **changes})


@settings(max_examples=400, deadline=None)
@given(
    data=st.binary(max_size=300),
    width=st.integers(-2, 20) | st.sampled_from([2**16, 2**32 - 1]),
    height=st.integers(-2, 20) | st.sampled_from([2**16, 2**32 - 1]),
    encoding=st.sampled_from([*ENCODINGS, "", "nv24", "8UC9"]),
    step=st.integers(-2, 90) | st.sampled_from([2**32 - 1]),
    big=st.booleans(),
    max_value=st.none() | st.integers(-1, 70000),
)
def test_any_fields_give_an_image_or_an_image_error(data, width, height, encoding, step, big, max_value):
    try:
        image = decode(data, width, height, encoding, step, big, max_value=max_value)
    except ImageError:
        return
    assert image.dtype == np.uint8 and image.flags.c_contiguous
    grey = encoding in ("mono8", "mono16", "8UC1", "16UC1", "32FC1")
    assert image.shape == ((height, width) if grey else (height, width, 3))


@settings(max_examples=200, deadline=None)
@given(
    encoding=st.sampled_from([name for name, spec in ENCODINGS.items() if spec.rows == 2]),
    half=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    padding=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_padding_and_byte_order_change_nothing(encoding, half, padding, seed):
    spec, shape = ENCODINGS[encoding], (2 * half[0], 2 * half[1])
    rng = np.random.default_rng(seed)
    samples = rng.integers(0, 60000 if spec.dtype == "u2" else 256, (*shape, spec.channels)).astype(spec.dtype)
    tight = decode(**raw(samples), encoding=encoding, max_value=300)
    for big in (False, True):
        np.testing.assert_array_equal(decode(**raw(samples, padding, big), encoding=encoding, max_value=300), tight)


def test_fallback_serves_only_unknown_encodings():
    calls = []

    def fallback(data, width, height, encoding, step, is_bigendian):
        calls.append((encoding, step))
        return RGB

    arguments = dict(data=b"?", width=8, height=6, step=3)
    np.testing.assert_array_equal(decode(**arguments, encoding="packed10", fallback=fallback), RGB)
    decode(**GOOD, encoding="mono8", fallback=fallback)
    assert calls == [("packed10", 3)]
    for bad in (lambda *a: RGB.astype(float), lambda *a: RGB[1:], lambda *a: 1 / 0, lambda *a: None):
        with pytest.raises(ImageError, match="fallback decoder .*packed10"):
            decode(**arguments, encoding="packed10", fallback=bad)


def test_the_document_lists_every_encoding():
    text = (Path(__file__).parents[1] / "docs" / "images.md").read_text()
    assert set(re.findall(r"`([\w]+)`", text)) >= set(ENCODINGS)


# -- compressed images -------------------------------------------------------------------------


def test_png_colour_grey_palette_and_alpha():
    np.testing.assert_array_equal(decode_compressed(encoded(RGB, "PNG")), RGB)
    np.testing.assert_array_equal(decode_compressed(encoded(GREY, "PNG")), GREY)
    np.testing.assert_array_equal(decode_compressed(encoded(np.dstack([RGB, GREY]), "PNG")), RGB)
    buffer = io.BytesIO()
    palette = Image.fromarray(RGB).quantize(16)
    palette.save(buffer, "PNG")
    np.testing.assert_array_equal(decode_compressed(buffer.getvalue()), np.asarray(palette.convert("RGB")))


def test_png_16_bit_is_scaled():
    stream = encoded(GREY.astype(np.uint16) * 257, "PNG")
    np.testing.assert_array_equal(decode_compressed(stream), GREY)
    dark = encoded(GREY.astype(np.uint16) * 2, "PNG")
    np.testing.assert_array_equal(decode_compressed(dark, max_value=510), GREY)
    with pytest.raises(ImageError, match="16UC1 has no brightness scale"):
        decode_compressed(stream, "16UC1; png compressed ")


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0, "quality": 95}])
def test_jpeg_as_pillow_decodes_it(options):
    stream = encoded(smooth(), "JPEG", **options)
    expected = np.asarray(Image.open(io.BytesIO(stream))).astype(int)
    assert np.abs(decode_compressed(stream) - expected).max() <= 3
    grey = decode_compressed(encoded(smooth()[..., 0], "JPEG"))
    assert grey.shape == (48, 64)


def test_exif_orientation_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to show
    assert decode_compressed(encoded(smooth(), "JPEG", exif=exif)).shape == (48, 64, 3)


def test_a_compressed_mosaic_is_interpolated():
    flat = np.broadcast_to(np.array([200, 100, 50], np.uint8), (16, 16, 3))
    stream = encoded(mosaic(flat, "gbrg"), "PNG")
    np.testing.assert_array_equal(decode_compressed(stream, "bayer_gbrg8; png compressed "), flat)
    assert decode_compressed(encoded(RGB, "PNG"), "rgb8; png compressed bgr8").tolist() == RGB.tolist()


def test_depth_transport_is_refused():
    with pytest.raises(ImageError, match="depth"):
        decode_compressed(b"\0" * 12 + encoded(GREY, "PNG"), "16UC1; compressedDepth png")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "PPM"])
def test_every_truncation_is_refused(kind):
    stream = encoded(smooth(12, 16), kind)
    assert decode_compressed(stream).shape == (12, 16, 3)
    for length in range(len(stream) - 1):
        with pytest.raises(ImageError):
            decode_compressed(stream[:length])


def test_a_changed_png_is_refused():
    stream = encoded(RGB, "PNG")
    for position in range(8, len(stream)):
        changed = bytearray(stream)
        changed[position] ^= 0x10
        with pytest.raises(ImageError):
            decode_compressed(changed)


def test_a_jpeg_with_a_thumbnail_or_a_trailer():
    inner, outer = encoded(smooth(8, 8), "JPEG"), encoded(smooth(), "JPEG")
    application = b"\xff\xe1" + struct.pack(">H", len(inner) + 2) + inner
    stream = outer[:2] + application + outer[2:]
    assert decode_compressed(stream + b"trailer" * 3).shape == (48, 64, 3)
    with pytest.raises(ImageError, match="truncated JPEG"):  # the thumbnail's end is not the image's
        decode_compressed(stream[:-30])


def huge(kind: str) -> bytes:
    if kind == "PNG":

        def chunk(name: bytes, body: bytes) -> bytes:
            return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

        header = struct.pack(">IIBBBBB", 20000, 20000, 8, 0, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    stream = bytearray(encoded(smooth(), "JPEG"))
    start = stream.index(b"\xff\xc0")
    stream[start + 5 : start + 9] = struct.pack(">HH", 20000, 20000)
    return bytes(stream)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_decompression_bomb_is_refused_before_decoding(kind, monkeypatch):
    monkeypatch.setattr(images.cv2, "imdecode", lambda *a: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="20000x20000"):
        decode_compressed(huge(kind))


@settings(max_examples=200, deadline=None)
@given(
    data=st.binary(max_size=80),
    magic=st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"P5 3 2 255\n", b"P6 2 1 9\n"]),
)
def test_any_bytes_give_an_image_or_an_image_error(data, magic):
    try:
        assert decode_compressed(magic + data).dtype == np.uint8
    except ImageError:
        pass


def test_read_image_names_the_file(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(RGB, "PNG"))
    np.testing.assert_array_equal(read_image(path), RGB)
    np.testing.assert_array_equal(read_image(str(path)), RGB)
    path.write_bytes(b"no image")
    for bad in (path, tmp_path / "missing.png", tmp_path):
        with pytest.raises(ImageError, match=re.escape(str(bad))):
            read_image(bad)


# -- sizes and grey ----------------------------------------------------------------------------


def test_grey_is_bt601_luma():
    assert to_grey(GREY) is GREY
    assert np.abs(to_grey(RGB) - RGB @ [0.299, 0.587, 0.114]).max() <= 0.51
    with pytest.raises(ImageError):
        to_grey(RGB.astype(np.float32))


@pytest.mark.parametrize("long_side", [640, 487, 322, 100, 7])
def test_resize_follows_the_half_pixel_formula_on_both_axes(long_side):
    y, x = np.mgrid[:333, :801]
    for axis, ramp in ((1, x / 4), (0, y / 4)):
        small, scale = resize_long_side(ramp.astype(np.uint8), long_side)
        assert max(small.shape) == long_side and scale == long_side / 801
        position = (np.arange(small.shape[axis]) + 0.5) * ramp.shape[axis] / small.shape[axis] - 0.5
        line = small.mean(1 - axis)
        # floor to 8 bits costs 3/8 grey value on average
        assert np.abs(line - (position / 4 - 3 / 8)).max() < 0.8
        assert abs(small.shape[0] - 333 * scale) <= 0.5


def test_resize_never_enlarges_and_does_not_alias():
    assert resize_long_side(RGB, 8)[0] is RGB
    assert resize_long_side(RGB, 100)[1] == 1.0
    stripes = np.tile(np.array([0, 255], np.uint8), (64, 400))
    assert np.abs(resize_long_side(stripes, 200)[0].astype(int) - 127.5).max() <= 1
    assert resize_long_side(np.zeros((1, 800), np.uint8), 100)[0].shape == (1, 100)
    for bad in (0, -5, 10.5):
        with pytest.raises(ImageError, match="long_side"):
            resize_long_side(RGB, bad)


def test_thumbnail_is_small_and_its_own():
    assert thumbnail(np.zeros((600, 800, 3), np.uint8)).shape == (120, 160, 3)
    small = thumbnail(RGB)
    assert not np.may_share_memory(small, RGB)
    np.testing.assert_array_equal(small, RGB)


def test_opencv_takes_read_only_views():
    view = decode(**GOOD, encoding="mono8")
    assert cv2.resize(view, (4, 3)).shape == (3, 4)
