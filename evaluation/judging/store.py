"""The verdict store: an append-only JSON Lines file of requests and replies, and what they cost.

Each line contains one of three things: a request that is about to be sent, with the largest usage that can be billed; a
reply, with the key of its prompt; or the ids of requests that ended without being billed. A request without an
outcome always counts with its maximum cost. Prices are dollars per million tokens; they come from a dated JSON file
that users edit.
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
BYTES_PER_TOKEN = 4  # approximately, in English; the judges' own tokenizers would have to be downloaded
TOKENS_PER_GRADE = 40  # expected number of tokens for a label, a comment and a score
MOST_TOKENS_PER_GRADE, MOST_TOKENS_AROUND = 160, 200  # limits that allow for comments longer than the rubric's 15 words
# Reasoning tokens by effort: the expected number, which is a guess, and the limit. If the limit is too low, a reply is
# cut off: we pay for it in vain, and request it again with twice the limit. If the limit is too high, the cost of a
# request that gets no answer is overestimated.
REASONING = {"none": (0, 0), "minimal": (50, 500), "low": (150, 2000), "medium": (500, 6000)}
MOST_REASONING = (2000, 25_000)  # for all other efforts; OpenAI recommends starting with this limit
REASONING_MODELS = ("gpt-5", "gpt-6", "o1", "o3", "o4")  # models that reason by default, except SILENT_BY_DEFAULT
SILENT_BY_DEFAULT = ("gpt-5.1", "gpt-5.2", "gpt-5.4")
NEVER_REASONING = ("gpt-4", "gpt-3.5")  # nothing is known about a model that is in none of these three lists
_USD: list[Any] = [attrs.validators.ge(0), attrs.validators.lt(math.inf)]


@attrs.frozen(kw_only=True)
class Usage:
    """The server's counts of tokens."""

    input: int = attrs.field(validator=_COUNT)  # including cached_input and cache_write
    cached_input: int = attrs.field(default=0, validator=_COUNT)
    cache_write: int = attrs.field(default=0, validator=_COUNT)
    output: int = attrs.field(validator=_COUNT)

    def __attrs_post_init__(self) -> None:
        if self.cached_input + self.cache_write > self.input:
            raise ValueError("more cached tokens than input tokens")


@attrs.frozen(kw_only=True)
class JudgeRequest:
    """A request that is about to be sent."""

    id: str  # unique, even among retries of the same request
    key: str  # key of the prompt
    limit: int  # the request's max_completion_tokens
    most: Usage  # the largest usage that can be billed


@attrs.frozen(kw_only=True)
class Reply:
    """A judge's reply to a prompt. It is paid for whether it is valid or not."""

    key: str
    asked: str | None  # the id of the JudgeRequest
    id: str | None  # the server's id
    text: str
    refusal: str | None
    usage: Usage | None  # None: the server sent no valid counts
    model: str | None = None  # the server's name for the dated snapshot that answered
    cut: bool = False  # True: the reply ended at the token limit
    error: str | None = None  # the server's error message instead of an answer

    def problem(self, answers: int) -> str | None:
        """Return what is wrong with the reply, or None if it is a valid verdict or a refusal."""
        if self.refusal is not None:
            return None
        if self.error is not None:
            return f"the server's message: {self.error}"
        try:
            read_grades(self.text, answers)
        except ValueError as error:
            return str(error)
        return None


@attrs.frozen(kw_only=True)
class StoreLine:
    """A line of the file. It has exactly one of the first three keys."""

    asked: JudgeRequest | None = None
    reply: Reply | None = None
    unbilled: list[str] = attrs.field(factory=list)  # ids of requests that ended without being billed
    why: str | None = None  # why the requests were not billed


