"""A child process of a command: ``python child.py MODULE:FUNCTION ARGUMENT...``.

``python -m`` would look for the package in the working directory first, where a
folder may have its name. Here the child runs the very files that its parent runs.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this folder, whose modules have everyday names

import ctypes
import importlib
import importlib.util
import os
import signal
from pathlib import Path


def main() -> int:
    """Call the function; what it returns is the exit code."""
    parent, target, *arguments = sys.argv[1:]
    _end_with(int(parent))
    _load_package()
    sys.argv = [target, *arguments]
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)()


def _end_with(parent: int) -> None:
    """SIGINT when the parent ends, also where that is killed and cannot tell us. Linux only.

    What a shell starts in the background ignores SIGINT, and so would its children.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGINT))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has ended before
            sys.exit(0)


def _load_package() -> None:
    init = Path(__file__).parents[1] / "__init__.py"
    spec = importlib.util.spec_from_file_location(init.parent.name, init)
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    sys.exit(main())
