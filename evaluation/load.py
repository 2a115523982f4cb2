"""A trained model and its tokenizer, from what a run directory holds."""

import json
from pathlib import Path

import attrs
import torch
from safetensors.torch import load_file

from errors import BadInput
from model.config import ModelConfig
from model.gpt import GPT
from model.pretrained import load_plain
from tokens.tokenizer import RANKS_FILE, Tokenizer, load_tokenizer
from training import checkpoint
from training.state_files import WEIGHTS

GPT2_VOCABULARY_SIZE = 50_257


@attrs.frozen
class Trained:
    """A model ready to be asked, in fp32 on `device`."""

    network: GPT
    tokenizer: Tokenizer
    path: Path  # of the checkpoint


def load_trained(run_directory: Path, name: str | None, tokenizer: str | None, device: torch.device) -> Trained:
    """Load a checkpoint by name; None takes `best`, or `latest` where nothing was validated.

    `tokenizer` overrides the one that made the run's tokens. Raises BadInput naming what is missing or damaged.
    """
    if not run_directory.is_dir():
        raise BadInput(f"{run_directory}: no such run directory")
    if name is None:
        name = "best" if (run_directory / "checkpoints" / "best").is_dir() else "latest"
    path = checkpoint.find(run_directory, name)
    if path is None:  # "auto" may find nothing
        raise BadInput(f"{run_directory / 'checkpoints'}: no checkpoint yet; train the run first")
    network = GPT(ModelConfig(**checkpoint.read_state(path)["config"]["model"]))
    try:
        load_plain(network, load_file(path / WEIGHTS))
    except ValueError as error:
        raise BadInput(f"{path / WEIGHTS}: {error}") from error
    return Trained(network.to(device).eval(), _tokenizer(run_directory, tokenizer, network.config), path)


def _tokenizer(run_directory: Path, wanted: str | None, config: ModelConfig) -> Tokenizer:
    loaded = load_tokenizer(wanted if wanted is not None else _recorded_tokenizer(run_directory, config))
    if loaded.vocabulary_size > config.vocab_size:
        raise BadInput(
            f"tokenizer {loaded.name}: got {loaded.vocabulary_size} ids, but the model of {run_directory} "
            f"knows {config.vocab_size}; pass the tokenizer of its tokens with --tokenizer"
        )
    return loaded


def _recorded_tokenizer(run_directory: Path, config: ModelConfig) -> str:
    """Return the tokenizer of the run's tokens as `resolved.json` names it; public GPT-2 token sets name none."""
    record = run_directory / checkpoint.RESOLVED
    entry = json.loads(record.read_text()).get("tokenizer") if record.is_file() else None
    if entry is not None:
        return str(run_directory / RANKS_FILE) if entry["ranks_file"] else str(entry["name"])
    if config.vocab_size == GPT2_VOCABULARY_SIZE:
        return "gpt2"
    raise BadInput(f"{record}: does not name the tokenizer of the run's tokens; pass it with --tokenizer")
