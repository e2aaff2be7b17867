"""The module of cuda-python since 12.8; ``VSLAM_FAKE_CUDA_PYTHON`` says the release."""

from fake_gpu.device import cuda_python as _cuda_python

if _cuda_python() < (12, 8):
    raise ModuleNotFoundError("No module named 'cuda.bindings'", name="cuda.bindings")

from fake_gpu.api_devices import *  # noqa: F403
from fake_gpu.api_graphs import *  # noqa: F403
from fake_gpu.api_memory import *  # noqa: F403
from fake_gpu.api_streams import *  # noqa: F403
from fake_gpu.live import *  # noqa: F403
from fake_gpu.runtime_types import *  # noqa: F403
