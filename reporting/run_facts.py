"""Facts of a run for people: network, data, machine and cost; and settings that differ between runs."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from reporting.run_history import RunHistory
from training.checkpoints.run_record import describe_changes
from training.config.train_config import KEYS, PLUMBING_KEYS

Fact = tuple[str, str]


@attrs.frozen(kw_only=True)
class DifferingSetting:
    """A setting of which runs have different values."""

    name: str
    plumbing: bool  # True: it changes no result by more than rounding
    values: list[str]  # one for each run


def headline(history: RunHistory) -> list[str]:
    """Return state, step, losses, tokens, time and dollars of a run."""
    steps = None if history.record is None else history.record.steps
    parts = [history.state, f"step {history.step:,}" + ("" if steps is None else f" of {steps:,}")]
    for name, text in (("validation_loss", "validation loss"), ("train_loss", "training loss")):
        if name in history.curves:
            parts.append(f"{text} {history.curves[name].last:.4f}")
    tokens = history.axes["tokens"].last if history.step else 0
    parts += [f"{tokens:,.0f} tokens", time_text(history.hours * 3600)]
    return parts + ([] if history.usd is None else [f"${history.usd:,.2f}"])


def facts(history: RunHistory) -> Iterator[Fact]:
    """Yield network, data, machine and price of a run. Unknown facts are left out."""
    from model.counts import parameter_count
    from model.stock import stock_class

    model, record, job = history.model, history.record, history.job
    shape = f"{model.n_layers} layers x {model.emb_dim} wide, {model.n_heads} heads, context {model.context_length:,}"
    yield "network", f"{parameter_count(model):,} parameters: {shape}, vocabulary {model.vocab_size:,}"
    if history.train.get("require_stock_class"):
        yield "class of transformers", stock_class(model, history.name).name
    if record is None:
        return
    if record.initial_weights is not None:
        yield "initial weights", record.initial_weights.source
    yield from (("settings", change) for change in describe_changes(record.changes))
    for source in record.sources or []:
        tokens, epochs = source["tokens"], source["epochs"]
        yield "dataset", f"{source['dataset']}: {tokens:,} tokens planned, {epochs:.3g} epochs"
    if job.tokenizer is not None:
        yield "tokenizer", f"{job.tokenizer.name}, {job.tokenizer.vocabulary_size:,} ids"
    if job.environment.device is not None:
        yield "machine", f"{job.environment.world_size} x {job.environment.device}"
        yield "software", f"torch {job.environment.packages.get('torch')}, Python {job.environment.python}"
    yield "numerics", f"{record.numerics.get('precision')}, determinism {record.numerics['determinism']}"
    if record.git_commit:
        yield "commit", record.git_commit
    if job.price_per_hour is not None:
        yield "price", f"${job.price_per_hour:,.2f} an hour"


def recipe(history: RunHistory) -> list[Fact]:
    """Return the keys of model.json and train.json that differ from their defaults, plumbing left out."""
    chosen = []
    for name, value in _settings(history).items():
        section, _, key = name.partition(".")
        if key not in PLUMBING_KEYS and value != KEYS[section][key].default:
            chosen.append((name, shown(value)))
    return chosen


def differing_settings(histories: Sequence[RunHistory]) -> list[DifferingSetting]:
    """Return the settings that differ between runs: of both files, of the machine, of the software."""
    every = [_settings(history) | _resolved(history) for history in histories]
    found = []
    for name in dict.fromkeys(name for values in every for name in values):
        values = [shown(one[name]) if name in one else "unknown" for one in every]
        if len(set(values)) > 1:
            found.append(DifferingSetting(name=name, plumbing=name.partition(".")[2] in PLUMBING_KEYS, values=values))
    return found


def time_text(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.2f} h"


def shown(value: Any) -> str:
    """Return a setting as it is written in JSON, in short."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _settings(history: RunHistory) -> dict[str, Any]:
    """Return the settings of the run by the names of their keys."""
    stored = {"model": attrs.asdict(history.model), "train": history.train}
    return {
        f"{section}.{key}": stored[section].get(key, definition.default)
        for section, known in KEYS.items()
        for key, definition in known.items()
    }


def _resolved(history: RunHistory) -> dict[str, Any]:
    record, job = history.record, history.job
    if record is None:
        return {}
    files = [str(sha256) for stream in record.train_streams for sha256 in stream.sha256]
    found = {
        "world size": record.world_size,
        "steps": record.steps,
        "commit": record.git_commit,
        "device": job.environment.device,
        "torch": job.environment.packages.get("torch"),
        "tokenizer": None if job.tokenizer is None else job.tokenizer.name,
        "token files": ", ".join(files) or None,
        **{f"resolved {key}": value for key, value in record.numerics.items()},
        "changes": "; ".join(describe_changes(record.changes)) or None,
    }
    return {name: value for name, value in found.items() if value is not None}
