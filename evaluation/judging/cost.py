"""Cost of a judgement: price table, the most that a request can be billed, estimates, and the money spent.

Prices are dollars per million tokens, from a dated JSON file that people edit.
"""

import math
import re
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, nearest
from common.json_files import read_json
from common.structure import structured
from evaluation.judging.prompt import Judge
from evaluation.judging.store import Usage

PRICES = Path(__file__).with_name("prices.json")
BYTES_PER_TOKEN = 4  # English, roughly: judges' tokenizers would have to be downloaded
TOKENS_PER_GRADE = 40  # label, comment, score
MOST_TOKENS_PER_GRADE, MOST_TOKENS_AROUND = 160, 200  # of a judge that exceeds the rubric's fifteen words
# Reasoning tokens by effort: expected (a guess), and allowed. A reply that is cut off is paid for in vain and asked for
# again with twice the limit; but a request without an answer counts at all that it was allowed.
REASONING = {"none": (0, 0), "minimal": (50, 500), "low": (150, 2000), "medium": (500, 6000)}
MOST_REASONING = (2000, 25_000)  # of every other effort; OpenAI advises as much to begin with
REASONING_MODELS = ("gpt-5", "gpt-6", "o1", "o3", "o4")  # by default, except:
SILENT_BY_DEFAULT = ("gpt-5.1", "gpt-5.2", "gpt-5.4")
NEVER_REASONING = ("gpt-4", "gpt-3.5")  # others are not known
_USD: list[Any] = [attrs.validators.ge(0), attrs.validators.lt(math.inf)]


@attrs.frozen(kw_only=True)
class Price:
    """Prices of one model, in US dollars per million tokens."""

    input: float = attrs.field(validator=_USD)
    cached_input: float = attrs.field(validator=_USD)
    cache_write: float = attrs.field(validator=_USD)
    output: float = attrs.field(validator=_USD)
    date: str  # when the price was read; empty: the price is unknown

    def of(self, usage: Usage) -> float:
        """Return the cost of tokens in dollars."""
        plain = usage.input - usage.cached_input - usage.cache_write
        write = max(self.input, self.cache_write)
        usd = plain * self.input + usage.cached_input * self.cached_input + usage.cache_write * write
        return (usd + usage.output * self.output) / 1e6


UNKNOWN_PRICE = Price(input=0.0, cached_input=0.0, cache_write=0.0, output=0.0, date="")


@attrs.frozen
class JudgeCost:
    """Cost so far, never below the server's bill."""

    counted: float  # dollars of replies, by the server's counts
    open: list[float]  # the most that each request without an answer or a count can cost

    @property
    def uncounted(self) -> float:
        return sum(self.open)

    @property
    def usd(self) -> float:
        return self.counted + self.uncounted

    def __str__(self) -> str:
        if not self.open:
            return money(self.usd)
        return (
            f"at most {money(self.usd)}: {money(self.counted)} by the server's counts, and up to "
            f"{money(self.uncounted)} for {len(self.open):,} requests without an answer or count, which may have been "
            "billed"
        )


def read_price(path: Path, model: str) -> Price:
    """Return the price of a model, or of a dated version of it. Raises BadInput if the file has none."""
    table = read_json(path)
    try:
        models = table["usd_per_million_tokens"]
        row = models.get(model, models.get(re.sub(r"-\d{4}-\d\d-\d\d$", "", model)))
        if row is not None:
            defaults = {"cached_input": row["input"], "cache_write": row["input"]}
            return structured({**defaults, **row, "date": table["date"]}, Price, unknown_keys=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: {error!r}; wanted the keys and numbers of {PRICES.name}") from error
    raise BadInput(f"{path}: no price of '{model}'; add it to the file, or pass --prices{nearest(model, models)}")


def money(usd: float) -> str:
    """Return dollars as text, rounded up: no printed cost is below the bill."""
    return f"${math.ceil(usd * 1e4 - 1e-6) / 1e4:.4f}"


def most_output(answers: int, judge: Judge) -> int:
    """Return the token limit of a reply, reasoning included."""
    by_default = "low" if judge.model.startswith(SILENT_BY_DEFAULT) else "medium"
    allowed = REASONING.get(judge.effort or by_default, MOST_REASONING)[1]
    reasoning = 0 if judge.model.startswith(NEVER_REASONING) else allowed
    return MOST_TOKENS_AROUND + answers * MOST_TOKENS_PER_GRADE + reasoning


def expected_usage(sent_bytes: int, answers: int, judge: Judge) -> Usage:
    """Return a guess of the usage of a request, without discounts for repeated prefixes."""
    silent = judge.effort is None and judge.model.startswith(SILENT_BY_DEFAULT)
    reasons = judge.model.startswith(REASONING_MODELS) and not silent
    reasoning = REASONING.get(judge.effort or "medium", MOST_REASONING)[0] if reasons else 0
    return Usage(input=-(-sent_bytes // BYTES_PER_TOKEN), output=answers * TOKENS_PER_GRADE + reasoning)
