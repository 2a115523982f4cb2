"""`evaluate.py smoke` speaks with the run's own tokenizer, the same way for a seed, and refuses what is no output."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.generation.smoke import GALLERY, shortest_cycle
from tests import launch
from tests.conftest import ROOT, MakeRun, change_weights, complete, one_line, only_line, shared
from tests.evaluation.comparison.stored import evaluate, results, said


def smoke(run: Path, *options: str) -> Any:
    return evaluate("smoke", run, "--device", "cpu", "--prompt", "def", *options)


def test_a_trained_run_continues_a_prompt_the_same_way_for_the_same_seed(copied: Path) -> None:
    first, again, other = (smoke(copied, "--seed", seed) for seed in ("1", "1", "2"))
    assert first.returncode == 0, first.stderr
    assert f"{copied}/checkpoints/step-" in first.stdout
    greedy, sampled = first.stdout.split(":\n", 1)[1].split("[temperature 1] def")
    assert greedy.startswith("[greedy] def")
    assert sampled.strip()
    assert first.stdout == again.stdout != other.stdout
    assert "] d" in smoke(copied, "--prompt", "", "--tokens", "100").stdout  # beyond the context, and from nothing


def test_the_gallery_is_the_same_on_any_number_of_ranks(copied: Path) -> None:
    for ranks in (1, 3):
        shown = said("smoke", copied, "--device", "cpu", ranks=ranks)
    first, other = [result["said"] for result in results(copied)]
    assert first == other
    assert [(item["prompt"], item["temperature"]) for item in first] == [(p, t) for p in GALLERY for t in (0, 1)]
    assert all(f"{item['prompt']}{item['text']}" in shown for item in first)


def test_what_is_no_output_is_one_line(copied: Path) -> None:
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
    assert "degenerate output: 16 tokens that repeat every 1, 'AAAAA" in refused(copied, *newest)
    change_weights(latest, lambda weights: weights["final_norm.bias"].fill_(torch.nan))
    assert "logits are not finite" in refused(copied, *newest)
    change_weights(latest, lambda weights: weights.pop("final_norm.bias"))
    assert "parameter final_norm.bias is missing" in refused(copied, *newest)


def test_repetition_is_told_from_text() -> None:
    texts = [[5] * 10, [5, 6] * 5 + [5], [5, 6, 6] * 4, [5, 6] * 5 + [6], [5] * 9]
    assert [shortest_cycle(tokens) for tokens in texts] == [1, 2, 3, None, None]


def test_continuations_too_short_to_repeat_say_so(copied: Path) -> None:
    short, enough = (smoke(copied, "--tokens", tokens) for tokens in ("9", "10"))
    assert short.returncode == enough.returncode == 0
    assert "continuations of 9 tokens are checked for empty output alone" in short.stderr
    assert "NOTE" not in enough.stderr


def test_a_stored_result_names_another_tokenizer(copied: Path) -> None:
    other = f"chars:{''.join(map(chr, range(32, 127)))}"
    done, own = (smoke(copied, "--tokenizer", name) for name in (other, "bytes"))
    assert "--tokenizer chars gives different ids from the model's own tokenizer, bytes" in done.stderr
    assert "NOTE" not in own.stderr
    first, second = results(copied)
    assert first["given_tokenizer"]["name"] == "chars" and first["given_tokenizer"]["is_other"]
    assert "given_tokenizer" not in second


@pytest.mark.slow
def test_a_run_on_gpt2_tokens_carries_its_tokenizer(make_run: MakeRun, tmp_path: Path) -> None:
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


def test_without_a_record_of_the_tokenizer_it_is_asked_for(copied: Path, tmp_path: Path) -> None:
    record = json.loads((copied / "resolved.json").read_text())
    (copied / "resolved.json").write_text(json.dumps(record | {"tokenizer": None}))
    assert "does not name the tokenizer of its tokens; put nanoGPT's meta.pkl next to" in one_line(smoke(copied))
    assert smoke(copied, "--tokenizer", "bytes").returncode == 0
    (tmp_path / "x.json").write_text(json.dumps([chr(number) for number in range(256)]))
    assert "naïve" in smoke(copied, "--tokenizer", str(tmp_path / "x.json"), "--prompt", "naïve").stdout
    unknown = smoke(copied, "--tokenizer", str(tmp_path / "x.json"), "--prompt", "na日ve")
    assert unknown.stderr.endswith("tokenizer chars: '日' is not one of its 256 characters\n")
