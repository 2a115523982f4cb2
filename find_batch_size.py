#!/usr/bin/env python3
"""The largest micro-batch of a run, here or on a GPU elsewhere: `python find_batch_size.py runs/8xa100`."""

import argparse
import json
import sys
from pathlib import Path

from common.arguments import print_any_name, whole_number
from common.errors import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, BadInput
from common.installation import begin

EPILOG = """examples:
  python find_batch_size.py runs/8xa100 --write
  python find_batch_size.py runs/8xa100 --predict a100-40gb,h100-80gb --world-size 8
  python find_batch_size.py runs/8xa100 --predict mine --machines prices.json     a GPU of your own: docs/money.md
  python find_batch_size.py runs/quickstart --device cpu --world-size 2

The same search under torchrun: train.py RUN --find-max-microbatch. It reads no tokens and writes nothing but, with
--write, one number. Exit status: 0 done, 1 error, 2 usage, 130 interrupted.
"""


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Find the largest micro-batch that fits, by full steps on all GPUs here, or predict it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="run directory: model.json and train.json")
    parser.add_argument("--predict", metavar="GPU,...", help="predict for these GPUs; needs none")
    parser.add_argument(
        "--machines", type=Path, metavar="FILE", help="with --predict: a price list, for the GPUs that it adds"
    )
    parser.add_argument(
        "--world-size",
        type=whole_number(1, 1 << 20),
        metavar="N",
        help="processes to start, or to predict for; default: one for each GPU, or 1",
    )
    parser.add_argument(
        "--write", action="store_true", help="put the largest into train.json; the global batch stays as it is"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override train.KEY or model.KEY; may be repeated",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda; cpu: a dry trial")
    parser.add_argument("--probe", help=argparse.SUPPRESS)  # a rank of a trial, started by batch_finder/worker_pool.py
    arguments = parser.parse_args()
    if arguments.predict is not None and arguments.write:
        parser.error("--write goes with a search, not with --predict")
    if arguments.machines is not None and arguments.predict is None:
        parser.error("--machines goes with --predict")
    return arguments


def main() -> int:
    """Run the command; return its exit status."""
    begin("find_batch_size.py")
    print_any_name()
    arguments = parse_arguments()
    from training.config.train_config import load_run  # after --help: it needs more time

    try:
        run = load_run(arguments.run, arguments.overrides)
        if arguments.predict is not None:
            from training.batch_finder.prediction_table import prediction_table
            from training.hardware.gpus import find_gpu
            from training.planning.price_list import gpus_of

            known = gpus_of(arguments.machines)
            gpus = [find_gpu(name.strip(), known) for name in arguments.predict.split(",")]
            print("\n".join(prediction_table(run, gpus, arguments.world_size or 1)))
        elif arguments.probe is not None:
            from training.batch_finder.worker import WorkerSettings, serve

            serve(run, arguments.device, WorkerSettings(**json.loads(arguments.probe)))
        else:
            from training.batch_finder.finder import report_largest

            report_largest(run, arguments.overrides, arguments.device, arguments.world_size, arguments.write)
    except BadInput as error:
        print(f"find_batch_size.py: {error}", file=sys.stderr, flush=True)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("find_batch_size.py: interrupted: nothing is written", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
