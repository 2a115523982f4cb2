"""Generation speed with a KV cache, beside `transformers` with the same weights, on this CPU, in turn.

python benchmarks/generation.py [--sizes tiny 124M] [--rounds 5] [--threads 1]

Both decode greedily from the same prompt, without an end of text; equal tokens are asserted. Needs `transformers`.
"""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import command
import numpy as np
import torch
from command import Size

from evaluation.export.export import save_network
from model.config import ModelConfig
from model.generate import Sampling, generate, lay_out_for_generation
from model.gpt import GPT, initialize

PROMPT_TOKENS, NEW_TOKENS = 32, 64
NAMES = ["lockstep", "transformers", "ratio"]


def main(*, sizes: tuple[Size, ...] = ("tiny", "124M"), rounds: int = 5, threads: int = 1) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    print(f"{PROMPT_TOKENS} prompt tokens, {NEW_TOKENS} new ones, {threads} threads, fp32")
    print(f"medians of {rounds} rounds in turn; tokens/s by wall clock, and by CPU seconds of the process")
    rows = []
    for size in sizes:
        ours, theirs = np.median(NEW_TOKENS / _seconds(command.config(size), rounds), axis=0)  # (wall clock, CPU) each
        cells = np.stack([ours, theirs, ours / theirs], axis=1).flatten()
        rows.append([size, *(f"{cell:.2f}" for cell in cells)])
    print(command.table(["model", *NAMES, *(f"CPU {name}" for name in NAMES)], rows))


def _seconds(config: ModelConfig, rounds: int) -> np.ndarray:
    """Return, for each round, ours and theirs: wall clock and CPU seconds (rounds, 2, 2)."""
    from transformers import AutoModelForCausalLM

    network = GPT(config)
    initialize(network, 0)
    network.eval()
    with TemporaryDirectory() as folder:
        save_network(network, Path(folder))
        other = AutoModelForCausalLM.from_pretrained(folder).eval()
    lay_out_for_generation(network)
    prompt = torch.randint(config.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def ours() -> list[int]:
        return generate(network, prompt[0].tolist(), NEW_TOKENS, Sampling(temperature=0))

    def theirs() -> list[int]:
        return other.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, PROMPT_TOKENS:].tolist()

    assert ours() == theirs()  # and both are warm
    return np.array([(_time(ours), _time(theirs)) for _ in range(rounds)])


def _time(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    command.run(main)
