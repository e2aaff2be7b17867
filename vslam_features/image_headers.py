"""Headers of JPEG, PNG, PNM and BMP streams: the size before anything is decoded, and whether the end is there."""

from __future__ import annotations

import re
import struct
import zlib

from .errors import ImageError


def compressed_size(data: bytes) -> tuple[int, int]:
    """(width, height) of a compressed image, read without decoding; truncated streams are refused.

    OpenCV 4 fills the missing part of a truncated image with grey and says nothing.

    Raises:
        ImageError: another format, a truncated stream, or a PNG with a wrong checksum.
    """
    try:
        if data.startswith(b"\xff\xd8"):
            return _jpeg_size(data)
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _png_size(data)
        if data.startswith(b"BM"):
            length, width, height = struct.unpack_from("<I12xii", data, 2)
            if length > len(data):
                raise ImageError(f"image: truncated BMP, {len(data)} of {length} bytes")
            return width, abs(height)
        space = rb"(?:\s|#[^\n]*\n)+"
        if match := re.match(rb"P([56])" + (space + rb"(\d{1,9})") * 3 + rb"\s", data):
            kind, width, height, top = map(int, match.groups())
            length = width * height * (1 if kind == 5 else 3) * (1 if top < 256 else 2)
            if match.end() + length > len(data):
                raise ImageError(f"image: truncated PNM, {len(data)} of {match.end() + length} bytes")
            return width, height
    except (struct.error, IndexError):
        raise ImageError(f"image: truncated or corrupted header in {len(data)} bytes") from None
    raise ImageError(f"image: {len(data)} bytes that are not JPEG, PNG, PNM (P5, P6) or BMP; they begin {data[:8]!r}")


def _png_size(data: bytes) -> tuple[int, int]:
    position, kind = 8, b""
    size = struct.unpack_from(">II", data, 16)
    while kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, position)
        (crc,) = struct.unpack_from(">I", data, position + 8 + length)
        if crc != zlib.crc32(memoryview(data)[position + 4 : position + 8 + length]):
            raise ImageError(f"image: corrupted PNG, wrong checksum of chunk {kind!r} at byte {position}")
        position += 12 + length
    return size


def _jpeg_size(data: bytes) -> tuple[int, int]:
    position, size = 2, None
    while True:
        if data[position] != 0xFF:
            raise ImageError(f"image: corrupted JPEG, no marker at byte {position}")
        marker = data[position + 1]
        if marker == 0xFF:  # fill byte
            position += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:  # markers without a length
            position += 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of frame
            height, width = struct.unpack_from(">HH", data, position + 5)
            size = width, height
        if marker == 0xDA:  # start of scan: entropy-coded data cannot contain the end marker
            if size is None or data.find(b"\xff\xd9", position) < 0:
                raise ImageError(f"image: truncated JPEG of {len(data)} bytes")
            return size
        (length,) = struct.unpack_from(">H", data, position + 2)
        position += 2 + length
