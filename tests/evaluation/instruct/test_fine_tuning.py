"""A fine-tuning run has correct token files, and its updates use the mean over the answers' tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from evaluation.command_line import FineTuneSettings
from evaluation.instruct.fine_tuning import TOKENS, make_example, train_run, write_run
from evaluation.shared.load import load
from evaluation.shared.model_location import locate
from evaluation.shared.records import Record
from tests.evaluation.instruct.instructions import fresh, records
from tokens.format.manifest import open_listed, read_manifest


@pytest.mark.parametrize("prompt_loss", [False, True])
def test_rows_contain_complete_records_with_answer_weights(tmp_path: Path, *, prompt_loss: bool) -> None:
    trained, train, held_out = fresh(tmp_path, context_length=512), records()[:8], records()[8:11]
    write_run(trained, train, held_out, FineTuneSettings(batch_size=4, prompt_loss=prompt_loss), tmp_path / "run")
    manifest = read_manifest(tmp_path / "run" / TOKENS)
    assert manifest is not None
    assert manifest.tokenizer.template is not None
    arrays = {}
    for split, rows in (("train", 3), ("validation", 3)):
        stream = open_listed(tmp_path / "run" / TOKENS, split, manifest)
        assert (stream.length, stream.context_length) == (rows * 512 + 1, 512)
        tokens, weights = np.empty(stream.length, np.uint16), np.empty(stream.length, np.uint8)
        stream.read_into(tokens, 0)
        stream.read_weights_into(weights, 0)
        arrays[split] = tokens, weights
    tokens, weights = arrays["train"]
    text = trained.tokenizer.decode(tokens.tolist())
    assert all(text.count(f"Instruction:\n{record.instruction}\n") == 1 for record in train)
    answers = "".join(f"{record.output}<|endoftext|>" for record in train)
    weighted_text = trained.tokenizer.decode(tokens[weights == 1].tolist())
    assert (len(weighted_text) > len(answers)) if prompt_loss else (sorted(weighted_text) == sorted(answers))
    tokens, weights = arrays["validation"]
    answers = "".join(f"{record.output}<|endoftext|>" for record in held_out)
    assert trained.tokenizer.decode(tokens[weights == 1].tolist()) == answers
    values = json.loads((tmp_path / "run" / "train.json").read_text())
    # The eight records fill three rows.
    assert (values["global_batch_size"], values["checkpoint_interval"]) == (2, 1)


@pytest.mark.slow
def test_update_uses_the_mean_over_answer_tokens(copied: Path, tmp_path: Path) -> None:
    location = locate(str(copied), None)
    ours, settings = (
        load(location, None, torch.device("cpu")),
        FineTuneSettings(epochs=1, batch_size=4, weight_decay=0.0),
    )
    short = [Record(instruction="Say", input="", output=f"{number} is {number}") for number in range(6)]
    write_run(ours, short[:4], short[4:], settings, tmp_path / "tuned")
    outcome = train_run(tmp_path / "tuned", location.path, torch.device("cpu"))
    assert len(outcome.losses) == 2
    optimizer = torch.optim.AdamW(ours.network.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    losses = []
    for record in short[:4]:
        example = make_example(ours, record, targets=False)
        tokens = torch.tensor(example.tokens)
        loss = F.cross_entropy(ours.network(tokens[None, :-1])[0], tokens[1:], reduction="none")
        losses.append(loss[example.first_target - 1 :])
    torch.cat(losses).mean().backward()
    optimizer.step()
    tuned = load(locate(str(tmp_path / "tuned"), None), None, torch.device("cpu"))
    for (name, tuned_parameter), expected_parameter in zip(
        tuned.network.named_parameters(), ours.network.parameters(), strict=True
    ):
        torch.testing.assert_close(tuned_parameter, expected_parameter, atol=2e-6, rtol=1e-4, msg=name)
    assert tuned.template is not None
    # The run is complete, so nothing is trained again.
    assert outcome == train_run(tmp_path / "tuned", location.path, torch.device("cpu"))


def test_short_context_cuts_the_beginning_of_the_prompt(tmp_path: Path) -> None:
    record = Record(instruction="Say it.", input="", output="x" * 100)
    complete = make_example(fresh(tmp_path, context_length=512), record)
    assert not complete.cut
    for context in (32, 128):
        example = make_example(fresh(tmp_path, context_length=context), record)
        assert example.cut
        assert (
            complete.tokens[: complete.first_target][-example.first_target :] == example.tokens[: example.first_target]
        )
        assert len(example.tokens) <= context + 1
        assert example.first_target >= context // 2
