"""Results of evaluations: measures, training costs, and the append-only log `evaluations.jsonl` of a run or model."""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from common.errors import BadInput
from common.files import write_error
from common.json_files import JsonLog, is_number, read_json_lines, scalars_in, utc_now
from common.text import dollars, time_cost
from evaluation.shared.given_tokenizer import GivenTokenizer
from evaluation.shared.significance import Interval, plus_minus, student_interval
from evaluation.shared.weights import WeightsIdentity
from training.telemetry.metrics_log import EVALUATIONS, last_price, priced_seconds, read_counted

if TYPE_CHECKING:
    from evaluation.shared.model_location import ModelLocation
    from training.state import Position

# A function that compares two lists of samples at a confidence level. Each list has a sample for each training seed.
# The function returns an interval for the mean of the first list minus the mean of the second list, or None if the
# samples cannot be compared.
Difference = Callable[[list[Any], list[Any], float], Interval | None]


def perplexity(nats: float) -> float:
    """Return the perplexity of a loss. It is infinite if it is too large for a float."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


@attrs.frozen(kw_only=True, eq=False)
class Published:
    """Published values of a measure, which are shown next to ours. They have no interval."""

    values: dict[str, str]  # by model, with as many digits as the source gives
    source: str
    # A function that takes a result's sample, and returns whether the published values were measured on the same data
    comparable: Callable[[Any], bool] = lambda _: True
    otherwise: str | None = None  # note to print if the values are omitted because they are not comparable


@attrs.frozen(kw_only=True)
class Measure:
    """A column of the comparison."""

    name: str
    unit: str = ""
    digits: int = 4
    higher_is_better: bool = True
    difference: Difference | None = None  # None: no statements about differences between models are made
    published: Published | None = None


@attrs.frozen(kw_only=True)
class Measurement:
    """A measure's value for a model, with a standard error, an interval, or neither."""

    measure: Measure
    value: float
    error: float | None = None
    freedom: float = math.inf  # degrees of freedom of the error
    interval: Interval | None = None  # 95%
    sample: Any = None  # the data that `measure.difference` compares; the type depends on the evaluation

    @property
    def text(self) -> str:
        if self.interval is not None:
            return self.interval.text(self.measure.digits)
        return plus_minus(self.value, self.error, self.measure.digits)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Both ends of the 95% interval, or None if they are unknown."""
        interval = self.interval or student_interval(self.value, self.error, self.freedom)
        return None if interval.low is None or interval.high is None else (interval.low, interval.high)


@attrs.frozen(kw_only=True)
class EvaluationResult:
    """An evaluation of a model, read from a line of `evaluations.jsonl`."""

    evaluation: str  # name of the command, followed by the variant of the evaluation if the command has several
    model: str
    time: str
    subject: str  # identity of the data; only results with equal subjects are comparable
    description: str  # the subject in words
    measurements: list[Measurement]
    ranks_models: bool = True  # False: the intervals omit a source of chance, so no model is called better
    left_out: int = 0  # number of items without an answer, which were left out for all models alike
    weights: WeightsIdentity | None = None  # the measured weights; None: the line has no hash
    # Name of the tokenizer from --tokenizer, unless it is known to be the model's own
    given_tokenizer: str | None = None

    @classmethod
    def of(cls, record: dict[str, Any], **values: Any) -> "EvaluationResult":
        """Return the result in a stored record. `values`: the fields that depend on the evaluation."""
        time, tokenizer = record.get("time"), GivenTokenizer.of(record)
        stored = {"evaluation": record["evaluation"], "model": record["model"]}
        stored |= {"time": time if isinstance(time, str) else "", "weights": WeightsIdentity.of(record)}
        result = cls(**(stored | values), given_tokenizer=None if tokenizer is None else tokenizer.name)
        return result if tokenizer is None or not tokenizer.is_other else result.with_tokenizer(tokenizer)

    def with_tokenizer(self, tokenizer: GivenTokenizer) -> "EvaluationResult":
        """Return this result under separate names, because the tokenizer that was used is not the model's own."""
        measurements = [
            attrs.evolve(
                measurement,
                measure=attrs.evolve(
                    measurement.measure,
                    name=f"{measurement.measure.name}, tokenizer {tokenizer.name}",
                    published=None,
                ),
            )
            for measurement in self.measurements
        ]
        return attrs.evolve(
            self,
            evaluation=f"{self.evaluation} by tokenizer {tokenizer.name}",
            subject=f"{self.subject} tokenizer {tokenizer.identity}",
            description=f"{self.description}; read with tokenizer {tokenizer.name}, which is not the model's own",
            measurements=measurements,
        )

    def measurement(self, measure: Measure) -> Measurement | None:
        return next((measurement for measurement in self.measurements if measurement.measure == measure), None)


