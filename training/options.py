"""Options of a launch, which the run directory does not hold, and their spelling on command lines."""

import time
from pathlib import Path
from typing import Annotated, Literal

import attrs
from cyclopts import Parameter

from common.arguments import option, whole_number
from training.launch import job_seconds
from training.planning.budget import USD, Budget

# Shared by train.py and find_batch_size.py
RunDirectory = Annotated[
    Path, option("run directory: model.json and train.json; checkpoints go beside them", name="RUN")
]
Overrides = Annotated[
    tuple[str, ...], option("override train.KEY or model.KEY; may be repeated", "KEY=VALUE", name="--set")
]
Device = Annotated[Literal["cuda", "cpu"] | None, option("default: cuda where there is a GPU")]


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Options:
    """Command-line options of a training job."""

    token_files: Annotated[Path | None, option("token files, instead of train.json's dataset", "DIR")] = None
    follow: Annotated[bool, option("train on token files that prepare_data.py is still writing, as they come")] = False
    resume: Annotated[
        str,
        option(
            "auto: from the newest checkpoint; never: archive earlier results and start anew; NAME: from "
            "checkpoints/NAME",
            "auto|never|NAME",
        ),
    ] = "auto"
    device: Device = None
    max_steps: Annotated[
        int | None, option("pause with a checkpoint after step N; the schedule stays", "N", check=whole_number(1))
    ] = None
    price_per_hour: Annotated[
        float | None, option("price of the machine: shows dollars spent and expected", "USD", check=USD)
    ] = None
    budget: Budget = attrs.field(factory=Budget)
    hash_every: Annotated[
        int | None, option("write the hash of weights and moments to the metrics", "N", check=whole_number(1))
    ] = None
    allow_numerics_drift: Annotated[
        bool, option("resume although torch, hardware, micro-batch or another part of the bits changed")
    ] = False
    replay: Annotated[
        tuple[int, int] | None,
        option(
            "rerun these steps from the nearest checkpoint and compare them with their record; writes nothing",
            "FROM TO",
            check=whole_number(1),
        ),
    ] = None
    # When the job started, by time.perf_counter()
    began: Annotated[float, Parameter(parse=False)] = attrs.field(factory=lambda: time.perf_counter() - job_seconds())
