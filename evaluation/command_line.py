"""Commands of `evaluate.py`: the options of each, and its registration. Importing this is quick: no torch."""

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
    str | None, option("checkpoint of a run; default: best where there is one, else latest", "best|latest|NAME")
]
Tokenizer = Annotated[
    str | None, option("default: that of the model or its tokens; FILE: .tiktoken, meta.pkl, .json", "gpt2|bytes|FILE")
]
Device = Annotated[Literal["cuda", "cpu"] | None, option("default: cuda where there is a GPU, else cpu")]
RangeName = Literal["fineweb-val-10m", "gpjt-test"]
LEAST_TEMPERATURE = 1e-3  # below, logits divided by it leave fp32
_POSITIVE = number(LEAST_TEMPERATURE, 1e3)
TEMPERATURE = ValueCheck(
    lambda value: value == 0 or _POSITIVE.holds(value), f"0, which is greedy, or {_POSITIVE.accepted_values}", float
)
SECONDS, USD, COUNT = number(0, 1e6, above=True), number(0, 1e9, above=True), integer(1)


@attrs.frozen(kw_only=True)
class MeasureOptions:
    """Options of a command that measures models; under torchrun the ranks share the work."""

    models: Models = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    device: Device = None


@attrs.frozen(kw_only=True)
class SmokeCommand(MeasureOptions):
    """Generate continuations of fixed prompts, or of your own."""

    prompt: Annotated[tuple[str, ...], option("replaces the fixed prompts; may be repeated", "TEXT")] = ()
    tokens: Annotated[int | None, option("of each; default: 40, or half a short context", "N", check=COUNT)] = None
    temperature: Annotated[float, option("sampling temperature; 0: greedy only", "T", check=TEMPERATURE)] = 1.0
    top_k: Annotated[int, option("sampling candidates for each token", "K", check=COUNT)] = 25
    seed: Annotated[int, option("sampling seed", "N", check=integer(0))] = 0


@attrs.frozen(kw_only=True)
class ModelOptions:
    """Options of a command that loads one model."""

    model: Annotated[str, option(MODEL_HELP, name="MODEL")] = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    device: Device = None


@attrs.frozen(kw_only=True)
class GenerationOptions(ModelOptions):
    """Options of a command that generates text by one model."""

    prompt: Annotated[str | None, option("text to continue or answer; default: stdin", "TEXT|FILE:PATH")] = None
    tokens: Annotated[int, option("tokens of a text, or of an answer at most", "N", check=COUNT)] = 500
    temperature: Annotated[float, option("sampling temperature; 0: the likeliest token", "T", check=TEMPERATURE)] = 0.8
    top_k: Annotated[int, option("candidates for each token: the K likeliest", "K", check=COUNT)] = 200
    top_p: Annotated[float, option("the fewest of them that reach P", "P", check=number(0, 1, above=True))] = 1.0
    seed: Annotated[int, option("seed of the first text; the next has the next one", "N", check=integer(0))] = 0


@attrs.frozen(kw_only=True)
class SampleCommand(GenerationOptions):
    """Sample text of any length after a prompt."""

    option_rules: ClassVar[OptionRules] = OptionRules(needs={"--against": "--trace"})
    samples: Annotated[int, option("number of texts", "N", check=COUNT)] = 1
    trace: Annotated[bool, option("then print which parts of each text stand in the training data")] = False
    against: Annotated[
        tuple[Path, ...], option("of --trace: token directory; default: those the run was trained on", "DIR")
    ] = ()


@attrs.frozen(kw_only=True)
class ChatCommand(GenerationOptions):
    """Converse with a model at the terminal, or have it answer one --prompt."""

    system: Annotated[str | None, option("system message, before the conversation", "TEXT")] = None


