"""Dry run of train.py: the arithmetic of a run, or with --plan its hours and dollars on machines for rent."""

import math

from common.errors import printable
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.saved_state import read_state
from training.checkpoints.verification import find
from training.command import TrainCommand
from training.config.batch_plan import describe, make_plan
from training.config.train_config import Run
from training.data.locate_tokens import lengths_at_hand
from training.initial_weights import InitialWeights, check_network, check_origin
from training.planning.estimate import make_estimate
from training.planning.estimate_table import describe_estimate, describe_forecast_file
from training.planning.price_list import MACHINES, read_machines
from training.planning.throughput import Network


def dry_run(run: Run, command: TrainCommand, initial: InitialWeights | None) -> None:
    """Print what a run would do; needs no GPU, nor tokens with min_train_tokens. Raises BadInput."""
    if initial is not None:
        _check_initial_weights(run, command.options.resume, initial)
    lengths = lengths_at_hand(run.train, command.options.token_files)
    if command.dry_run:
        plan = make_plan(run.train, run.model.context_length, command.world_size or 1, lengths)
        lines = describe(run.model, run.train, plan)
    else:
        prices = read_machines(command.machines or MACHINES, command.machine)
        network = Network(nodes=command.nodes, link=command.node_link or math.inf)
        lines = [*describe_estimate(make_estimate(run, prices, lengths, network)), *describe_forecast_file(run)]
    print("\n".join(map(printable, [*run.notices, *lines])))


def _check_initial_weights(run: Run, wanted: str, initial: InitialWeights) -> None:
    """Raise BadInput where training could not begin with, or go on from, the weights of --init-from."""
    found = None if wanted == "never" else find(checkpoints_of(run.directory), wanted)
    if found is not None:
        check_origin(initial, read_state(found).config.initial_weights, found)
    else:
        check_network(initial, initial.load().config, run.model, run.directory / "model.json")
