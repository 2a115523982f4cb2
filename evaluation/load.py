"""A trained model and its tokenizer, from a run, a checkpoint, or a directory or repository of Hugging Face's."""

import json
import re
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from errors import BadInput
from hub_client import show_bars_in_terminals_only
from model.config import ModelConfig
from model.gpt import GPT
from model.naming import config_of, to_plain
from model.pretrained import load_plain
from tokens.tokenizer import RANKS_FILE, Tokenizer, load_tokenizer
from tokens.tokenizer_files import read_tokenizer_files
from training import checkpoint
from training.ranks import Ranks, together
from training.state_files import WEIGHTS

GPT2_VOCABULARY_SIZE = 50_257
INDEX = f"{WEIGHTS}.index.json"  # of weights in several files
# Where n_heads is written: Hugging Face's, gpjt's (its run directories and published models), OpenAI's.
CONFIG_FILES = ("config.json", "model.json", "hparams.json")
HEADS_KEYS = ("n_head", "n_heads", "num_attention_heads")
# What of Hugging Face's config.json would make another network of the same weights.
ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
HUB_FILES = [*CONFIG_FILES, "*.safetensors", INDEX, "tokenizer*.json", "vocab.json", "merges.txt"]


@attrs.frozen
class Place:
    """Where a model lies."""

    path: Path  # of the checkpoint or model directory
    run: Path | None  # the run directory that it belongs to
    home: Path  # where results about it are kept: the run, the model directory, or for a model of the hub one in runs/

    @property
    def is_own(self) -> bool:
        """True for a checkpoint of ours, which tells how it was made."""
        return (self.path / checkpoint.STATE).is_file()

    @property
    def title(self) -> str:
        """What people call it: of a run its name and the checkpoint's."""
        name = self.home.resolve().name
        return name.replace("--", "/") if self.run is None else f"{name} {self.path.resolve().name}"

    @property
    def record(self) -> dict[str, Any]:
        """What the run wrote about itself, if it did."""
        file = None if self.run is None else self.run / checkpoint.RESOLVED
        return _read_json(file) if file is not None and file.is_file() else {}


@attrs.frozen
class Trained:
    """A model ready to be asked, in fp32 on its device."""

    network: GPT
    tokenizer: Tokenizer
    place: Place


def locate(reference: str, name: str | None) -> Place:
    """Find the model that a command line names: a directory, or OWNER/NAME on the hub, which is downloaded.

    `name`: which checkpoint of a run; None takes `best`, or `latest` where nothing was validated. Raises BadInput where
    there is none, or where the files of one of ours are not what its manifest says.
    """
    home = home_of(reference)
    path = Path(reference)
    if not path.is_dir():
        path = _download(reference)
    run = path if (path / "checkpoints").is_dir() or (path / "train.json").is_file() else None
    if run is not None:
        path = _checkpoint(run, name)
    elif name is not None:
        raise BadInput(f"{path}: --checkpoint {name} names one of a run directory, which this is not")
    elif path.resolve().parent.name == "checkpoints":
        path = path.resolve()
        run = home = path.parent.parent
    place = Place(path, run, home)
    if place.is_own:
        if problem := checkpoint.verify(path):
            raise BadInput(f"{problem}; take another checkpoint")
    else:
        _read_config(path, run)
        if not any((path / name).is_file() for name in (WEIGHTS, INDEX)):
            raise BadInput(f"{path / WEIGHTS}: missing; wanted weights as safetensors")
    return place


def home_of(reference: str) -> Path:
    """Return the directory where results about a model are kept, `evaluations.jsonl` and answers; it may be absent."""
    path = Path(reference)
    if not path.is_dir():
        return Path("runs") / reference.replace("/", "--")  # of the hub
    inside = path.resolve().parent
    return inside.parent if inside.name == "checkpoints" else path


def load(place: Place, tokenizer: str | None, device: torch.device) -> Trained:
    """Load a model. `tokenizer` overrides the one that belongs to it. Raises BadInput naming what is damaged."""
    network = _own(place.path) if place.is_own else _foreign(place.path, place.run)
    return Trained(network.to(device).eval(), _tokenizer(place, tokenizer, network.config), place)


def load_on_all(ranks: Ranks, place: Place, tokenizer: str | None) -> Trained:
    """Load a model on every rank. Raises BadInput on every rank."""
    loaded: list[Trained] = []

    def work() -> None:
        loaded.append(load(place, tokenizer, ranks.device))

    together(ranks, work)
    return loaded[0]


