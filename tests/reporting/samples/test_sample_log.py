"""The sample log: damaged lines are left out and counted, and sources are shown without parent folders."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from evaluation.generation.smoke import AskedPrompt
from evaluation.loss.token_range import Range
from evaluation.shared.load import Trained
from evaluation.shared.model_location import ModelLocation
from reporting.samples.sample_log import (
    CheckpointSample,
    HeldOutText,
    held_out_prompts,
    read_samples,
    special_among,
    spelled,
    weights_on_disk,
)
from reporting.samples.sample_sections import cell, sample_sections
from tests.reporting.samples.sampled import sample
from tests.reporting.written_runs import training, write_run
from tokens.format.token_file import open_split
from tokens.tokenizer.loading import load_tokenizer, record_of
from tokens.tokenizer.template import TEMPLATES, TURN_TOKENS, USER, Message
from training.telemetry.metrics_log import SAMPLES


def write_samples(run: Path, *samples: CheckpointSample) -> Path:
    write_run(run, training())
    (run / SAMPLES).write_text("".join(json.dumps(attrs.asdict(one_sample)) + "\n" for one_sample in samples))
    return run


@pytest.mark.parametrize(
    "changes",
    [
        *({"log_probabilities": [value] * 13} for value in (1e308, -1e308, 1000.0, math.nan, -math.inf, "x", 10**400)),
        {"log_probabilities": [-1.0]},
        *({"step": value} for value in (-5, "x", 10**30)),
        {"starts": -3},
        *({"held_out": {"window": value}} for value in (0, -1, "x")),
        {"held_out": {"tokens": ["\u20ac"] * 14}},
    ],
)
def test_invalid_lines_are_left_out_and_counted(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = write_samples(tmp_path / "run", sample(4, 2.0))
    damaged = attrs.asdict(sample(8, 2.0))
    for key, value in changes.items():
        damaged[key] = damaged[key] | value if isinstance(value, dict) else value
    with (run / SAMPLES).open("a") as file:
        file.write(json.dumps(damaged) + "\n")
    samples, log = read_samples(run)
    assert [valid.step for valid in samples] == [4] and log.damaged == [2]
    sections, notes = sample_sections([run], record=False)
    assert [str(note) for note in notes] == [f"NOTE: {run / SAMPLES}: skipped 1 damaged line, at line 2"]
    assert "Log-probabilities" in sections


@pytest.mark.parametrize("source", ["/home/me/tokens/code: validation, tokens 0 to 512", "tokens/code: validation"])
def test_the_source_has_no_parent_folders(tmp_path: Path, source: str) -> None:
    held_out = sample(4, 2.0).held_out
    assert held_out is not None
    run = write_samples(tmp_path / "run", sample(4, 2.0, held_out=attrs.evolve(held_out, source=source)))
    [stored] = read_samples(run)[0]
    assert stored.held_out is not None and stored.held_out.source.startswith("code: validation")


def test_a_manifest_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    os.mkfifo(checkpoint / "manifest.json")
    assert weights_on_disk(tmp_path) == {}


def test_special_tokens_have_the_tokenizers_names(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes").with_special_tokens(TURN_TOKENS)
    message = [Message(USER, "a<|end|>")]
    ids = TEMPLATES["turns"].prompt(tokenizer, message)
    tokens, special = spelled(tokenizer, ids), special_among(tokenizer, ids)
    assert "".join(tokens) == "<|user|>a<|end|><|end|><|assistant|>"
    text = HeldOutText(source="", ids=ids, tokens=tokens, window=8, special=special)
    shown = [cell(text, at, []) for at in range(len(ids))]
    assert [token["text"] for token in shown if "end" in token["classes"]] == ["<|user|>", "<|end|>", "<|assistant|>"]


def test_chat_models_are_prompted_with_their_template(tmp_path: Path) -> None:
    tokenizer, template = load_tokenizer("bytes").with_special_tokens(TURN_TOKENS), TEMPLATES["turns"]
    record = record_of(tokenizer, ranks=False, template=template.text).as_json()
    (tmp_path / "resolved.json").write_text(json.dumps({"tokenizer": record}))
    network: Any = None
    trained = Trained(network, tokenizer, ModelLocation(tmp_path, tmp_path, tmp_path))
    prompt = AskedPrompt.of(trained, "what")
    assert prompt.ids == template.prompt(tokenizer, [Message(USER, "what")])
    assert prompt.text == "<|user|>what<|end|><|assistant|>"


def test_prompts_have_the_ids_of_training(answers: Path) -> None:
    trained: Any = SimpleNamespace(decode=str)
    stream = open_split(answers, "validation")
    prompts = held_out_prompts(trained, Range(directory=answers, split="validation", start=0, count=9))
    rows = {tuple(stream.read(start, 32).tolist()): start for start in range(0, stream.length - 32, 32)}
    assert prompts
    for prompt in prompts:
        starts = [start for row, start in rows.items() if list(row[: len(prompt.ids)]) == prompt.ids]
        firsts = []  # for each such row, the place of the first token that adds to the loss
        for start in starts:
            weights = np.empty(32, np.uint8)
            stream.read_weights_into(weights, start)
            firsts.append(weights.tolist().index(1) if weights.any() else None)
        assert len(prompt.ids) in firsts
