"""Command lines of train.py and find_batch_size.py: options of a launch, and its errors as lines."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import attrs
from cyclopts import Parameter

from common.arguments import Command, option
from common.checks import KeyRows, integer, number
from common.errors import UsageError
from common.launch import job_seconds
from common.option_rules import OptionRules
from training.telemetry.budget import USD, Budget

if TYPE_CHECKING:
    pass

TRAIN_EPILOG = """examples:
  torchrun --standalone --nproc_per_node=8 train.py runs/8xa100 --price-per-hour 14.32
  python train.py runs/mine --like runs/quickstart --set learning_rate=0.002
  python train.py runs/own --like runs/quickstart --set dataset=token_files/own
  python train.py runs/8xa100 --dry-run --world-size 8
  python train.py runs/8xa100 --plan
  python train.py runs/8xa100 --plan --nodes 2 --node-link 50
  python train.py runs/gpt2 --like hf:gpt2 --init-from gpt2
  python train.py runs/8xa100 --preflight
  torchrun --standalone --nproc_per_node=8 train.py runs/8xa100 --find-max-microbatch
  python train.py runs/mine --look 500

The same command line continues a run that was stopped or killed.

Exit status: 0 done (or nothing left to do), 1 error, 2 usage, 3 diverged,
75 stopped early with a checkpoint. torchrun exits with 1 for all of these but
0: exit.json in the run directory has the status; a killed job leaves none.
"""
FIND_EPILOG = """examples:
  python find_batch_size.py runs/8xa100 --write
  python find_batch_size.py runs/8xa100 --predict a100-40gb,h100-80gb --world-size 8
  torchrun --standalone --nproc_per_node=8 find_batch_size.py runs/8xa100
  python find_batch_size.py runs/8xa100 --predict mine --machines prices.json
      for a GPU of your own: docs/money.md
  python find_batch_size.py runs/quickstart --device cpu --world-size 2

train.py RUN --find-max-microbatch runs the same search. It reads no tokens, and
with --write it changes one number in train.json; otherwise it writes nothing.

