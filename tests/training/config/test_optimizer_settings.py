"""The optimizer in words, with its own settings."""

import pytest

from training.config.key_groups import OptimizationOptions
from training.config.optimizer_settings import describe_optimizer
from training.optimizers.muon import MUON


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (OptimizationOptions(), "AdamW"),
        (OptimizationOptions(optimizer="muon"), f"{MUON.title}; momentum 0.95"),
        (
            OptimizationOptions(optimizer="muon", muon_split_qkv=True, muon_momentum_warmup_steps=300),
            f"{MUON.title}; queries, keys and values apart; momentum 0.85 to 0.95 in 300 steps",
        ),
    ],
)
def test_an_optimizer_is_described_with_its_own_settings(options: OptimizationOptions, words: str) -> None:
    assert describe_optimizer(options) == words
