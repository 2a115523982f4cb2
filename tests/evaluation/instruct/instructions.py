"""Instruction records, and untrained models to fine-tune on them."""

from pathlib import Path
from typing import Any

from evaluation.shared.load import Trained
from evaluation.shared.model_location import ModelLocation
from evaluation.shared.records import Record
from model.config import ModelConfig
from model.gpt import GPT, initialize
from tests.conftest import TINY_MODEL
from tokens.tokenizer.loading import load_tokenizer

RECORDS = [
    {"instruction": f"Count to {number}.", "output": " ".join(map(str, range(1, number + 1)))}
    | ({"input": "in digits"} if number % 2 else {})
    for number in range(1, 41)
]


def fresh(tmp_path: Path, **changes: Any) -> Trained:
    network = GPT(ModelConfig(**(TINY_MODEL | {"context_length": 256} | changes)))
    initialize(network, 0)
    return Trained(network.eval(), load_tokenizer("bytes"), ModelLocation(tmp_path, None, tmp_path))


def records() -> list[Record]:
    return [Record(**({"input": ""} | record)) for record in RECORDS]
