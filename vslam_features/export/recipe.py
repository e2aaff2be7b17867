"""The recipe of MegaLoc: weights to two ONNX files, fp32 and fp16, that are placed once they passed the self-check."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ..artifacts.cache import cache_folder, sha256_of, staging
from ..artifacts.card import ModelCard
from ..artifacts.catalogue import find_entry
from ..graph.fp16 import to_half
from ..graph.rules import downstream_of_last
from ..networks.megaloc import MEGALOC, MEGALOC_TINY, MegaLoc, load, randomised
from . import onnx_file
from .descriptors import INPUT, OUTPUT, Picture, by_file, by_torch, float_reference, imagenet, pictures
from .graph_table import GraphFacts
from .half_twin import write_half
from .megaloc import Exportable
from .placement import PRECISIONS, Exported, Progress, finish, place, sha256_of_state, target, tools
from .self_check import MIN_PREPROCESSING_COSINE, SelfCheck


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
        sha256 = sha256_of(self.weights) if self.weights else sha256_of_state(network)
        released = sha256 == entry.weights.sha256
        return ModelCard(
            role="global",
            name=self.name,
            licence=entry.licence if self.name == "megaloc" else "none",
            source_sha256=sha256,
            version=entry.version if released else "" if self.weights else "random, seed 0",
            preprocessing=imagenet(width, height),
            tools=tools(),
        )


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
    targets = {p: target(source.name, p, folder) for p in PRECISIONS}
    with staging(targets["fp32"].parent) as scratch:
        staged = {p: scratch / path.name for p, path in targets.items()}
        graphs = {}
        card, tensors, expected, graphs["fp32"] = _export(source, shown, staged["fp32"], check, progress, debug)
        gc.collect()
        reference = [float_reference(p.image, card.preprocessing) for p in shown]
        fp32 = _check_fp32(staged["fp32"], tensors, reference, expected, check, progress)
        check.require()
        feeds = [{INPUT: tensor} for tensor in tensors]
        # Everything from the last LayerNormalization on computes in fp32.
        half, graphs["fp16"] = write_half(
            staged["fp32"], staged["fp16"], lambda model: to_half(model, downstream_of_last()), feeds, check, progress
        )
        gc.collect()
        progress("running the fp16 twin on ONNX Runtime")
        check.agree("fp16 twin against fp32, cosine", by_file(staged["fp16"], tensors)[0], fp32)
        check.describe(fp32)
        check.require()
        card = replace(card, self_check=check.texts())
        finish(staged, card)
        place(staged, targets)
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


def _example(network: MegaLoc) -> torch.Tensor:
    width, height = network.config.image_size
    return torch.zeros(1, 3, height, width)
