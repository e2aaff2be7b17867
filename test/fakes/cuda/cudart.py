"""The module of cuda-python up to 12.9; ``VSLAM_FAKE_CUDA_PYTHON=13`` makes it a newer one that lacks it."""

import os

if os.environ.get("VSLAM_FAKE_CUDA_PYTHON", "").startswith("13"):
    raise ModuleNotFoundError("No module named 'cuda.cudart'", name="cuda.cudart")

from fake_gpu.runtime_api import *  # noqa: F403
from fake_gpu.runtime_types import *  # noqa: F403
