"""Child of ``doctor``: a runtime's library, and a session of a tiny model on the device that is asked for.

What a library offers says what it was built with. Only a session says what it got.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from .doctor_child import answer, question

# y = Relu(x) of two numbers, float32, opset 13, as onnx.helper writes it: no library is needed to have it.
_RELU = bytes.fromhex(
    "080712003a330a0c0a0178120179220452656c751201675a0f0a0178120a0a08080112040a02080262"
    "0f0a0179120a0a08080112040a02080242040a00100d"
)


def main() -> int:
    """Question: ``runtime``, ``device``. Answer: ``error``, or ``version``, ``offers`` and what a session got."""
    asked = question()
    try:
        facts = {"onnxruntime": _onnxruntime, "openvino": _openvino}[asked["runtime"]]()
    except Exception as error:  # whatever a broken installation raises
        return answer({"error": f"{type(error).__name__}: {error}"})
    return answer({**facts, **_session(asked["runtime"], asked["device"])})


def _onnxruntime() -> dict:
    from ..runtimes.ort import library

    ort = library()
    return {"version": ort.__version__, "offers": ort.get_available_providers(), "file": ort.__file__}


def _openvino() -> dict:
    import openvino

    from ..runtimes.ov import shared_core

    version = openvino.__version__.split("-")[0]  # its build number follows
    return {"version": version, "offers": shared_core().available_devices, "file": openvino.__file__}


def _session(runtime: str, device: str) -> dict:
    """``provider`` and ``on``: what it got; ``note``: why that is not what was asked for; or ``session_error``."""
    from .. import registry
    from ..runtimes.base import LoadRequest

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "relu.onnx"
        path.write_bytes(_RELU)
        try:
            session = registry.get("runtime", runtime)().load(path, LoadRequest(device, strict=False, threads=1))
            y = session.run({"x": np.array([-1.5, 2.5], np.float32)})["y"]
        except Exception as error:  # libraries have exceptions of their own
            return {"session_error": f"{type(error).__name__}: {error}"}
    if y.tolist() != [0.0, 2.5]:
        return {"session_error": f"computes Relu(-1.5, 2.5) as {y.tolist()}"}
    return {"provider": session.active.provider, "on": session.active.device, "note": session.active.note}
