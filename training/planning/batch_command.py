"""The command of find_batch_size.py: search on this machine, predict for other GPUs, or run as one rank of a probe."""

import json

from common.errors import BadInput, accepted
from common.launch import check_environment
from common.output import show
from training.command import FindCommand, TrainCommand
from training.config.train_config import Run, load_run


def run(command: FindCommand) -> None:
    """Search for the largest micro-batch, predict it, or run as one rank of a probe. Raises BadInput."""
    check_environment()
    run = load_run(command.run, command.overrides)
    if command.predict is not None:
        from training.hardware.gpus import find_gpu
        from training.planning.batch_search import prediction_table
        from training.planning.price_list import gpus_of

        table, ranks = gpus_of(command.machines), command.world_size or run.train.execution.tensor_parallel
        gpus, problems = accepted(command.predict.split(","), lambda name: find_gpu(name.strip(), table))
        if gpus:
            show(*prediction_table(run.model, run.train, gpus, ranks))
        if problems:
            raise BadInput(*problems)
    elif command.probe is not None:
        from training.planning.batch_probe import run_probe

        run_probe(run, command.device, **json.loads(command.probe))
    else:
        from training.planning.batch_finder import report_largest

        report_largest(run, command.overrides, command.device, command.world_size, command.write)


def find_for_training(run: Run, command: TrainCommand, _: object) -> None:
    """Search for the largest micro-batch, on the ranks that train.py was started with. Raises BadInput."""
    from training.planning.batch_finder import report_largest

    report_largest(run, command.overrides, command.options.device, None, command.write)
