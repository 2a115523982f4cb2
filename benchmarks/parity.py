"""Parity of logits with other implementations: the largest difference in fp32, import and export.

python benchmarks/parity.py [--sizes tiny 124M]

Weights, biases and gains are random. Each direction goes through files and the code of the commands; variants: tied or
untied head, with or without QKV bias, each activation of GPT-2; then each class of `transformers`, with its options.
Needs `transformers`.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import command
import torch
from command import Size
from safetensors.torch import save_file

from evaluation.export.export import save_network
from evaluation.shared.load import load, locate
from model.generate import Sampling, generate
from model.gpt import GPT
from model.stock_config import GPT2_ACTIVATIONS
from tests.model.architectures import CASES
from tests.model.test_naming import gpjt, nanogpt, network, openai, plain_of

OTHERS = {"from OpenAI": openai, "from nanoGPT": nanogpt, "from gpjt": gpjt}
SEQUENCES, TOKENS, GENERATED = 2, 128, 64
COLUMNS = ["largest logit", "to the class", "from the class", f"same {GENERATED} tokens"]


def main(*, sizes: tuple[Size, ...] = ("tiny", "124M")) -> None:
    """Print a table."""
    print(f"largest difference of a logit over {SEQUENCES} x {TOKENS} tokens, fp32; torch {torch.__version__}, CPU")
    rows = []
    for size, tied, bias, activation in product(sizes, (True, False), (True, False), GPT2_ACTIVATIONS):
        config = attrs.evolve(command.config(size), tie_weights=tied, qkv_bias=bias, drop_rate=0.0)
        found = dict(_differences(network(attrs.evolve(config, activation=activation))))
        name = f"{size}, {'tied' if tied else 'untied'}, {'with' if bias else 'without'} qkv bias, {activation}"
        rows.append([name, *(f"{value:.1e}" for value in found.values())])
    print(command.table(["model", *found], rows))
    for size in sizes:
        print(f"{size}, classes of transformers, there and back")
        print(command.table(["class", "options", *COLUMNS], [_class_row(size, *case) for case in CASES]))


def _class_row(size: Size, name: str, options: dict[str, Any]) -> list[str]:
    """Return a row on one class: its name, options, and differences."""
    from transformers import AutoModelForCausalLM

    ours = network(attrs.evolve(command.config(size), **options | {"drop_rate": 0.0}))
    tokens = _tokens(ours.config.vocab_size)
    with TemporaryDirectory() as name_of_folder, torch.no_grad():
        folder = Path(name_of_folder)
        save_network(ours, folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
        assert type(theirs).__name__ == name
        wanted, logits = ours(tokens), theirs(tokens).logits
        theirs.save_pretrained(folder / "back")
        back = _loaded(folder / "back")(tokens)
        prompt = tokens[:1, :5]
        spoken = theirs.generate(prompt, max_new_tokens=GENERATED, do_sample=False, eos_token_id=None, pad_token_id=0)
    same = spoken[0, 5:].tolist() == generate(ours, prompt[0].tolist(), GENERATED, Sampling(temperature=0))
    differences = [float(wanted.abs().max()), float((logits - wanted).abs().max()), float((back - logits).abs().max())]
    changed = {key: value for key, value in options.items() if value != getattr(command.config(size), key)}
    told = ", ".join(f"{key} {value}" for key, value in changed.items())
    return [name, told, *(f"{value:.1e}" for value in differences), "yes" if same else "NO"]


def _tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))


def _differences(model: GPT) -> Iterator[tuple[str, float]]:
    """Yield each way and the largest difference of a logit on it."""
    from transformers import AutoModelForCausalLM

    config = model.config
    tokens = _tokens(config.vocab_size)
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
