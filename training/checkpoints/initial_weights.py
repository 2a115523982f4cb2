"""Initial weights: random ones, or for continued pretraining those of another model."""

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

# Keys of model.json that change no function of the weights: dropout, and random weights.
FREE_KEYS = ("drop_rate", "zero_init_projections", "zero_init_head")


class OtherModel(NamedTuple):
    network: GPT  # on the CPU
    tokenizer: TokenizerRecord | None  # of its tokens, where it is a run that recorded it


@attrs.frozen
class InitialWeights:
    """Another model, from whose weights a run starts."""

    source: str  # as on the command line
    load: Callable[[], OtherModel]  # raises BadInput

    def load_checked(self, wanted: ModelConfig, model_file: Path, tokenizer: TokenizerRecord | None) -> OtherModel:
        """Return the other model. Raises BadInput for another network than `model_file`'s, but for new ids.

        Also where an id of the run's `tokenizer` means something else to it.
        """
        other = self.load()
        described = _described(other.network.config)
        for key, ours in _described(wanted).items():
            theirs = described[key]
            if theirs != ours and not (key == "vocab_size" and ours > theirs):
                raise BadInput(
                    f"{model_file}: {key}: got {json.dumps(ours)}, but --init-from {self.source} has "
                    f"{json.dumps(theirs)}; set it to that"
                )
        known = other.tokenizer
        if tokenizer is not None and known is not None and not tokenizer.extends(known):
            raise BadInput(
                f"--init-from {self.source}: its tokenizer is {known.name}, {known.vocabulary_size:,} ids, that of "
                f"the run's tokens {tokenizer.name}, {tokenizer.vocabulary_size:,} ids, or another of that name; "
                "prepare them with its tokenizer"
            )
        return other


def start_random(state: TrainState, seed: int) -> None:
    """Give a state at step 0 random weights. A rank keeps its rows of one tensor after the other."""
    parameters = state.parallel.by_plain_name(state.parallel.named_parameters())
    for name, values in initial_weights(meta_network(state.parallel.network.config), seed):
        keep_rows(parameters[name], values)


def start_from(
    initial: InitialWeights, state: TrainState, model_file: Path, tokenizer: TokenizerRecord | None, ranks: Ranks
) -> WeightsOrigin:
    """Set the weights of a state at step 0. Call it on every rank. Raises BadInput, as `InitialWeights` does, too."""
    given: dict[str, Tensor] = {}  # on rank 0, so that no other holds a whole network
    wanted = state.parallel.network.config

    def load() -> WeightsOrigin:
        values, origin = values_from(initial, wanted, model_file, tokenizer)
        given.update(values)
        return origin

    origin = from_coordinator(ranks, load, group=ranks.download)
    for name, parameter in state.parallel.by_plain_name(state.parallel.named_parameters()).items():
        whole = torch.empty(parameter.shape, device=ranks.device)
        if ranks.coordinates:
            whole.copy_(given.pop(name))
        dist.broadcast(whole, src=0)
        keep_rows(parameter, whole)
    lines = [f"starting from the weights of {origin.source}, sha256 {origin.sha256[:12]}..."]
    if origin.vocab_size is not None:
        lines.append(f"vocabulary {origin.vocab_size:,} -> {wanted.vocab_size:,}: new rows are the mean of the others")
    if origin.unseen:
        lines.append(f"{origin.unseen} special tokens that it has never seen begin as the end of text")
    show(*lines, once=True)
    return origin


def values_from(
    initial: InitialWeights, wanted: ModelConfig, model_file: Path, tokenizer: TokenizerRecord | None
) -> tuple[dict[str, Tensor], WeightsOrigin]:
    """Return the weights with which a run of another model begins, by plain name, and their origin.

    They are whole, on the CPU, with rows for new ids and for special tokens that the other model has never seen.
    Training begins with them, and `train.py --look` shows their losses. Raises BadInput, as `load_checked` does.
    """
    other = initial.load_checked(wanted, model_file, tokenizer)
    network, unseen = other.network, {} if tokenizer is None else unseen_tokens(other, tokenizer)
    given: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        values = with_new_rows(name, parameter.detach(), network.config, wanted)
        if unseen and axes_of(name, wanted).row_names == ["vocab"]:
            values = values.index_copy(0, torch.tensor(list(unseen)), values[list(unseen.values())])
        given[name] = values
    grown_from = None if network.config.vocab_size == wanted.vocab_size else network.config.vocab_size
    digest = weights_sha256(network)
    origin = WeightsOrigin(source=initial.source, sha256=digest, vocab_size=grown_from, unseen=len(unseen) or None)
    return given, origin


