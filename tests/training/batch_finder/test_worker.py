"""Worker: headroom."""

import pytest
import torch

from training.batch_finder.worker import HEADROOM, _usable_bytes
from training.planning.memory_model import GIB


def test_headroom_is_kept_once_and_from_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    total, held, others = 80 * GIB, 10 * GIB, 3 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - held - others, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held)
    for gpu, size in ((None, total), (24 * GIB, 24 * GIB), (90 * GIB, total)):
        assert _usable_bytes(torch.device("cuda"), gpu) == size - others - int(HEADROOM * size)
