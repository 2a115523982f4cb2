"""Measures: numbers that evaluations report, as `evaluate.py compare` reads them from stored results."""

import math
from collections.abc import Callable
from typing import Any

import attrs

from evaluation.shared.significance import Interval, plus_minus, student_interval

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
        """The value with its error or interval."""
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
    session: str = ""  # what the items that were left out belong to, for people

    @classmethod
    def of(cls, record: dict[str, Any], **values: Any) -> "EvaluationResult":
        """Return the result in a line, with those fields that all evaluations store alike."""
        stored = {"evaluation": record["evaluation"], "model": record["model"], "time": str(record.get("time"))}
        return cls(**(stored | values))

    def measurement(self, measure: Measure) -> Measurement | None:
        """Return the measurement of a measure, if there is one."""
        return next((one for one in self.measurements if one.measure == measure), None)
