"""What a model is compared with and falls back on: the fp32 file of the same weights, on a CPU."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

from . import registry
from .artifacts.cache import cache_folder
from .artifacts.card import ModelCard, read_card
from .artifacts.file_kind import FileKind, require_kind
from .artifacts.provider_options import provider_options
from .artifacts.store import content_sha256, locate, model_path
from .errors import ConfigError, ModelError, ModelFileError, ModelMissingError, RuntimeMissingError
from .runtimes.base import LoadRequest, Session
from .runtimes.engine_file import read_header

logger = logging.getLogger(__name__)

# What runs a file exactly, by its suffix: a CPU in fp32, without graph optimisation where that can be switched off.
_RUNTIMES = {".onnx": ("onnxruntime", {}), ".xml": ("openvino", {"precision_hint": "f32"})}


@dataclass(frozen=True)
class ModelFile:
    """A model file; ``sha256`` is of its content when it was first looked at."""

    path: Path
    card: ModelCard
    sha256: str

    @classmethod
    def at(cls, path: Path) -> ModelFile:
        """Raises ModelFileError where it is no model or has no card, CacheError where it cannot be read."""
        if path.suffix == ".onnx":
            require_kind(path, FileKind.ONNX)  # a Git LFS pointer or a web page is called by its name
        return cls(path, read_card(path), content_sha256(path))

    def load(self, runtime: str, options: dict, request: LoadRequest) -> Session:
        """A session of the content that was looked at; ModelFileError where it changed, else as ``Runtime.load``."""
        cls = registry.get("runtime", runtime)
        if runtime == "onnxruntime":
            options = provider_options(self.path, self.card, options, request.device)
        session = cls(cls.Options(**options)).load(self.path, request)
        if content_sha256(self.path) != self.sha256:
            raise ModelFileError(f"{self.path}: its content has changed since it was opened; start again")
        return session


@dataclass(frozen=True)
class Reference:
    """The file that a model is compared with.

    Args:
        file: the reference's. same: it is the model's own. threads: of its sessions; 0: all cores.
    """

    file: ModelFile
    same: bool
    threads: int = 0

    @classmethod
    def of(cls, file: ModelFile, threads: int = 0) -> Reference:
        """The fp32 ONNX file that claims the same weights; of an engine else the ONNX file that it was built from.

        Where there is none, the file itself.
        """
        source = _source(file)
        twin = _twin(source or file) or source or file
        return cls(twin, twin.sha256 == file.sha256, threads)

    @property
    def label(self) -> str:
        """How a parity record names it: ``self`` or the sha256 of the file."""
        return "self" if self.same else self.file.sha256

    @property
    def runnable(self) -> bool:
        """Whether there is a runtime for such files that computes what they say."""
        return self.file.path.suffix in _RUNTIMES

    @property
    def proves(self) -> bool:
        """Whether it is another file, and what runs it is installed."""
        runtime, _ = _RUNTIMES.get(self.file.path.suffix, ("", {}))
        return not self.same and bool(runtime) and importlib.util.find_spec(runtime) is not None

    def load(self) -> tuple[Session, ModelCard]:
        """A new session.

        Raises:
            ModelMissingError, ModelFileError: the file is gone, or another since it was looked at.
            RuntimeMissingError: what runs such a file is not installed, or nothing does.
        """
        path = self.file.path
        if not self.runnable:
            raise RuntimeMissingError(
                f"{path}: no runtime computes a {path.suffix} file exactly, and there is no fp32 ONNX file of its "
                f"weights to compare it with: run 'vslam-features models fetch {self.file.card.name}'"
            )
        if not path.is_file():
            raise ModelMissingError(f"the reference {path} is gone since the model was opened; start again")
        runtime, options = _RUNTIMES[path.suffix]
        return self.file.load(runtime, options, LoadRequest(threads=self.threads, optimise=False)), self.file.card


def _source(file: ModelFile) -> ModelFile | None:
    """The ONNX file that an engine was built from: where it was, beside the engine, or in the cache."""
    if file.path.suffix != ".engine":
        return None
    facts = read_header(file.path).facts
    built = Path(facts.source)
    for path in (built, file.path.with_name(built.name), cache_folder("models") / built.name):
        try:
            if path.is_file() and content_sha256(path) == facts.source_sha256:
                return ModelFile.at(path)
        except ModelError as error:
            logger.info("%s: %s is not its source: %s", file.path, path, error)
    return None


def _twin(file: ModelFile) -> ModelFile | None:
    """The fp32 file: beside a file that was named by its path, as both were made, else in the cache."""
    if file.card.precision == "fp32" and file.path.suffix == ".onnx":
        return file
    beside = file.path.with_name(model_path(file.card.name, "fp32").name)
    for model in (str(beside), file.card.name):
        try:
            twin = ModelFile.at(locate(model, "fp32"))
        except (ModelError, ConfigError) as error:  # ConfigError: its name is none of the registry
            logger.info("%s: no fp32 reference: %s", file.card.name, error)
            continue
        if twin.card.precision == "fp32" and _same_weights(twin.card, file.card):  # a name is only a name
            return twin
    return None


def _same_weights(a: ModelCard, b: ModelCard) -> bool:
    """Whether two files are to compute the same, by their cards; of files of unknown making nobody knows."""
    same = (a.role, a.source_sha256, a.preprocessing.id) == (b.role, b.source_sha256, b.preprocessing.id)
    return same and bool(a.source_sha256)
