"""Parity of logits with other GPT-2 implementations: the largest difference in fp32, import and export.

python benchmarks/parity.py [--sizes quickstart 124M]

Weights, biases and gains are random. Each direction goes through files and the code of the commands; variants: tied or
untied head, with or without QKV bias, each activation. Needs `transformers`.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import command
import torch
from command import Size
from safetensors.torch import save_file

from evaluation.export.export import save_network
from evaluation.shared.load import load, locate
from model.gpt import GPT
from model.stock import GPT2_ACTIVATIONS
from tests.model.test_naming import gpjt, nanogpt, network, openai, plain_of

OTHERS = {"from OpenAI": openai, "from nanoGPT": nanogpt, "from gpjt": gpjt}
SEQUENCES, TOKENS = 2, 128


def main(*, sizes: tuple[Size, ...] = ("quickstart", "124M")) -> None:
    """Print a table."""
    print(f"largest difference of a logit over {SEQUENCES} x {TOKENS} tokens, fp32; torch {torch.__version__}, CPU")
    rows = []
    for size, tied, bias, activation in product(sizes, (True, False), (True, False), GPT2_ACTIVATIONS):
        config = attrs.evolve(command.config(size), tie_weights=tied, qkv_bias=bias, drop_rate=0.0)
        found = dict(_differences(network(attrs.evolve(config, activation=activation))))
        name = f"{size}, {'tied' if tied else 'untied'}, {'with' if bias else 'without'} qkv bias, {activation}"
        rows.append([name, *(f"{value:.1e}" for value in found.values())])
    print(command.table(["model", *found], rows))


def _differences(model: GPT) -> Iterator[tuple[str, float]]:
    """Yield each way and the largest difference of a logit on it."""
    from transformers import AutoModelForCausalLM

    config = model.config
    tokens = torch.randint(config.vocab_size, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
    with TemporaryDirectory() as name, torch.no_grad():
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
    command.run(main)
