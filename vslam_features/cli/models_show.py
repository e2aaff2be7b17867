"""``models list`` and ``models info``: what there is, and what a file is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ..config import Config
from ..errors import ModelError


def default_models() -> list[str]:
    """Models that the default configuration uses."""
    config = Config()
    groups = (config.features, config.matcher, config.retrieval)
    return [g.options["model"] for g in groups if "model" in g.options]


def list_models(args) -> int:
    """Print what there is."""
    from ..artifacts.cache import cache_root
    from ..artifacts.catalogue import load_catalogue

    catalogue, default = load_catalogue(), default_models()
    rows = [_state(entry, name in default) for name, entry in catalogue.items()]
    engines = _engines()
    if args.json:
        print(json.dumps({"cache": str(cache_root()), "models": rows, "engines": engines}))
        return 0
    print(f"{'name':<29} {'role':<9} {'licence':<13} {'weights':>8}  {'here':<12} verified on")
    for r in rows:
        name = r["name"] + (" *" if r["default"] else "")
        here = ", ".join(r["built"]) or ("weights" if r["weights"] else "-")
        mb = "export" if r["weights_mb"] is None else f"{r['weights_mb']:.1f} MB"
        print(f"{name:<29} {r['role']:<9} {r['licence']:<13} {mb:>8}  {here:<12} {', '.join(r['verified']) or '-'}")
    exported = ", ".join(r["name"] for r in rows if r["weights_mb"] is None)
    hint = f"{exported}: from weights that you download, by 'vslam-features models export'; " if exported else ""
    print(f"* of the default configuration; {hint}files are in {cache_root()}")
    if engines:
        print("\nTensorRT engines, which run on the GPU, driver and version that they were built for:")
    for e in engines:
        print(f"  {e['file']}: {e['error'] or _made_for(e)}")
    return 0


def _engines() -> list[dict]:
    """The engines of the cache: what they are for, and what the gate found; or what is wrong with the file."""
    from ..artifacts.cache import cache_folder
    from ..artifacts.records import records_of
    from ..artifacts.store import content_sha256
    from ..runtimes.engine_file import SUFFIX, read_header

    found = []
    for path in sorted(cache_folder("engines").glob(f"*{SUFFIX}")):
        try:
            header, records = read_header(path), records_of(content_sha256(path))
        except ModelError as error:
            found.append({"file": path.name, "error": str(error)})
            continue
        facts = {n: getattr(header.facts, n) for n in ("precision", "typing", "gpu", "driver", "tensorrt", "time")}
        outcome = {
            "verified": sorted({r.device for r in records if r.passed}),
            "failed": sorted({r.device for r in records if not r.passed}),
        }
        found.append({"file": path.name, "error": "", "name": header.name, **facts, **outcome})
    return found


def _made_for(engine: dict) -> str:
    text = f"{engine['gpu']}, driver {engine['driver']}, TensorRT {engine['tensorrt']}, {engine['time'][:10]}"
    if engine["failed"]:
        return f"{text}; FAILED on {', '.join(engine['failed'])}"
    return f"{text}; {'verified on ' + ', '.join(engine['verified']) if engine['verified'] else 'not verified yet'}"


def _state(entry, default: bool) -> dict:
    from ..artifacts.records import records_of
    from ..artifacts.sources import weights_path
    from ..artifacts.store import content_sha256, model_path

    built = [p for p in ("fp32", "fp16") if model_path(entry.name, p).is_file()]
    records = [r for p in built for r in records_of(content_sha256(model_path(entry.name, p)))]
    return {
        "name": entry.name,
        "role": entry.role,
        "version": entry.version,
        "licence": entry.licence,
        "homepage": entry.homepage,
        "default": default,
        "weights_mb": None if entry.export else entry.weights.size / 1e6,
        "weights": weights_path(entry).is_file(),
        "get": entry.how_to_get(),
        "built": built,
        "verified": sorted({r.runtime for r in records if r.passed}),
        "failed": sorted({r.runtime for r in records if not r.passed}),
    }


def info(args) -> int:
    """Print all that is known of a model file."""
    from ..artifacts.card import identity, read_card, sidecar_path
    from ..artifacts.file_kind import identify
    from ..artifacts.proposal import propose
    from ..artifacts.records import records_of
    from ..artifacts.store import content_sha256, locate
    from ..models import proven_sha256

    path = locate(args.model, args.precision)
    facts = {"file": str(path), "kind": str(identify(path)), "megabytes": round(path.stat().st_size / 1e6, 2)}
    facts["sha256"] = content_sha256(path)
    session, tensors = (None, _engine(path)) if path.suffix == ".engine" else _tensors(path)
    proposed = ""
    try:
        card = read_card(path)
    except ModelError as error:
        facts["card"] = str(error)
        if session is not None and not sidecar_path(path).exists():
            proposed = propose(path, session)
    else:
        facts["card"] = card.to_dict()
        records = records_of(facts["sha256"])
        facts["identity"] = sorted({str(identity(card, proven_sha256(r))) for r in records})
        facts["records"] = [dataclasses.asdict(r) for r in records]
        if session is not None:
            facts["binding"] = _binding(path, card, session)
    facts |= tensors
    if args.json:
        print(json.dumps(facts | ({"proposed_card": proposed} if proposed else {})))
        return 0
    print(json.dumps(facts, indent=2))
    if proposed:
        print(f"\n# A card for it: correct what is uncertain and save this as {sidecar_path(path)}\n{proposed}", end="")
    elif session is not None and isinstance(facts["card"], str):
        print(
            "\nNo card can be proposed: no input is an image, and no two are keypoints (docs/models.md has the fields)"
        )
    return 0


def _engine(path: Path) -> dict:
    """What an engine says of its making: on no other machine can it be loaded to be asked."""
    from ..runtimes.engine_file import read_header

    try:
        return {"engine": dataclasses.asdict(read_header(path).facts)}
    except ModelError as error:
        return {"engine": str(error)}


def _tensors(path: Path):
    """A session, and inputs and outputs as it sees them; without one why not."""
    from .. import registry
    from ..artifacts.proposal import told
    from ..runtimes.base import LoadRequest

    name = "openvino" if path.suffix == ".xml" else "onnxruntime"
    try:
        session = registry.get("runtime", name)().load(path, LoadRequest())
    except ModelError as error:
        return None, {"tensors": str(error)}
    sides = {"inputs": session.inputs, "outputs": session.outputs}
    return session, {side: {n: told(spec) for n, spec in specs.items()} for side, specs in sides.items()}


def _binding(path: Path, card, session) -> str:
    """Whether the card fits the tensors of the file, in words."""
    from ..artifacts.binding import Binding

    try:
        Binding(session, card, str(path)).require()
    except ModelError as error:
        return str(error)
    return "the card fits the file"