class VerdictStore:
    """The file of verdicts, which is locked while it is open."""

    def __init__(self, path: Path):
        """Open the file. Raises BadInput if it cannot be used or is in use."""
        self.path = path
        self.replies: list[Reply] = []  # oldest first
        self.by_prompt: defaultdict[str, list[Reply]] = defaultdict(list)  # all replies, by the prompt's key
        self.open: dict[str, JudgeRequest] = {}  # requests without an outcome or without token counts, by id
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = open_locked(
                path, f"{path}: in use by another judge session; wait for it, or pass another --verdicts"
            )
            self._log = JsonLog(path)  # opened under the lock, because JsonLog checks whether the last line is complete
        lines = read_json_lines(path, lambda record: structured(record, StoreLine, unknown_keys=True))
        for line in lines.records:
            self._take(line)
        show(*lines.notes())

    def append(self, line: StoreLine) -> None:
        """Store a line and sync it to the disk. Raises BadInput, for example if the disk is full.

        A line with unbilled requests is not synced: if such a line is lost, its requests merely count as billed.
        """
        record = {key: value for key, value in attrs.asdict(line).items() if value}
        with writing(self.path):
            self._log.append({**record, "time": utc_now()}, durable=not line.unbilled)
        self._take(line)

    def close(self) -> None:
        self._log.close()
        self._lock.close()

    def _take(self, line: StoreLine) -> None:
        """Update the replies and the open requests with a line of the file."""
        if (request := line.asked) is not None:
            self.open[request.id] = request
        for id in line.unbilled:
            self.open.pop(id, None)
        if (reply := line.reply) is not None:
            self.replies.append(reply)
            self.by_prompt[reply.key].append(reply)
            if reply.usage is not None:
                self.open.pop(reply.asked or "", None)


@attrs.frozen(kw_only=True)
class Price:
    """The prices of a model, in US dollars per million tokens."""

    input: float = attrs.field(validator=_USD)
    cached_input: float = attrs.field(validator=_USD)
    cache_write: float = attrs.field(validator=_USD)
    output: float = attrs.field(validator=_USD)
    date: str  # when the price was looked up; empty: the price is unknown

    def of(self, usage: Usage) -> float:
        """Return the price in dollars of the tokens that `usage` counts."""
        plain = usage.input - usage.cached_input - usage.cache_write
        write = max(self.input, self.cache_write)
        usd = plain * self.input + usage.cached_input * self.cached_input + usage.cache_write * write
        return (usd + usage.output * self.output) / 1e6


UNKNOWN_PRICE = Price(input=0.0, cached_input=0.0, cache_write=0.0, output=0.0, date="")


@attrs.frozen
class JudgeCost:
    """The cost so far, in dollars. It is never less than the server's bill."""

    billed_usd: float  # the cost of replies, according to the server's token counts
    open: list[float]  # the maximum costs of the requests without an answer or without token counts

    @property
    def usd(self) -> float:
        return self.billed_usd + sum(self.open)

    def __str__(self) -> str:
        if not self.open:
            return dollars_at_most(self.usd)
        return (
            f"at most {dollars_at_most(self.usd)}: {dollars_at_most(self.billed_usd)} by the server's token counts, "
            f"and up to {dollars_at_most(sum(self.open))} for {len(self.open):,} requests without an answer or a token "
            "count, which may have been billed"
        )


def read_price(path: Path, model: str) -> Price:
    """Return the price of a model. Raises BadInput if it is not in the file.

    If a dated version of a model, such as gpt-5-mini-2025-08-07, has no row of its own, it has the price of the
    undated model.
    """
    table = read_json(path)
    try:
        models = table["usd_per_million_tokens"]
        row = models.get(model, models.get(re.sub(r"-\d{4}-\d\d-\d\d$", "", model)))
        if row is not None:
            defaults = {"cached_input": row["input"], "cache_write": row["input"]}
            return structured({**defaults, **row, "date": table["date"]}, Price, unknown_keys=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: {error!r}; wanted a file with the same keys as {PRICES.name}") from error
    raise BadInput(f"{path}: no price for '{model}'; add it to the file, or pass --prices; {nearest(model, models)}")


def most_output(answers: int, judge: Judge) -> int:
    """Return the token limit of a reply, including reasoning."""
    by_default = "low" if judge.model.startswith(SILENT_BY_DEFAULT) else "medium"
    allowed = REASONING.get(judge.effort or by_default, MOST_REASONING)[1]
    reasoning = 0 if judge.model.startswith(NEVER_REASONING) else allowed
    return MOST_TOKENS_AROUND + answers * MOST_TOKENS_PER_GRADE + reasoning


def expected_usage(sent_bytes: int, answers: int, judge: Judge) -> Usage:
    """Return an estimate of a request's usage, without discounts for repeated prefixes."""
    is_silent = judge.effort is None and judge.model.startswith(SILENT_BY_DEFAULT)
    is_reasoning = judge.model.startswith(REASONING_MODELS) and not is_silent
    reasoning = REASONING.get(judge.effort or "medium", MOST_REASONING)[0] if is_reasoning else 0
    return Usage(input=-(-sent_bytes // BYTES_PER_TOKEN), output=answers * TOKENS_PER_GRADE + reasoning)
