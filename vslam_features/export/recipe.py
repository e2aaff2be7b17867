"""The recipe of MegaLoc: weights to two ONNX files, fp32 and fp16, that are placed once they passed the self-check."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from .. import __version__
from ..artifacts.cache import adopt, cache_folder, sha256_of, staging
from ..artifacts.card import ModelCard, read_card, set_aside_sidecar
from ..artifacts.catalogue import find_entry
from ..artifacts.preprocessing import Preprocessing
from ..artifacts.store import model_path
from ..errors import ConfigError, ExportError
from ..graph.fp16 import Half, to_half
from ..graph.peaks import half_values, with_peaks
from ..graph.rules import downstream_of_last
from ..networks.megaloc import MEGALOC, MEGALOC_TINY, MegaLoc, load, randomised
from . import onnx_file
from .descriptors import INPUT, OUTPUT, Picture, by_file, by_torch, float_reference, peaks_by_file, pictures
from .graph_table import GraphFacts
from .megaloc import Exportable
from .self_check import LARGEST_HALF, MIN_PREPROCESSING_COSINE, Check, SelfCheck

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
KERNEL = "antialias"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """What is exported.

    Args:
        weights: a file of the released network; None: random ones, seeded, of no use for places.
        tiny: the small network for tests.
    """

    weights: Path | None = None
    tiny: bool = False

    @property
    def name(self) -> str:
        """Of the model and its files."""
        if self.tiny:
            return "megaloc-tiny"
        return "megaloc" if self.weights else "megaloc-random"

    def network(self) -> MegaLoc:
        """Raises WeightsError."""
        config = MEGALOC_TINY if self.tiny else MEGALOC
        return load(config, self.weights) if self.weights else randomised(config, 0)

    def card(self, network: MegaLoc) -> ModelCard:
        """Of the fp32 file, without its self-check."""
        width, height = network.config.image_size
        entry = find_entry("megaloc")
        sha256 = sha256_of(self.weights) if self.weights else _sha256_of_state(network)
        released = sha256 == entry.weights.sha256
        return ModelCard(
            role="global",
            name=self.name,
            licence=entry.licence if self.name == "megaloc" else "none",
            source_sha256=sha256,
            version=entry.version if released else "" if self.weights else "random, seed 0",
            preprocessing=Preprocessing("rgb", width, height, KERNEL, IMAGENET_MEAN, IMAGENET_STD),
            tools={
                "vslam_features": __version__,
                **{name: version(name) for name in ("torch", "onnx", "onnxscript", "onnx-ir")},
            },
        )


@dataclass(frozen=True)
class Exported:
    """``files``: precision -> where it is; ``half``: figures of the fp16 pass."""

    card: ModelCard
    files: dict[str, Path]
    graphs: dict[str, GraphFacts]
    check: SelfCheck
    half: Half


def export_megaloc(
    source: Source,
    images: Sequence[Path] = (),
    folder: Path | None = None,
    progress: Progress = lambda text: None,
    debug: bool = False,
) -> Exported:
    """Export, check, place. Nothing is placed, and what is there stays, unless every check passed.

    Args:
        images: pictures or folders for the self-check, see ``descriptors.pictures``.
        folder: for the files; None: where models of the cache are looked for by name.
        progress: called with a line of text before each step.
        debug: let the exporter speak.
    Raises:
        WeightsError, ExportError, ConfigError, DataError, ImageError, CacheError.
    """
    shown = pictures(images)
    check = SelfCheck([p.name for p in shown])
    targets = {p: _target(source.name, p, folder) for p in ("fp32", "fp16")}
    with staging(targets["fp32"].parent) as scratch:
        staged = {p: scratch / target.name for p, target in targets.items()}
        graphs = {}
        card, tensors, expected, graphs["fp32"] = _export(source, shown, staged["fp32"], check, progress, debug)
        gc.collect()
        reference = [float_reference(p.image, card.preprocessing) for p in shown]
        fp32 = _check_fp32(staged["fp32"], tensors, reference, expected, check, progress)
        check.require()
        half, graphs["fp16"] = _write_half(staged, tensors, check, progress)
        gc.collect()
        progress("running the fp16 twin on ONNX Runtime")
        check.agree("fp16 twin against fp32, cosine", by_file(staged["fp16"], tensors)[0], fp32)
        check.describe(fp32)
        check.require()
        card = replace(card, self_check=check.texts())
        for precision, path in staged.items():
            onnx_file.add_card(path, replace(card, precision=precision))
            if read_card(path) != replace(card, precision=precision):
                raise ExportError(f"the card of {path.name} is not read back as it was written")
        for precision, path in staged.items():
            set_aside_sidecar(targets[precision])
            adopt(path, targets[precision])
    return Exported(card, targets, graphs, check, half)


def compare_raw(source: Source, progress: Progress = lambda text: None, debug: bool = False) -> dict[str, GraphFacts]:
    """The network exported as it is and with the rewrites, side by side; no file stays. Raises as the export does."""
    network, facts = source.network(), {}
    with staging(cache_folder("models")) as scratch:
        for title, wrap in (("rewritten", Exportable), ("as it is", lambda n: n)):
            progress(f"exporting the network {title}" if title == "as it is" else "exporting the network with rewrites")
            path = scratch / "graph.onnx"
            graph = onnx_file.export(wrap(network), {INPUT: _example(network)}, [OUTPUT], debug=debug)
            onnx_file.write(graph, path)
            facts[title] = GraphFacts.of(graph, path)
    return facts


def _export(source: Source, shown: list[Picture], path: Path, check: SelfCheck, progress: Progress, debug: bool):
    """Card, input tensors, the descriptors by the wrapper, and facts of the graph; writes the fp32 file."""
    progress("loading the weights" if source.weights else "making random weights")
    network = source.network()
    card = source.card(network)
    tensors = [card.preprocessing.apply(p.image) for p in shown]
    wrapper = Exportable(network).eval()
    progress(f"running the network in torch on {len(shown)} pictures")
    original, expected = by_torch(network, tensors), by_torch(wrapper, tensors)
    check.differ("wrapper against original, max difference", expected, original)
    check.require()
    progress("exporting to ONNX")
    graph = onnx_file.export(wrapper, {INPUT: _example(network)}, [OUTPUT], debug=debug)
    progress("writing and checking the fp32 file")
    onnx_file.write(graph, path)
    onnx_file.release(wrapper)  # and with it the network
    return card, tensors, expected, GraphFacts.of(graph, path)


def _check_fp32(path: Path, tensors, reference, expected: np.ndarray, check: SelfCheck, progress: Progress):
    """Descriptors by the fp32 file. ``reference``: the tensors as the published preprocessing makes them."""
    progress("running the fp32 file on ONNX Runtime")
    fp32, published = np.split(by_file(path, [*tensors, *reference])[0], 2)
    check.differ("ONNX fp32 against torch, max difference", fp32, expected)
    check.agree("ONNX fp32 against torch, cosine", fp32, expected)
    check.agree("our preprocessing against torch's, cosine", fp32, published, MIN_PREPROCESSING_COSINE)
    if find_spec("openvino"):
        progress("running the fp32 file on OpenVINO in f32")
        check.agree("OpenVINO f32 against ONNX Runtime, cosine", by_file(path, tensors, "openvino")[0], fp32)
        progress("running the fp32 file on OpenVINO in the precision that it picks")
        free, provider = by_file(path, tensors, "openvino", precision_hint="auto")
        check.agree(f"OpenVINO by itself ({provider.split()[-1]}), cosine", free, fp32, None)
    return fp32


def _write_half(staged: dict[str, Path], tensors, check: SelfCheck, progress: Progress) -> tuple[Half, GraphFacts]:
    """The fp16 twin: everything from the last LayerNormalization on computes in fp32."""
    progress("making the fp16 twin")
    model = ir.load(staged["fp32"])
    half = to_half(model, downstream_of_last())
    onnx_file.write(half.model, staged["fp16"])
    facts, halved = GraphFacts.of(half.model, staged["fp16"]), half_values(half.model)
    half = replace(half, model=None)
    gc.collect()
    progress("looking for values that half precision cannot hold")
    probe = staged["fp32"].with_name("peaks.onnx")
    onnx_file.write(with_peaks(model, halved), probe)
    del model
    gc.collect()
    check.checks.append(Check("largest value computed in fp16", peaks_by_file(probe, tensors), LARGEST_HALF))
    probe.unlink()
    return half, facts


def _example(network: MegaLoc) -> torch.Tensor:
    width, height = network.config.image_size
    return torch.zeros(1, 3, height, width)


def _target(name: str, precision: str, folder: Path | None) -> Path:
    target = model_path(name, precision)
    if folder is None:
        return target
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: is no folder")
    return folder / target.name


def _sha256_of_state(network: MegaLoc) -> str:
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(name.encode())
        digest.update(value.numpy())
    return digest.hexdigest()
