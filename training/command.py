"""Command line of train.py."""

from pathlib import Path
from typing import Annotated

import attrs

from common.arguments import UsageError, option, whole_number
from training.options import Options, Overrides, RunDirectory

EPILOG = """examples:
  torchrun --standalone --nproc_per_node=8 train.py runs/8xa100 --price-per-hour 14.32
  python train.py runs/quickstart --set train.learning_rate=6e-4
  python train.py runs/8xa100 --dry-run --world-size 8
  python train.py runs/8xa100 --plan

The same command line continues a run that was stopped or killed.

Exit status: 0 done (or nothing left to do), 1 error, 2 usage, 3 diverged,
75 stopped early with a checkpoint. torchrun exits with 1 for all of these but
0: exit.json in the run directory has the status; a killed job leaves none.
"""


@attrs.frozen(kw_only=True)
class TrainCommand:
    """Train the GPT-2 of a run directory, alone or under torchrun on many GPUs."""

    run: RunDirectory = attrs.field(kw_only=False)
    options: Options = attrs.field(factory=Options)
    overrides: Overrides = ()
    dry_run: Annotated[bool, option("print the arithmetic of the run and exit; needs no GPU")] = False
    world_size: Annotated[
        int | None,
        option("with --dry-run: the number of ranks to plan for; default: 1", "N", check=whole_number(1, 1 << 20)),
    ] = None
    plan: Annotated[bool, option("print memory, hours and dollars on rented machines and exit; needs no GPU")] = False
    machines: Annotated[Path | None, option("with --plan: a price list of your own", "FILE")] = None
    machine: Annotated[tuple[str, ...], option("with --plan: only this machine; may be repeated", "NAME")] = ()
    find_max_microbatch: Annotated[
        bool, option("search for the largest micro-batch that fits, without tokens or training; see find_batch_size.py")
    ] = False
    write: Annotated[bool, option("with --find-max-microbatch: write it to train.json; the global batch stays")] = False

    def __attrs_post_init__(self) -> None:
        if self.write and not self.find_max_microbatch:
            raise UsageError("--write goes with --find-max-microbatch")
        if self.world_size is not None and not self.dry_run:
            raise UsageError("--world-size goes with --dry-run; torchrun sets the world size of a run")
        if (self.machines is not None or self.machine) and not self.plan:
            raise UsageError("--machines and --machine go with --plan")
        if self.options.budget.max_usd is not None and self.options.price_per_hour is None:
            raise UsageError("--max-usd needs --price-per-hour, the price of the machine")

    @property
    def trains(self) -> bool:
        """Whether the run directory is written to: by training, not by a plan, a search or a replay."""
        return not (self.dry_run or self.plan or self.find_max_microbatch) and self.options.replay is None
