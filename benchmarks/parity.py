"""Parity of logits with other GPT-2 implementations: the largest difference in fp32, import and export.

python benchmarks/parity.py [--sizes quickstart 124M]

Weights, biases and gains are random. Each direction goes through files and the code of the commands; variants: tied or
untied head, with or without QKV bias, each activation. Needs `transformers`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from evaluation.export.export import save_network  # noqa: E402  # after the path to it
from evaluation.shared.load import load, locate  # noqa: E402
from model.config import ACTIVATIONS, GPT2_SIZES  # noqa: E402
from model.gpt import GPT  # noqa: E402
from model.stock import GPT2_ACTIVATIONS  # noqa: E402
from tests.model.test_naming import gpjt, nanogpt, network, openai, plain_of  # noqa: E402
from training.config.train_config import load_run  # noqa: E402

OTHERS = {"from OpenAI": openai, "from nanoGPT": nanogpt, "from gpjt": gpjt}
SEQUENCES, TOKENS = 2, 128


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["quickstart", "124M"], choices=["quickstart", *GPT2_SIZES])
    arguments = parser.parse_args()
    print(f"largest difference of a logit over {SEQUENCES} x {TOKENS} tokens, fp32; torch {torch.__version__}, CPU")
    rows = []
    for size in arguments.sizes:
        config = GPT2_SIZES[size] if size in GPT2_SIZES else load_run(ROOT / "runs" / size, []).model
        for tied, bias, activation in product((True, False), (True, False), ACTIVATIONS):
            changes: dict[str, Any] = {
                "tie_weights": tied,
                "qkv_bias": bias,
                "activation": activation,
                "drop_rate": 0.0,
            }
            model = network(attrs.evolve(config, **changes))
            name = f"{size}, {'tied' if tied else 'untied'}, {'with' if bias else 'without'} qkv bias, {activation}"
            rows.append({"model": name, **{way: f"{value:.1e}" for way, value in _differences(model)}})
    print(tabulate(rows, headers="keys", stralign="right", disable_numparse=True))


def _differences(model: GPT) -> Iterator[tuple[str, float]]:
    """Yield each way and the largest difference of a logit on it."""
    from transformers import AutoModelForCausalLM

    config = model.config
    tokens = torch.randint(config.vocab_size, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        wanted = model(tokens)
        (folder / "out").mkdir()
        save_network(model, folder / "out")
        theirs = AutoModelForCausalLM.from_pretrained(folder / "out", trust_remote_code=False).eval()
        largest = float(wanted.abs().max())
        yield "largest logit", largest
        yield "to Hugging Face", float((theirs(tokens).logits - wanted).abs().max())
        theirs.save_pretrained(folder / "back")
        yield "from Hugging Face", float((_loaded(folder / "back")(tokens) - theirs(tokens).logits).abs().max())
        for way, naming in OTHERS.items():
            weights = {key: value.contiguous() for key, value in naming(plain_of(model), config).items()}
            (folder / way).mkdir()
            save_file(weights, folder / way / "model.safetensors")
            known = {"n_head": config.n_heads, "activation_function": GPT2_ACTIVATIONS[config.activation]}
            (folder / way / "config.json").write_text(json.dumps(known))
            yield way, float((_loaded(folder / way)(tokens) - wanted).abs().max())


def _loaded(path: Path) -> GPT:
    return load(locate(str(path), None), "bytes", torch.device("cpu")).network


if __name__ == "__main__":
    main()
