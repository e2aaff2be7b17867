"""ILogger and the messages of the library."""

from __future__ import annotations

import sys
import time
import weakref

from .enums import Severity


class Checked(type):
    """pybind11 refuses an object whose class overrides ``__init__`` and does not call that of its base."""

    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        if not getattr(made, "_constructed", False):
            base = next(each for each in cls.__mro__ if each.__module__.startswith("fake_trt"))
            raise TypeError(f"tensorrt.{base.__name__}.__init__() must be called when overriding __init__")
        return made


class ILogger(metaclass=Checked):
    """To be derived from: ``log(severity, msg)`` takes the messages."""

    Severity = Severity

    def __init__(self):
        self._constructed = True

    def log(self, severity, msg):
        raise RuntimeError('Tried to call pure virtual function "ILogger::log"')


class Logger(ILogger):
    """Writes to the terminal what is at least as severe as asked for."""

    def __init__(self, min_severity=Severity.WARNING):
        super().__init__()
        self.min_severity = min_severity

    def log(self, severity, msg):
        if int(severity) <= int(self.min_severity):
            stamp = time.strftime("%m/%d/%Y-%H:%M:%S")
            print(f"[{stamp}] [TRT] [{'FEWIV'[int(severity)]}] {msg}", file=sys.stderr)


for _name, _value in Severity.__members__.items():
    setattr(ILogger, _name, _value)

_users: weakref.WeakSet = weakref.WeakSet()
_logger: list = [None]


def register(user, logger) -> None:
    """The first logger serves all builders and runtimes until the last of them is gone; another one is ignored."""
    if not isinstance(logger, ILogger):
        raise TypeError(f"__init__(): incompatible constructor arguments. Invoked with: {logger!r}")
    if not len(_users):
        _logger[0] = logger
    _users.add(user)
    if logger is not _logger[0]:
        warn("The logger passed into createInferRuntime or createInferBuilder differs from one already registered.")


def say(severity, text: str) -> None:
    """Give a message to the logger in charge."""
    if _logger[0] is not None:
        try:
            _logger[0].log(severity, text)
        except Exception as error:  # the real binding does the same: an exception cannot pass through the library
            print(f"[ERROR] Exception caught in log(): {error}", file=sys.stderr)


def error(text: str) -> None:
    """A message of severity ERROR."""
    say(Severity.ERROR, text)


def warn(text: str) -> None:
    """A message of severity WARNING."""
    say(Severity.WARNING, text)


def inform(text: str) -> None:
    """A message of severity INFO."""
    say(Severity.INFO, text)
