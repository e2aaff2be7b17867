"""The module of cuda-python before 13; ``VSLAM_FAKE_CUDA_PYTHON`` says the release."""

from fake_gpu.device import cuda_python as _cuda_python

if _cuda_python() >= (13, 0):
    raise ImportError("cannot import name 'cudart' from 'cuda' (unknown location)")

from fake_gpu.api_devices import *  # noqa: F403
from fake_gpu.api_graphs import *  # noqa: F403
from fake_gpu.api_memory import *  # noqa: F403
from fake_gpu.api_streams import *  # noqa: F403
from fake_gpu.live import *  # noqa: F403
from fake_gpu.runtime_types import *  # noqa: F403
