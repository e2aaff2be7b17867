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


class MapError(VslamFeaturesError):
    """A map cannot be written, saved or loaded."""


class MapFileError(MapError):
    """A file is no map, is one of another version, or cannot be read."""


class MapDamagedError(MapFileError):
    """A map file is damaged; the message names the file and the table."""


class ModelError(VslamFeaturesError):
    """Root of what can be wrong with a learned model."""


class ModelMissingError(ModelError):
    """A model's file is not on this machine; the message names the command that brings it."""


class ModelFileError(ModelError):
    """A file is not the model it should be: an LFS pointer, a web page, cut short, changed, without a card."""


class RuntimeMissingError(ModelError):
    """A runtime's library is not installed, or has not the device that was asked for."""


class ParityError(ModelError):
    """A model does not compute what its reference computes and may not run."""


class BackendError(ModelError):
    """A runtime failed while it ran a model."""


class NonFiniteError(BackendError):
    """A model returned NaN or infinity. ``outputs``: name -> array, all that it returned."""

    def __init__(self, message: str, outputs: dict):
        super().__init__(message)
        self.outputs = outputs


class WeightsError(ModelError):
    """A file of network weights cannot be read, is damaged, or asks for more than tensors."""


class ExportError(ModelError):
    """A network cannot be exported, or what was exported does not compute what the network does."""


class FetchError(ModelError):
    """A model's file could be had from none of its sources."""


class CacheError(ModelError):
    """The folder of fetched and built models cannot be used."""
