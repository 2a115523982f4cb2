"""Command line of find_batch_size.py."""

from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from common.arguments import UsageError, option, whole_number
from training.command import Device, Overrides, RunDirectory

EPILOG = """examples:
  python find_batch_size.py runs/8xa100 --write
  python find_batch_size.py runs/8xa100 --predict a100-40gb,h100-80gb --world-size 8
  python find_batch_size.py runs/8xa100 --predict mine --machines prices.json
      for a GPU of your own: docs/money.md
  python find_batch_size.py runs/quickstart --device cpu --world-size 2

The same search under torchrun: train.py RUN --find-max-microbatch. It reads no
tokens and writes nothing but, with --write, one number.

Exit status: 0 done, 1 error, 2 usage, 130 interrupted.
"""


@attrs.frozen(kw_only=True)
class FindCommand:
    """Find the largest micro-batch that fits, by full steps on all GPUs here, or predict it."""

    run: RunDirectory = attrs.field(kw_only=False)
    predict: Annotated[str | None, option("predict for these GPUs, without having one", "GPU,...")] = None
    machines: Annotated[Path | None, option("with --predict: a price list, for the GPUs that it adds", "FILE")] = None
    world_size: Annotated[
        int | None,
        option(
            "processes to start, or to predict for; default: one per GPU, or 1", "N", check=whole_number(1, 1 << 20)
        ),
    ] = None
    write: Annotated[bool, option("write the result to train.json; the global batch stays as it is")] = False
    overrides: Overrides = ()
    device: Device = None  # cpu: a dry trial
    probe: Annotated[str | None, Parameter(show=False)] = None  # a worker of the search: worker_pool.py

    def __attrs_post_init__(self) -> None:
        if self.predict is not None and self.write:
            raise UsageError("--write goes with a search, not with --predict")
        if self.machines is not None and self.predict is None:
            raise UsageError("--machines goes with --predict")