def append_result(
    home: Path, model: str, kind: str, values: dict[str, Any], weights: WeightsIdentity | None = None
) -> None:
    """Append a result to the log in a model's directory, and sync the log. Raises BadInput.

    `weights`: the measured weights; None only for answers from older versions, which do not record the weights.
    """
    hashes = {} if weights is None else weights.as_record()
    result = {"evaluation": kind, "model": model, "time": utc_now(), **hashes, **values}
    path = home / EVALUATIONS
    try:
        home.mkdir(parents=True, exist_ok=True)
        with closing(JsonLog(path)) as log:
            log.append(result, durable=True)
    except OSError as error:
        raise BadInput(f"{write_error(path, error)}; the result is {json.dumps(result)}") from error


def results_of(home: Path, model: str, kind: str) -> list[dict[str, Any]]:
    """Return a model's results of this kind, oldest first. Raises BadInput as `read_results` does."""
    return [result for result in read_results(home) if (result.get("evaluation"), result["model"]) == (kind, model)]


def read_results(home: Path, parse: Callable[[dict[str, Any]], Any] = dict) -> list[Any]:
    """Return all results, oldest first, converted by `parse`. Raises BadInput.

    Damaged results are left out: those that are not valid records, and those for which `parse` returns None.
    """
    return read_json_lines(home / EVALUATIONS, lambda record: parse(record) if _is_sound(record) else None).noted()


@attrs.frozen(kw_only=True)
class RunCost:
    """The cost of training a run up to a checkpoint."""

    tokens: int
    hours: float  # wall clock
    hours_by_price: dict[float | None, float]  # by the machine's price in USD per hour; None: the price is unknown

    @property
    def dollars(self) -> float | None:
        """The cost of all hours that have a price, or None if no price is known."""
        costs = [time_cost(3600 * hours, price) for price, hours in self.hours_by_price.items()]
        known_costs = [cost for cost in costs if cost is not None]
        return sum(known_costs) if known_costs else None

    def __str__(self) -> str:
        prices = [dollars(price) for price in self.hours_by_price if price is not None]
        return f"{dollars(self.dollars or 0)} at {' and '.join(prices)} an hour"


def cost_of(location: "ModelLocation", position: "Position") -> RunCost:
    """Return the cost of training a run up to the position of a checkpoint."""
    records = [] if location.run is None else read_counted(location.run).records
    seconds = seconds_by_price(records, position.elapsed_seconds, location.job.price_per_hour)
    return RunCost(
        tokens=position.tokens,
        hours=position.elapsed_seconds / 3600,
        hours_by_price={price: value / 3600 for price, value in seconds.items()},
    )


def seconds_by_price(
    lines: Sequence[dict[str, Any]], elapsed_seconds: float, price: float | None
) -> dict[float | None, float]:
    """Divide the first `elapsed_seconds` of a run by price: return the number of seconds for each price per hour.

    `lines`: the run's metrics. `price`: the price to use if no job has recorded a price.
    """
    seconds: dict[float | None, float] = {}
    counted_seconds, line_price = 0.0, (default_price := last_price(lines, price))
    for reached, line_price in priced_seconds(lines, default_price):
        before, counted_seconds = counted_seconds, min(reached, elapsed_seconds)
        seconds[line_price] = seconds.get(line_price, 0.0) + counted_seconds - before
    # The remaining seconds are between the last line and the time when the checkpoint was saved.
    seconds[line_price] = seconds.get(line_price, 0.0) + elapsed_seconds - counted_seconds
    return {price: paid_seconds for price, paid_seconds in seconds.items() if paid_seconds > 0}


def _is_sound(record: dict[str, Any]) -> bool:
    """Return whether a record names a model and an evaluation, and all of its finite numbers pass `is_number`."""
    named = isinstance(record.get("model"), str) and isinstance(record.get("evaluation"), str)
    numbers = [number for number in scalars_in(record) if type(number) in (int, float)]
    return named and all(is_number(number) for number in numbers if type(number) is int or math.isfinite(number))
