"""Initial weights of a run: random weights, or the weights of another model for continued pretraining."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import BadInput
from common.output import show
from model.axes import axes_of, unpadded
from model.config import ModelConfig
from model.counts import meta_network
from model.gpt import GPT, initial_weights
from tokens.format.manifest import TokenizerRecord
from training.checkpoints.run_record import RunRecord, WeightsOrigin
from training.parallel.mesh import Placed, held_pieces, within
from training.parallel.process_group import Ranks, from_coordinator
from training.state import TrainState

# Keys of model.json that do not change the network's output for given weights: dropout and initialization
FREE_KEYS = ("drop_rate", "zero_init_projections", "zero_init_head")


class OtherModel(NamedTuple):
    network: GPT  # on the CPU
    tokenizer: TokenizerRecord | None  # None unless the model comes from a run that recorded its tokenizer


@attrs.frozen
class InitialWeights:
    """The model from whose weights a run starts."""

    source: str  # as written on the command line
    load: Callable[[], OtherModel]  # raises BadInput

    def load_checked(self, config: ModelConfig, model_file: Path, tokenizer: TokenizerRecord | None) -> OtherModel:
        """Load the model and check that a run can start from it.

        The model's vocabulary may be smaller than the run's. Raises BadInput if the model's network differs in any
        other way from the run's `config`, which was read from `model_file`. Also raises BadInput if an id of the run's
        `tokenizer` means something else to the model.
        """
        model = self.load()
        model_keys = _network_keys(model.network.config)
        for key, run_value in _network_keys(config).items():
            model_value = model_keys[key]
            if model_value != run_value and not (key == "vocab_size" and run_value > model_value):
                raise BadInput(
                    f"{model_file}: {key}: got {json.dumps(run_value)}, but --init-from {self.source} has "
                    f"{json.dumps(model_value)}; set it to {json.dumps(model_value)}"
                )
        model_tokenizer = model.tokenizer
        if tokenizer is not None and model_tokenizer is not None and not tokenizer.extends(model_tokenizer):
            raise BadInput(
                f"--init-from {self.source}: that model's tokenizer, {model_tokenizer.name} with "
                f"{model_tokenizer.vocabulary_size:,} ids, differs from the tokenizer of the run's tokens, "
                f"{tokenizer.name} with {tokenizer.vocabulary_size:,} ids; prepare the tokens with that model's "
                "tokenizer"
            )
        return model


def start_random(state: TrainState, seed: int) -> None:
    """Give random weights to a state at step 0. Each rank copies its rows of one tensor at a time."""
    parameters = state.parallel.by_plain_name(state.parallel.named_parameters())
    for name, values in initial_weights(meta_network(state.parallel.network.config), seed):
        copy_local_rows(parameters[name], values)


def start_from(
    initial: InitialWeights, state: TrainState, model_file: Path, tokenizer: TokenizerRecord | None, ranks: Ranks
) -> WeightsOrigin:
    """Give the weights of another model to a state at step 0. Call it on every rank.

    Raises BadInput, including the errors of `InitialWeights.load_checked`.
    """
    weights: dict[str, Tensor] = {}  # filled on rank 0 only, so that no other rank holds all weights of a network
    config = state.parallel.network.config

    def load() -> WeightsOrigin:
        loaded_weights, origin = values_from(initial, config, model_file, tokenizer)
        weights.update(loaded_weights)
        return origin

    origin = from_coordinator(ranks, load, group=ranks.download)
    for name, parameter in state.parallel.by_plain_name(state.parallel.named_parameters()).items():
        full = torch.empty(parameter.shape, device=ranks.device)
        if ranks.coordinates:
            full.copy_(weights.pop(name))
        dist.broadcast(full, src=0)
        copy_local_rows(parameter, full)
    lines = [f"starting from the weights of {origin.source}, sha256 {origin.sha256[:12]}..."]
    if origin.vocab_size is not None:
        growth = f"{origin.vocab_size:,} -> {config.vocab_size:,}"
        lines.append(f"vocabulary {growth}: each new row is the mean of the model's rows")
    if origin.unseen:
        lines.append(
            f"{origin.unseen} special tokens are new to the model: they start as copies of the end-of-text token"
        )
    show(*lines, once=True)
    return origin


def values_from(
    initial: InitialWeights, config: ModelConfig, model_file: Path, tokenizer: TokenizerRecord | None
) -> tuple[dict[str, Tensor], WeightsOrigin]:
    """Return the first weights of a run that starts from another model, and their origin.

    The tensors are complete, have plain names, and are on the CPU. They include rows for new ids and for special tokens
    that the other model has never seen. Training begins with them, and `train.py --look` uses them to show losses
    before the first step. Raises BadInput, as `load_checked` does.
    """
    model = initial.load_checked(config, model_file, tokenizer)
    network, unseen = model.network, {} if tokenizer is None else unseen_tokens(model, tokenizer)
    weights: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        values = with_new_rows(name, parameter.detach(), network.config, config)
        if unseen and axes_of(name, config).row_names == ["vocab"]:
            values = values.index_copy(0, torch.tensor(list(unseen)), values[list(unseen.values())])
        weights[name] = values
    old_vocab_size = None if network.config.vocab_size == config.vocab_size else network.config.vocab_size
    digest = weights_sha256(network)
    origin = WeightsOrigin(source=initial.source, sha256=digest, vocab_size=old_vocab_size, unseen=len(unseen) or None)
    return weights, origin


def first_network(
    record: RunRecord, initial: InitialWeights | None, model_file: Path, tokenizer: TokenizerRecord | None
) -> GPT:
    """Rebuild a run's network on the CPU, as it was before the first step, according to the run's record.

    Raises BadInput if `initial` is not the model from whose weights the run began.
    """
    config, recorded_origin = record.network_config(), record.initial_weights
    weights: Iterable[tuple[str, Tensor]]
    if initial is None and recorded_origin is None:
        weights = initial_weights(meta_network(config), record.train.random_seed)
    elif initial is None:
        assert recorded_origin is not None
        source = recorded_origin.source
        raise BadInput(f"the run began with the weights of {source}: pass --init-from {source}")
    elif recorded_origin is None:
        raise BadInput(f"--init-from {initial.source}: the run began with random weights; leave out --init-from")
    else:
        weights_by_name, origin = values_from(initial, config, model_file, tokenizer)
        if origin.sha256 != recorded_origin.sha256:
            raise BadInput(
                f"--init-from {initial.source}: the sha256 of these weights is {origin.sha256[:12]}..., but the run "
                f"began with {recorded_origin.sha256[:12]}... from {recorded_origin.source}; pass the model as it was "
                "when the run began"
            )
        weights = weights_by_name.items()
    network = GPT(config)
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, values in weights:
            parameters[name].copy_(values)
    return network


def unseen_tokens(model: OtherModel, tokenizer: TokenizerRecord) -> dict[int, int]:
    """Map the id of each special token that the model has never seen to the id of another token.

    The row of the other token is copied to initialize the row of the unseen token.
    """
    model_tokenizer, end = model.tokenizer, tokenizer.end_of_text_id
    # A model without a chat template was trained on plain text, whose only special token is the end of text.
    trained_on_text = model_tokenizer is not None and model_tokenizer.template is None
    first = 0 if trained_on_text else model.network.config.vocab_size
    special_ids = tokenizer.all_special_tokens.values()
    return {token_id: end for token_id in special_ids if token_id >= first and token_id != end}


def with_new_rows(name: str, values: Tensor, old_config: ModelConfig, config: ModelConfig) -> Tensor:
    """Return a parameter on the CPU with additional rows for a larger vocabulary.

    Each new row is the mean of the old rows, rounded once.
    """
    if old_config.vocab_size == config.vocab_size or axes_of(name, old_config).row_names != ["vocab"]:
        return values
    old = unpadded(name, values, old_config)
    rows = values.new_zeros(config.padded_vocab_size, *values.shape[1:])
    rows[: len(old)] = old
    # numpy adds in the same order for any number of threads.
    rows[len(old) : config.vocab_size] = torch.from_numpy(old.numpy().mean(axis=0, dtype=np.float64))
    return rows


@torch.no_grad()
def copy_local_rows(parameter: Placed, full: Tensor) -> None:
    """Copy this rank's part of a full tensor into the parameter: some rows, or some columns of some rows."""
    for rows, columns, local_part in held_pieces(parameter):
        local_part.copy_(within(full, rows, columns))


def weights_sha256(network: GPT) -> str:
    """Return the sha256 of the parameters' values in fp32, ordered by name, without vocabulary padding."""
    digest = hashlib.sha256()
    for name, parameter in sorted(network.named_parameters()):
        digest.update(unpadded(name, parameter.detach().cpu(), network.config).contiguous().numpy().data)
    return digest.hexdigest()


def check_origin(initial: InitialWeights, origin: WeightsOrigin | None, checkpoint: Path) -> None:
    """Raise BadInput if the run of a checkpoint began with weights other than `initial`.

    `origin`: the model from whose weights the run began; None if they were random.
    """
    if origin is None or origin.source != initial.source:
        weights = "random weights" if origin is None else f"the weights of {origin.source}"
        raise BadInput(
            f"--init-from {initial.source}: {checkpoint} belongs to a run that began with {weights}; leave out "
            "--init-from to resume, or start over with --resume never"
        )


def _network_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys that determine what a network computes. A null that stands for a number becomes that number."""
    resolved = attrs.asdict(config) | {"n_kv_heads": config.kv_heads, "mlp_width": config.hidden_width}
    return {key: value for key, value in resolved.items() if key not in FREE_KEYS}
