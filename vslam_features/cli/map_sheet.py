"""One picture of the thumbnails of a map."""

from __future__ import annotations

import math
from pathlib import Path

import cv2
import numpy as np

from ..errors import ConfigError, MapError
from ..maps.placing import placed_file
from ..maps.reader import MapReader

MAX_TILES = 200
_WIDTH, _HEIGHT, _TEXT, _GAP = 160, 120, 18, 6
_PAPER, _INK, _LOOP = (255, 255, 255), (40, 40, 40), (0, 130, 0)


def write_sheet(reader: MapReader, path: Path) -> int:
    """Write a PNG and return how many keyframes are in it: at most ``MAX_TILES``, evenly chosen.

    Keyframes with a verified loop have a green frame and name the keyframe that they are the same place as.

    Raises ConfigError for a name that is no PNG's, MapError where the picture cannot be written or the map is empty.
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--sheet {path}: the picture is a PNG file, give a name that ends with .png")
    total = len(reader.headers())
    if total == 0:
        raise MapError(f"{reader.path}: the map has no keyframes to draw")
    loops = dict(reader.confirmed_loops())
    ids = sorted({round(i) for i in np.linspace(0, total - 1, min(total, MAX_TILES))})
    columns = min(len(ids), max(1, math.ceil(math.sqrt(len(ids) * 1.6 * _HEIGHT / _WIDTH))))
    rows = -(-len(ids) // columns)
    tile = np.array([_HEIGHT + _TEXT + _GAP, _WIDTH + _GAP])
    sheet = np.full((*(tile * (rows, columns) + _GAP), 3), _PAPER, np.uint8)
    for place, kf_id in enumerate(ids):
        y, x = tile * divmod(place, columns) + _GAP
        _draw(sheet[y : y + _HEIGHT + _TEXT, x : x + _WIDTH], reader.thumbnail(kf_id), kf_id, loops.get(kf_id))
    done, data = cv2.imencode(".png", sheet)
    if not done:
        raise MapError(f"{path}: the picture cannot be encoded")
    with placed_file(path, replace=True) as part:
        part.write_bytes(data.tobytes())
    return len(ids)


def _draw(tile: np.ndarray, picture: np.ndarray | None, kf_id: int, same_as: int | None) -> None:
    box = tile[:_HEIGHT]
    box[:] = 225
    if picture is not None and picture.size:
        colour = cv2.cvtColor(picture, cv2.COLOR_GRAY2BGR if picture.ndim == 2 else cv2.COLOR_RGB2BGR)
        scale = min(_WIDTH / colour.shape[1], _HEIGHT / colour.shape[0])
        size = [max(1, round(side * scale)) for side in colour.shape[1::-1]]
        colour = cv2.resize(colour, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
        y, x = (_HEIGHT - colour.shape[0]) // 2, (_WIDTH - colour.shape[1]) // 2
        box[y : y + colour.shape[0], x : x + colour.shape[1]] = colour
    ink, text = (_INK, str(kf_id)) if same_as is None else (_LOOP, f"{kf_id} = {same_as}")
    if same_as is not None:
        cv2.rectangle(tile, (0, 0), (_WIDTH - 1, _HEIGHT - 1), _LOOP, 3)
    cv2.putText(tile, text, (2, _HEIGHT + _TEXT - 5), cv2.FONT_HERSHEY_SIMPLEX, 0.45, ink, 1, cv2.LINE_AA)
