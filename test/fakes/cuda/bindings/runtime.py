"""The module of cuda-python from 12.6 on; ``VSLAM_FAKE_CUDA_PYTHON=12.2`` makes it an older one that lacks it."""

import os

if os.environ.get("VSLAM_FAKE_CUDA_PYTHON", "") == "12.2":
    raise ModuleNotFoundError("No module named 'cuda.bindings'", name="cuda.bindings")

from fake_gpu.runtime_api import *  # noqa: F403
from fake_gpu.runtime_types import *  # noqa: F403