def first_network(
    record: RunRecord, initial: InitialWeights | None, model_file: Path, tokenizer: TokenizerRecord | None
) -> GPT:
    """Return the network of a run as it was before its first step, on the CPU, from the run's record.

    Raises BadInput where `initial` is not the model from whose weights the run began.
    """
    wanted, began = record.network_config(), record.initial_weights
    values: Iterable[tuple[str, Tensor]]
    if initial is None and began is None:
        values = initial_weights(meta_network(wanted), record.train.random_seed)
    elif initial is None:
        assert began is not None
        raise BadInput(f"the run began with the weights of {began.source}: pass --init-from {began.source}")
    elif began is None:
        raise BadInput(f"--init-from {initial.source}: the run began with random weights; leave it out")
    else:
        given, origin = values_from(initial, wanted, model_file, tokenizer)
        if origin.sha256 != began.sha256:
            raise BadInput(
                f"--init-from {initial.source}: has weights of sha256 {origin.sha256[:12]}..., but the run began with "
                f"{began.sha256[:12]}... of {began.source}; pass the model as it was then"
            )
        values = given.items()
    network = GPT(wanted)
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, value in values:
            parameters[name].copy_(value)
    return network


def unseen_tokens(other: OtherModel, tokenizer: TokenizerRecord) -> dict[int, int]:
    """Return special tokens that the other model has never seen, each with the id of the row that it copies."""
    theirs, end = other.tokenizer, tokenizer.end_of_text_id
    # In plain text there is no special token but the end of text.
    first = 0 if theirs is not None and theirs.template is None else other.network.config.vocab_size
    return {each: end for each in tokenizer.all_special_tokens.values() if each >= first and each != end}


def with_new_rows(name: str, values: Tensor, given: ModelConfig, wanted: ModelConfig) -> Tensor:
    """Return a parameter on the CPU with rows for a larger vocabulary, each the mean of the old ones, rounded once."""
    if given.vocab_size == wanted.vocab_size or axes_of(name, given).row_names != ["vocab"]:
        return values
    old = unpadded(name, values, given)
    rows = values.new_zeros(wanted.padded_vocab_size, *values.shape[1:])
    rows[: len(old)] = old
    # numpy adds in one order, whatever the number of threads
    rows[len(old) : wanted.vocab_size] = torch.from_numpy(old.numpy().mean(axis=0, dtype=np.float64))
    return rows


@torch.no_grad()
def keep_rows(parameter: Placed, whole: Tensor) -> None:
    """Copy those rows of a whole tensor, or columns of them, that this rank holds."""
    for rows, columns, held in held_pieces(parameter):
        held.copy_(within(whole, rows, columns))


def weights_sha256(network: GPT) -> str:
    """Return the sha256 of the parameters' values in fp32, ordered by name, without vocabulary padding."""
    digest = hashlib.sha256()
    for name, parameter in sorted(network.named_parameters()):
        digest.update(unpadded(name, parameter.detach().cpu(), network.config).contiguous().numpy().data)
    return digest.hexdigest()


def check_origin(initial: InitialWeights, origin: WeightsOrigin | None, checkpoint: Path) -> None:
    """Raise BadInput where the run of a checkpoint began with other weights. `origin`: those it began with."""
    if origin is None or origin.source != initial.source:
        began = "random weights" if origin is None else f"those of {origin.source}"
        raise BadInput(
            f"--init-from {initial.source}: {checkpoint} is of a run that began with {began}; leave it out to resume, "
            "or start over with --resume never"
        )


def _described(config: ModelConfig) -> dict[str, Any]:
    """Return the keys that describe a network with its weights, without nulls that stand for a number."""
    spelled = attrs.asdict(config) | {"n_kv_heads": config.kv_heads, "mlp_width": config.hidden_width}
    return {key: value for key, value in spelled.items() if key not in FREE_KEYS}
