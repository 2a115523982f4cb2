"""Results of evaluations: `evaluations.jsonl` of a run or model, append-only; measures, and the cost of training."""

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

# Of samples of two sides, one for each training seed, and a confidence: the mean of the first less that of the second.
Difference = Callable[[list[Any], list[Any], float], Interval | None]


def perplexity(nats: float) -> float:
    """Return the perplexity of a loss, infinite where a float does not hold it."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


@attrs.frozen(kw_only=True, eq=False)
class Published:
    """Values that others have published of one measure, shown beside ours; they have no interval."""

    values: dict[str, str]  # by model, as printed there
    source: str
    comparable: Callable[[Any], bool] = lambda _: True  # of a result's sample: whether it is on the same data
    otherwise: str | None = None  # note where published values are omitted because it is not


@attrs.frozen(kw_only=True)
class Measure:
    """A column of the comparison."""

    name: str
    unit: str = ""
    digits: int = 4
    higher_is_better: bool = True
    difference: Difference | None = None  # None: no statement about two models
    published: Published | None = None


@attrs.frozen(kw_only=True)
class Measurement:
    """A measure's value for one model, with its standard error, with an interval, or alone."""

    measure: Measure
    value: float
    error: float | None = None
    freedom: float = math.inf  # degrees of freedom of the error
    interval: Interval | None = None  # 95 %
    sample: Any = None  # input of `measure.difference`, of a type that the evaluation chooses

    @property
    def text(self) -> str:
        if self.interval is not None:
            return self.interval.text(self.measure.digits)
        return plus_minus(self.value, self.error, self.measure.digits)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Both ends of the 95 % interval, where known."""
        found = self.interval or student_interval(self.value, self.error, self.freedom)
        return None if found.low is None or found.high is None else (found.low, found.high)


@attrs.frozen(kw_only=True)
class EvaluationResult:
    """One evaluation of one model, structured from a line of `evaluations.jsonl`."""

    evaluation: str  # what was evaluated: the command, with a task's name where it runs several
    model: str
    time: str
    subject: str  # identity of the data: results are comparable only where it is equal
    description: str  # of the subject, for people
    measurements: list[Measurement]
    ranks_models: bool = True  # False: intervals omit a source of chance, so that no model is called better
    left_out: int = 0  # items without an answer, left out for all models alike
    weights: WeightsIdentity | None = None  # that were measured; None: the line has no hash of them
    given_tokenizer: str | None = None  # name of the one of --tokenizer, unless it is known to be the model's own

    @classmethod
    def of(cls, record: dict[str, Any], **values: Any) -> "EvaluationResult":
        """Return the result in a line, with those fields that all evaluations store alike."""
        time, given = record.get("time"), GivenTokenizer.of(record)
        stored = {"evaluation": record["evaluation"], "model": record["model"]}
        stored |= {"time": time if isinstance(time, str) else "", "weights": WeightsIdentity.of(record)}
        result = cls(**(stored | values), given_tokenizer=None if given is None else given.name)
        return result if given is None or not given.is_other else result.under(given)

    def under(self, tokenizer: GivenTokenizer) -> "EvaluationResult":
        """Return this result as one of a model under another tokenizer than its own: it has columns of its own."""
        measured = [
            attrs.evolve(
                one,
                measure=attrs.evolve(
                    one.measure, name=f"{one.measure.name}, tokenizer {tokenizer.name}", published=None
                ),
            )
            for one in self.measurements
        ]
        return attrs.evolve(
            self,
            evaluation=f"{self.evaluation} by tokenizer {tokenizer.name}",
            subject=f"{self.subject} tokenizer {tokenizer.identity}",
            description=f"{self.description}; read by tokenizer {tokenizer.name}, which is not the model's own",
            measurements=measured,
        )

    def measurement(self, measure: Measure) -> Measurement | None:
        return next((one for one in self.measurements if one.measure == measure), None)


def append_result(
    home: Path, model: str, kind: str, values: dict[str, Any], weights: WeightsIdentity | None = None
) -> None:
    """Append a result to the log of a model's directory, and sync it. Raises BadInput.

    `weights`: those that were measured; None only where older answers do not tell.
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
    """Return a model's results of one kind, oldest first. Raises BadInput as `read_results` does."""
    return [result for result in read_results(home) if (result.get("evaluation"), result["model"]) == (kind, model)]


def read_results(home: Path, parse: Callable[[dict[str, Any]], Any] = dict) -> list[Any]:
    """Return all results as `parse` returns them, oldest first, without damaged ones (None). Raises BadInput."""
    return read_json_lines(home / EVALUATIONS, lambda record: parse(record) if _is_sound(record) else None).noted()


@attrs.frozen(kw_only=True)
class RunCost:
    tokens: int
    hours: float  # wall clock
    hours_by_price: dict[float | None, float]  # price of the machine, USD per hour; None: of a run without prices

    @property
    def dollars(self) -> float | None:
        """Cost of all hours; None where no price is known."""
        costs = [time_cost(3600 * hours, price) for price, hours in self.hours_by_price.items()]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if known else None

    def __str__(self) -> str:
        prices = [dollars(price) for price in self.hours_by_price if price is not None]
        return f"{dollars(self.dollars or 0)} at {' and '.join(prices)} an hour"


def cost_of(place: "ModelLocation", position: "Position") -> RunCost:
    records = [] if place.run is None else read_counted(place.run).records
    seconds = seconds_by_price(records, position.elapsed_seconds, place.job.price_per_hour)
    return RunCost(
        tokens=position.tokens,
        hours=position.elapsed_seconds / 3600,
        hours_by_price={price: value / 3600 for price, value in seconds.items()},
    )


def seconds_by_price(
    lines: Sequence[dict[str, Any]], elapsed_seconds: float, price: float | None
) -> dict[float | None, float]:
    """Return how many of a run's first seconds cost each price per hour. `price`: where no job has recorded one."""
    seconds: dict[float | None, float] = {}
    counted, paid = 0.0, (known := last_price(lines, price))
    for reached, paid in priced_seconds(lines, known):
        before, counted = counted, min(reached, elapsed_seconds)
        seconds[paid] = seconds.get(paid, 0.0) + counted - before
    seconds[paid] = seconds.get(paid, 0.0) + elapsed_seconds - counted  # saved after the last line
    return {price: value for price, value in seconds.items() if value > 0}


def _is_sound(record: dict[str, Any]) -> bool:
    """Tell whether a result names its model and evaluation, and its numbers are within arithmetic, or not finite."""
    named = isinstance(record.get("model"), str) and isinstance(record.get("evaluation"), str)
    numbers = [one for one in scalars_in(record) if type(one) in (int, float)]
    return named and all(is_number(one) for one in numbers if type(one) is int or math.isfinite(one))
