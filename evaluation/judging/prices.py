"""Price table: dollars per million tokens, from a dated JSON file that people edit."""

import math
import re
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, nearest
from common.json_files import read_json
from common.structure import structured
from evaluation.judging.store import Usage

PRICES = Path(__file__).with_name("prices.json")
_USD: list[Any] = [attrs.validators.ge(0), attrs.validators.lt(math.inf)]
_SHARE: list[Any] = [attrs.validators.ge(0), attrs.validators.le(1)]


@attrs.frozen(kw_only=True)
class Price:
    """Prices of one model, in US dollars per million tokens."""

    input: float = attrs.field(validator=_USD)
    cached_input: float = attrs.field(validator=_USD)
    cache_write: float = attrs.field(validator=_USD)
    output: float = attrs.field(validator=_USD)
    batch_discount: float = attrs.field(validator=_SHARE)  # share that a batch saves
    date: str  # when the price was read; empty: the price is unknown

    def of(self, usage: Usage, *, batch: bool) -> float:
        """Return the cost of tokens in dollars."""
        plain = usage.input - usage.cached_input - usage.cache_write
        write = max(self.input, self.cache_write)
        usd = plain * self.input + usage.cached_input * self.cached_input + usage.cache_write * write
        return (usd + usage.output * self.output) / 1e6 * (1 - self.batch_discount if batch else 1)


UNKNOWN_PRICE = Price(input=0.0, cached_input=0.0, cache_write=0.0, output=0.0, batch_discount=0.0, date="")


def read_price(path: Path, model: str) -> Price:
    """Return the price of a model, or of a dated version of it. Raises BadInput if the file has none."""
    table = read_json(path)
    try:
        models, shared = table["usd_per_million_tokens"], {key: table[key] for key in ("batch_discount", "date")}
        row = models.get(model, models.get(re.sub(r"-\d{4}-\d\d-\d\d$", "", model)))
        if row is not None:
            defaults = {"cached_input": row["input"], "cache_write": row["input"]}
            return structured({**defaults, **row, **shared}, Price, unknown_keys=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: {error!r}; wanted the keys and numbers of {PRICES.name}") from error
    raise BadInput(f"{path}: no price of '{model}'; add it to the file, or pass --prices{nearest(model, models)}")


def money(usd: float) -> str:
    """Return dollars as text, rounded up: no printed cost is below the bill."""
    return f"${math.ceil(usd * 1e4 - 1e-6) / 1e4:.4f}"
