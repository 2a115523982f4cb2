"""The page of a report: one HTML file about runs. It can be opened anywhere, without a network, server or script."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from jinja2 import UndefinedError
from markupsafe import Markup

from common.errors import BadInput, refusing
from common.json_files import read_json, utc_now
from common.line_chart import PALETTE, Line, LineChart
from common.text import dollars, dollars_of_total, duration
from common.web_page import render
from evaluation.comparison.compare import as_fragment, compare
from evaluation.comparison.rows import Row, distinct, read_rows
from model.counts import parameter_count
from model.stock import stock_class
from reporting.run_charts import charted_axes, grouped, legend
from reporting.run_history import RunHistory
from training.checkpoints.directory import checkpoints_of, name_of
from training.checkpoints.lookup import checkpoints_by_step
from training.checkpoints.run_record import describe_changes
from training.config.train_config import KEYS, PLUMBING_KEYS
from training.telemetry.metrics_log import ACCOUNT, EVALUATIONS, EXPERIMENTS, LADDER, Metric, result_files

Fact = tuple[str, str]
SIGN = b"Lockstep's <code>report.py</code>"  # marks every page of a report
RESULT_COLUMNS = ("variant", "loss", "difference from the base, with its interval")
# Errors that a damaged record can cause.
NOT_A_RESULT = (OSError, ValueError, TypeError, LookupError, AttributeError, UndefinedError)
FLOPS = 6  # per token and per weight of a matrix product, for the forward and backward pass together


def report_page(runs: Sequence[Path], histories: Sequence[RunHistory], sections: Mapping[str, Any]) -> str:
    """Return the page about runs as HTML.

    `histories` are those of `runs`, in the same order. `sections` maps titles to additional sections. The section
    "Results" comes first on the page; its value is a list with the results of each experiment.
    """
    compared, advice = _evaluations(runs, histories) if runs else (None, "No run has begun.")
    groups = grouped(histories)
    return render(
        "reporting/templates/report_page.html",
        title=" / ".join(name for name, _ in groups) or "Results",
        groups=groups,
        written=utc_now(),
        headlines=[(history.name, headline(history)) for history in histories],
        axes=charted_axes(histories) if histories else [],
        legend=legend(histories),
        marked=sorted({mark.kind for mark in histories[0].marks}) if len(histories) == 1 else [],
        sections=sections,
        differing=differing_settings([histories[members[0]] for _, members in groups]),
        histories=histories,
        ledgers=[list(ledger_rows(history)) for history in histories],
        facts=[list(facts(history)) for history in histories],
        recipes=[list(recipe(history)) for history in histories],
        checkpoints=[[*map(name_of, checkpoints_by_step(checkpoints_of(run)))] for run in runs],
        compared=compared,
        advice=advice,
    )


def ledger_rows(history: RunHistory) -> Iterator[tuple[str, str, str, float]]:
    """Yield the rows of the table of times: name, time, dollars ("" without a price) and share of the total.

    Parts that took no time are left out. The last row is the total.
    """
    total, positive = sum(history.ledger.values()), sum(max(0.0, seconds) for seconds in history.ledger.values())
    total_usd = history.ledger_usd if total > 0 else None
    for name, seconds in [*history.ledger.items(), ("total", total)] if positive else []:
        if seconds:
            usd = "" if total_usd is None else dollars_of_total(total_usd * seconds / total, total_usd)
            yield name, duration(seconds), usd, max(0.0, seconds) / positive


def headline(history: RunHistory) -> list[str]:
    """Return the parts of a run's headline: state, step, losses, tokens, time and dollars."""
    steps = None if history.record is None else history.record.steps
    parts = [history.state, f"step {history.step:,}" + ("" if steps is None else f" of {steps:,}")]
    for name, text in ((Metric.VALIDATION_LOSS, "validation loss"), (Metric.TRAIN_LOSS, "training loss")):
        if name in history.curves:
            parts.append(f"{text} {history.curves[name].last:.4f}")
    tokens = history.axes["tokens"].last if history.step else 0
    parts += [f"{tokens:,.0f} tokens", duration(history.hours * 3600), *filter(None, [history.compared])]
    return parts + ([] if history.usd is None else [dollars(history.usd)])


