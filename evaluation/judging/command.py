"""Options of evaluate.py judge."""

from pathlib import Path
from typing import Annotated

import attrs

from common.arguments import option
from common.checks import integer, number

SECONDS, USD, COUNT = number(0, 1e6, above=True), number(0, 1e9, above=True), integer(1)


@attrs.frozen(kw_only=True)
class JudgeCommand:
    """Have a language model score several models' answers side by side."""

    answers: Annotated[
        tuple[str, ...], option("answer file, or MODEL for all of its answer files", name="ANSWERS...", required=True)
    ] = attrs.field(kw_only=False)
    model: Annotated[
        str | None, option("the judge; default: none, print only the scores that need no judge", "NAME")
    ] = None
    base_url: Annotated[str | None, option("OpenAI-compatible server; default: $OPENAI_BASE_URL, or OpenAI", "URL")] = (
        None
    )
    effort: Annotated[str | None, option("reasoning effort; default: the server's", "LEVEL")] = None
    orders: Annotated[int, option("prompts per question, with reordered answers", "K", check=COUNT)] = 3
    seed: Annotated[int, option("random seed of the orders", "N", check=integer(0))] = 0
    common: Annotated[bool, option("judge only the questions that all files share")] = False
    concurrency: Annotated[int, option("maximum requests in flight", "N", check=COUNT)] = 8
    timeout: Annotated[float, option("deadline of a request", "SECONDS", check=SECONDS)] = 120.0
    max_usd: Annotated[float | None, option("budget in dollars, over all sessions: never exceeded", "X", check=USD)] = (
        None
    )
    prices: Annotated[Path | None, option("price table; default: evaluation/judging/prices.json", "FILE")] = None
    retry_wrong: Annotated[bool, option("retry prompts that got only invalid replies")] = False
    allow_left_out: Annotated[
        float, option("keep the result if at most so many prompts have no verdict", "PERCENT", check=number(0, 100))
    ] = 10.0
    verdicts: Annotated[
        Path | None, option("verdict store; default: runs/verdicts.jsonl of the repository", "FILE")
    ] = None
