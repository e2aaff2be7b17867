"""The ``vslam-features`` command: one module a verb, each with ``add_parser(subparsers)`` and ``run(args) -> int``.

Exit codes: 0 success; 1 an error or an incomplete result; 2 wrong usage; 3
complete, but stages failed on the way; 70 a bug; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
import traceback
from importlib.util import find_spec

from .. import __version__
from ..errors import PluginError, VslamFeaturesError

# In the order of the help text. Those that are not there (yet) are left out.
COMMANDS = ("demo", "match", "replay", "map", "models", "doctor", "bench")


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code. Errors are one message on stderr; ``--debug`` adds the traceback."""
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed usage or help
        return int(stop.code or 0)
    _log_to_stderr(args.debug)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (such as head) has left; without this Python complains again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (VslamFeaturesError, OSError) as error:
        return _fail(f"error: {error}", 1, args.debug)
    except Exception as error:  # the last line of defence; --debug shows all
        text = f"unexpected {type(error).__name__}: {error}; this is a bug, --debug shows where"
        return _fail(text, 70, args.debug)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
    parser = argparse.ArgumentParser(
        prog="vslam-features",
        description="Visual front-end of a SLAM system: match images, replay recordings, check an installation.",
        epilog="example: vslam-features match a.png b.png --viz matches.png",
        parents=[debug],
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(debug=False)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        if find_spec(f"{__package__}.{name}") is None:
            continue
        try:
            module = importlib.import_module(f"{__package__}.{name}")
        except ImportError as error:  # of a library: doctor still runs, and says what to do
            _add_broken(subparsers, name, error)
            continue
        before = set(subparsers.choices)
        module.add_parser(subparsers)
        for added in set(subparsers.choices) - before:
            # Also after the verb, where people type it.
            subparsers.choices[added].add_argument(
                "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors"
            )
            subparsers.choices[added].set_defaults(run=module.run)
    return parser


def _add_broken(subparsers, name: str, error: ImportError) -> None:
    """A command whose libraries cannot be imported: it says so when it is called, whatever its arguments are."""
    reason = f"{name} cannot run: {error}; 'vslam-features doctor' says what to do"

    def run(args) -> int:
        raise PluginError(reason)

    parser = subparsers.add_parser(name, help="cannot run: a library is missing, see doctor", add_help=False)
    parser.add_argument("anything", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def _fail(text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(text, file=sys.stderr)
    return code


class _Brief(logging.Formatter):
    """Log records without their traceback; progress without a level."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        text = level + record.getMessage()
        return f"{text}: {type(error).__name__}: {error}" if error else text


class _Handler(logging.StreamHandler):
    """Ours, so that a second call replaces it and no other. A progress bar on the terminal makes way for a line."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm")  # not loaded: there is no bar
        with bars.tqdm.external_write_mode(self.stream) if bars else contextlib.nullcontext():
            super().emit(record)


def _log_to_stderr(debug: bool) -> None:
    handler, root = _Handler(), logging.getLogger()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s") if debug else _Brief())
    root.handlers = [h for h in root.handlers if not isinstance(h, _Handler)]
    root.addHandler(handler)
    # The parity gate at a first use takes a minute or two with a large model: it must not look like a hang.
    logging.getLogger("vslam_features.models").setLevel(logging.INFO)