Exit status: 0 done, 1 error, 2 usage, 130 interrupted.
"""

OF_TRAINING = (  # options of train.py
    "--like --set --token-files --follow --resume --init-from --allow-numerics-drift --device --max-steps --hash-every "
    "--price-per-hour --max-hours --max-usd --then"
)
COUNT, WORLD_SIZE = integer(1), integer(1, 1 << 20)
LINK = number(0, 1e6, above=True, example="12.5")
RATE = number(0, 60, above=True, example="0.5")
RunDirectory = Annotated[
    Path, option("run directory: model.json and train.json; checkpoints go beside them", name="RUN")
]
Overrides = Annotated[
    tuple[str, ...], option("override a key of train.json or model.json; may be repeated", "KEY=VALUE", name="--set")
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
    init_from: Annotated[
        str | None,
        option(
            "start from the weights of another model instead of random ones: a run, a checkpoint, a model directory, "
            "or OWNER/NAME of the hub; a run that has a checkpoint resumes from that",
            "MODEL",
        ),
    ] = None
    device: Device = None
    max_steps: Annotated[
        int | None, option("pause with a checkpoint after step N; the schedule stays", "N", check=COUNT)
    ] = None
    price_per_hour: Annotated[
        float | None, option("price of the machine: shows dollars spent and expected", "USD", check=USD)
    ] = None
    budget: Budget = attrs.field(factory=Budget)
    hash_every: Annotated[
        int | None, option("write the hash of weights and moments to the metrics", "N", check=COUNT)
    ] = None
    allow_numerics_drift: Annotated[
        bool, option("resume although torch, hardware, micro-batch or another part of the bits changed")
    ] = False
    replay: Annotated[
        tuple[int, int] | None,
        option(
            "rerun these steps from the nearest checkpoint and compare them with their record; writes nothing",
            "FROM TO",
            check=COUNT,
        ),
    ] = None
    then: Annotated[
        str | None,
        option("run COMMAND, 'sudo poweroff' for one, once it is done or stopped, saved and uploaded", "COMMAND"),
    ] = None
    # When the job started, by time.perf_counter()
    began: Annotated[float, Parameter(parse=False)] = attrs.field(factory=lambda: time.perf_counter() - job_seconds())


def key_rows() -> KeyRows:
    """Return the rows of the keys of run directories, by file, for errors about unknown options."""
    from training.config.train_config import KEY_ROWS

    return KEY_ROWS


@attrs.frozen(kw_only=True)
class TrainCommand:
    """Train the model of a run directory, alone or under torchrun on many GPUs."""

    help_groups: ClassVar[dict[str, str]] = {
        "Run directory": "RUN --like --set --keys --token-files --follow",
        "Start, resumption, end": "--resume --init-from --allow-numerics-drift --device --max-steps --hash-every",
        "Time and money": "--price-per-hour --max-hours --max-usd --then",
        "Instead of training": "--dry-run --world-size --plan --machines --machine --nodes --node-link --preemptions "
        "--preflight --find-max-microbatch --write --replay --look --rank --html",
    }
    option_rules: ClassVar[OptionRules] = OptionRules(
        work="training",
        uses=OF_TRAINING,
        modes={
            "--keys": "",
            "--dry-run": f"{OF_TRAINING} --world-size",  # it shows what the same command line would do without it
            "--plan": "--like --set --token-files --resume --init-from --price-per-hour --machines --machine --nodes "
            "--node-link --preemptions",
            "--preflight": "--like --set --token-files --init-from --resume --device",
            "--find-max-microbatch": "--like --set --token-files --init-from --device --write",
            "--replay": "--set --token-files --follow --init-from --device",
            "--look": "--set --token-files --init-from --device --rank --html",
        },
        needs={"--max-usd": "--price-per-hour"},
        reasons_unused={
            "training": {
                "--world-size": "torchrun sets the world size of a run",
                "--nodes": "torchrun sets the nodes of a run",
            }
        },
        reasons_needed={"--max-usd": "the price of the machine"},
    )
    run: RunDirectory = attrs.field(kw_only=False)
    options: Options = attrs.field(factory=Options)
    like: Annotated[
        str | None,
        option(
            "write RUN, a new run directory, with the keys of another one, those of --set, and vocabulary, validation "
            "and epochs fitted to the tokens; then train. hf:DIR or hf:OWNER/NAME: with the network of that model. "
            "With --dry-run or --plan: print it, write nothing",
            "OTHER",
        ),
    ] = None
    keys: Annotated[bool, option("without RUN: print all keys of model.json and train.json and exit")] = False
    overrides: Overrides = ()
    dry_run: Annotated[
        bool, option("print the arithmetic of the run, and what the other options would do, and exit; needs no GPU")
    ] = False
    world_size: Annotated[
        int | None, option("with --dry-run: ranks to plan for; default: tensor_parallel", "N", check=WORLD_SIZE)
    ] = None
    preflight: Annotated[
        bool, option("check this machine for the run and exit: GPUs, compiler, disk, shared memory, open files")
    ] = False
    plan: Annotated[bool, option("print memory, hours and dollars on rented machines and exit; needs no GPU")] = False
    machines: Annotated[Path | None, option("with --plan: a price list of your own", "FILE")] = None
    machine: Annotated[tuple[str, ...], option("with --plan: only this machine; may be repeated", "NAME")] = ()
    nodes: Annotated[int, option("with --plan: so many of each machine", "N", check=COUNT)] = 1
    node_link: Annotated[
        float | None,
        option("with --nodes: GB/s of a machine to the others; 12.5 with a card of 100 Gb/s", "GB/S", check=LINK),
    ] = None
    preemptions: Annotated[
        float | None,
        option("with --plan: preemptions of a spot machine an hour; default: 0.47, as V100s of AWS", "N", check=RATE),
    ] = None
    find_max_microbatch: Annotated[
        bool,
        option(
            "search for the largest micro-batch that fits, by full steps on all GPUs here, and exit; reads no tokens. "
            "find_batch_size.py does the same",
            name=("--find-max-microbatch", "--find-max-microbatch-size"),
        ),
    ] = False
    write: Annotated[
        bool,
        option("with --find-max-microbatch: write the result to train.json; the global batch does not change"),
    ] = False
    look: Annotated[
        int | None,
        option("show the text that this step trains on, coloured by each token's loss before it", "STEP", check=COUNT),
    ] = None
    rank: Annotated[int | None, option("with --look: what this data-parallel rank reads", "R", check=integer(0))] = None
    html: Annotated[Path | None, option("with --look: write the text to a page, too", "FILE")] = None

    def __attrs_post_init__(self) -> None:
        options = self.options
        fitted = {"--token-files": options.token_files, "--init-from": options.init_from}  # by --like
        fitted = {name: value for name, value in fitted.items() if value is not None and self.like is None}
        for given, holds, problem in (
            (self.keys, False, "--keys goes alone, without RUN: python train.py --keys"),
            (self.nodes > 1, self.node_link, "--nodes and --node-link go together"),
            (self.node_link, self.nodes > 1, "--nodes and --node-link go together"),
            (
                self.plan and options.resume != "auto",
                options.init_from is not None,
                "--resume with --plan needs --init-from: a plan is of the whole run, wherever it resumes",
            ),
            (
                self.preflight or self.find_max_microbatch,
                not fitted,
                f"{' and '.join(fitted)} with {'--preflight' if self.preflight else '--find-max-microbatch'} needs "
                "--like, which fits a new run to it: nothing else here reads tokens or weights",
            ),
        ):
            if given and not holds:
                raise UsageError(problem)

    @property
    def trains(self) -> bool:
        """True if this command trains: it is no plan, search, look or replay, and so it writes to the run directory."""
        reports_only = self.dry_run or self.preflight or self.plan or self.find_max_microbatch
        return not (reports_only or self.look is not None or self.options.replay is not None)


@attrs.frozen(kw_only=True)
class FindCommand:
    """Find the largest micro-batch that fits, by full steps on all GPUs here, or predict it."""

    option_rules: ClassVar[OptionRules] = OptionRules(
        work="a search",
        uses="--set --world-size --device --write --probe",
        modes={"--predict": "--set --world-size --machines"},
    )
    run: RunDirectory = attrs.field(kw_only=False)
    predict: Annotated[str | None, option("predict for these GPUs, without having one", "GPU,...")] = None
    machines: Annotated[Path | None, option("with --predict: a price list, for the GPUs that it adds", "FILE")] = None
    world_size: Annotated[
        int | None, option("processes to start, or to predict for; default: one per GPU", "N", check=WORLD_SIZE)
    ] = None
    write: Annotated[bool, option("write the result to train.json; the global batch stays as it is")] = False
    overrides: Overrides = ()
    device: Device = None  # cpu: a dry trial
    probe: Annotated[str | None, Parameter(show=False)] = None  # a rank of a probe: planning/batch_probe.py


FIND_COMMANDS = {"": Command(FindCommand, "training.planning.batch_command")}
