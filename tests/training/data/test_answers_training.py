"""Runs with the objective "answers": the loss is the mean over the answers' tokens, and wrong settings are refused."""

import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.errors import BadInput
from model.config import ModelConfig
from model.gpt import GPT, initialize
from tests.conftest import MakeRun, complete, metrics, one_line, train
from tokens.batches.micro_batches import Reading, TokenSource, micro_batches
from tokens.batches.mixture import Mixture, Stage
from tokens.batches.sampling import Layout, WindowOrder
from tokens.format.header import write_weighted
from tokens.format.token_file import TokenStream, open_split
from training.config.train_config import load_run
from training.data.verify_tokens import check_tokens

CONTEXT = 32


def mean_loss(network: GPT, stream: TokenStream, rows: range) -> float:
    """Return the mean loss over the tokens of weight 1 in these rows, computed in fp64 in a single batch."""
    first, count = rows.start * CONTEXT, len(rows) * CONTEXT
    tokens = torch.from_numpy(stream.read(first, count + 1).astype(np.int64))
    weights = np.empty(count, np.uint8)
    stream.read_weights_into(weights, first + 1)
    logits = network(tokens[:-1].view(-1, CONTEXT)).flatten(0, 1)
    losses = F.cross_entropy(logits, tokens[1:], reduction="none")[torch.from_numpy(weights) == 1]
    return losses.mean().item()


def test_losses_are_means_over_weighted_tokens(make_run: MakeRun, answers: Path) -> None:
    keys = {"dataset": str(answers), "objective": "answers"}
    run, single = make_run(**keys), make_run("one", **keys, microbatch_size=1)
    for trained_run in (run, single):
        complete(trained_run, "--max-steps", "2")
    config = load_run(run, ())
    network = GPT(ModelConfig(**attrs.asdict(config.model)))
    initialize(network, config.train.random_seed)
    network.double()
    with torch.no_grad():
        expected_loss = mean_loss(network, open_split(answers, "train"), range(8))
        expected_validation = mean_loss(network, open_split(answers, "validation"), range(10))
    for trained_run in (run, single):
        assert metrics(trained_run, "train_loss")[1] == pytest.approx(expected_loss, rel=1e-6)
        assert metrics(trained_run, "validation_loss")[0] == pytest.approx(expected_validation, rel=1e-6)
    assert metrics(run, "train_loss")[2] == pytest.approx(metrics(single, "train_loss")[2], rel=1e-5)


def reading_of(stream: TokenStream, ranks: int) -> Reading:
    layout = Layout(context_length=4, microbatch_size=2, microbatches=6, data_parallel_size=ranks)
    source = TokenSource(stream=stream, start_token=0, order=WindowOrder(count=24, shuffle=True, seed=3))
    return Reading(
        sources=(source,), mixture=Mixture([Stage(0, (1,))]), layout=layout, vocabulary_size=97, weighted=True
    )


def test_ranks_know_the_weight_of_the_step(tmp_path: Path) -> None:
    tokens = np.arange(97, dtype=np.uint16)
    write_weighted(tmp_path / "train.safetensors", tokens, tokens % 5 == 1, 4)
    write_weighted(tmp_path / "test.safetensors", tokens, np.zeros(97), 4)
    stream, silent = open_split(tmp_path, "train"), open_split(tmp_path, "test")
    alone = list(micro_batches(reading_of(stream, 1), 0, range(2)))
    for step in range(2):
        step_batches = alone[6 * step : 6 * step + 6]
        weights = torch.stack([batch.weights for batch in step_batches if batch.weights is not None])
        assert {batch.mean_weight for batch in step_batches} == {weights.double().mean().item()}
        assert torch.equal(weights, torch.stack([batch.targets % 5 == 1 for batch in step_batches]).float())
    for rank in range(2):
        expected_batches = [batch for step in range(2) for batch in alone[6 * step + 3 * rank :][:3]]
        for batch, expected in zip(micro_batches(reading_of(stream, 2), rank, range(2)), expected_batches, strict=True):
            assert batch.mean_weight == expected.mean_weight
            assert batch.weights is not None and expected.weights is not None
            assert torch.equal(batch.weights, expected.weights)
    for batch in micro_batches(reading_of(silent, 1), 0, range(1)):
        assert batch.mean_weight == 1.0
        assert batch.weights is not None and not batch.weights.any()


def test_runs_continue_after_steps_without_weight(make_run: MakeRun, tmp_path: Path) -> None:
    tokens, weights = np.arange(CONTEXT * 64 + 1, dtype=np.uint16) % 257, np.zeros(CONTEXT * 64 + 1)
    weights[: 16 * CONTEXT] = 1
    for split in ("train", "validation"):
        write_weighted(tmp_path / f"{split}.safetensors", tokens, weights, CONTEXT)
    run = make_run(dataset=str(tmp_path), objective="answers", validation_sequences=1)
    complete(run)
    losses = metrics(run, "train_loss")
    assert [losses[step] for step in range(3, 9)] == [0.0] * 6 and all(map(math.isfinite, losses.values()))
    assert metrics(run, "grad_norm")[8] == 0.0
    nothing = make_run("nothing", dataset=str(tmp_path), objective="answers", start_val_token=32 * CONTEXT)
    assert "no token of the 10 validation sequences belongs to an answer" in one_line(train(nothing))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"objective": "text"}, r'train\.json: objective: got "text", wanted "answers", because .* has conversations'),
    ({"dataset": None}, r'train\.json: objective: got "answers", wanted "text": no conversations in '),
    ({"model": {"context_length": 16}}, r"model\.json: context_length: got 16, wanted 32, the length of the rows"),
    ({"start_train_token": 33}, r"train\.json: start_train_token: got 33, wanted a multiple of 32"),
    ({"start_val_token": 7}, r"train\.json: start_val_token: got 7, wanted a multiple of 32"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_settings_unfit_for_conversations_are_refused(
    make_run: MakeRun, answers: Path, token_files: Path, keys: dict[str, Any], message: str
) -> None:
    keys = {"objective": "answers", "dataset": str(answers)} | keys
    keys["dataset"] = keys["dataset"] or str(token_files)
    with pytest.raises(BadInput, match=message):
        check_tokens(load_run(make_run(**keys), ()), None, 1)


def test_dry_runs_also_refuse_unfit_settings(make_run: MakeRun, answers: Path) -> None:
    run = make_run(dataset=str(answers))
    for option in ("--dry-run", "--plan"):
        assert 'objective: got "text", wanted "answers"' in one_line(train(run, option))
    assert "64 windows of " in complete(run, "--dry-run", "--set", "objective=answers").stdout
