#!/usr/bin/env python3
"""The largest micro-batch of a run, here or on a GPU elsewhere: `python find_batch_size.py runs/8xa100`."""

import json
import sys
from typing import TYPE_CHECKING

from common.errors import BadInput, accepted
from common.output import show
from common.script import Script

if TYPE_CHECKING:
    from training.command import FindCommand


def main() -> int:
    with Script("find_batch_size.py") as script:
        from common.arguments import ScriptTexts, parse
        from training.command import FIND_EPILOG, FindCommand, key_rows

        texts = ScriptTexts(epilog=FIND_EPILOG)
        command = parse("find_batch_size.py", FindCommand, sys.argv[1:], texts=texts, key_rows=key_rows)
        script.interrupted = ": nothing is written"
        find(command)
    return script.status


def find(command: "FindCommand") -> None:
    from training.config.train_config import load_run  # after --help: it needs more time
    from training.launch import check_environment

    check_environment()
    run = load_run(command.run, command.overrides)
    if command.predict is not None:
        from training.batch_finder.search import prediction_table
        from training.hardware.gpus import find_gpu
        from training.planning.price_list import gpus_of

        known, ranks = gpus_of(command.machines), command.world_size or run.train.execution.tensor_parallel
        gpus, problems = accepted(command.predict.split(","), lambda name: find_gpu(name.strip(), known))
        if gpus:
            show(*prediction_table(run.model, run.train, gpus, ranks))
        if problems:
            raise BadInput(*problems)
    elif command.probe is not None:
        from training.batch_finder.probe import run_probe

        run_probe(run, command.device, **json.loads(command.probe))
    else:
        from training.batch_finder.finder import report_largest

        report_largest(run, command.overrides, command.device, command.world_size, command.write)


if __name__ == "__main__":
    sys.exit(main())
