"""Initial weights: those of another model instead of random ones, for continued pretraining."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from common.errors import BadInput
from model.config import ModelConfig
from model.gpt import GPT
from model.pretrained import unpadded
from training.checkpoints.run_record import WeightsOrigin
from training.checkpoints.storage import Checkpoint
from training.parallel.process_group import Ranks, from_coordinator, together
from training.parallel.sharding import held_rows
from training.state import TrainState
from training.telemetry.reporter import print_lines

# Keys of model.json that change no function of the weights: dropout, and random weights.
FREE_KEYS = ("drop_rate", "zero_init_projections", "zero_init_head")


@attrs.frozen
class InitialWeights:
    """Another model, from whose weights a run starts."""

    source: str  # as on the command line
    load: Callable[[], GPT]  # onto the CPU; raises BadInput


def start_from(initial: InitialWeights, state: TrainState, model_file: Path, ranks: Ranks) -> WeightsOrigin:
    """Replace the weights of a state at step 0. Call it on every rank.

    Raises BadInput for a model that cannot be read, or is another network than that of `model_file`.
    """
    loaded: list[GPT] = []

    def load() -> None:
        network = initial.load()
        check_network(initial, network.config, state.parallel.network.config, model_file)
        loaded.append(network)

    for first in (True, False):  # the first rank of a machine may download it for the others
        together(ranks, load, only=(ranks.local_rank == 0) is first, group=ranks.download)
    [network] = loaded
    given = dict(network.named_parameters())
    with torch.no_grad():
        for name, parameter in state.parallel.named_parameters().items():
            first_row, held = held_rows(parameter)
            held.copy_(given[name][first_row : first_row + len(held)])
    origin = WeightsOrigin(source=initial.source, sha256=from_coordinator(ranks, lambda: weights_sha256(network)))
    print_lines(ranks, [f"starting from the weights of {origin.source}, sha256 {origin.sha256[:12]}..."])
    return origin


def weights_sha256(network: GPT) -> str:
    """Return the sha256 of the parameters' values in fp32, ordered by name, without vocabulary padding."""
    digest = hashlib.sha256()
    for name, parameter in sorted(network.named_parameters()):
        digest.update(unpadded(name, parameter.detach(), network.config).contiguous().numpy().data)
    return digest.hexdigest()


def check_network(initial: InitialWeights, given: ModelConfig, wanted: ModelConfig, model_file: Path) -> None:
    """Raise BadInput where the other model's network is another than that of `model_file`."""
    described = _described(given)
    for key, ours in _described(wanted).items():
        theirs = described[key]
        if theirs != ours:
            raise BadInput(
                f"{model_file}: {key}: got {json.dumps(ours)}, but --init-from {initial.source} has "
                f"{json.dumps(theirs)}; set it to that"
            )


def check_origin(initial: InitialWeights, origin: WeightsOrigin | None, checkpoint: Checkpoint) -> None:
    """Raise BadInput where the run of a checkpoint began with other weights. `origin`: those it began with."""
    if origin is None or origin.source != initial.source:
        began = "random weights" if origin is None else f"those of {origin.source}"
        raise BadInput(
            f"--init-from {initial.source}: {checkpoint} is of a run that began with {began}; leave it out to resume, "
            "or start anew with --resume never"
        )


def _described(config: ModelConfig) -> dict[str, Any]:
    """Return the keys that describe a network with its weights, without nulls that stand for a number."""
    spelled = attrs.asdict(config) | {"n_kv_heads": config.kv_heads, "mlp_width": config.hidden_width}
    return {key: value for key, value in spelled.items() if key not in FREE_KEYS}
