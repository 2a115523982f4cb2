"""Generation speed with a KV cache, beside `transformers` with the same weights, on this CPU, in turn.

python benchmarks/generation.py [--sizes quickstart 124M] [--rounds 5] [--threads 1]

Both decode greedily from the same prompt, without an end of text; equal tokens are asserted. Needs `transformers`.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from evaluation.export.export import save_network  # noqa: E402  # after the path to it
from model.config import GPT2_SIZES, ModelConfig  # noqa: E402
from model.generate import Sampling, generate, lay_out_for_generation  # noqa: E402
from model.gpt import GPT, initialize  # noqa: E402
from training.config.train_config import load_run  # noqa: E402

PROMPT_TOKENS, NEW_TOKENS = 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["quickstart", "124M"], choices=["quickstart", *GPT2_SIZES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{PROMPT_TOKENS} prompt tokens, {NEW_TOKENS} new ones, {arguments.threads} threads, fp32")
    print(f"medians of {arguments.rounds} rounds in turn; tokens/s by wall clock, and by CPU seconds of the process")
    columns = ("lockstep", "transformers", "ratio")
    print(f"{'model':12}" + "".join(f"{name:>18}" for name in (*columns, *(f"CPU {name}" for name in columns))))
    for size in arguments.sizes:
        config = GPT2_SIZES[size] if size in GPT2_SIZES else load_run(ROOT / "runs" / size, []).model
        ours, theirs = (
            [statistics.median(NEW_TOKENS / seconds for seconds in clock) for clock in zip(*rounds, strict=True)]
            for rounds in zip(*_rounds(config, arguments.rounds), strict=True)
        )
        cells = [cell for one, other in zip(ours, theirs, strict=True) for cell in (one, other, one / other)]
        print(f"{size:12}" + "".join(f"{cell:>18.2f}" for cell in cells), flush=True)


def _rounds(config: ModelConfig, rounds: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return, for each round, wall clock and CPU seconds of ours, and of theirs."""
    from transformers import AutoModelForCausalLM

    network = GPT(config)
    initialize(network, 0)
    network.eval()
    with tempfile.TemporaryDirectory() as folder:
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
    return [(_time(ours), _time(theirs)) for _ in range(rounds)]


def _time(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
