"""The commands of `evaluate.py` and their options. Importing this module is fast because it does not import torch."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import attrs
from cyclopts import Parameter

from common.arguments import Command, option
from common.checks import ValueCheck, integer, number
from common.option_rules import OptionRules

MODEL_HELP = "run, checkpoint or model directory, or OWNER/NAME on the hub"
Models = Annotated[tuple[str, ...], option(MODEL_HELP, name="MODEL...", required=True)]
Checkpoint = Annotated[
    str | None, option("checkpoint of a run; default: best if it exists, else latest", "best|latest|NAME")
]
Tokenizer = Annotated[
    str | None,
    option(
        "use this tokenizer (FILE: .tiktoken, meta.pkl or .json); default: the model's own tokenizer",
        "gpt2|bytes|FILE",
    ),
]
Device = Annotated[Literal["cuda", "cpu"] | None, option("device to run on; default: cuda if there is a GPU, else cpu")]
RangeName = Literal["fineweb-val-10m", "gpjt-test"]
LEAST_TEMPERATURE = 1e-3  # logits divided by a smaller temperature would exceed the range of fp32
_POSITIVE = number(LEAST_TEMPERATURE, 1e3)
TEMPERATURE = ValueCheck(
    lambda value: value == 0 or _POSITIVE.holds(value), f"0 (greedy) or {_POSITIVE.accepted_values}", float
)
SECONDS, USD, COUNT = number(0, 1e6, above=True), number(0, 1e9, above=True), integer(1)


@attrs.frozen(kw_only=True)
class MeasureOptions:
    """Options of a command that measures models. Under torchrun, the ranks share the work."""

    models: Models = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    device: Device = None


@attrs.frozen(kw_only=True)
class SmokeCommand(MeasureOptions):
    """Generate continuations of fixed prompts or of your own prompts, and detect degenerate output."""

    prompt: Annotated[
        tuple[str, ...], option("use this prompt instead of the fixed ones; may be repeated", "TEXT")
    ] = ()
    tokens: Annotated[
        int | None, option("tokens per continuation; default: 40, or half the context if less", "N", check=COUNT)
    ] = None
    temperature: Annotated[float, option("sampling temperature; 0: only greedy", "T", check=TEMPERATURE)] = 1.0
    top_k: Annotated[int, option("sample from the K likeliest tokens", "K", check=COUNT)] = 25
    seed: Annotated[int, option("sampling seed", "N", check=integer(0))] = 0


@attrs.frozen(kw_only=True)
class ModelOptions:
    """Options of a command that loads a single model."""

    model: Annotated[str, option(MODEL_HELP, name="MODEL")] = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    device: Device = None


@attrs.frozen(kw_only=True)
class GenerationOptions(ModelOptions):
    """Options of a command that generates text with a single model."""

    prompt: Annotated[str | None, option("text to continue or answer; default: stdin", "TEXT|FILE:PATH")] = None
    tokens: Annotated[int, option("tokens per text; an answer may have fewer", "N", check=COUNT)] = 500
    temperature: Annotated[
        float, option("sampling temperature; 0: always the likeliest token", "T", check=TEMPERATURE)
    ] = 0.8
    top_k: Annotated[int, option("sample from the K likeliest tokens", "K", check=COUNT)] = 200
    top_p: Annotated[
        float,
        option(
            "sample from the smallest set of likeliest tokens whose probabilities add up to P",
            "P",
            check=number(0, 1, above=True),
        ),
    ] = 1.0
    seed: Annotated[int, option("seed of the first text; the next text uses N + 1", "N", check=integer(0))] = 0


@attrs.frozen(kw_only=True)
class SampleCommand(GenerationOptions):
    """Sample text of any length after a prompt."""

    option_rules: ClassVar[OptionRules] = OptionRules(needs={"--against": "--trace"})
    samples: Annotated[int, option("number of texts", "N", check=COUNT)] = 1
    trace: Annotated[bool, option("also print which parts of each text occur in the training data")] = False
    against: Annotated[
        tuple[Path, ...],
        option("token directory that --trace searches; may be repeated; default: the run's training data", "DIR"),
    ] = ()


@attrs.frozen(kw_only=True)
class ChatCommand(GenerationOptions):
    """Chat with a model in the terminal, or let it answer a single --prompt."""

    system: Annotated[str | None, option("system message at the start of the conversation", "TEXT")] = None


@attrs.frozen(kw_only=True)
class ServeCommand(ModelOptions):
    """Serve a model through OpenAI's API and a chat page."""

    host: Annotated[str, option("address to listen on; any other than loopback requires an API key", "ADDRESS")] = (
        "127.0.0.1"
    )
    port: Annotated[int, option("port to listen on; 0: any free port", "N", check=integer(0, 65535))] = 8000
    api_key_file: Annotated[
        Path | None, option("file that contains the API key; default: $LOCKSTEP_API_KEY", "FILE")
    ] = None
    slots: Annotated[
        int, option("number of answers generated at the same time; each needs memory for its cache", "N", check=COUNT)
    ] = 8
    queue: Annotated[int, option("number of answers that may wait for a slot", "N", check=integer(0))] = 64
    tokens: Annotated[
        int | None, option("largest number of tokens per answer; default: the context length", "N", check=COUNT)
    ] = None


