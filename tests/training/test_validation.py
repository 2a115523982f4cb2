"""Validation: the mean does not depend on the micro-batch size, dropout is off, and a request to stop ends it early."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.conftest import MakeRun
from tests.training.conftest import state_of
from tokens.format.token_file import open_split
from training.parallel.process_group import Ranks
from training.validation import Validation


def never() -> bool:
    return False


@pytest.fixture
def parts(make_run: MakeRun, alone: Ranks) -> tuple[Any, Any, Ranks]:
    return *state_of(make_run(model={"drop_rate": 0.5}), alone), alone


def test_validation_loss_is_independent_of_micro_batch(parts: Any, token_files: Path) -> None:
    state, settings, ranks = parts
    validation = Validation(open_split(token_files, "validation"), 7, 10, 32)
    losses = set()
    for size in (1, 3, 4, 10, 16):
        layout = attrs.evolve(settings.layout, microbatch_size=size)
        losses.add(validation.measure(state, attrs.evolve(settings, layout=layout), ranks, never))
        assert state.parallel.model.training
    [loss] = losses
    assert loss == pytest.approx(math.log(257), rel=0.05)  # the network has not learned anything yet
    next_slice = Validation(open_split(token_files, "validation"), 8, 10, 32)
    assert next_slice.measure(state, settings, ranks, never) != loss


def test_stop_request_ends_validation_without_a_loss(parts: Any, token_files: Path) -> None:
    state, settings, ranks = parts
    validation = Validation(open_split(token_files, "validation"), 0, 10, 32)
    assert validation.measure(state, settings, ranks, lambda: True) is None
    assert state.parallel.model.training


def test_token_ids_are_copied_from_pinned_memory(
    parts: Any, token_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, settings, ranks = parts
    copies: list[tuple[Any, ...]] = []

    def note(ids: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        copies.append((*arguments, keywords))
        return ids

    monkeypatch.setattr(torch.Tensor, "pin_memory", note)
    monkeypatch.setattr(torch.Tensor, "to", note)
    monkeypatch.setattr("training.validation.autocast", lambda *_: nullcontext())
    gpu = attrs.evolve(ranks, device=torch.device("cuda", 0))
    assert Validation(open_split(token_files, "validation"), 0, 1, 32).measure(state, settings, gpu, never) is not None
    assert copies[:4] == [({},)] * 2 + [(gpu.device, {"non_blocking": True})] * 2
