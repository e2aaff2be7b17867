"""Files that ship beside the package: configurations, profiles, the model registry."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from .errors import ConfigError


def share_path(relative: str) -> Path:
    """Path of a shipped file such as ``config/fastdds.xml``, wherever the package was installed.

    A source checkout comes first, then the prefix of this package (colcon), then
    that of Python (pip). Raises ConfigError where none has the file.
    """
    package = Path(__file__).resolve().parent
    prefixes = [p for p in package.parents if (p / "lib").is_dir()]
    prefixes += [Path(sysconfig.get_path("data")), Path(sys.prefix)]
    tried = [package.parent / relative, *(p / "share" / "vslam_features" / relative for p in prefixes)]
    for path in tried:
        if path.is_file():
            return path
    raise ConfigError(f"{relative} is not there; looked at {', '.join(map(str, tried))}: install the package again")