def _checkpoint(run: Path, name: str | None) -> Path:
    directory = run / "checkpoints"
    if name is None:
        name = "best" if (directory / "best").is_dir() else "latest"
    names = sorted(path.name for path in directory.glob("*/") if not path.name.startswith("."))
    if not names:
        raise BadInput(f"{directory}: no checkpoint yet; train the run first")
    if name not in names:
        raise BadInput(f"{directory / name}: no such checkpoint; there are {', '.join(names)}")
    return (directory / name).resolve()


def _own(path: Path) -> GPT:
    network = GPT(ModelConfig(**checkpoint.read_state(path)["config"]["model"]))
    _fill(network, load_file(path / WEIGHTS), path / WEIGHTS)
    return network


def _foreign(path: Path, run: Path | None) -> GPT:
    """Return the network of weights under other names."""
    config_file, values = _read_config(path, run)
    weights = _read_weights(path)
    if values.get("tie_word_embeddings", values.get("model_type") == "gpt2") and "lm_head.weight" in weights:
        del weights["lm_head.weight"]  # a copy
    heads = next((values[key] for key in HEADS_KEYS if key in values), None)
    if heads is None:
        raise BadInput(
            f"{config_file}: got no {', '.join(HEADS_KEYS)}; how many heads the model has, nothing else tells"
        )
    for key, wanted in ONLY_VALUES.items():
        if values.get(key, wanted[0]) not in wanted:
            raise BadInput(f"{config_file}: {key}: got {values[key]!r}, wanted {wanted[0]!r} as in GPT-2")
    try:
        plain = to_plain(weights)
        network = GPT(config_of(plain, heads))
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error
    _fill(network, plain, path)
    return network


def _fill(network: GPT, plain: dict[str, Tensor], path: Path) -> None:
    try:
        load_plain(network, plain)
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error


def _read_config(path: Path, run: Path | None) -> tuple[Path, dict[str, Any]]:
    candidates = [path / name for name in CONFIG_FILES] + ([run / "model.json"] if run is not None else [])
    file = next((file for file in candidates if file.is_file()), None)
    if file is None:
        raise BadInput(
            f"{path}: no model; wanted a run directory, one of its checkpoints, or weights with a {CONFIG_FILES[0]}"
        )
    values = _read_json(file)
    inside = values.get("cfg")  # of gpjt's published models
    return file, inside if isinstance(inside, dict) else values


def _read_weights(path: Path) -> dict[str, Tensor]:
    names = [WEIGHTS]
    if (path / INDEX).is_file():
        places = _read_json(path / INDEX).get("weight_map")
        names = sorted({str(name) for name in places.values()}) if isinstance(places, dict) else []
        if any(Path(name).name != name for name in names) or not names:
            raise BadInput(f"{path / INDEX}: damaged: wanted weight_map with the names of files beside it")
    weights: dict[str, Tensor] = {}
    for name in names:
        try:
            weights |= load_file(path / name)
        except FileNotFoundError as error:
            raise BadInput(f"{path / name}: missing; wanted weights as safetensors") from error
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{path / name}: damaged: {error}") from error
    return weights


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise BadInput(f"{file}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{file}: got {type(values).__name__}, wanted a JSON object")
    return values


def _download(reference: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", reference, re.ASCII):
        raise BadInput(f"{reference}: no such directory; wanted a run, a checkpoint, or a model of the hub, OWNER/NAME")
    from huggingface_hub import snapshot_download

    show_bars_in_terminals_only()
    try:
        return Path(snapshot_download(reference, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client raises errors of its own and lets its transport's through
        detail = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"{reference}: no such directory, and no model of the hub that can be had: {detail}") from error


def _tokenizer(place: Place, wanted: str | None, config: ModelConfig) -> Tokenizer:
    if wanted is not None:
        loaded = load_tokenizer(wanted)
    else:
        loaded = read_tokenizer_files(place.path) or load_tokenizer(_recorded_tokenizer(place, config))
    if loaded.vocabulary_size > config.vocab_size:
        raise BadInput(
            f"tokenizer {loaded.name}: got {loaded.vocabulary_size} ids, but the model of {place.path} "
            f"knows {config.vocab_size}; pass the tokenizer of its tokens with --tokenizer"
        )
    return loaded


def _recorded_tokenizer(place: Place, config: ModelConfig) -> str:
    """Return the tokenizer of the run's tokens as `resolved.json` names it; public GPT-2 token sets name none."""
    entry = place.record.get("tokenizer")
    if entry is not None:
        assert place.run is not None
        return str(place.run / RANKS_FILE) if entry["ranks_file"] else str(entry["name"])
    if config.vocab_size == GPT2_VOCABULARY_SIZE:
        return "gpt2"
    record = (place.run or place.path) / checkpoint.RESOLVED
    raise BadInput(f"{record}: does not name the tokenizer of the run's tokens; pass it with --tokenizer")
