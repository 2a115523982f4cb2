"""Verdict store: an append-only JSON Lines file of requests and replies, and their cost.

A line is a request about to be sent, with the most that it can be billed; a reply, under the key of its prompt; or the
ids of requests that ended unbilled. A request without an outcome counts at its most forever. Prices are dollars per
million tokens, from a dated JSON file that people edit.
"""

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import attrs

from common.checks import integer, structured
from common.errors import BadInput
from common.files import open_locked, writing
from common.json_files import JsonLog, read_json, read_json_lines, utc_now
from common.output import show
from common.text import dollars_at_most, nearest
from evaluation.judging.prompt import Judge, read_grades

_COUNT = integer(0, 1 << 50)
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
class Usage:
    """Tokens that the server has counted."""

    input: int = attrs.field(validator=_COUNT)  # with the two below
    cached_input: int = attrs.field(default=0, validator=_COUNT)
    cache_write: int = attrs.field(default=0, validator=_COUNT)
    output: int = attrs.field(validator=_COUNT)

    def __attrs_post_init__(self) -> None:
        if self.cached_input + self.cache_write > self.input:
            raise ValueError("more cached tokens than tokens")


@attrs.frozen(kw_only=True)
class Asked:
    """A request about to be sent."""

    id: str  # of this sending
    key: str  # of the prompt
    limit: int  # max_completion_tokens, as sent
    most: Usage  # that can be billed


@attrs.frozen(kw_only=True)
class Reply:
    """A judge's reply to a prompt, valid or not: it is paid for."""

    key: str
    asked: str | None  # Asked.id
    id: str | None  # the server's
    text: str
    refusal: str | None
    usage: Usage | None  # None: not counted by the server
    model: str | None = None  # the dated snapshot that answered, by the server's name
    cut: bool = False  # ended at the limit
    error: str | None = None  # the server's message in place of an answer

    def problem(self, answers: int) -> str | None:
        """Return the fault of the reply; None for a valid verdict and a refusal."""
        if self.refusal is not None:
            return None
        if self.error is not None:
            return f"the server says: {self.error}"
        try:
            read_grades(self.text, answers)
        except ValueError as error:
            return str(error)
        return None


@attrs.frozen(kw_only=True)
class StoreLine:
    """One line of the file, which has one of these keys."""

    asked: Asked | None = None
    reply: Reply | None = None
    unbilled: list[str] = attrs.field(factory=list)  # ids of requests that have ended unbilled
    why: str | None = None


class VerdictStore:
    """The file, locked while it is open. Raises BadInput if it cannot be used, or is in use."""

    def __init__(self, path: Path):
        self.path = path
        self.replies: list[Reply] = []  # oldest first
        self.by_prompt: defaultdict[str, list[Reply]] = defaultdict(list)  # the same, by the prompt's key
        self.open: dict[str, Asked] = {}  # requests without an outcome, or without a count, by id
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = open_locked(path, f"{path}: another judge holds it; wait for it, or pass another --verdicts")
            self._log = JsonLog(path)  # opened under the lock: it checks whether the last line is whole
        lines = read_json_lines(path, lambda record: structured(record, StoreLine, unknown_keys=True))
        for line in lines.records:
            self._take(line)
        show(*lines.notes())

    def append(self, line: StoreLine) -> None:
        """Store a line, synced to the disk. Raises BadInput if the disk is full, say."""
        record = {key: value for key, value in attrs.asdict(line).items() if value}
        with writing(self.path):  # what is unbilled counts as billed if this line is lost
            self._log.append({**record, "time": utc_now()}, durable=not line.unbilled)
        self._take(line)

    def close(self) -> None:
        self._log.close()
        self._lock.close()

    def _take(self, line: StoreLine) -> None:
        if (asked := line.asked) is not None:
            self.open[asked.id] = asked
        for id in line.unbilled:
            self.open.pop(id, None)
        if (reply := line.reply) is not None:
            self.replies.append(reply)
            self.by_prompt[reply.key].append(reply)
            if reply.usage is not None:
                self.open.pop(reply.asked or "", None)


@attrs.frozen(kw_only=True)
class Price:
    """Prices of one model, in US dollars per million tokens."""

    input: float = attrs.field(validator=_USD)
    cached_input: float = attrs.field(validator=_USD)
    cache_write: float = attrs.field(validator=_USD)
    output: float = attrs.field(validator=_USD)
    date: str  # when the price was read; empty: the price is unknown

    def of(self, usage: Usage) -> float:
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
    def usd(self) -> float:
        return self.counted + sum(self.open)

    def __str__(self) -> str:
        if not self.open:
            return dollars_at_most(self.usd)
        return (
            f"at most {dollars_at_most(self.usd)}: {dollars_at_most(self.counted)} by the server's counts, and up to "
            f"{dollars_at_most(sum(self.open))} for {len(self.open):,} requests without an answer or count, which may "
            "have been billed"
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
    raise BadInput(f"{path}: no price of '{model}'; add it to the file, or pass --prices; {nearest(model, models)}")


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
