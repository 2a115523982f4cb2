"""Write the model card (README.md) of an exported model from the record of its run. Unknown facts are left out."""

from collections.abc import Iterator
from pathlib import Path

from common.hub_client import OUR_TAG
from common.text import small_number
from evaluation.shared.load import Trained
from evaluation.shared.machines import describe_drift, trained_on
from evaluation.shared.model_location import ModelLocation
from evaluation.shared.results import cost_of, perplexity
from model.config import rows
from model.counts import parameter_count
from model.stock import stock_class
from tokens.hub.download import hub_name
from training.checkpoints.run_record import describe_changes
from training.checkpoints.saved_state import read_state
from training.config.optimization import describe_group_rates, describe_optimizer, describe_schedule, make_schedule
from training.state import Position
from training.telemetry.metrics_log import Metric, read_metrics

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
DTYPE_WORDS = {"float32": "fp32", "bfloat16": "bf16, rounded from fp32"}


def model_card(trained: Trained, name: str, license_name: str | None, dtype: str = "float32") -> str:
    """Return the card with its front matter for the hub. `name`: OWNER/NAME, or the name of a folder."""
    from huggingface_hub import ModelCard, ModelCardData

    config = trained.network.config
    stock = stock_class(config)
    data = ModelCardData(
        license=license_name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[stock.config["model_type"], OUR_TAG],
    )
    tokenizer = f"`{trained.tokenizer.name}`: {trained.tokenizer.vocabulary_size:,} ids"
    shape = [fact for row in rows(type(config)).values() if (fact := row.card and row.card(config, stock.model_type))]
    sections = [
        ("Model", "", [("tokenizer", tokenizer), *shape, ("weights", DTYPE_WORDS[dtype])]),
        ("Training", "\nTrained with Lockstep's `train.py`.\n", list(_training(trained.location))),
    ]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=name.rpartition("/")[2],
        name=name,
        stock=stock,
        chats=trained.template is not None,
        parameters=f"{parameter_count(config):,}",
        sections=sections,
    )
    return str(card)


def _training(location: ModelLocation) -> Iterator[tuple[str, str]]:
    """Yield rows of a table of facts about a model's training. For a model from another program, there are none."""
    if not location.is_lockstep_checkpoint:
        return
    state = read_state(location.path)
    config = state.config
    cost = cost_of(location, state.position)
    length = config.model.context_length
    directories = [Path(stream.directory) for stream in config.train_streams]
    names = [hub_name(directory) or directory.resolve().name for directory in directories]
    if names:
        yield "dataset", ", ".join(f"`{name}`" for name in names)
    yield "tokens", f"{cost.tokens:,}"
    batch = config.global_batch_size
    yield "global batch", f"{batch:,} sequences of {length:,} tokens, {batch * length:,} tokens"
    yield "updates", f"{state.position.step:,} of {config.steps:,}"
    options = config.train.optimization
    betas = f"betas {options.adam_beta1:g} and {options.adam_beta2:g}, weight decay {options.weight_decay:g}"
    yield "optimizer", f"{describe_optimizer(options)}; {betas}"
    yield "learning rate", describe_schedule(make_schedule(options, config.steps or state.position.step))
    if (group_rates := describe_group_rates(options)) is not None:
        yield "learning rates", group_rates
    for change in describe_changes(config.changes):
        yield "settings", change
    initial = "random"
    if origin := config.initial_weights:
        source = Path(origin.source)
        name = source.resolve().name if source.exists() else origin.source
        initial = f"`{name}` (sha256 of its values: `{origin.sha256}`)"
        if origin.vocab_size is not None:
            initial += f", with rows for {config.model.vocab_size - origin.vocab_size:,} new ids"
    yield "initial weights", initial
    yield "seed", str(config.train.random_seed)
    yield from _losses(location, state.position)
    records = [] if location.run is None else read_metrics(location.run)
    used = trained_on(records, state.position.step, location.job.environment, config.git_commit)
    if used.machines:
        yield "machine", used.machines
        yield "precision", str(config.numerics.get("precision", config.train.execution.precision))
    yield from (("numerics", line) for line in describe_drift(records, state.position.step))
    if used.software:
        yield "software", used.software
    yield "time", f"{small_number(cost.hours)} hours"
    if cost.dollars is not None:
        yield "cost", str(cost)
    if used.commits:
        yield "commit", f"`{used.commits}`" if used.commits == config.git_commit else used.commits


def _losses(location: ModelLocation, position: Position) -> Iterator[tuple[str, str]]:
    records = [] if location.run is None else read_metrics(location.run)
    losses = [
        record[Metric.TRAIN_LOSS]
        for record in records
        if Metric.TRAIN_LOSS in record and record["step"] <= position.step
    ]
    if losses:
        yield "training loss", f"{losses[-1]:.4f} nats per token"
    if (loss := position.validation_loss) is not None:
        yield "validation loss", f"{loss:.4f} nats per token (perplexity {perplexity(loss):,.2f})"