def facts(history: RunHistory) -> Iterator[Fact]:
    """Yield facts about a run's network, data, machine and price. Unknown facts are left out."""
    model, record, job = history.model, history.record, history.job
    shape = f"{model.n_layers} layers x {model.emb_dim} wide, {model.n_heads} heads, context {model.context_length:,}"
    yield "network", f"{parameter_count(model):,} parameters: {shape}, vocabulary {model.vocab_size:,}"
    if history.train.require_stock_class:
        yield "class of transformers", stock_class(model, history.name).name
    if record is None:
        return
    if record.initial_weights is not None:
        yield "initial weights", record.initial_weights.source
    yield from (("settings", change) for change in describe_changes(record.changes))
    for source in record.sources or []:
        tokens, epochs = source["tokens"], source["epochs"]
        # The number of epochs is None if the tokens were still being prepared.
        share = "" if epochs is None else f", {epochs:.3g} epochs"
        yield "dataset", f"{source['dataset']}: {tokens:,} tokens planned{share}"
    if job.tokenizer is not None:
        yield "tokenizer", f"{job.tokenizer.name}, {job.tokenizer.vocabulary_size:,} ids"
    if history.used.machines is not None:
        yield "machine", history.used.machines
    if history.used.software is not None:
        yield "software", history.used.software
    yield "numerics", f"{record.numerics.get('precision')}, determinism {record.numerics['determinism']}"
    if history.used.commits is not None:
        yield "commit", history.used.commits
    if job.price_per_hour is not None:
        yield "price", f"{dollars(job.price_per_hour)} an hour"


def recipe(history: RunHistory) -> Iterator[Fact]:
    """Yield the settings of model.json and train.json that differ from their defaults, except plumbing."""
    for name, value in _settings(history).items():
        section, _, key = name.partition(".")
        if key not in PLUMBING_KEYS and value != KEYS[section][key].default:
            yield name, shown(value)


def differing_settings(histories: Sequence[RunHistory]) -> list[tuple[str, bool, list[str]]]:
    """Return what differs between runs: the settings in their files, the token files, the machine and the software.

    Each row has the setting's name, whether it is plumbing, and its value in each run. Plumbing changes results by no
    more than rounding.
    """
    settings_by_run = [_settings(history) | _resolved(history) for history in histories]
    rows = []
    for name in dict.fromkeys(name for settings in settings_by_run for name in settings):
        values = [shown(settings[name]) if name in settings else "unknown" for settings in settings_by_run]
        if len(set(values)) > 1:
            rows.append((name, name.partition(".")[2] in PLUMBING_KEYS, values))
    return rows


