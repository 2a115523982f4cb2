"""`--init-from`: a run on any layout starts from another model and records its source; wrong models are refused."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from model.config import ModelConfig
from model.gpt import GPT, initialize
from tests.conftest import TINY_MODEL, MakeRun, complete, metrics, one_line, train
from tests.evaluation.comparison.stored import evaluate
from tests.launch import ROOT
from tests.launch import run as run_command
from training.checkpoints.initial_weights import with_new_rows

# Settings of model.json that leave the shapes of TINY_MODEL's parameters unchanged
FREE = {"drop_rate": 0.1, "zero_init_projections": True, "mlp_width": 128, "n_kv_heads": 2}
HASHED = ("--hash-every", "1", "--max-steps", "2")


def record(run: Path) -> dict[str, Any]:
    origin: dict[str, Any] = json.loads((run / "resolved.json").read_text())["initial_weights"]
    return origin


def test_run_starts_from_another_models_weights(make_run: MakeRun, finished: Path, tmp_path: Path) -> None:
    weights = load_file(finished / "checkpoints" / "best" / "model.safetensors")
    hashes = []
    for name, ranks, options in (("alone", 1, ()), ("sharded", 2, ("--set", "parallel=fsdp"))):
        run = make_run(name, FREE, random_seed=7, learning_rate=1e-30, weight_decay=0, schedule_learning_rate=False)
        done = complete(run, "--init-from", str(finished), *HASHED, *options, ranks=ranks)
        assert f"starting from the weights of {finished}, sha256 " in done.stdout
        trained = load_file(run / "checkpoints" / "latest" / "model.safetensors")
        # The learning rate is too small to change any weight.
        assert all((trained[key] == tensor).all() for key, tensor in weights.items())
        hashes.append((metrics(run, "state_sha256"), record(run)))
    assert hashes[0] == hashes[1]
    assert evaluate("export", tmp_path / "alone", tmp_path / "exported").returncode == 0
    assert "| initial weights | `run` (sha256 of its values: `" in (tmp_path / "exported" / "README.md").read_text()
    foreign = make_run("foreign")
    complete(foreign, "--init-from", str(tmp_path / "exported"), *HASHED)
    assert record(foreign) == hashes[0][1] | {"source": str(tmp_path / "exported")}


def test_new_turn_tokens_copy_end_of_text(make_run: MakeRun, finished: Path, tmp_path: Path) -> None:
    old = load_file(finished / "checkpoints" / "best" / "model.safetensors")["token_embedding.weight"]
    mean = old.double().mean(0).float()
    (tmp_path / "talks.jsonl").write_text('{"instruction": "Add 1 and 2.", "output": "That is 3."}\n' * 400)
    talks, prepared = str(tmp_path / "talks.jsonl"), str(tmp_path / "talks")
    options = ("--template", "turns", "--context-length", "32", "--tokenizer", "bytes", "--split", "tail")
    run_command(ROOT / "prepare_data.py", talks, "--output", prepared, *options).check_returncode()
    keys = {"dataset": prepared, "objective": "answers", "validation_interval": None}
    keys |= {"learning_rate": 1e-30, "weight_decay": 0, "schedule_learning_rate": False}
    hashes = []
    for name, ranks, options in (("alone", 1, ()), ("sharded", 2, ("--set", "parallel=fsdp"))):
        run = make_run(name, {"vocab_size": 400}, **keys)
        done = complete(run, "--init-from", str(finished), *HASHED, *options, ranks=ranks)
        assert "vocabulary 257 -> 400: each new row is the mean of the model's rows" in done.stdout
        assert "4 special tokens are new to the model: they start as copies of the end-of-text token" in done.stdout
        grown = load_file(run / "checkpoints" / "latest" / "model.safetensors")["token_embedding.weight"]
        assert torch.equal(grown[:257], old) and torch.equal(grown[261:], mean.expand(139, -1))
        assert torch.equal(grown[257:261], old[256].expand(4, -1))
        hashes.append((metrics(run, "state_sha256"), record(run)))
    assert hashes[0] == hashes[1]
    assert (record(run)["vocab_size"], record(run)["unseen"]) == (257, 4)
    complete(run, "--init-from", str(finished), "--replay", "1", "2")
    complete(run, "--max-steps", "3")
    assert record(run) == hashes[0][1]
    assert evaluate("export", run, tmp_path / "exported").returncode == 0
    assert ", with rows for 143 new ids" in (tmp_path / "exported" / "README.md").read_text()
    fewer = make_run("fewer", {"vocab_size": 256})
    assert "vocab_size: got 256, but --init-from " in one_line(train(fewer, "--init-from", str(run), "--dry-run"))
    plain = make_run("plain", {"vocab_size": 400})  # this run's tokenizer has no turn tokens
    for options in ((), ("--dry-run",)):
        line = one_line(train(plain, "--init-from", str(run), *options))
        assert "that model's tokenizer, bytes with 261 ids, differs from the tokenizer of the run's tokens" in line


def test_only_embedding_and_untied_head_get_rows() -> None:
    old_config = attrs.evolve(ModelConfig(**TINY_MODEL), tie_weights=False)
    network = GPT(old_config)
    initialize(network, 1)
    config = attrs.evolve(old_config, vocab_size=300)
    grown = {
        name: with_new_rows(name, parameter.detach(), old_config, config)
        for name, parameter in network.named_parameters()
    }
    expected_shapes = {name: parameter.shape for name, parameter in GPT(config).named_parameters()}
    assert {name: rows.shape for name, rows in grown.items()} == expected_shapes
    mean = network.output_weight()[:257].double().mean(0).float()
    assert torch.equal(grown["head.weight"][257:300], mean.expand(43, -1))


def test_run_with_a_checkpoint_resumes_from_it(make_run: MakeRun, finished: Path) -> None:
    run, init_option = make_run(random_seed=7), ("--init-from", str(finished))
    complete(run, *init_option, "--max-steps", "2")
    origin = record(run)
    line = one_line(train(run, "--init-from", str(run)))
    assert f"belongs to a run that began with the weights of {finished}; leave out --init-from to resume" in line
    for options, last_step in ((init_option, "4"), ((), "6")):
        done = complete(run, *options, "--max-steps", last_step)
        assert "resuming from" in done.stdout and "starting from" not in done.stdout
        assert record(run) == origin
    assert f"the weights of {finished}; pass them to --init-from" in one_line(train(run, "--replay", "1", "1"))
    complete(run, *init_option, "--replay", "1", "2")
    for replayed_run, message in ((run, f"the weights of {finished}; pass"), (finished, "random weights; leave")):
        line = one_line(train(replayed_run, "--init-from", str(run), "--replay", "1", "1"))
        assert f"--replay: the run began with {message}" in line
    (run / "metrics.jsonl").unlink()
    replay = train(run, *init_option, "--replay", "1", "1")
    assert replay.returncode == 1 and "has no numbers for these steps" in replay.stdout


def test_run_that_began_with_other_weights_is_refused(copied: Path, finished: Path) -> None:
    options = ("--init-from", str(finished))
    for option in ((), ("--dry-run",)):
        line = one_line(train(copied, *options, *option))
        assert "belongs to a run that began with random weights; leave out --init-from to resume" in line
    complete(copied, *options, "--dry-run", "--resume", "never")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"n_layers": 1}, "n_layers: got 1, but --init-from "),
        ({"tie_weights": False}, "tie_weights: got false, but --init-from "),
    ],
)
def test_key_that_changes_the_network_is_named(
    make_run: MakeRun, finished: Path, model: dict[str, object], message: str
) -> None:
    run = make_run("run", model)
    for option in ((), ("--dry-run",)):
        line = one_line(train(run, "--init-from", str(finished), *option))
        assert f"train.py: {run / 'model.json'}: {message}{finished} has " in line
    complete(make_run("same"), "--init-from", str(finished), "--dry-run")
    assert "no/where/at/all: no such directory" in one_line(train(run, "--init-from", "no/where/at/all"))
