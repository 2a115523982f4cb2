"""Worker: headroom, and errors that mean too little memory."""

import pytest
import torch

from training.batch_finder.worker import HEADROOM, _usable_bytes, is_memory_error
from training.planning.memory_model import GIB


def test_headroom_is_kept_once_and_from_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    total, held, others = 80 * GIB, 10 * GIB, 3 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - held - others, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held)
    for gpu, size in ((None, total), (24 * GIB, 24 * GIB), (90 * GIB, total)):
        assert _usable_bytes(torch.device("cuda"), gpu) == size - others - int(HEADROOM * size)


def test_errors_of_memory_are_told_from_others() -> None:
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60)
    assert is_memory_error(failure.value)
    assert is_memory_error(MemoryError())
    for words in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    ):
        assert is_memory_error(RuntimeError(words))
    assert not is_memory_error(RuntimeError("shapes do not match"))