@attrs.frozen(kw_only=True)
class ServeCommand(ModelOptions):
    """Serve a model: OpenAI's API and a page to chat."""

    host: Annotated[str, option("address; others than loopback need an API key", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, option("0: a free one", "N", check=integer(0, 65535))] = 8000
    api_key_file: Annotated[Path | None, option("file of the API key; default: $LOCKSTEP_API_KEY", "FILE")] = None
    slots: Annotated[int, option("answers at a time, each with its keys and values", "N", check=COUNT)] = 8
    queue: Annotated[int, option("answers that may wait", "N", check=integer(0))] = 64
    tokens: Annotated[int | None, option("most tokens of an answer; default: the context", "N", check=COUNT)] = None


@attrs.frozen(kw_only=True)
class LossCommand(MeasureOptions):
    """Held-out loss in nats per token and bits per byte, with standard errors."""

    option_rules: ClassVar[OptionRules] = OptionRules(
        excludes=dict.fromkeys(("--split", "--from", "--count"), "--range"),
        reasons_excluded=dict.fromkeys(
            ("--split", "--from", "--count"), "a published range has its own split, start and count"
        ),
    )
    tokens: Annotated[Path | None, option("token directory; default: that of the first run", "DIR")] = None
    name: Annotated[
        RangeName | None,
        option("published range, in place of --split, --from and --count; its tokens are downloaded", name="--range"),
    ] = None
    split: Annotated[Literal["train", "validation", "test"] | None, option("default: validation")] = None
    # Not --start: torchrun parses all options and takes that for an abbreviation of its own.
    start: Annotated[
        int | None,
        option("first token; default: 50,000,000, or after the validated ones", "N", name="--from", check=integer(0)),
    ] = None
    count: Annotated[int | None, option("tokens to predict; default: 19,660,800, or all", "N", check=COUNT)] = None


@attrs.frozen(kw_only=True)
class CoreCommand(MeasureOptions):
    """CORE: 22 few-shot tasks as nanochat measures them, and bits per byte of the gold answers."""

    bundle: Annotated[
        Path | None, option("nanochat's eval_bundle.zip, or its folder; default: downloaded to runs/", "FILE|DIR")
    ] = None
    tasks: Annotated[str | None, option("names, with commas; default: all", "TASKS")] = None
    count: Annotated[int | None, option("items of each task at most; default: all", "N", check=COUNT)] = None
    against: Annotated[
        Path | None, option("training data: measure also without the items whose text shares 13 tokens with it", "DIR")
    ] = None


@attrs.frozen(kw_only=True)
class FineTuneSettings:
    """Fine-tuning hyperparameters. The defaults are those of Raschka's book, which gpjt's comparisons use."""

    seed: Annotated[int, option("first seed, of the order and dropout", "N", check=integer(0))] = 0
    epochs: Annotated[int, option("maximum", "N", check=COUNT)] = 20
    batch_size: Annotated[int, option("records per update, about: it is made of rows of several", "N", check=COUNT)] = 8
    learning_rate: Annotated[float, option("learning rate, constant", "X", check=number(0, above=True))] = 5e-5
    weight_decay: Annotated[float, option("decay of the weights", "X", check=number(0))] = 0.1
    prompt_loss: Annotated[bool, option("train on the prompt's tokens as well")] = False
    longest_answer: Annotated[int, option("most tokens of an answer, or half the context", "N", check=COUNT)] = 256


@attrs.frozen(kw_only=True)
class InstructCommand(MeasureOptions):
    """Fine-tune a copy on instructions, and generate answers to held-out ones."""

    data: Annotated[Path, option("JSON of records: instruction, input, output", "FILE")]
    seeds: Annotated[int, option("number of fine-tunings", "N", check=COUNT)] = 1
    settings: Annotated[FineTuneSettings, Parameter(name="*")] = FineTuneSettings()
    output: Annotated[Path | None, option("directory for answers; default: answers/ of the run", "DIR")] = None
    keep: Annotated[Path | None, option("keep the run of each fine-tuning in DIR", "DIR")] = None


OF_JUDGE = (  # without one there are only scores that need none
    *("--base-url", "--effort", "--orders", "--seed", "--concurrency", "--timeout", "--max-usd", "--prices"),
    *("--retry-wrong", "--allow-left-out", "--verdicts"),
)


@attrs.frozen(kw_only=True)
class JudgeCommand:
    """Have a language model score several models' answers side by side."""

    option_rules: ClassVar[OptionRules] = OptionRules(needs=dict.fromkeys(OF_JUDGE, "--model"))
    answers: Annotated[
        tuple[str, ...], option("answer file, or MODEL for all of its own", name="ANSWERS...", required=True)
    ] = attrs.field(kw_only=False)
    model: Annotated[str | None, option("the judge; default: none, only scores without one", "NAME")] = None
    base_url: Annotated[str | None, option("API like OpenAI's; default: $OPENAI_BASE_URL, or OpenAI", "URL")] = None
    effort: Annotated[str | None, option("reasoning effort; default: the server's", "LEVEL")] = None
    orders: Annotated[int, option("prompts per question, with reordered answers", "K", check=COUNT)] = 3
    seed: Annotated[int, option("random seed of the orders", "N", check=integer(0))] = 0
    common: Annotated[bool, option("judge only the questions that all files share")] = False
    concurrency: Annotated[int, option("maximum requests in flight", "N", check=COUNT)] = 8
    timeout: Annotated[float, option("deadline of a request", "SECONDS", check=SECONDS)] = 120.0
    max_usd: Annotated[float | None, option("dollars of all sessions: never exceeded", "X", check=USD)] = None
    prices: Annotated[Path | None, option("price table; default: evaluation/judging/prices.json", "FILE")] = None
    retry_wrong: Annotated[bool, option("retry prompts that got only invalid replies")] = False
    allow_left_out: Annotated[float, option("most prompts without a verdict", "PERCENT", check=number(0, 100))] = 10.0
    verdicts: Annotated[Path | None, option("verdict store; default: runs/verdicts.jsonl", "FILE")] = None


@attrs.frozen(kw_only=True)
class CompareCommand:
    """Compare stored results in one table, and name significant differences."""

    models: Models = attrs.field(kw_only=False)
    seed_deviation: Annotated[
        float | None,
        option("of the held-out loss over random_seed; default: estimated", "NATS", check=number(0, above=True)),
    ] = None
    markdown: Annotated[bool, option("print GitHub's Markdown")] = False


@attrs.frozen(kw_only=True)
class ExportCommand:
    """Export a model to a directory that Hugging Face's libraries load as a class of their own."""

    option_rules: ClassVar[OptionRules] = OptionRules(needs={"--private": "--push"})
    model: Annotated[str, option(MODEL_HELP, name="MODEL")] = attrs.field(kw_only=False)
    directory: Annotated[Path, option("output directory, new or empty", name="DIR")] = attrs.field(kw_only=False)
    checkpoint: Checkpoint = None
    tokenizer: Tokenizer = None
    dtype: Annotated[Literal["float32", "bfloat16"], option("precision of the weights")] = "float32"
    push: Annotated[str | None, option("upload to the hub as well", "OWNER/NAME")] = None
    private: Annotated[bool, option("create a private repository")] = False
    license: Annotated[str | None, option("license identifier for the model card, such as mit", "NAME")] = None


@attrs.frozen
class RegisteredCommand(Command):
    """A command whose results are stored under its name."""

    measures: str | None = attrs.field(
        default=None, kw_only=True
    )  # module whose `read_results` structures such a line; it may raise rows.UNREADABLE


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
