"""What ``doctor`` says of the configured models: their files, their engines, and what their parity records say."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..config import Config
from ..errors import ConfigError, ModelError, ModelMissingError
from .check import FAIL, OK, WARN, Check

_OWN_ENGINE = "build it on this robot, or name the model instead of the file: engines of models are built by themselves"


def configured_models(config: Config) -> list[str]:
    """Names and paths of the models that the configuration opens, each once."""
    from ..classical import used_models

    return list(dict.fromkeys(model for models in used_models(config).values() for model in models))


def check_models(config: Config, versions: Mapping[str, str], gpu: Mapping | None = None) -> Iterator[Check]:
    """A line for each model; with the runtime ``tensorrt`` one for its engine, too, whose records count then.

    Args:
        versions: runtime -> version of its library, as a parity record has it.
        gpu: what ``doctor_gpu_probe`` found.
    """
    gpu = gpu or {}
    name = gpu.get("gpu", {}).get("name", "")
    for model in configured_models(config):
        engine = gpu.get("engines", {}).get(model)
        if engine is not None and "error" in engine and (problem := _file_problem(model, config)) is None:
            yield Check(FAIL, "engine", f"of {model}: {engine['error']}", _rebuild(model, config))
            continue
        file = engine["source"] if engine is not None and "source" in engine else model
        problem = _file_problem(file, config, model)
        if problem is not None:
            yield problem
        elif engine is None:
            yield _recorded(file, config, versions, name)
        else:
            yield _engine(model, config, engine)
            if not engine["reasons"]:
                yield _recorded(engine["path"], config, versions, name)


def _file_problem(file: str, config: Config, model: str = "") -> Check | None:
    """What is wrong with a model's file, told apart, with what brings the right one; None: nothing.

    ``file``: name or path; ``model``: how the configuration calls it.
    """
    from ..artifacts.card import read_card, sidecar_path
    from ..artifacts.file_kind import FileKind, identify
    from ..artifacts.store import SUFFIXES, locate

    model = model or file
    named = Path(model).suffix in SUFFIXES
    precision = config.runtime.precision
    variant = "" if precision == "fp32" else f" --precision {precision}"
    fetch = f"vslam-features models fetch {model} --force{variant}"
    try:
        path = locate(file, precision)
    except ModelMissingError as error:
        if named:
            return Check(FAIL, "model", str(error), "correct the path in the configuration, or copy the file there")
        state = FAIL if config.models.if_missing == "error" else WARN
        return Check(
            state, "model", f"{model} ({precision}) is not here", f"vslam-features models fetch {model}{variant}"
        )
    except ConfigError as error:
        return Check(FAIL, "model", str(error), "'vslam-features models list' shows the names")
    again = f"copy {path.name} again from where it was made" if named else fetch
    if path.suffix == ".engine":
        again = _OWN_ENGINE
    try:
        facts = identify(path)
    except ModelError as error:
        return Check(FAIL, "model", str(error), "give the user that runs the front-end the right to read it")
    expected = {".onnx": FileKind.ONNX, ".xml": FileKind.OPENVINO_XML, ".engine": FileKind.TENSORRT_ENGINE}[path.suffix]
    if facts.kind != expected:
        pulled = f"'git lfs pull' where it comes from, or {again}" if facts.kind is FileKind.GIT_LFS_POINTER else again
        return Check(FAIL, "model", f"{path} ({facts.size} bytes) is {facts}, expected {expected.value}", pulled)
    if problem := _damage(path):
        return Check(FAIL, "model", problem, again)
    try:
        read_card(path)
    except ModelError as error:
        sidecar = sidecar_path(path)
        fix = f"correct {sidecar}" if sidecar.is_file() else again
        return Check(FAIL, "model", str(error), f"write {sidecar}, see docs/models.md" if named else fix)
    return None


def _damage(path: Path) -> str:
    """What a whole look at a file finds: its content is not what its header, or its graph, says; empty: nothing."""
    from ..artifacts.store import content_sha256
    from ..runtimes.engine_file import read_engine

    try:
        if path.suffix == ".engine":
            read_engine(path)
        else:
            content_sha256(path)
    except ModelError as error:
        return str(error)
    return ""


def _recorded(model: str, config: Config, versions: Mapping[str, str], gpu: str) -> Check:
    """What parity records say of a model whose file is well."""
    from ..artifacts.card import read_card
    from ..artifacts.records import card_id, gate_id, records_of
    from ..artifacts.store import content_sha256, locate

    path = locate(model, config.runtime.precision)
    card, sha256 = read_card(path), content_sha256(path)
    kept, judged = records_of(sha256), (gate_id(card), card_id(card))
    # Of each runtime and device the newest counts. A session asks for its library, device, gate and card.
    here = (r for r in kept if _of_this_machine(r.device, gpu) and r.version == _installed(r.runtime, versions))
    valid = (r for r in here if (r.gate, r.card) == judged)
    newest = {(r.runtime, r.device.partition(" ")[0]): r for r in sorted(valid, key=lambda r: r.time)}
    used = newest.get((config.runtime.name, _device(config)))
    passed = sorted({r.runtime for r in newest.values() if r.passed})
    text = f"{card.name} {card.precision}, {path.stat().st_size / 1e6:.1f} MB"
    verify = f"vslam-features models verify {model}"
    if used and not used.passed:
        text += f"; failed on {used.runtime}: {'; '.join(used.reasons[:2])}"
        if config.models.allow_unverified:
            return Check(WARN, "model", f"{text}; models.allow_unverified lets it run", verify)
        return Check(FAIL, "model", text, f"{verify}; then choose another runtime")
    if passed:
        return Check(OK, "model", f"{text}; verified on {', '.join(passed)}")
    if kept and not newest:
        last = max(kept, key=lambda r: r.time)
        text += f"; last compared on {last.runtime} {last.version}, {last.device}, not with what is installed here"
        return Check(WARN, "model", text, f"verified again at the next start, or: {verify}")
    return Check(OK, "model", f"{text}; verified at its first use")


def _engine(model: str, config: Config, found: Mapping) -> Check:
    """The TensorRT engine of a model: there and fitting, or why it is built at the next start."""
    text = found["path"]
    if found["there"] and not found["reasons"]:
        return Check(OK, "engine", f"{text}: fits this GPU, driver and TensorRT")
    text += f": {'; '.join(found['reasons'])}"
    if model.endswith(".engine"):  # named by its path, so that nothing is built in its place
        return Check(FAIL, "engine", f"{text}; it is refused", _OWN_ENGINE)
    if config.runtime.options.get("build") == "never":
        return Check(FAIL, "engine", f"{text}; runtime.options.build is never", _rebuild(model, config))
    return Check(
        WARN,
        "engine",
        f"{text}; built at the next start, which takes minutes",
        f"build it now: {_rebuild(model, config)}",
    )


def _rebuild(model: str, config: Config) -> str:
    from ..artifacts.engine_maker import build_words

    return f"vslam-features {shlex.join(build_words(model, config.runtime))}"


def _device(config: Config) -> str:
    """The configured device in the words of a record."""
    kind, _, number = config.runtime.device.partition(":")
    on_gpu = config.runtime.name == "tensorrt" or kind in ("cuda", "tensorrt")
    return f"cuda:{int(number or 0)}" if on_gpu else config.runtime.device


def _of_this_machine(device: str, gpu: str) -> bool:
    """Whether a record's device can be this machine's; of accelerators other than CUDA's nothing is known here."""
    from ..runtimes.hardware import cpu_name, gpu_name

    kind, _, hardware = device.partition(" ")
    if kind == "cpu":
        return hardware == cpu_name()
    # On a Jetson CUDA and nvidia-smi have different names for it.
    return hardware in {gpu_name(), gpu} - {""} if kind.startswith("cuda") else True


def _installed(runtime: str, versions: Mapping[str, str]) -> str:
    """Version of a runtime's library in the words of its records; empty where there is none."""
    return versions.get(runtime.removeprefix("fake(").removesuffix(")"), "")
