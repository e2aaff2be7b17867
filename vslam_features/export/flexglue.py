"""The recipe of FlexGlue: an encoder and a matcher as ONNX files, fp32 and fp16, and the matcher that stops early.

Opset 18 with attention as MatMul, Softmax, MatMul: a layer of the released size takes as long as with the Attention of
opset 23 (1.5 to 1.9 against 1.4 to 2.0 s of processor time in ONNX Runtime 1.32, 1.3 against 1.2 in OpenVINO 2026.4),
1.8 GB of memory against 2.5, and every runtime that is supported has the operators.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir
import torch

from ..artifacts.cache import sha256_of, staging
from ..artifacts.card import ModelCard
from ..graph.early_stop import add_early_stop, check_layers
from ..graph.fp16 import to_half
from ..graph.rules import Rule, back_to, by_op, downstream_of, downstream_of_last, union
from ..networks.flexglue import FLEXGLUE, FLEXGLUE_TINY, FlexGlue, Matcher
from ..networks.flexglue_weights import constructed, load, randomised
from . import onnx_file
from .descriptors import imagenet, pictures
from .flexglue_check import MatcherCheck, check_maps, check_twin_maps
from .graph_table import GraphFacts
from .half_twin import write_half
from .placement import PRECISIONS, Exported, Progress, finish, place, sha256_of_state, target, tools
from .self_check import SelfCheck

_NORM = "LayerNormalization"
INPUTS = (*(f"{name}{i}" for name in ("keypoints", "descriptors", "image_size") for i in "01"), "min_covisibility")
OUTPUTS = ("matches0", "mscores0", "covisibility_score")


@dataclass(frozen=True)
class Source:
    """What is exported.

    Args:
        weights: a state dict of :class:`~vslam_features.networks.flexglue.FlexGlue`, which the release's is not. None:
            of the tiny network constructed weights, with which pictures match, else random ones of no use.
        tiny: the small network for tests.
    """

    weights: Path | None = None
    tiny: bool = False

    def name(self, part: str = "") -> str:
        """Of a model and its files; ``part``: empty, ``-matcher`` or ``-matcher-early-stop``."""
        return f"flexglue{part}{'-tiny' if self.tiny else '' if self.weights else '-random'}"

    def network(self) -> FlexGlue:
        """Raises WeightsError."""
        config = FLEXGLUE_TINY if self.tiny else FLEXGLUE
        if self.weights:
            return load(config, self.weights)
        return constructed(config, 0) if self.tiny else randomised(config, 0)

    def cards(self, network: FlexGlue) -> tuple[ModelCard, ModelCard]:
        """Of the fp32 files of encoder and matcher, without their self-checks."""
        shared = dict(
            licence="none",
            source_sha256=sha256_of(self.weights) if self.weights else sha256_of_state(network),
            version="" if self.weights else f"{'constructed' if self.tiny else 'random'}, seed 0",
            tools=tools(),
        )
        steps = imagenet(*network.config.image_size)
        encoder = ModelCard(role="features", name=self.name(), preprocessing=steps, **shared)
        matcher = ModelCard(
            role="matcher",
            name=self.name("-matcher"),
            features_model=self.name(),
            layers=network.config.layers,
            **shared,
        )
        return encoder, matcher


@dataclass
class _Run:
    """One export on its way: what its steps share."""

    scratch: Path
    folder: Path | None
    progress: Progress
    done: list[tuple[dict[str, Path], Exported]] = field(default_factory=list)

    def staged(self, name: str) -> dict[str, Path]:
        return {p: self.scratch / target(name, p, self.folder).name for p in PRECISIONS}

    def finish(self, staged: dict[str, Path], card: ModelCard, graphs, check: SelfCheck, half) -> None:
        """A model whose checks passed, with its card, ready to be placed. Raises ExportError."""
        check.require()
        card = replace(card, self_check=check.texts())
        finish(staged, card)
        targets = {p: target(card.name, p, self.folder) for p in PRECISIONS}
        self.done.append((staged, Exported(card, targets, graphs, check, half)))

    def place(self) -> list[Exported]:
        for staged, exported in self.done:
            place(staged, exported.files)
        return [exported for _, exported in self.done]


def export_flexglue(
    source: Source,
    early_stop_layers: Sequence[int] = (),
    images: Sequence[Path] = (),
    folder: Path | None = None,
    progress: Progress = lambda text: None,
    debug: bool = False,
    force: bool = False,
) -> list[Exported]:
    """Export, check, place: encoder, matcher and, with layers to check, the matcher that stops early.

    Nothing is placed, and what is there stays, unless every check of all files passed. In the matcher the scores of the
    layers are values ``score_1`` to ``score_8`` that no output needs, so that ``models patch early-stop`` finds them.

    Args:
        early_stop_layers: ascending, from 1; ``force``: layer 1 among them.
        images: pictures or folders for the self-check, see ``descriptors.pictures``; each two are a pair.
        folder: for the files; None: where models of the cache are looked for by name.
        progress: called with a line of text before each step.
        debug: let the exporter speak.
    Raises:
        WeightsError, ExportError, ConfigError, DataError, ImageError, CacheError.
    """
    shown = pictures(images)
    where = target(source.name(), "fp32", folder).parent
    with staging(where) as scratch:
        run = _Run(scratch, folder, progress)
        progress("loading the weights" if source.weights else "making weights")
        network = source.network()
        if early_stop_layers:
            count = network.config.layers
            check_layers(range(1, count), early_stop_layers, count, force)
        cards = source.cards(network)
        _export_encoder(run, network, cards[0], shown, debug)
        progress("matching in torch")
        check = MatcherCheck.of(network, cards[0].preprocessing, shown, early_stop_layers)
        progress("exporting the matcher to ONNX")
        scored = {p: scratch / f"scored.{p}.onnx" for p in PRECISIONS}
        onnx_file.write(export_scored(network.matcher, debug), scored["fp32"])
        onnx_file.release(network)
        gc.collect()
        half = _export_matcher(run, cards[1], scored, check)
        if early_stop_layers:
            _export_early_stop(run, source, cards[1], scored, check, early_stop_layers, half, force)
        return run.place()


def export_scored(matcher: Matcher, debug: bool = False) -> ir.Model:
    """The graph of a matcher with the score after each layer but the last as an output, ``score_1`` and so on."""
    config = matcher.config
    shapes = ((7, 2), (5, 2), *((config.dim, *config.grid),) * 2, (2,), (2,), ())
    # A tensor of its own for each: one that comes twice would be one input that serves as both.
    example = {name: torch.zeros(shape) for name, shape in zip(INPUTS, shapes)}
    names = [*OUTPUTS, *(f"score_{k}" for k in range(1, config.layers))]
    dynamic = {"keypoints0": {0: "M"}, "keypoints1": {0: "N"}}
    return onnx_file.export(matcher, example, names, dynamic, debug=debug)


def without_scores(scored: ir.Model) -> ir.Model:
    """A copy without the scores of layers among its outputs; they stay in the graph, where patches find them."""
    model = scored.clone()
    kept = [value for value in model.graph.outputs if value.name in OUTPUTS]
    model.graph.outputs.clear()
    model.graph.outputs.extend(kept)
    return model


def keep_in_matcher(layers: int) -> Rule:
    """What computes in fp32: positions, the readout, the heads of all layers, and comparisons of scores.

    The scores are those of layers 1 to ``layers`` - 1 by name; the last head's is the covisibility score.
    """
    heads = back_to(_NORM, *(f"score_{k}" for k in range(1, layers)), "covisibility_score")
    return union(downstream_of(*(name for name in INPUTS if "descriptors" not in name)), downstream_of_last(), heads)


def _export_encoder(run: _Run, network: FlexGlue, card: ModelCard, shown, debug: bool) -> None:
    """The last step of the twin is a cast from half precision: its maps are stored in two bytes without loss."""
    check, staged, graphs = SelfCheck([p.name for p in shown]), run.staged(card.name), {}
    tensors = [card.preprocessing.apply(p.image) for p in shown]
    width, height = network.config.image_size
    run.progress("exporting the encoder to ONNX")
    graph = onnx_file.export(network.encoder, {"image": torch.zeros(1, 3, height, width)}, ["descriptors"], debug=debug)
    onnx_file.write(graph, staged["fp32"])
    graphs["fp32"] = GraphFacts.of(graph, staged["fp32"])
    maps = check_maps(check, network, staged["fp32"], tensors, run.progress)
    check.require()
    feeds = [{"image": tensor} for tensor in tensors]
    half, graphs["fp16"] = write_half(
        staged["fp32"], staged["fp16"], lambda model: to_half(model, by_op(_NORM)), feeds, check, run.progress
    )
    check_twin_maps(check, staged["fp16"], tensors, maps, run.progress)
    run.finish(staged, card, graphs, check, half)


def _export_matcher(run: _Run, card: ModelCard, scored: dict[str, Path], check: MatcherCheck):
    """Figures of the fp16 pass."""
    staged, graphs = run.staged(card.name), {}
    graphs["fp32"] = _write_plain(scored["fp32"], staged["fp32"])
    check.plain(staged["fp32"], run.progress)
    half, _ = write_half(
        scored["fp32"],
        scored["fp16"],
        lambda model: to_half(model, keep_in_matcher(card.layers)),
        check.feeds,
        check.table,
        run.progress,
    )
    graphs["fp16"] = _write_plain(scored["fp16"], staged["fp16"])
    check.half(staged["fp16"], run.progress)
    run.finish(staged, card, graphs, check.table, half)
    return half


def _export_early_stop(run, source, card, scored, check: MatcherCheck, layers: Sequence[int], half, force: bool):
    card = replace(
        card,
        name=source.name("-matcher-early-stop"),
        early_stop_layers=tuple(layers),
        patches=(f"early-stop {','.join(map(str, layers))}",),
    )
    run.progress(f"adding early stops after layers {', '.join(map(str, layers))}")
    staged, graphs = run.staged(card.name), {}
    scores = {k: f"score_{k}" for k in range(1, card.layers)}
    for precision, path in staged.items():
        done = add_early_stop(ir.load(scored[precision]), scores, layers, card.layers, force=force)
        onnx_file.write(done.model, path)
        graphs[precision] = GraphFacts.of(done.model, path)
    stops = check.early_stop(staged, run.progress)
    run.finish(staged, card, graphs, stops, half)


def _write_plain(scored: Path, path: Path) -> GraphFacts:
    model = without_scores(ir.load(scored))
    onnx_file.write(model, path)
    return GraphFacts.of(model, path)
