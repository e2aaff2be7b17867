"""What ``doctor`` says of runtimes and model files."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
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
        import onnxruntime

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
    from ..artifacts.records import records_of
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
        # Of each runtime the newest counts: those of older versions say nothing of what is installed.
        newest = {r.runtime: r for r in sorted(records_of(sha256), key=lambda r: r.time)}
        used, passed = newest.get(config.runtime.name), [name for name, r in newest.items() if r.passed]
        text = f"{card.name} {card.precision}, {path.stat().st_size / 1e6:.1f} MB"
        if used and not used.passed:
            text += f"; failed on {used.runtime}: {'; '.join(used.reasons[:2])}"
            yield Check(FAIL, "model", text, f"vslam-features models verify {name}; then choose another runtime")
        elif not passed:
            yield Check(OK, "model", f"{text}; verified at its first use")
        else:
            yield Check(OK, "model", f"{text}; verified on {', '.join(sorted(passed))}")
