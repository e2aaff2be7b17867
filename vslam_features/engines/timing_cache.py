"""Timings of kernels that earlier builds took, one file a GPU and version of TensorRT: a rebuild needs far less time.

Another GPU's timings are worse than none, so that TensorRT is asked to refuse them too.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from ..artifacts.cache import cache_folder, place
from ..errors import CacheError

logger = logging.getLogger(__name__)


def timing_cache_path(gpu: str, capability: str, version: str) -> Path:
    """Where it is kept."""
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{gpu} {capability} {version}".lower()).strip("-")
    return cache_folder("engines") / f"{slug}.timing"


def attach(config, path: Path) -> None:
    """Give a builder's configuration the timings of a file; empty ones where there is none, or it will not do."""
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError as error:
        logger.warning("%s cannot be read, the build takes its timings anew: %s", path, error)
        content = b""
    for timings in dict.fromkeys((content, b"")):
        cache = config.create_timing_cache(timings)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return
        logger.warning("%s: TensorRT does not take these timings, it takes its own", path)


def keep(config, path: Path) -> None:
    """Write what a build has found out. A failure costs the next build time, and nothing else."""
    cache = config.get_timing_cache()
    content = None if cache is None else cache.serialize()
    if content is None:
        return
    try:
        place(path, bytes(content))
    except CacheError as error:
        logger.warning("timings of the build are not kept: %s", error)
