"""Determinism level of a run: by train.json and device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from training.config.train_config import load_run
from training.exactness.levels import resolve_determinism


@pytest.mark.parametrize(
    ("wanted", "device", "level"),
    [
        (None, "cpu", "elastic"),
        (None, "cuda", "off"),
        ("run", "cpu", "run"),
        ("elastic", "cuda", "elastic"),
        ("off", "cpu", "off"),
    ],
)
def test_the_default_is_the_strongest_level_that_costs_nothing(
    make_run: Callable[..., Path], wanted: str | None, device: str, level: str
) -> None:
    train = load_run(make_run(determinism=wanted), []).train
    assert resolve_determinism(train, torch.device(device)) == level
