"""What a judge costs: prices from a dated JSON file that people edit, estimates, limits, a budget."""

import math
import re
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, nearest
from common.json_files import read_json
from evaluation.judging.verdicts import Asked, Usage, VerdictStore

PRICES = Path(__file__).with_name("prices.json")
BYTES_PER_TOKEN = 4  # of English, a little more in fact; the tokenizers of judges would have to be downloaded
TOKENS_PER_GRADE = 40  # a label, a comment, a score
MOST_TOKENS_PER_GRADE, MOST_TOKENS_AROUND = 160, 200  # of a judge that does not keep to the rubric's fifteen words
# Thoughts, by effort: what is expected, a guess, and what is allowed. A reply that is cut off is paid for in vain, and
# asked for again with twice the limit; but a request that nobody answers counts at all that it was allowed.
THOUGHTS = {"none": (0, 0), "minimal": (50, 500), "low": (150, 2000), "medium": (500, 6000)}
MOST_THOUGHTS = (2000, 25_000)  # of every other effort; OpenAI advises as much to begin with
THINK = ("gpt-5", "gpt-6", "o1", "o3", "o4")  # models that think unless told otherwise, but for:
SILENT_BY_DEFAULT = ("gpt-5.1", "gpt-5.2", "gpt-5.4")
NEVER_THINK = ("gpt-4", "gpt-3.5")  # of others nobody knows
ENOUGH_REPLIES = 5  # of a judge, to expect more of the same
MANY_REPLIES, ROOM = 20, 4  # to limit it by the longest of them, and to how many times that


@attrs.frozen(kw_only=True)
class Price:
    """Of one model, in US dollars for a million tokens."""

    input: float
    cached_input: float
    cache_write: float
    output: float
    batch_discount: float  # what part of the price a batch saves
    date: str  # when it was read

    def of(self, usage: Usage, *, batch: bool) -> float:
        """Return what tokens cost, in dollars."""
        plain = usage.input - usage.cached_input - usage.cache_write
        write = max(self.input, self.cache_write)
        usd = plain * self.input + usage.cached_input * self.cached_input + usage.cache_write * write
        return (usd + usage.output * self.output) / 1e6 * (1 - self.batch_discount if batch else 1)


def read_price(path: Path, model: str) -> Price:
    """Return the price of a model, or of a dated version of it. Raises BadInput where the file has none."""
    values = read_json(path)
    try:
        models, discount, date = values["usd_per_million_tokens"], float(values["batch_discount"]), str(values["date"])
        undated = re.sub(r"-\d{4}-\d\d-\d\d$", "", model)
        row = models.get(model, models.get(undated))
        if row is None:
            raise BadInput(
                f"{path}: no price of '{model}'; add it to the file, or pass --prices{nearest(model, models)}"
            )
        return _price(row, discount, date)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path}: {error!r}; wanted the keys and numbers of {PRICES.name}") from error


def most_output(answers: int, model: str, effort: str | None, longest: int | None = None) -> int:
    """Return how many tokens a reply may have, thoughts included; the server is told to end there.

    `longest`: of many replies of this judge; then the limit is halved while it is far above that.
    """
    by_default = "low" if model.startswith(SILENT_BY_DEFAULT) else "medium"
    allowed = THOUGHTS.get(effort or by_default, MOST_THOUGHTS)[1]
    least = MOST_TOKENS_AROUND + answers * MOST_TOKENS_PER_GRADE
    limit = least + (0 if model.startswith(NEVER_THINK) else allowed)
    while longest is not None and limit // 2 >= max(least, ROOM * longest):
        limit //= 2
    return limit


def most_usage(sent_bytes: int, output: int) -> Usage:
    """Return the most that a request can use: a tokenizer of bytes makes at most one token of each."""
    return Usage(input=sent_bytes, cache_write=sent_bytes, output=output)


def expected_usage(sent_bytes: int, answers: int, model: str, effort: str | None) -> Usage:
    """Return a guess of what a request will use, without discounts for repeated beginnings."""
    thinks = model.startswith(THINK) and (effort is not None or not model.startswith(SILENT_BY_DEFAULT))
    thoughts = THOUGHTS.get(effort or "medium", MOST_THOUGHTS)[0] if thinks else 0
    return Usage(input=-(-sent_bytes // BYTES_PER_TOKEN), output=answers * TOKENS_PER_GRADE + thoughts)


@attrs.frozen(kw_only=True)
class Measured:
    """What a judge's replies have used so far."""

    replies: int
    input: float  # tokens a byte that was sent
    output: float  # tokens an answer

    def usage(self, sent_bytes: int, answers: int) -> Usage:
        """Return what a request will use, if it is like those."""
        return Usage(input=math.ceil(self.input * sent_bytes), output=math.ceil(self.output * answers))


def measured(store: VerdictStore, judge: str) -> Measured | None:
    """Return what a judge's replies have used; None of less than ENOUGH_REPLIES."""
    pairs: list[tuple[Asked, Usage]] = [
        (asked, reply.usage)
        for reply in store.in_order
        if reply.usage is not None
        and reply.usage.output > 0
        and (asked := store.asked.get(reply.asked or "")) is not None
        and asked.judge == judge
    ]
    if len(pairs) < ENOUGH_REPLIES:
        return None
    return Measured(
        replies=len(pairs),
        input=sum(usage.input for _, usage in pairs) / sum(asked.sent_bytes for asked, _ in pairs),
        output=sum(usage.output for _, usage in pairs) / sum(asked.answers for asked, _ in pairs),
    )


class JudgeBudget:
    """What has been spent or may still be billed, and whether another request may be sent."""

    def __init__(self, price: Price | None, most: float | None, usd: float = 0.0):
        """Start with what earlier sessions count. `price` None: nothing is counted; `most`: None: no limit."""
        self.price = price
        self.usd = usd  # costs, and of requests without an outcome the most that they can cost
        self._most = most

    def cost(self, usage: Usage, *, batch: bool) -> float:
        """Return what tokens cost, in dollars; 0 where no price is known."""
        return 0.0 if self.price is None else self.price.of(usage, batch=batch)

    def reserve(self, asked: Asked) -> bool:
        """Count a request, about to be sent, at its most; False: it could be too much, and is not to be sent."""
        usd = self.cost(asked.most, batch=asked.batch)
        if self._most is not None and self.usd + usd > self._most:
            return False
        self.usd += usd
        return True

    def settle(self, asked: Asked, usage: Usage | None) -> None:
        """Count what a request has used in place of its most; None: not known, so that this stays."""
        if usage is not None:
            self.usd += self.cost(usage, batch=asked.batch) - self.cost(asked.most, batch=asked.batch)


def money(usd: float) -> str:
    """Return dollars as text, rounded up: what is printed is never below the bill."""
    return f"${math.ceil(usd * 1e4 - 1e-6) / 1e4:.4f}"


def _price(row: dict[str, Any], discount: float, date: str) -> Price:
    values = {"cached_input": row["input"], "cache_write": row["input"]} | row
    numbers = {key: float(values[key]) for key in ("input", "cached_input", "cache_write", "output")}
    if not 0 <= discount <= 1 or not all(0 <= number < math.inf for number in numbers.values()):
        raise ValueError(f"batch_discount {discount}, prices {numbers}: wanted 0 to 1, and finite numbers from 0")
    return Price(**numbers, batch_discount=discount, date=date)
