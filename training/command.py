"""The command lines of train.py and find_batch_size.py: their options, and the rules on combining them."""

import time
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import attrs
from cyclopts import Parameter

from common.arguments import Command, option
from common.checks import KeyRows, ValueCheck, integer, number
from common.errors import UsageError
from common.launch import job_seconds
from common.option_rules import OptionRules
from training.telemetry.budget import USD, Budget

TRAIN_EPILOG = """examples:
  torchrun --standalone --nproc_per_node=8 train.py runs/8xa100 \\
    --price-per-hour 22.32 --max-usd 60
  python train.py runs/mine --like runs/quickstart --set learning_rate=0.002
  python train.py runs/own --like runs/quickstart --set dataset=token_files/own
  python train.py runs/8xa100 --dry-run --world-size 8
  python train.py runs/8xa100 --plan
  python train.py runs/8xa100 --plan --nodes 2 --node-link 50
  python train.py runs/gpt2 --like hf:gpt2 --init-from gpt2
  python train.py runs/8xa100 --preflight
  torchrun --standalone --nproc_per_node=8 train.py runs/8xa100 \\
    --find-max-microbatch
  python train.py runs/mine --look 500

To continue a run that was stopped or killed, repeat the same command line.

Exit status: 0 done (or nothing left to do), 1 error, 2 wrong command line,
3 diverged, 75 stopped early with a checkpoint. torchrun reports every failure
as 1; the real status is in exit.json in the run directory. A job that was
killed leaves no exit.json.
"""
FIND_EPILOG = """examples:
  python find_batch_size.py runs/8xa100 --write
  python find_batch_size.py runs/8xa100 --world-size 8 \\
    --predict a100-40gb,h100-80gb
  torchrun --standalone --nproc_per_node=8 find_batch_size.py runs/8xa100
  python find_batch_size.py runs/8xa100 --predict mine --machines prices.json
      docs/money.md describes the price list that adds your own GPU
  python find_batch_size.py runs/quickstart --device cpu --world-size 2

train.py RUN --find-max-microbatch runs the same search. The search reads no
tokens. With --write it changes one number in train.json; otherwise it writes
nothing.

Exit status: 0 done, 1 error, 2 wrong command line, 130 interrupted.
"""

TRAINING_OPTIONS = (  # the options of train.py that apply when it trains
    "--like --set --token-files --follow --resume --init-from --allow-numerics-drift --device --max-steps --hash-every "
    "--price-per-hour --max-hours --max-usd --then"
)
COUNT, WORLD_SIZE = integer(1), integer(1, 1 << 20)
LINK = number(0, 1e6, above=True, example="12.5")
RATE = number(0, 60, above=True, example="0.5")
RunDirectory = Annotated[
    Path, option("run directory, with model.json and train.json; checkpoints are saved in it", name="RUN")
]
Overrides = Annotated[
    tuple[str, ...], option("override a key of train.json or model.json; may be repeated", "KEY=VALUE", name="--set")
]
Device = Annotated[
    Literal["cuda", "cpu"] | None, option("device to use; default: cuda if a GPU is visible, otherwise cpu")
]


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Options:
    """Command-line options of a training job."""

    token_files: Annotated[
        Path | None, option("directory of token files to train on, instead of the dataset in train.json", "DIR")
    ] = None
    follow: Annotated[
        bool,
        option("train on token files while prepare_data.py is still writing them; training waits when necessary"),
    ] = False
    resume: Annotated[
        str,
        option(
            "auto: resume from the newest checkpoint; never: archive earlier results and start from step 0; NAME: "
            "resume from checkpoints/NAME",
            "auto|never|NAME",
        ),
    ] = "auto"
    init_from: Annotated[
        str | None,
        option(
            "start from the weights of another model, not from random weights: a run, a checkpoint, a model directory, "
            "or OWNER/NAME on the Hugging Face hub. A run that has a checkpoint resumes from its checkpoint instead",
            "MODEL",
        ),
    ] = None
    device: Device = None
    max_steps: Annotated[
        int | None,
        option("stop after step N and save a checkpoint; the learning-rate schedule does not change", "N", check=COUNT),
    ] = None
    price_per_hour: Annotated[
        float | None,
        option(
            "price of the machine per hour; progress then shows the cost so far and the expected total",
            "USD",
            check=USD,
        ),
    ] = None
    budget: Budget = attrs.field(factory=Budget)
    hash_every: Annotated[
        int | None,
        option("every N steps, write a hash of weights and optimizer state to the metrics", "N", check=COUNT),
    ] = None
    allow_numerics_drift: Annotated[
        bool,
        option(
            "resume even if torch, the hardware, the micro-batch or anything else that affects the bits has changed"
        ),
    ] = False
    replay: Annotated[
        tuple[int, int] | None,
        option(
            "train these steps again, starting at the nearest earlier checkpoint, and compare the numbers with the "
            "recorded ones; writes nothing",
            "FROM TO",
            check=COUNT,
        ),
    ] = None
    then: Annotated[
        str | None,
        option(
            "run this shell command after the job has ended and its last checkpoint is saved and uploaded, to stop "
            "paying for the machine. In a RunPod container, use 'runpodctl stop pod $RUNPOD_POD_ID' (storage is billed "
            "until you remove the pod). On a virtual machine, 'sudo poweroff' ends the bill at AWS and Google Cloud, "
            "but not at Lambda or Azure: terminate their machines by hand. See docs/rented-machines.md",
            "COMMAND",
            check=ValueCheck(lambda value: value.strip() != "", "a shell command"),
        ),
    ] = None
    # When the job started, by the clock of time.perf_counter()
    began: Annotated[float, Parameter(parse=False)] = attrs.field(factory=lambda: time.perf_counter() - job_seconds())


