"""Import models from other programs: Hugging Face, nanoGPT, OpenAI and gpjt. Code in pickle files is never run."""

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import BadInput, refusing
from common.json_files import read_json
from common.output import note, show
from common.text import quoted
from evaluation.shared.model_files import (
    CONFIG_FILES,
    FACTS,
    INDEX,
    NANOGPT,
    OPTIONS,
    check_facts,
    check_model_files,
    inner_config,
    weight_files,
)
from model.config import (
    GPT2,
    NANOGPT_KEYS,
    OUR_ACTIVATIONS,
    ROTARY,
    STOCK_ACTIVATIONS,
    UNGATED,
    ModelConfig,
    stock_keys,
)
from model.gpt import GPT
from model.naming import config_of, is_nanogpt, load_plain, to_plain
from model.stock import config_of_stock
from model.stock_weights import from_stock
from training.checkpoints.directory import WEIGHTS

KEYS = stock_keys(GPT2)  # our keys -> the keys of Hugging Face's GPT-2
# Our keys that may have any supported value. All other keys must have their defaults (see ONLY_VALUES), because weights
# with GPT-2's names do not reveal which values they were trained with.
READ_KEYS = {
    *("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers", "drop_rate", "qkv_bias", "tie_weights"),
    *("activation", "biases", "mlp_width", "zero_init_projections", "zero_init_head"),
}
# The only supported values of these keys: with another value, the same weights would form a different network. Some of
# the keys are Hugging Face's, and some are ours.
ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": (GPT2,),
    "scale_attn_weights": (True,),
    "add_cross_attention": (False,),
    **{field.name: (field.default,) for field in attrs.fields(ModelConfig) if field.name not in READ_KEYS},
}
# Keys whose values must agree with the shapes of the weights: Hugging Face's keys, nanoGPT's keys and ours.
SHAPE_KEYS = {KEYS["mlp_width"]: "hidden_width"} | {
    key: name
    for name in ("emb_dim", "n_layers", "context_length", "vocab_size")
    for key in (name, *OPTIONS[name].keys[GPT2], *OPTIONS[name].keys.get(NANOGPT_KEYS, ()))
}
# The keys that name the activation. Each key has a mapping from the file's activation names to our names.
ACTIVATION_KEYS = {
    KEYS["activation"]: {theirs: ours for theirs, ours in OUR_ACTIVATIONS.items() if ours in UNGATED},
    "activation": {name: name for name in UNGATED},
}
NANOGPT_NOTE = (
    "{path}: these are weights of nanoGPT, so exact GELU is assumed. If they were trained with GPT-2's tanh-GELU, "
    "which build-nanogpt uses and nanoGPT used before May 2023, write {setting} to {config}"
)
CONVERSION = (
    "python -c \"import torch; from safetensors.torch import save_file; model = torch.load('ckpt.pt', 'cpu', "
    "weights_only=False)['model']; save_file({name: value.clone() for name, value in model.items()}, "
    "'model.safetensors')\""
)


def check_foreign(path: Path, run: Path | None) -> None:
    """Raise BadInput if a directory does not contain a model. `run`: the run directory that the model belongs to."""
    if path.is_file():
        raise BadInput(f"{path}: is a file; pass its folder: {path.parent}")
    check_model_files(path, run)
    if not (path / NANOGPT).is_file():
        _read_config(path, run)
        if not _has_safetensors(path):
            raise BadInput(f"{path / WEIGHTS}: missing; wanted weights in safetensors files, or nanoGPT's {NANOGPT}")


def load_foreign(path: Path, run: Path | None) -> GPT:
    """Load a model that another program has saved. Raises BadInput.

    `run`: the run directory that the model belongs to, or None.
    """
    if (path / NANOGPT).is_file() and not _has_safetensors(path):
        weights, values, where = _read_nanogpt(path)
    else:
        (where, values), weights = _read_config(path, run), _read_weights(path)
        if isinstance(kind := values.get("model_type"), str) and kind in ROTARY:
            with refusing(where):
                config = config_of_stock(values, kind)
                return with_parameters(config, from_stock(weights, config, kind))
    heads = next((values[key] for key in FACTS["n_heads"] if key in values), None)
    if heads is None:
        raise BadInput(
            f"{where}: got none of the keys {', '.join(FACTS['n_heads'])}; add one of them, because the weights do not "
            "show the number of heads"
        )
    for key, supported_values in ONLY_VALUES.items():
        if values.get(key, supported_values[0]) not in supported_values:
            raise BadInput(f"{where}: {key}: got {quoted(values[key])}, wanted {supported_values[0]!r} as in GPT-2")
    with refusing(path):
        # Hugging Face's GPT-2 has tied weights by default: if the file has a head in addition to the embedding, the
        # head is a copy of the embedding.
        tied = values.get(KEYS["tie_weights"], values.get("tie_weights", values.get("model_type") == GPT2))
        plain = to_plain(weights, tied=tied is True)
        config = config_of(plain, heads, _activation(values, where, is_nanogpt(weights)))
        for key, field in SHAPE_KEYS.items():
            shape = getattr(config, field)
            if values.get(key) is not None and values[key] != shape:
                raise BadInput(f"{where}: {key}: got {quoted(values[key])}, but the weights next to it have {shape:,}")
        config = attrs.evolve(
            config,
            norm_eps=values.get(KEYS["norm_eps"], config.norm_eps),
            scale_attention_by_inverse_layer=values.get(KEYS["scale_attention_by_inverse_layer"], False),
        )
        network = with_parameters(config, plain)
    if not any(key in values for key in ACTIVATION_KEYS) and is_nanogpt(weights):
        setting = json.dumps({KEYS["activation"]: STOCK_ACTIVATIONS["gelu_tanh"]})
        show(note(NANOGPT_NOTE.format(path=path, setting=setting, config=path / CONFIG_FILES[0])), once=True)
    return network


