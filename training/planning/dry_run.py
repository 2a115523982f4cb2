"""The dry run of train.py: steps, tokens and FLOPs of a run or, with --plan, its time and cost on rented machines."""

import math

import attrs
from tabulate import tabulate

from common.output import show
from model.axes import TENSOR_AXES, axes_of, plain_name
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.initial_weights import InitialWeights, check_origin
from training.checkpoints.lookup import find_to_resume
from training.checkpoints.saved_state import read_state
from training.command import TrainCommand
from training.config.batch_plan import describe, make_plan
from training.config.train_config import Run
from training.data.locate_tokens import lengths_of, streams_at_hand
from training.data.open_tokens import check_objective
from training.data.verify_tokens import tokens_at_hand
from training.parallel.process_group import RankGroup
from training.planning.estimate import make_estimate
from training.planning.forecast_file import describe_forecast_file
from training.planning.job_options import describe_options
from training.planning.memory_model import STATE_BYTES, MemoryModel
from training.planning.network_sizes import network_sizes
from training.planning.plan_table import describe_estimate, wrapped
from training.planning.price_list import MACHINES, read_machines
from training.planning.stored_core import describe_core
from training.planning.throughput import Network


def dry_run(run: Run, command: TrainCommand, initial: InitialWeights | None) -> None:
    """Print what the run would do, without needing a GPU.

    Raises BadInput if the run could not start, for example because of the weights or checkpoint of --init-from.
    """
    if initial is not None:
        resume = command.options.resume
        checkpoint = None if resume == "never" else find_to_resume(checkpoints_of(run.directory), resume)
        if checkpoint is not None:
            check_origin(initial, read_state(checkpoint).config.initial_weights, checkpoint)
        else:
            token_set = tokens_at_hand(run.train, command.options.token_files)
            tokenizer = token_set.tokenizer[1] if token_set and token_set.tokenizer else None
            initial.load_checked(run.model, run.directory / "model.json", tokenizer)
    streams = streams_at_hand(run.train, command.options.token_files)
    check_objective(run, streams.values())
    lengths = lengths_of(streams)
    if command.dry_run:
        ranks = command.world_size or run.train.execution.tensor_parallel
        plan = make_plan(run.train, run.model.context_length, ranks, lengths)
        lines = describe(run.model, run.train, plan)
        lines += describe_shards(MemoryModel.of(run.model, run.train, ranks)) if run.train.execution.shards > 1 else []
        lines += describe_options(run, command, plan)
    else:
        prices = read_machines(command.machines or MACHINES, command.machine)
        prices = attrs.evolve(prices, preemptions_per_hour=command.preemptions or prices.preemptions_per_hour)
        network = Network(nodes=command.nodes, link=command.node_link or math.inf)
        estimate = make_estimate(run, prices, lengths, network, command.options.price_per_hour)
        lines = wrapped([*describe_estimate(estimate), *describe_forecast_file(run), *describe_core(run)])
    show(*wrapped(map(str, run.notices)), *lines)


def describe_shards(memory: MemoryModel) -> list[str]:
    """Return a table of the parameters, with their axes, their tensor shards and their bytes per rank.

    A parameter that occurs in every layer gets only one row.
    """
    (shards, tensor_size), layers, rows = memory.tensor, memory.model.n_layers, {}
    sizes, ranks = network_sizes(memory.model, shards, tensor_size), RankGroup(rank=0, size=memory.shards)
    for name, part in {**sizes.outer, **sizes.block}.items():
        axes, plain = axes_of(name, memory.model), plain_name(name).replace(".0.", ".*.")
        columns = [axes.columns] if axes.columns else []
        divided_axes = [axis for axis in (*axes.rows, *columns) if axis.name in TENSOR_AXES]
        parts = [f"{axis.name} {min(shards, axis.parts or shards)}" for axis in divided_axes]
        size = STATE_BYTES * (shards // tensor_size) * ranks.chunk(part.shape[0]) * math.prod(part.shape[1:])
        axis_names = " x ".join([" ".join(axes.row_names), *(axis.name for axis in columns)])
        size *= layers if "*" in plain else 1
        rows[plain] = [plain, axis_names, ", ".join(dict.fromkeys(parts)) or "whole", f"{size:,}"]
    wrapper = f", {memory.parallel} on {memory.shards}" * memory.sharded
    headings, sides = ["parameter", "axes", "shards", "bytes per rank"], ("left", "left", "left", "right")
    table = tabulate([*rows.values()], headings, disable_numparse=True, colalign=sides)
    return [f"shards       {shards}, {shards // tensor_size} on each rank{wrapper}", *table.splitlines()]
