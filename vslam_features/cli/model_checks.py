"""What ``doctor`` says of runtimes and model files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec

from ..errors import ModelError
from .check import FAIL, OK, WARN, Check

# Distributions that install the same Python package, each over the other.
_ONNXRUNTIMES = {"onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"}


def check_runtimes() -> Iterator[Check]:
    """ONNX Runtime (one of its distributions) and OpenVINO."""
    names = {(d.metadata["Name"] or "").lower().replace("_", "-") for d in metadata.distributions()}
    installed = sorted(names & _ONNXRUNTIMES)
    if len(installed) > 1:
        wanted = "cuda" if "onnxruntime-gpu" in installed else "cpu"
        fix = f"pip uninstall -y {' '.join(installed)} && pip install 'vslam_features[{wanted}]'"
        yield Check(FAIL, "onnxruntime", f"{' and '.join(installed)} overwrite each other", fix)
    elif not installed and find_spec("onnxruntime") is None:
        fix = "pip install 'vslam_features[cpu]', or [cuda] with an NVIDIA GPU"
        yield Check(WARN, "onnxruntime", "not installed: learned models cannot run, sift + nearest + vlad do", fix)
    else:
        from ..runtimes.ort import library

        onnxruntime = library()
        offered = ", ".join(p.removesuffix("ExecutionProvider") for p in onnxruntime.get_available_providers())
        yield Check(
            OK, "onnxruntime", f"{onnxruntime.__version__} from {', '.join(installed) or 'the system'}; {offered}"
        )
    if find_spec("openvino") is not None:
        try:
            version = metadata.version("openvino")
        except metadata.PackageNotFoundError:  # of the system, not of pip
            version = "of the system"
        yield Check(OK, "openvino", version)


def check_models() -> Iterator[Check]:
    """The models of the default configuration: whether they are here, and what their parity records say."""
    from ..artifacts.card import read_card
    from ..artifacts.records import card_id, gate_id, records_of
    from ..artifacts.store import content_sha256, locate
    from ..config import Config
    from ..errors import ModelMissingError

    config = Config()
    groups = (config.features, config.matcher, config.retrieval)
    for name in (g.options["model"] for g in groups if "model" in g.options):
        try:
            path = locate(name, config.runtime.precision)
            card, sha256 = read_card(path), content_sha256(path)
        except ModelMissingError:
            yield Check(WARN, "model", f"{name} is not here", f"vslam-features models fetch {name}")
            continue
        except ModelError as error:
            yield Check(FAIL, "model", str(error), f"vslam-features models fetch {name} --force")
            continue
        kept, judged = records_of(sha256), (gate_id(card), card_id(card))
        # Of each runtime and device the newest counts. A session asks for its library, device, gate and card.
        here = (r for r in kept if _of_this_machine(r.device) and r.version == _installed(r.runtime))
        valid = (r for r in here if (r.gate, r.card) == judged)
        newest = {(r.runtime, r.device.partition(" ")[0]): r for r in sorted(valid, key=lambda r: r.time)}
        used = newest.get((config.runtime.name, config.runtime.device))
        passed = sorted({r.runtime for r in newest.values() if r.passed})
        text = f"{card.name} {card.precision}, {path.stat().st_size / 1e6:.1f} MB"
        if used and not used.passed:
            text += f"; failed on {used.runtime}: {'; '.join(used.reasons[:2])}"
            yield Check(FAIL, "model", text, f"vslam-features models verify {name}; then choose another runtime")
        elif passed:
            yield Check(OK, "model", f"{text}; verified on {', '.join(passed)}")
        elif kept and not newest:
            last = max(kept, key=lambda r: r.time)
            text += f"; last compared on {last.runtime} {last.version}, {last.device}, not with what is installed here"
            yield Check(
                WARN, "model", text, f"verified again at the next start, or: vslam-features models verify {name}"
            )
        else:
            yield Check(OK, "model", f"{text}; verified at its first use")


def _of_this_machine(device: str) -> bool:
    """Whether a record's device can be this machine's; of accelerators other than CUDA's nothing is known here."""
    from ..runtimes.hardware import cpu_name, gpu_name

    kind, _, hardware = device.partition(" ")
    if kind == "cpu":
        return hardware == cpu_name()
    return hardware == gpu_name() if kind.startswith("cuda") else True


@cache
def _installed(runtime: str) -> str:
    """Version of a runtime's library in the words of its records; empty where there is none."""
    library = runtime.removeprefix("fake(").removesuffix(")")
    if library not in ("onnxruntime", "openvino") or find_spec(library) is None:
        return ""
    version = import_module(library).__version__
    return version.split("-")[0] if library == "openvino" else version  # its build number follows