def shown(value: Any) -> str:
    """Return a setting as in JSON, but with short floats and with commas in large integers."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def is_experiment(directory: Path) -> bool:
    """Return whether experiment.py has written to a directory."""
    records = [record_file for _, record_file in (result_files(directory, name) for name in EXPERIMENTS)]
    return any(path.exists() for path in (directory / ACCOUNT, *records))


def experiment_results(directory: Path) -> str | None:
    """Return the results that experiment.py wrote to a directory, as HTML, or None if it ran no experiment there."""
    template = "reporting/templates/experiment_results.html"
    for name in EXPERIMENTS:
        table_file, path = result_files(directory, name)
        if path.exists():
            record = read_json(path)
            with refusing(path, "damaged or edited; rerun the experiment to write it again", kinds=NOT_A_RESULT):
                text = table_file.read_text(errors="replace")
                chart = law_chart(record).svg() if name == LADDER else None
                return render(template, **{"columns": RESULT_COLUMNS} | record | {"chart": chart, "text": text})
    text = (
        "No table yet: experiment.py writes it at the end. To see a sweep's finished runs now, run "
        "experiment.py sweep FILE --collect"
    )
    return render(template, chart=None, variants=None, text=text) if (directory / ACCOUNT).exists() else None


def law_chart(record: dict[str, Any]) -> LineChart:
    """Return the chart of ladder.json: loss over compute.

    It shows the measured points and the fitted law of each size, and the forecast with its interval.
    """
    series: dict[str, list[tuple[float, float, float]]] = {}
    for point in record["points"]:
        series.setdefault(point["rung"], []).append((point["tokens"], point["loss"], point["parameters"]))
    if isinstance(target := record["target"], dict):  # without a forecast, target is None or, in older files, a name
        losses = (target[key] for key in ("loss", "low", "high"))
        series["forecast, 90%"] = [(target["tokens"], loss, target["parameters"]) for loss in losses]
    law, lines = record["law"], []
    for number, (name, points) in enumerate(series.items()):
        tokens, loss, size = np.array(sorted(points), float).T
        line = Line(name=name, x=FLOPS * size * tokens, y=loss, color=number % len(PALETTE), dotted=True)
        lines.append(line)
        if law:
            law_tokens = np.geomspace(tokens[0] / 2, tokens[-1], 50)
            size_term = law["size_factor"] / size[0] ** law["alpha"]
            fitted = law["floor"] + size_term + law["token_factor"] / law_tokens ** law["beta"]
            x = FLOPS * size[0] * law_tokens
            lines.append(attrs.evolve(line, name=f"law, {name}", x=x, y=fitted, dotted=False))
    title = f"validation loss, from left to right: {', '.join(series)}; solid: fitted law"
    return LineChart(title=title, axis="FLOPs, 6 N D", lines=lines, logarithmic=True, logarithmic_x=True)


def _evaluations(runs: Sequence[Path], histories: Sequence[RunHistory]) -> tuple[Markup | None, str | None]:
    """Return, as HTML, the comparison of the runs that have evaluations, and advice on the runs that have none.

    Runs with different tokenizers cannot be measured on the same range of tokens, so the advice has a separate command
    for each tokenizer.
    """
    measured = [run for run in runs if (run / EVALUATIONS).is_file()]
    missing = [str(run) for run in runs if run not in measured]
    by_tokenizer: dict[object, list[str]] = {}
    for run, history in zip(runs, histories, strict=True):
        if str(run) in missing:
            tokenizer = history.job.tokenizer
            by_tokenizer.setdefault(tokenizer and (tokenizer.name, tokenizer.identity), []).append(str(run))
    commands = [f"python evaluate.py loss {shlex.join(names)}" for names in by_tokenizer.values()]
    advice = f"To measure the held-out loss: {'; '.join(commands)}" if missing else None
    if not measured:
        return None, f"No evaluations yet. {advice}"
    rows: list[Row] = []
    problems: list[str] = []
    for run in measured:  # if a run's results cannot be read, the other runs are still compared
        try:
            rows += read_rows([str(run)])
        except BadInput as error:
            problems.append(f"{error}.")
    try:
        compared = as_fragment(compare(distinct(rows))) if rows else None
    except BadInput as error:
        compared, problems = None, [*problems, f"No comparison: {error}."]
    coverage = [f"{len(missing)} of {len(runs)} runs have no evaluations."] if compared is not None and missing else []
    return compared, " ".join(filter(None, [*problems, *coverage, advice])) or None


def _settings(history: RunHistory) -> dict[str, Any]:
    sections = {"model": attrs.asdict(history.model), "train": history.train.flat()}
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def _resolved(history: RunHistory) -> dict[str, Any]:
    record, job = history.record, history.job
    if record is None:
        return {}
    files = [str(sha256) for stream in record.train_streams for sha256 in stream.sha256]
    values = {
        "world size": record.world_size,
        "steps": record.steps,
        "commit": history.used.commits,
        "device": ", ".join(history.used.devices) or None,
        "software": history.used.software,
        "tokenizer": None if job.tokenizer is None else job.tokenizer.name,
        "token files": ", ".join(files) or None,
        **{f"resolved {key}": value for key, value in record.numerics.items()},
        "changes": "; ".join(describe_changes(record.changes)) or None,
    }
    return {name: value for name, value in values.items() if value is not None}
