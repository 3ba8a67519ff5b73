"""Whether an error says that a device, or the host, had no memory left."""

import errno

import torch

SAYINGS = (
    "out of memory",  # torch's allocators, the driver (pinned memory too), Triton, NCCL
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HOST_ALLOCATION_FAILED",  # of cuDNN 9
    "DEVICE_ALLOCATION_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "ROCBLAS_STATUS_MEMORY_ERROR",
    "DefaultCPUAllocator: can't allocate memory",
    "Cannot allocate memory",  # the C library's, of a mapped file or of memory shared with a data worker
)


def is_out_of_memory(error: BaseException) -> bool:
    """By its type, or by its words: libraries and drivers have no type of their own for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in SAYINGS)