@attrs.frozen(kw_only=True)
class LossCommand(MeasureOptions):
    """Measure the held-out loss in nats per token and bits per byte, with standard errors."""

    option_rules: ClassVar[OptionRules] = OptionRules(
        excludes=dict.fromkeys(("--split", "--from", "--count"), "--range"),
        reasons_excluded=dict.fromkeys(
            ("--split", "--from", "--count"), "a published range has its own split, start and count"
        ),
    )
    tokens: Annotated[Path | None, option("token directory; default: the first run's", "DIR")] = None
    name: Annotated[
        RangeName | None,
        option("published range, instead of --split, --from and --count; its tokens are downloaded", name="--range"),
    ] = None
    split: Annotated[Literal["train", "validation", "test"] | None, option("split to measure; default: validation")] = (
        None
    )
    # The option is not named --start, which torchrun would take for an abbreviation of one of its own options.
    start: Annotated[
        int | None,
        option(
            "first token; default: 50,000,000 or, in a shorter split, the first token that the models have not seen",
            "N",
            name="--from",
            check=integer(0),
        ),
    ] = None
    count: Annotated[
        int | None, option("number of tokens to predict; default: 19,660,800, or all there are", "N", check=COUNT)
    ] = None


@attrs.frozen(kw_only=True)
class CoreCommand(MeasureOptions):
    """Measure CORE (22 few-shot tasks, as in nanochat) and the bits per byte of the gold answers."""

    bundle: Annotated[
        Path | None, option("nanochat's eval_bundle.zip or its folder; default: download to runs/", "FILE|DIR")
    ] = None
    tasks: Annotated[str | None, option("names of tasks, separated by commas; default: all", "TASKS")] = None
    count: Annotated[int | None, option("largest number of items per task; default: all", "N", check=COUNT)] = None
    against: Annotated[
        Path | None,
        option("training data; also compute scores without items that share 13 consecutive tokens with it", "DIR"),
    ] = None


@attrs.frozen(kw_only=True)
class FineTuneSettings:
    """Hyperparameters of fine-tuning. The defaults are from Raschka's book; gpjt's comparisons use them, too."""

    seed: Annotated[
        int, option("first seed; a seed determines the order of the records and the dropout", "N", check=integer(0))
    ] = 0
    epochs: Annotated[int, option("largest number of epochs", "N", check=COUNT)] = 20
    batch_size: Annotated[
        int, option("number of records per update; approximate, because a row holds several records", "N", check=COUNT)
    ] = 8
    learning_rate: Annotated[float, option("constant learning rate", "X", check=number(0, above=True))] = 5e-5
    weight_decay: Annotated[float, option("weight decay", "X", check=number(0))] = 0.1
    prompt_loss: Annotated[bool, option("also train on the tokens of the prompt")] = False
    longest_answer: Annotated[
        int, option("largest number of tokens per answer; at most half the context", "N", check=COUNT)
    ] = 256


@attrs.frozen(kw_only=True)
class InstructCommand(MeasureOptions):
    """Fine-tune a copy of each model on instructions, and answer held-out instructions."""

    data: Annotated[Path, option("JSON file of records with instruction, input and output", "FILE")]
    seeds: Annotated[int, option("number of fine-tuning runs, each with its own seed", "N", check=COUNT)] = 1
    settings: Annotated[FineTuneSettings, Parameter(name="*")] = FineTuneSettings()
    output: Annotated[Path | None, option("directory for the answers; default: answers/ in the run", "DIR")] = None
    keep: Annotated[Path | None, option("keep all fine-tuning runs in this directory", "DIR")] = None


JUDGE_OPTIONS = (  # options that have no effect without a judge
    *("--base-url", "--effort", "--orders", "--seed", "--concurrency", "--timeout", "--max-usd", "--prices"),
    *("--retry-wrong", "--allow-left-out", "--verdicts"),
)


