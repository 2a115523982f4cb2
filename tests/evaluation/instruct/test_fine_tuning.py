"""Fine-tuning makes the update of the mean over answers' tokens, and ends with the best epoch."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from evaluation.command_line import FineTuneSettings
from evaluation.instruct import fine_tuning
from evaluation.instruct.fine_tuning import fine_tune, make_example, prompt_text, validation_loss
from evaluation.shared.records import Record
from tests.evaluation.instruct.instructions import fresh, records
from training.parallel.process_group import Ranks


@pytest.mark.parametrize("prompt_loss", [False, True])
def test_an_update_is_that_of_the_mean_over_the_answers_tokens(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch, *, prompt_loss: bool
) -> None:
    settings = FineTuneSettings(epochs=1, batch_size=4, learning_rate=1e-2, prompt_loss=prompt_loss)
    ours, theirs = fresh(tmp_path), fresh(tmp_path)
    monkeypatch.setattr(fine_tuning, "validation_loss", lambda *_: next(falling))
    falling = iter([2.0, 1.0])
    fine_tune(ours, records()[:4], records()[4:6], settings, alone)
    optimizer = torch.optim.AdamW(theirs.network.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for record in records()[:4]:
        prompt, answer = (theirs.tokenizer.encode(text).tolist() for text in (prompt_text(record), record.output))
        tokens = torch.tensor([*prompt, *answer, theirs.tokenizer.end_of_text_id])
        loss = F.cross_entropy(theirs.network(tokens[None, :-1])[0], tokens[1:], reduction="none")
        losses.append(loss if prompt_loss else loss[len(prompt) - 1 :])
    torch.cat(losses).mean().backward()
    optimizer.step()
    for (name, one), other in zip(ours.network.named_parameters(), theirs.network.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4, msg=name)
        assert not torch.equal(one, fresh(tmp_path).network.get_parameter(name))


def test_the_best_epoch_is_handed_on_and_later_ones_are_not(tmp_path: Path, alone: Ranks) -> None:
    trained, train, validation = fresh(tmp_path), records()[:34], records()[38:]
    outcome = fine_tune(trained, train, validation, FineTuneSettings(learning_rate=2e-2, epochs=50), alone)
    assert 0 < outcome.best_epoch < len(outcome.losses) - 1 < 50
    assert min(outcome.losses) == outcome.losses[outcome.best_epoch] < outcome.losses[-1]
    held_out = [make_example(trained, record) for record in validation]
    assert validation_loss(trained, held_out, alone) == outcome.losses[outcome.best_epoch]
    assert not trained.network.training


def test_a_model_that_only_gets_worse_stays_as_it_was(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = fresh(tmp_path)
    before = copy.deepcopy(trained.network.state_dict())
    rising = iter([1.0, 2.0])
    monkeypatch.setattr(fine_tuning, "validation_loss", lambda *_: next(rising))
    assert fine_tune(trained, records()[:8], records()[8:], FineTuneSettings(learning_rate=1.0), alone).best_epoch == 0
    assert all(torch.equal(value, before[name]) for name, value in trained.network.state_dict().items())


def test_what_a_short_context_does_not_hold_is_the_prompts_beginning(tmp_path: Path) -> None:
    record = Record(instruction="Say it.", input="", output="x" * 100)
    for context in (32, 128, 512):
        trained = fresh(tmp_path, context_length=context)
        example = make_example(trained, record)
        text = trained.tokenizer.decode(example.tokens[: example.first_target])
        assert prompt_text(record).endswith(text)
        assert len(example.tokens) <= context + 1
        assert example.cut == (text != prompt_text(record) or example.tokens[-1] != trained.tokenizer.end_of_text_id)
        assert example.first_target >= context // 2 or not example.cut
    assert not example.cut
