"""The one exception root of the package.

A message says what failed, which file, topic or parameter, what was got and
expected, and the next step. Callers that serve people (CLI, node) catch
:class:`VslamFeaturesError` and show the message without a traceback.
"""


class VslamFeaturesError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(VslamFeaturesError):
    """A configuration value or parameter is unknown, ill-typed or out of range."""


class PluginError(VslamFeaturesError):
    """A plug-in is unknown, or a library that it needs is missing."""


class ImageError(VslamFeaturesError):
    """An image cannot be decoded or has a shape or type outside the contract."""


class CameraError(VslamFeaturesError):
    """A camera model is invalid or does not belong to the image."""


class BagError(VslamFeaturesError):
    """A recording cannot be opened, lacks the topics asked for, or ends early."""


class IdentityError(VslamFeaturesError):
    """Features or descriptors of different models were about to be compared."""


class DataError(VslamFeaturesError):
    """An array at a boundary has the wrong shape, type or a non-finite value."""