@attrs.frozen(kw_only=True)
class JudgeCommand:
    """Let a language model score several models' answers side by side."""

    option_rules: ClassVar[OptionRules] = OptionRules(needs=dict.fromkeys(JUDGE_OPTIONS, "--model"))
    answers: Annotated[
        tuple[str, ...],
        option("file of answers, or MODEL for all answers of a model", name="ANSWERS...", required=True),
    ] = attrs.field(kw_only=False)
    model: Annotated[
        str | None, option("the judge; default: none, and only the scores that need no judge are printed", "NAME")
    ] = None
    base_url: Annotated[
        str | None, option("an API compatible with OpenAI's; default: $OPENAI_BASE_URL, else OpenAI", "URL")
    ] = None
    effort: Annotated[str | None, option("reasoning effort; default: the server's", "LEVEL")] = None
    orders: Annotated[
        int, option("prompts per question, each with the answers in a different order", "K", check=COUNT)
    ] = 3
    seed: Annotated[int, option("random seed for the orders", "N", check=integer(0))] = 0
    common: Annotated[bool, option("judge only the questions that all files share")] = False
    concurrency: Annotated[int, option("largest number of simultaneous requests", "N", check=COUNT)] = 8
    timeout: Annotated[float, option("time limit of a request", "SECONDS", check=SECONDS)] = 120.0
    max_usd: Annotated[
        float | None, option("budget in dollars for all sessions together; never exceeded", "X", check=USD)
    ] = None
    prices: Annotated[Path | None, option("price table; default: evaluation/judging/prices.json", "FILE")] = None
    retry_wrong: Annotated[bool, option("retry prompts that got only invalid replies")] = False
    allow_left_out: Annotated[
        float, option("largest permitted share of prompts without a verdict", "PERCENT", check=number(0, 100))
    ] = 10.0
    verdicts: Annotated[Path | None, option("store of verdicts; default: runs/verdicts.jsonl", "FILE")] = None


@attrs.frozen(kw_only=True)
class CompareCommand:
    """Compare stored results in a table, and state which differences are significant."""

    models: Models = attrs.field(kw_only=False)
    seed_deviation: Annotated[
        float | None,
        option(
            "standard deviation of the held-out loss over values of random_seed; default: estimated",
            "NATS",
            check=number(0, above=True),
        ),
    ] = None
    markdown: Annotated[bool, option("print the table in GitHub's Markdown")] = False


@attrs.frozen(kw_only=True)
class ExportCommand:
    """Export a model to a directory that Hugging Face's libraries load without remote code."""

    option_rules: ClassVar[OptionRules] = OptionRules(needs={"--private": "--push"})
    model: Annotated[str, option(MODEL_HELP, name="MODEL")] = attrs.field(kw_only=False)
    directory: Annotated[Path, option("output directory; must be new or empty", name="DIR")] = attrs.field(
        kw_only=False
    )
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    dtype: Annotated[Literal["float32", "bfloat16"], option("precision of the weights")] = "float32"
    push: Annotated[str | None, option("also upload to this repository on the hub", "OWNER/NAME")] = None
    private: Annotated[bool, option("create a private repository")] = False
    license: Annotated[str | None, option("license identifier for the model card, such as mit", "NAME")] = None


@attrs.frozen
class RegisteredCommand(Command):
    """A command whose results are stored under its name."""

    # The module with the function `read_results`, which reads a stored result and may raise rows.UNREADABLE. None: the
    # command has no column in the comparison.
    measures: str | None = attrs.field(default=None, kw_only=True)


COMMANDS = {  # in the order of the comparison's columns
    "sample": RegisteredCommand(SampleCommand, "evaluation.generation.sample"),
    "chat": RegisteredCommand(ChatCommand, "evaluation.generation.chat"),
    "serve": RegisteredCommand(ServeCommand, "evaluation.serve.serve"),
    "smoke": RegisteredCommand(SmokeCommand, "evaluation.generation.smoke"),
    "loss": RegisteredCommand(LossCommand, "evaluation.loss.held_out_loss", measures="evaluation.loss.loss_measures"),
    "core": RegisteredCommand(CoreCommand, "evaluation.core.core", measures="evaluation.core.core_scores"),
    "instruct": RegisteredCommand(
        InstructCommand, "evaluation.instruct.instruct", measures="evaluation.instruct.reference_scores"
    ),
    "judge": RegisteredCommand(JudgeCommand, "evaluation.judging.judge", measures="evaluation.judging.scores"),
    "compare": RegisteredCommand(CompareCommand, "evaluation.comparison.compare"),
    "export": RegisteredCommand(ExportCommand, "evaluation.export.export"),
}
