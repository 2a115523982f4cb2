"""Price table: dollars per million tokens, from a dated JSON file that people edit."""

import math
import re
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, nearest
from common.json_files import read_json
from evaluation.judging.store import Usage

PRICES = Path(__file__).with_name("prices.json")


@attrs.frozen(kw_only=True)
class Price:
    """Prices of one model, in US dollars per million tokens."""

    input: float
    cached_input: float
    cache_write: float
    output: float
    batch_discount: float  # share of the price that a batch saves
    date: str  # when the price was read

    @property
    def known(self) -> bool:
        return bool(self.date)

    def of(self, usage: Usage, *, batch: bool) -> float:
        """Return the cost of tokens in dollars."""
        plain = usage.input - usage.cached_input - usage.cache_write
        write = max(self.input, self.cache_write)
        usd = plain * self.input + usage.cached_input * self.cached_input + usage.cache_write * write
        return (usd + usage.output * self.output) / 1e6 * (1 - self.batch_discount if batch else 1)


UNKNOWN_PRICE = Price(input=0.0, cached_input=0.0, cache_write=0.0, output=0.0, batch_discount=0.0, date="")


def read_price(path: Path, model: str) -> Price:
    """Return the price of a model, or of a dated version of it. Raises BadInput if the file has none."""
    values = read_json(path)
    try:
        models = values["usd_per_million_tokens"]
        row = models.get(model, models.get(re.sub(r"-\d{4}-\d\d-\d\d$", "", model)))
        if row is None:
            hint = nearest(model, models)
            raise BadInput(f"{path}: no price of '{model}'; add it to the file, or pass --prices{hint}")
        return _price(row, float(values["batch_discount"]), str(values["date"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path}: {error!r}; wanted the keys and numbers of {PRICES.name}") from error


def money(usd: float) -> str:
    """Return dollars as text, rounded up: no printed cost is below the bill."""
    return f"${math.ceil(usd * 1e4 - 1e-6) / 1e4:.4f}"


def _price(row: dict[str, Any], discount: float, date: str) -> Price:
    values = {"cached_input": row["input"], "cache_write": row["input"]} | row
    numbers = {key: float(values[key]) for key in ("input", "cached_input", "cache_write", "output")}
    if not 0 <= discount <= 1 or not all(0 <= number < math.inf for number in numbers.values()):
        raise ValueError(f"batch_discount {discount}, prices {numbers}: wanted 0 to 1, and finite numbers from 0")
    return Price(**numbers, batch_discount=discount, date=date)