def model_files(path: Path) -> list[Path]:
    """Return the files that define another program's network, sorted; [] if the directory contains no model.

    The configuration is one of these files, because the same weights with another configuration are another network.
    """
    weights = sorted(path.glob("*.safetensors")) or [file for file in [path / NANOGPT] if file.is_file()]
    config_files = [path / name for name in (*CONFIG_FILES, INDEX) if (path / name).is_file()]
    return sorted([*weights, *config_files]) if weights else []


def with_parameters(config: ModelConfig, plain: dict[str, Tensor]) -> GPT:
    """Return a network with these parameters. Raises ValueError if the parameters do not fit it.

    `plain`: the parameters by their plain names.
    """
    network = GPT(config)
    load_plain(network, plain)
    return network


def _activation(values: dict[str, Any], where: Path, nanogpt: bool) -> str:
    """Return the configured activation.

    The default is that of nanoGPT if the weights are nanoGPT's, and that of GPT-2 for all other weights.
    """
    for key, our_names in ACTIVATION_KEYS.items():
        if key in values:
            if not isinstance(values[key], str) or values[key] not in our_names:
                raise BadInput(f"{where}: {key}: got {quoted(values[key])}, wanted {', '.join(map(repr, our_names))}")
            return our_names[values[key]]
    return "gelu" if nanogpt else "gelu_tanh"


def _has_safetensors(path: Path) -> bool:
    return any((path / name).is_file() for name in (WEIGHTS, INDEX))


def _read_config(path: Path, run: Path | None) -> tuple[Path, dict[str, Any]]:
    candidates = [path / name for name in CONFIG_FILES] + ([run / "model.json"] if run is not None else [])
    file = next((file for file in candidates if file.exists()), None)
    if file is None:
        raise BadInput(
            f"{path}: not a model; wanted a run directory, a checkpoint, or weights with a {CONFIG_FILES[0]}"
        )
    return file, inner_config(read_json(file))


def _read_weights(path: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name in weight_files(path):
        try:
            with safe_open(path / name, framework="pt") as file:
                weights |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a dict
                # If several tensors share memory, save_model stores only one of them, and the metadata maps the names
                # of the other tensors to the stored tensor's name.
                shared = file.metadata() or {}
        except FileNotFoundError as error:
            raise BadInput(f"{path / name}: missing; wanted weights in safetensors files") from error
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{path / name}: damaged: {error}") from error
        weights |= {alias: weights[stored] for alias, stored in shared.items() if stored in weights}
    return weights


def _read_nanogpt(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], Path]:
    """Return the weights of a nanoGPT checkpoint, its configuration, and the file that contains the configuration.

    The configuration is completed by a config.json next to the checkpoint, if there is one.
    """
    file = path / NANOGPT
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # unpickling can raise any exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(
            f"{file}: refused: the file is damaged, or it contains more than tensors and plain values, so that loading "
            f"it could run code: {reason} If you trust it, convert it to safetensors, and write n_head to "
            f"{CONFIG_FILES[0]}: {CONVERSION}"
        ) from error
    weights, values = (content.get(key) if isinstance(content, dict) else None for key in ("model", "model_args"))
    if not isinstance(weights, dict) or not isinstance(values, dict):
        raise BadInput(f"{file}: got no 'model' or no 'model_args', wanted a checkpoint of nanoGPT's train.py")
    if not all(isinstance(value, Tensor) for value in weights.values()):
        raise BadInput(f"{file}: model: wanted only tensors")
    config_file = path / CONFIG_FILES[0]
    if not config_file.exists():
        return weights, values, file
    check_facts([(file, values), (config_file, read_json(config_file))])
    return weights, values | read_json(config_file), config_file