def key_rows() -> KeyRows:
    """Return the rows of all keys in model.json and train.json. Errors about unknown options can suggest a key."""
    from training.config.train_config import KEY_ROWS

    return KEY_ROWS


@attrs.frozen(kw_only=True)
class TrainCommand:
    """Train the model of a run directory, alone or under torchrun on many GPUs."""

    help_groups: ClassVar[dict[str, str]] = {
        "Run directory": "RUN --like --set --keys --token-files --follow",
        "Starting and stopping": "--resume --init-from --allow-numerics-drift --device --max-steps --hash-every",
        "Time and money": "--price-per-hour --max-hours --max-usd --then",
        "Instead of training": "--dry-run --world-size --plan --machines --machine --nodes --node-link --preemptions "
        "--preflight --find-max-microbatch --write --replay --look --rank --html",
    }
    option_rules: ClassVar[OptionRules] = OptionRules(
        work="training",
        uses=TRAINING_OPTIONS,
        modes={
            "--keys": "",
            "--dry-run": f"{TRAINING_OPTIONS} --world-size",  # --dry-run shows what these options would do
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
                "--nodes": "torchrun sets the number of nodes of a run",
            }
        },
        reasons_needed={"--max-usd": "the price of the machine"},
    )
    run: RunDirectory = attrs.field(kw_only=False)
    options: Options = attrs.field(factory=Options)
    like: Annotated[
        str | None,
        option(
            "create the run directory RUN from the keys of another run directory, apply --set, fit the vocabulary, the "
            "validation and the epochs to the tokens, and train the run. For hf:DIR or hf:OWNER/NAME, use the network "
            "of that Hugging Face model. With --dry-run or --plan, RUN is printed but not written",
            "OTHER",
        ),
    ] = None
    keys: Annotated[bool, option("without RUN: print all keys of model.json and train.json and exit")] = False
    overrides: Overrides = ()
    dry_run: Annotated[
        bool,
        option("print the arithmetic of the run and what the other options would do, then exit; needs no GPU"),
    ] = False
    world_size: Annotated[
        int | None,
        option(
            "with --dry-run: number of ranks to plan for; default: tensor_parallel in train.json",
            "N",
            check=WORLD_SIZE,
        ),
    ] = None
    preflight: Annotated[
        bool,
        option(
            "check whether this machine can train the run, then exit: GPUs, compiler, disk, shared memory, open files"
        ),
    ] = False
    plan: Annotated[
        bool, option("print memory, hours and dollars of the run on rented machines, then exit; needs no GPU")
    ] = False
    machines: Annotated[Path | None, option("with --plan: a price list of your own", "FILE")] = None
    machine: Annotated[tuple[str, ...], option("with --plan: only this machine; may be repeated", "NAME")] = ()
    nodes: Annotated[int, option("with --plan: number of machines of each type", "N", check=COUNT)] = 1
    node_link: Annotated[
        float | None,
        option(
            "with --nodes: speed of the network between machines in GB/s; 12.5 for a 100 Gb/s card", "GB/S", check=LINK
        ),
    ] = None
    preemptions: Annotated[
        float | None,
        option(
            "with --plan: preemptions of a spot machine per hour; default: 0.47, measured on AWS V100s", "N", check=RATE
        ),
    ] = None
    find_max_microbatch: Annotated[
        bool,
        option(
            "search for the largest micro-batch that fits, by running full steps on all GPUs of this machine, then "
            "exit; reads no tokens. find_batch_size.py does the same",
            name=("--find-max-microbatch", "--find-max-microbatch-size"),
        ),
    ] = False
    write: Annotated[
        bool,
        option("with --find-max-microbatch: write the micro-batch to train.json; the global batch does not change"),
    ] = False
    look: Annotated[
        int | None,
        option(
            "show the text that this step trains on, colored by each token's loss before the step, then exit",
            "STEP",
            check=COUNT,
        ),
    ] = None
    rank: Annotated[
        int | None, option("with --look: show the text of this data-parallel rank", "R", check=integer(0))
    ] = None
    html: Annotated[Path | None, option("with --look: also write the text to this page", "FILE")] = None

    def __attrs_post_init__(self) -> None:
        options = self.options
        # --preflight and --find-max-microbatch use these options only to fit a new run (--like) to tokens or weights.
        needing_like = {"--token-files": options.token_files, "--init-from": options.init_from}
        needing_like = {name: value for name, value in needing_like.items() if value is not None and self.like is None}
        for condition, requirement, problem in (
            (self.keys, False, "--keys takes no RUN and no other option: python train.py --keys"),
            (self.nodes > 1, self.node_link, "--nodes and --node-link must be given together"),
            (self.node_link, self.nodes > 1, "--nodes and --node-link must be given together"),
            (
                self.plan and options.resume != "auto",
                options.init_from is not None,
                "--resume with --plan needs --init-from: a plan always covers all steps, even if the run would resume",
            ),
            (
                self.preflight or self.find_max_microbatch,
                not needing_like,
                f"{' and '.join(needing_like)} with {'--preflight' if self.preflight else '--find-max-microbatch'} "
                f"need{'s' if len(needing_like) == 1 else ''} --like, which fits a new run to the tokens or weights; "
                "without --like, this command reads neither",
            ),
        ):
            if condition and not requirement:
                raise UsageError(problem)

    @property
    def trains(self) -> bool:
        """Whether this command trains, and therefore writes to the run directory.

        With --dry-run, --preflight, --plan, --find-max-microbatch, --look or --replay, it does not train.
        """
        reports_only = self.dry_run or self.preflight or self.plan or self.find_max_microbatch
        return not (reports_only or self.look is not None or self.options.replay is not None)


@attrs.frozen(kw_only=True)
class FindCommand:
    """Find the largest micro-batch that fits: run full steps on all GPUs of this machine, or predict the size."""

    option_rules: ClassVar[OptionRules] = OptionRules(
        work="a search",
        uses="--set --world-size --device --write --probe",
        modes={"--predict": "--set --world-size --machines"},
    )
    run: RunDirectory = attrs.field(kw_only=False)
    predict: Annotated[
        str | None, option("predict the micro-batch for these GPUs; this machine needs no GPU", "GPU,...")
    ] = None
    machines: Annotated[Path | None, option("with --predict: a price list of your own, which can add GPUs", "FILE")] = (
        None
    )
    world_size: Annotated[
        int | None,
        option("number of processes to start, or to predict for; default: one per GPU", "N", check=WORLD_SIZE),
    ] = None
    write: Annotated[bool, option("write the micro-batch to train.json; the global batch does not change")] = False
    overrides: Overrides = ()
    device: Device = None  # "cpu" tries out the search without a GPU
    probe: Annotated[str | None, Parameter(show=False)] = None  # one rank of a probe: see planning/batch_probe.py


FIND_COMMANDS = {"": Command(FindCommand, "training.planning.batch_command")}
