"""Importing this makes torch see the devices.

torch's C++ looks for the hooks of a device once, so it has to come before torch.
"""

import ctypes
import sys

from cuda_standin.build import build

if "torch" in sys.modules:
    raise ImportError("the stand-in for CUDA has to be imported before torch")
library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)

from cuda_standin import attention, device, nccl, storages, waits  # noqa: E402

device.install(library)
storages.install()
attention.install()
nccl.install()
waits.install(library)
