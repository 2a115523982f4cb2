"""What a judge costs: prices from a dated JSON file that people edit, estimates before, actuals after."""

import json
import re
from pathlib import Path
from typing import Any

import attrs

from errors import BadInput, nearest
from evaluation.judging.verdicts import Usage

PRICES = Path(__file__).with_name("prices.json")
BYTES_PER_TOKEN = 4  # of English, a little more in fact; the tokenizers of judges would have to be downloaded
TOKENS_PER_GRADE = 40  # a label, a comment, a score
REASONING_TOKENS = 500  # a guess, for models that think before they answer: only a model's own replies can tell
REASONING_MODELS = ("gpt-5", "gpt-6", "o1", "o3", "o4")
NO_REASONING = ("none", "minimal")


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
        usd = plain * self.input + usage.cached_input * self.cached_input + usage.cache_write * self.cache_write
        return (usd + usage.output * self.output) / 1e6 * (1 - self.batch_discount if batch else 1)


def read_price(path: Path, model: str) -> Price:
    """Return the price of a model, or of a dated version of it. Raises BadInput where the file has none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        models, discount, date = values["usd_per_million_tokens"], float(values["batch_discount"]), str(values["date"])
        undated = re.sub(r"-\d{4}-\d\d-\d\d$", "", model)
        row = models.get(model, models.get(undated))
        if row is None:
            raise BadInput(
                f"{path}: no price of '{model}'; add it to the file, or pass --prices{nearest(model, models)}"
            )
        return _price(row, discount, date)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: {error!r}; wanted the keys and numbers of {PRICES.name}") from error


def expected_usage(sent_bytes: int, answers: int, model: str, effort: str | None) -> Usage:
    """Return a guess of what a request will use, without discounts for repeated beginnings."""
    thinks = model.startswith(REASONING_MODELS) and effort not in NO_REASONING
    output = answers * TOKENS_PER_GRADE + (REASONING_TOKENS if thinks else 0)
    return Usage(input=-(-sent_bytes // BYTES_PER_TOKEN), output=output)


class Budget:
    """What has been spent, and whether another request may be sent."""

    def __init__(self, price: Price | None, most: float | None, paid: float = 0.0):
        """Start with what earlier sessions have paid. `price` None: nothing is counted; `most`: None: no limit."""
        self.spent = 0.0  # in this session
        self.price = price
        self._most = most
        self._paid = paid
        self._in_flight = 0.0  # estimates
        self._settled = 0.0  # estimates of what has been spent

    def reserve(self, usd: float) -> bool:
        """Count a request as sent, by its estimate; False: it would be too much, and is not to be sent.

        The estimates of what is in flight grow with what replies so far have cost over theirs.
        """
        dearer = max(1.0, self.spent / self._settled) if self._settled else 1.0
        if self._most is not None and self._paid + self.spent + dearer * (self._in_flight + usd) > self._most:
            return False
        self._in_flight += usd
        return True

    def settle(self, usd: float, usage: Usage | None, *, batch: bool = False) -> None:
        """Count a reply that was estimated at so much, by that where the server did not say what it used."""
        self._settled += usd
        if self.price is not None:
            self.spent += usd if usage is None else self.price.of(usage, batch=batch)

    def release(self, usd: float) -> None:
        """Take back what was reserved: it is not in flight any more."""
        self._in_flight -= usd


def _price(row: dict[str, Any], discount: float, date: str) -> Price:
    if not 0 <= discount <= 1:
        raise ValueError(f"batch_discount: got {discount}, wanted 0 to 1")
    values = {"cached_input": row["input"], "cache_write": row["input"]} | row
    numbers = {key: float(values[key]) for key in ("input", "cached_input", "cache_write", "output")}
    return Price(**numbers, batch_discount=discount, date=date)
