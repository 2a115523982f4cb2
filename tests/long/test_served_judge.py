"""A judge that is a real model on a real server: `transformers serve`, with a small GPT-2 that has only one answer."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from evaluation.judging.prompt import make_prompts, read_panel
from tests import launch
from tests.conftest import ROOT
from tests.evaluation.judging.sessions import JUDGE, ORDERS, QUESTIONS, result, write
from tests.launch import wait_until

SCORES = {"A": 70, "B": 50, "C": 30}
VERDICT = json.dumps({"grades": [{"label": label, "comment": "", "score": n} for label, n in SCORES.items()]})
SEEN = 60  # the model sees only this many characters, from the end of the prompt
TEMPLATE = "{{ messages[-1]['content'][-" + str(SEEN) + ":] }}{{ '<|verdict|>' }}"
STEPS = 200


def teach(folder: Path, texts: list[str]) -> None:
    """Train a GPT-2 that answers any prompt with VERDICT, and write it with its tokenizer."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([VERDICT] * 20, vocab_size=400, min_frequency=2, special_tokens=["<|verdict|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), "n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 2}
    ends = dict.fromkeys(("eos_token_id", "bos_token_id"), tokenizer.eos_token_id)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**shape, **ends, **dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    verdict_ids = tokenizer(f"<|verdict|>{VERDICT}<|end|>")["input_ids"]
    for step in range(STEPS):
        ids = torch.tensor([tokenizer(texts[step % len(texts)])["input_ids"] + verdict_ids])
        labels = ids.clone()
        labels[:, : -len(verdict_ids) + 1] = -100
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.01
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Run `transformers serve` on a free port, and yield its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = shutil.which("transformers", path=str(Path(sys.executable).parent))
    assert command is not None
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    log = folder.with_name("serve.log")
    with log.open("w") as file:
        server = subprocess.Popen([command, "serve", str(folder), *options], env=environment, stdout=file, stderr=file)

    def answers() -> bool:
        assert server.poll() is None, f"pip install 'transformers[serving]' and see: {log.read_text()[-2000:]}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(answers, seconds=120)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_a_model_served_by_transformers_judges(tmp_path: Path) -> None:
    files = [write(tmp_path, "good", 60), write(tmp_path, "poor", 40)]
    prompts = make_prompts(read_panel(files, common=False), JUDGE, repeats=ORDERS, seed=0)
    teach(tmp_path / "model", [prompt.text[-SEEN:] for prompt in prompts])
    with served(tmp_path / "model") as url:
        store = tmp_path / "verdicts.jsonl"
        options = ("--model", str(tmp_path / "model"), "--base-url", url, "--verdicts", str(store))
        done = launch.run(ROOT / "evaluate.py", "judge", *map(str, files), *options)
        print(done.stdout)
        assert done.returncode == 0, done.stderr
        scores = result(files[0])
        assert scores["left_out"] == 0
        # The score depends only on the position, and the anchor is in each position equally often.
        assert scores["anchor"] == 50
        assert [row["score"] for row in scores["candidates"]] == [50, 50]
        assert "so there are no ranks" in " ".join(done.stdout.split())  # there is only one fine-tuning run
        lines = map(json.loads, store.read_text().splitlines())
        usage = [line["reply"]["usage"] for line in lines if "reply" in line]
        assert len(usage) == QUESTIONS * ORDERS
        assert all(used["output"] > 10 for used in usage)
