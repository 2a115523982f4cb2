"""Out-of-memory errors of a GPU or of a CPU, among the types that torch and the libraries below it raise."""

import torch

CPU_WORDS = "can't allocate memory"  # torch raises a plain RuntimeError
# CUDA and NCCL; cuBLAS; cuBLAS and cuDNN without memory for a handle; cuDNN 9; torch on a slice of a GPU (MIG), where
# NVML does not tell it whose the memory is (pytorch issue 112377).
GPU_WORDS = ("out of memory", "ALLOC_FAILED", "STATUS_NOT_INITIALIZED", "ALLOCATION_FAILED", "NVML_SUCCESS == ")


def is_memory_error(error: Exception) -> bool:
    """Tell whether an error means too little memory."""
    return is_gpu_memory_error(error) or isinstance(error, MemoryError) or _says(error, CPU_WORDS)


def is_gpu_memory_error(error: Exception) -> bool:
    """Tell whether an error means too little memory of a GPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(_says(error, words) for words in GPU_WORDS)


def _says(error: Exception, words: str) -> bool:
    return isinstance(error, RuntimeError) and words in str(error)
