"""`evaluate.py smoke` speaks with the run's own tokenizer, the same way for a seed, and refuses what is no output."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evaluation.smoke.smoke import GALLERY, shortest_cycle
from tests import launch
from tests.conftest import ROOT, seal_again, shared, train
from tests.evaluation.comparison.stored import evaluate, results
from training.checkpoints.directory import WEIGHTS


def smoke(run: Path, *options: str) -> Any:
    return evaluate("smoke", run, "--device", "cpu", "--prompt", "def", *options)


def change_weights(run: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = run / "checkpoints" / "latest"
    weights = load_file(path / WEIGHTS)
    change(weights)
    save_file(weights, path / WEIGHTS)
    seal_again(path)


def test_a_trained_run_continues_a_prompt_the_same_way_for_the_same_seed(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert train(run).returncode == 0
    first, again, other = (smoke(run, "--seed", seed) for seed in ("1", "1", "2"))
    assert first.returncode == 0, first.stderr
    assert f"{run}/checkpoints/step-" in first.stdout
    greedy, sampled = first.stdout.split(":\n", 1)[1].split("[temperature 1] def")
    assert greedy.startswith("[greedy] def")
    assert sampled.strip()
    assert first.stdout == again.stdout != other.stdout
    assert "best" in smoke(run, "--checkpoint", "absent").stderr
    too_long = smoke(run, "--tokens", "100")
    assert too_long.returncode == 1
    assert "do not fit the context of 32 tokens" in too_long.stderr


def test_the_gallery_is_the_same_on_any_number_of_ranks(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert train(run, "--max-steps", "3").returncode == 0
    for ranks in (1, 2, 3):
        done = evaluate("smoke", run, "--device", "cpu", ranks=ranks)
        assert done.returncode == 0, done.stderr
    first, *others = [result["said"] for result in results(run)]
    assert [first] * 2 == others
    assert [(item["prompt"], item["temperature"]) for item in first] == [(p, t) for p in GALLERY for t in (0, 1)]
    assert all(f"{item['prompt']}{item['text']}" in done.stdout for item in first)


def test_degenerate_and_damaged_models_exit_non_zero(make_run: Callable[..., Path]) -> None:
    run = make_run(validation_interval=None)
    assert train(run, "--max-steps", "1").returncode == 0

    def repeat(weights: dict[str, torch.Tensor]) -> None:
        weights["final_norm.weight"].zero_()
        weights["final_norm.bias"].copy_(weights["token_embedding.weight"][65] * 1e6)

    change_weights(run, repeat)
    same = smoke(run)
    assert same.returncode == 1
    assert "degenerate output: 16 tokens that repeat every 1, 'AAAAA" in same.stderr
    change_weights(run, lambda weights: weights["final_norm.bias"].fill_(torch.nan))
    broken = smoke(run)
    assert broken.returncode == 1
    assert "logits are not finite" in broken.stderr
    change_weights(run, lambda weights: weights.pop("final_norm.bias"))
    missing = smoke(run)
    assert missing.returncode == 1
    assert "parameter final_norm.bias is missing" in missing.stderr


def test_repetition_is_told_from_text() -> None:
    assert shortest_cycle([5] * 10) == 1
    assert shortest_cycle([5, 6] * 5 + [5]) == 2
    assert shortest_cycle([5, 6, 6] * 4) == 3
    assert shortest_cycle([5, 6] * 5 + [6]) is None
    assert shortest_cycle([5] * 9) is None


def test_a_run_on_gpt2_tokens_carries_its_tokenizer(make_run: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    options = ("--output", str(out), "--tokenizer", str(shared("gpt2.tiktoken")))
    launch.run(ROOT / "prepare_data.py", str(shared("wikitext2.txt")), *options).check_returncode()
    run = make_run(model={"vocab_size": 50257}, dataset=str(out))
    done = train(run, "--max-steps", "1")
    assert done.returncode == 0, done.stderr
    (out / "tokenizer.tiktoken").unlink()
    spoken = smoke(run)
    assert spoken.returncode == 0, spoken.stderr
    assert "] def" in spoken.stdout
    wrong = smoke(run, "--tokenizer", "bert")
    assert wrong.returncode == 1
    assert "tokenizer 'bert' is unknown" in wrong.stderr


def test_without_a_record_of_the_tokenizer_it_is_asked_for(make_run: Callable[..., Path]) -> None:
    run = make_run(validation_interval=None)
    assert train(run, "--max-steps", "1").returncode == 0
    record = json.loads((run / "resolved.json").read_text())
    (run / "resolved.json").write_text(json.dumps(record | {"tokenizer": None}))
    asked = smoke(run)
    assert asked.returncode == 1
    assert "does not name the tokenizer of the run's tokens; pass it with --tokenizer" in asked.stderr
    assert smoke(run, "--tokenizer", "bytes").returncode == 0


def test_a_reader_that_leaves_costs_no_result_and_is_no_traceback(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert train(run, "--max-steps", "1").returncode == 0
    left = launch.start(ROOT / "evaluate.py", "smoke", str(run), "--device", "cpu")
    left.stdout.close()
    assert left.wait(60) == 1
    assert "Traceback" not in left.stderr.read()
    assert (run / "evaluations.jsonl").is_file()


@pytest.mark.parametrize("run", ["runs/absent", "runs/8xa100"])
def test_a_run_without_checkpoints_is_one_line(run: str) -> None:
    done = smoke(Path(run))
    assert done.returncode == 1
    assert done.stderr.startswith("evaluate.py: ")
    assert done.stderr.count("\n") == 1
