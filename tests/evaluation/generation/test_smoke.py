"""`evaluate.py smoke` uses the run's tokenizer, gives text that depends only on the seed, and refuses bad output."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.generation.smoke import GALLERY, shortest_cycle
from tests import launch
from tests.conftest import ROOT, MakeRun, change_weights, complete, one_line, only_line, shared
from tests.evaluation.comparison.stored import evaluate, output_of, results


def smoke(run: Path, *options: str) -> Any:
    return evaluate("smoke", run, "--device", "cpu", "--prompt", "def", *options)


def test_same_seed_gives_the_same_continuation(copied: Path) -> None:
    first, again, different = (smoke(copied, "--seed", seed) for seed in ("1", "1", "2"))
    assert first.returncode == 0, first.stderr
    assert f"{copied}/checkpoints/step-" in first.stdout
    greedy, sampled = first.stdout.split(":\n", 1)[1].split("[temperature 1] def")
    assert greedy.startswith("[greedy] def")
    assert sampled.strip()
    assert first.stdout == again.stdout != different.stdout
    # The text is longer than the context, and the prompt is empty.
    assert "] d" in smoke(copied, "--prompt", "", "--tokens", "100").stdout


def test_gallery_is_equal_on_any_number_of_ranks(copied: Path) -> None:
    for ranks in (1, 3):
        shown = output_of("smoke", copied, "--device", "cpu", ranks=ranks)
    first, second = [result["said"] for result in results(copied)]
    assert first == second
    assert [(item["prompt"], item["temperature"]) for item in first] == [(p, t) for p in GALLERY for t in (0, 1)]
    assert all(f"{item['prompt']}{item['text']}" in shown for item in first)


def test_degenerate_output_is_refused(copied: Path) -> None:
    def refused(run: Path | str, *options: str) -> str:
        return only_line(smoke(Path(run), *options))

    assert "best" in refused(copied, "--checkpoint", "absent")
    assert "no such directory" in refused("runs/absent")
    assert "no checkpoint yet" in refused("runs/8xa100")
    newest, latest = ("--checkpoint", "latest"), copied / "checkpoints" / "latest"

    def repeat(weights: dict[str, torch.Tensor]) -> None:
        weights["final_norm.weight"].zero_()
        weights["final_norm.bias"].copy_(weights["token_embedding.weight"][65] * 1e6)

    change_weights(latest, repeat)
    assert "degenerate output: 16 tokens that repeat with period 1: 'AAAAA" in refused(copied, *newest)
    change_weights(latest, lambda weights: weights["final_norm.bias"].fill_(torch.nan))
    assert "logits are not finite" in refused(copied, *newest)
    change_weights(latest, lambda weights: weights.pop("final_norm.bias"))
    assert "parameter final_norm.bias is missing" in refused(copied, *newest)


def test_repetition_is_distinguished_from_text() -> None:
    texts = [[5] * 10, [5, 6] * 5 + [5], [5, 6, 6] * 4, [5, 6] * 5 + [6], [5] * 9]
    assert [shortest_cycle(tokens) for tokens in texts] == [1, 2, 3, None, None]


def test_short_continuations_are_noted(copied: Path) -> None:
    short, enough = (smoke(copied, "--tokens", tokens) for tokens in ("9", "10"))
    assert short.returncode == enough.returncode == 0
    assert "continuations of 9 tokens are checked only for empty output" in short.stderr
    assert "NOTE" not in enough.stderr


def test_stored_result_names_a_different_tokenizer(copied: Path) -> None:
    characters = f"chars:{''.join(map(chr, range(32, 127)))}"
    done, plain = (smoke(copied, "--tokenizer", name) for name in (characters, "bytes"))
    assert "--tokenizer chars gives different ids from the model's own tokenizer, bytes" in done.stderr
    assert "NOTE" not in plain.stderr
    first, second = results(copied)
    assert first["given_tokenizer"]["name"] == "chars" and first["given_tokenizer"]["is_other"]
    assert "given_tokenizer" not in second


@pytest.mark.slow
def test_run_contains_the_tokenizer_of_its_tokens(make_run: MakeRun, tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    options = ("--output", str(out), "--tokenizer", str(shared("gpt2.tiktoken")))
    launch.run(ROOT / "prepare_data.py", str(shared("wikitext2.txt")), *options).check_returncode()
    run = make_run(model={"vocab_size": 50257}, dataset=str(out))
    complete(run, "--max-steps", "1")
    (out / "tokenizer.tiktoken").unlink()
    spoken = smoke(run)
    assert spoken.returncode == 0, spoken.stderr
    assert "] def" in spoken.stdout
    assert "tokenizer 'bert' is unknown" in one_line(smoke(run, "--tokenizer", "bert"))


def test_unknown_tokenizer_must_be_passed(copied: Path, tmp_path: Path) -> None:
    record = json.loads((copied / "resolved.json").read_text())
    (copied / "resolved.json").write_text(json.dumps(record | {"tokenizer": None}))
    assert "does not name the tokenizer of its tokens; put nanoGPT's meta.pkl next to" in one_line(smoke(copied))
    assert smoke(copied, "--tokenizer", "bytes").returncode == 0
    (tmp_path / "x.json").write_text(json.dumps([chr(number) for number in range(256)]))
    assert "naïve" in smoke(copied, "--tokenizer", str(tmp_path / "x.json"), "--prompt", "naïve").stdout
    unknown = smoke(copied, "--tokenizer", str(tmp_path / "x.json"), "--prompt", "na日ve")
    assert unknown.stderr.endswith("tokenizer chars: '日' is not one of its 256 characters\n")
