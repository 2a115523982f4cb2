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


def describe_memory_error(error: Exception, microbatch_size: int) -> str:
    """Return a memory error as one line, with a remedy."""
    gpu, size = is_gpu_memory_error(error), microbatch_size
    smaller = next((n for n in range(size - 1, 0, -1) if size % n == 0), None)
    advice = f"try --set microbatch_size={smaller}, or find_batch_size.py"
    if smaller is None:
        advice = "use a larger GPU, or parallel fsdp" if gpu else "use a larger machine, or a smaller model"
    return f"{'the GPU' if gpu else 'this machine'}'s memory does not hold microbatch_size {size}; {advice}"


def _says(error: Exception, words: str) -> bool:
    return isinstance(error, RuntimeError) and words in str(error)
