#!/usr/bin/env python3
"""Train one run directory: `torchrun --standalone --nproc_per_node=8 train.py runs/8xa100`."""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from common.arguments import number, print_any_name, whole_number
from common.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_ERROR, BadInput, Diverged, printable
from common.files import is_folder, system_error
from common.installation import begin
from training.launch import environment_rank, job_seconds
from training.supervision.supervision import Supervision

if TYPE_CHECKING:
    from training.config.train_config import Run

CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: "  # torch raises a plain RuntimeError
RANK_0_SECONDS = 30.0  # for rank 0 to print an error, after a slow start: torchrun ends all ranks once one has failed

EPILOG = """examples:
  torchrun --standalone --nproc_per_node=8 train.py runs/8xa100 --price-per-hour 14.32
  python train.py runs/quickstart --set train.learning_rate=6e-4
  python train.py runs/8xa100 --dry-run --world-size 8
  python train.py runs/8xa100 --plan

The same command line continues a run that was stopped or killed. Exit status: 0 done (or nothing left to do),
1 error, 2 usage, 3 diverged, 75 stopped early with a checkpoint. torchrun exits with 1 for all of these but 0: the
file exit.json in the run directory tells; where there is none, the job was killed.
"""


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Train the GPT-2 of a run directory, alone or under torchrun on many GPUs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="run directory: model.json and train.json; checkpoints go beside them")
    parser.add_argument("--token-files", type=Path, metavar="DIR", help="token files, instead of train.json's dataset")
    parser.add_argument(
        "--follow", action="store_true", help="train on token files that prepare_data.py is still writing, as they come"
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|NAME",
        help="auto (default): from the newest checkpoint; never: archive earlier results and start anew; "
        "NAME: from checkpoints/NAME",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override train.KEY or model.KEY; may be repeated",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument(
        "--max-steps",
        type=whole_number(1),
        metavar="N",
        help="pause with a checkpoint after step N; the schedule stays",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the arithmetic of the run and exit; needs no GPU")
    parser.add_argument(
        "--world-size",
        type=whole_number(1, 1 << 20),
        metavar="N",
        help="with --dry-run: the number of ranks to plan for (default 1)",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print memory, hours and dollars on machines for rent and exit; needs no GPU",
    )
    parser.add_argument("--machines", type=Path, metavar="FILE", help="with --plan: a price list of your own")
    parser.add_argument(
        "--machine", action="append", default=[], metavar="NAME", help="with --plan: only this machine; may be repeated"
    )
    parser.add_argument(
        "--price-per-hour",
        type=number(0, above=True, example="14.32"),
        metavar="USD",
        help="price of the machine: shows dollars spent and expected",
    )
    parser.add_argument(
        "--max-usd",
        type=number(0, above=True, example="14.32"),
        metavar="USD",
        help="stop with a checkpoint before the run has cost more",
    )
    parser.add_argument(
        "--max-hours",
        type=number(0, above=True, example="3.5"),
        metavar="HOURS",
        help="stop with a checkpoint before it has taken more",
    )
    parser.add_argument(
        "--hash-every", type=whole_number(1), metavar="N", help="write the hash of weights and moments to the metrics"
    )
    parser.add_argument(
        "--allow-numerics-drift",
        action="store_true",
        help="resume although torch, hardware, micro-batch or another part of the bits changed",
    )
    parser.add_argument(
        "--replay",
        type=whole_number(1),
        nargs=2,
        metavar=("FROM", "TO"),
        help="run these steps again from the nearest checkpoint, beside their record; writes nothing",
    )
    parser.add_argument(
        "--find-max-microbatch",
        action="store_true",
        help="try which micro-batch fits, without tokens, and train nothing; see find_batch_size.py",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="with --find-max-microbatch: put it into train.json; the global batch stays",
    )
    arguments = parser.parse_args()
    if arguments.write and not arguments.find_max_microbatch:
        parser.error("--write goes with --find-max-microbatch")
    if arguments.world_size is not None and not arguments.dry_run:
        parser.error("--world-size goes with --dry-run; torchrun sets the world size of a run")
    if (arguments.machines is not None or arguments.machine) and not arguments.plan:
        parser.error("--machines and --machine go with --plan")
    if arguments.max_usd is not None and arguments.price_per_hour is None:
        parser.error("--max-usd needs --price-per-hour, the price of the machine")
    return arguments


def main() -> int:
    """Run the command; return its exit status."""
    began = time.perf_counter() - job_seconds()
    begin("train.py")
    print_any_name()
    arguments = parse_arguments()
    writes = not (arguments.dry_run or arguments.plan or arguments.find_max_microbatch) and arguments.replay is None
    holds = writes and environment_rank() == 0 and is_folder(arguments.run)
    try:
        supervision = Supervision(arguments.run if holds else None)
    except BadInput as error:
        say(str(error))
        return EXIT_ERROR
    if supervision.earlier_status is not None:
        say(f"this job ended with status {supervision.earlier_status}, and torchrun restarted it: ending again")
        return supervision.earlier_status
    from torch.distributed.elastic.multiprocessing.errors import record  # after --help: torch takes seconds

    try:
        status = record(train)(arguments, supervision, began) or EXIT_DONE  # record's type allows None
    except Exception:  # noqa: BLE001  # record has kept it for torchrun; printed here, because leave() prints nothing
        traceback.print_exc()
        status = EXIT_ERROR
    supervision.exit_record.write(status)
    return status


def train(arguments: argparse.Namespace, supervision: Supervision, began: float) -> int:
    """Check the run directory before the process group starts, then train; return the exit status."""
    import torch

    from training.batch_finder.finder import report_largest
    from training.config.batch_plan import derive_layout
    from training.config.train_config import load_run
    from training.job import run_job
    from training.launch import environment_world_size
    from training.options import Options
    from training.planning.budget import Budget

    try:
        run = load_run(arguments.run, arguments.overrides)
        if arguments.dry_run:
            return dry_run(run, arguments)
        if arguments.plan:
            return plan_machines(run, arguments)
        if arguments.find_max_microbatch:
            report_largest(run, arguments.overrides, arguments.device, None, arguments.write)
            return EXIT_DONE
        derive_layout(run, environment_world_size())
        options = Options(
            token_files=arguments.token_files,
            follow=arguments.follow,
            resume=arguments.resume,
            device=arguments.device,
            max_steps=arguments.max_steps,
            price_per_hour=arguments.price_per_hour,
            budget=Budget(max_hours=arguments.max_hours, max_usd=arguments.max_usd),
            hash_every=arguments.hash_every,
            allow_numerics_drift=arguments.allow_numerics_drift,
            replay=None if arguments.replay is None else tuple(arguments.replay),
            began=began,
        )
        return run_job(run, options, supervision)
    except (BadInput, Diverged) as error:
        alone = isinstance(error, BadInput) and error.alone
        # Rank 0 raises the same; when it has printed it and ended, torchrun sends this rank SIGTERM.
        if environment_rank() == 0 or alone or not supervision.stop_asked.wait(RANK_0_SECONDS):
            say(str(error))
        return EXIT_DIVERGED if isinstance(error, Diverged) else EXIT_ERROR
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and CPU_OUT_OF_MEMORY not in str(error):
            raise
        say(f"rank {environment_rank()}: {out_of_memory(run, gpu=isinstance(error, torch.OutOfMemoryError))}")
    except OSError as error:
        if error.filename is None:
            raise
        say(system_error(error))  # a file or folder that cannot be read, for one
    return EXIT_ERROR


def out_of_memory(run: "Run", *, gpu: bool) -> str:
    """Return the out-of-memory error as one line, with what to do."""
    size = run.train.batch.microbatch_size
    smaller = next((n for n in range(size - 1, 0, -1) if size % n == 0), None)
    advice = f"try --set microbatch_size={smaller}, or find_batch_size.py"
    if smaller is None:
        advice = "use a larger GPU, or parallel fsdp" if gpu else "use a larger machine, or a smaller model"
    return f"{'the GPU' if gpu else 'this machine'}'s memory does not hold microbatch_size {size}; {advice}"


def say(problem: str) -> None:
    """Print an error as one line."""
    print(f"train.py: {printable(problem)}", file=sys.stderr, flush=True)


def dry_run(run: "Run", arguments: argparse.Namespace) -> int:
    """Print what a run would do; needs neither GPU nor process group, nor tokens where min_train_tokens is set."""
    from training.config.batch_plan import check_steps, describe, make_plan
    from training.data.locate_tokens import lengths_at_hand

    plan = make_plan(run, arguments.world_size or 1, lengths_at_hand(run, arguments.token_files))
    check_steps(run, plan)
    print("\n".join(map(printable, [*run.notices, *describe(run, plan)])))
    return EXIT_DONE


def plan_machines(run: "Run", arguments: argparse.Namespace) -> int:
    """Print what a run would take on machines for rent; needs what a dry run needs."""
    from training.data.locate_tokens import lengths_at_hand
    from training.planning.estimate import make_estimate
    from training.planning.estimate_table import describe_estimate
    from training.planning.price_list import MACHINES, read_machines

    prices = read_machines(arguments.machines or MACHINES, arguments.machine)
    estimate = make_estimate(run, prices, lengths_at_hand(run, arguments.token_files))
    print("\n".join(map(printable, [*run.notices, *describe_estimate(estimate)])))
    return EXIT_DONE


def leave(status: int) -> NoReturn:
    """End this process at once, without the interpreter's own shutdown.

    gloo's threads release their last tensors a moment after a collective returns. During the shutdown they would wait
    for an interpreter that is gone, and the process aborts: with torch 2.13, one in five short FSDP runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
