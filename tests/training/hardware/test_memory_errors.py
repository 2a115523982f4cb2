"""Errors of memory are told from others, and those of a GPU from those of a CPU."""

import pytest
import torch

from training.hardware.memory_errors import is_gpu_memory_error, is_memory_error


def test_errors_of_memory_are_told_from_others() -> None:
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60)
    for error in (failure.value, MemoryError()):
        assert is_memory_error(error) and not is_gpu_memory_error(error)
    for words in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1165',  # of a slice
    ):
        assert is_memory_error(RuntimeError(words)) and is_gpu_memory_error(RuntimeError(words))
    assert not is_memory_error(RuntimeError("shapes do not match"))
