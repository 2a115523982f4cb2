"""evaluate.py judge: an OpenAI-compatible language model scores several models' answers side by side."""

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import attrs

from common.arguments import number, option, whole_number
from common.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, BadInput
from evaluation.shared.command_line import check_alone

if TYPE_CHECKING:
    from evaluation.instruct.overlap import FreeScores
    from evaluation.judging.client import Credentials
    from evaluation.judging.judgement import Judgement, JudgeOptions
    from evaluation.judging.panel import Panel
    from evaluation.judging.prices import Price
    from evaluation.judging.prompt import Judge

VERDICTS = Path(__file__).resolve().parents[2] / "runs" / "verdicts.jsonl"
POSITIVE, COUNT = number(0, above=True), whole_number(1)


@attrs.frozen(kw_only=True)
class JudgeCommand:
    """Have a language model score several models' answers side by side."""

    answers: Annotated[
        tuple[str, ...], option("answer file, or MODEL for all of its answer files", name="ANSWERS", required=True)
    ] = attrs.field(kw_only=False)
    model: Annotated[
        str | None, option("the judge; default: none, print only the scores that need no judge", "NAME")
    ] = None
    base_url: Annotated[str | None, option("OpenAI-compatible server; default: $OPENAI_BASE_URL, or OpenAI", "URL")] = (
        None
    )
    api: Annotated[Literal["responses", "chat"], option("OpenAI API to use")] = "responses"
    effort: Annotated[str | None, option("reasoning effort; default: the server's", "LEVEL")] = None
    batch: Annotated[bool, option("use the Batch API: half the price, replies within a day")] = False
    poll_seconds: Annotated[float, option("interval between polls of a batch", "N", check=POSITIVE)] = 30.0
    orders: Annotated[int, option("prompts per question, with reordered answers", "K", check=COUNT)] = 3
    seed: Annotated[int, option("random seed of the orders", "N", check=whole_number(0))] = 0
    common: Annotated[bool, option("judge only the questions that all files share")] = False
    concurrency: Annotated[int, option("maximum requests in flight", "N", check=COUNT)] = 8
    timeout: Annotated[float, option("deadline of a request", "SECONDS", check=POSITIVE)] = 120.0
    max_usd: Annotated[
        float | None, option("budget in dollars, over all sessions: never exceeded", "X", check=POSITIVE)
    ] = None
    prices: Annotated[Path | None, option("price table; default: evaluation/judging/prices.json", "FILE")] = None
    retry_wrong: Annotated[bool, option("retry prompts that got only invalid replies")] = False
    allow_left_out: Annotated[
        float, option("keep the result if at most so many prompts have no verdict", "PERCENT", check=number(0, 100))
    ] = 10.0
    verdicts: Annotated[
        Path | None, option("verdict store; default: runs/verdicts.jsonl of the repository", "FILE")
    ] = None

    def run(self) -> int:
        """Print the scores that need no judge, send what is not answered yet, keep and print the judge's scores."""
        check_alone("judge")
        from evaluation.judging.panel import find_files, read_panel
        from evaluation.judging.store import VerdictStore

        panel = read_panel(find_files(self.answers), common=self.common)
        if self.model is None:
            _print_free(panel)
            print("no judge was asked: name one with --model")
            return EXIT_DONE
        from evaluation.judging.client import find_key
        from evaluation.judging.judgement import Judgement
        from evaluation.judging.report import cost_line

        judge, credentials = _server(self, self.model)
        price = _price(self, judge)
        with closing(VerdictStore(self.verdicts or default_store())) as store:
            judgement = Judgement(panel, judge, store, price, _options(self))
            if judgement.outstanding():
                find_key(judge.base_url, credentials)  # fails before anything that takes time
            free = _print_free(panel)
            if any(len(candidate.seeds) > panel.slots for candidate in panel.candidates):
                print(f"judged: the first {panel.slots} of each model's seeds, as many as all models have")
            print(judgement.plan(), flush=True)
            if judgement.outstanding():
                from evaluation.judging.session import ask  # imports openai

                ask(judgement, credentials)
            if judgement.ending.interrupted or judgement.ending.fatal is not None:
                print(cost_line(judgement), flush=True)
            if judgement.ending.interrupted:
                missing = judgement.verdicts().count("missing")
                print(
                    f"interrupted: {missing:,} verdicts are missing; nothing is lost, rerun the same command "
                    "to continue"
                )
                return EXIT_INTERRUPTED
            if judgement.ending.fatal is not None:
                raise judgement.ending.fatal
            return _conclude(judgement, free, self.allow_left_out)


def default_store() -> Path:
    """Return the repository's store. Raises BadInput if one in this folder, an earlier default, would be ignored."""
    here = Path("runs/verdicts.jsonl")
    if here.exists() and here.resolve() != VERDICTS.resolve():
        raise BadInput(
            f"{here}: holds verdicts, and so may {VERDICTS}, the default in every folder; "
            "pass the one to use as --verdicts"
        )
    return VERDICTS


def _print_free(panel: "Panel") -> "list[list[FreeScores]]":
    """Print the scores that need no judge and return them, by candidate and seed."""
    from evaluation.instruct.overlap import free_scores
    from evaluation.judging.report import free_table

    free = [[free_scores(answers) for answers in candidate.seeds] for candidate in panel.candidates]
    print(f"{len(panel.questions):,} questions\n{free_table(panel, free)}", flush=True)
    return free


def _server(arguments: "JudgeCommand", model: str) -> "tuple[Judge, Credentials]":
    """Return the judge, and the user and password that its URL holds."""
    from evaluation.judging.client import OPENAI_URL, split_credentials
    from evaluation.judging.prompt import Judge

    url = arguments.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    if not url.startswith(("http://", "https://")):
        shown = url.rpartition("@")[2]
        raise BadInput(f"--base-url: got '{shown}', wanted http:// or https://, as http://localhost:8000/v1")
    plain, credentials = split_credentials(url)
    judge = Judge(model=model, effort=arguments.effort, base_url=plain.rstrip("/"), api=arguments.api)
    return judge, credentials


def _price(arguments: "JudgeCommand", judge: "Judge") -> "Price":
    """Return the judge's price. It may be unknown for a server other than OpenAI's, if no limit needs it."""
    from evaluation.judging.client import OPENAI_URL
    from evaluation.judging.prices import PRICES, UNKNOWN_PRICE, read_price

    try:
        return read_price(arguments.prices or PRICES, judge.model)
    except BadInput:
        if judge.base_url == OPENAI_URL or arguments.max_usd is not None or arguments.prices is not None:
            raise
        return UNKNOWN_PRICE


def _options(arguments: "JudgeCommand") -> "JudgeOptions":
    from evaluation.judging.judgement import JudgeOptions

    return JudgeOptions(
        orders=arguments.orders,
        seed=arguments.seed,
        batch=arguments.batch,
        poll_seconds=arguments.poll_seconds,
        concurrency=arguments.concurrency,
        timeout_seconds=arguments.timeout,
        max_usd=arguments.max_usd,
        retry_wrong=arguments.retry_wrong,
    )


def _conclude(judgement: "Judgement", free: "list[list[FreeScores]]", allowed_percent: float) -> int:
    """Keep and print scores and comments; return the exit status. Raises BadInput if too many verdicts are missing."""
    from evaluation.judging.judge_result import keep_comments, keep_results
    from evaluation.judging.prices import money
    from evaluation.judging.report import report
    from evaluation.judging.scores import score

    verdicts, over_budget = judgement.verdicts(), judgement.ending.over_budget
    missing, left_out, total = verdicts.count("missing"), verdicts.left_out, len(verdicts.states)
    scores = score(judgement.panel, judgement.prompts, verdicts.scores) if left_out < total else None
    complete = not missing and left_out <= total * allowed_percent / 100
    notes = keep_results(judgement, verdicts, scores, free) if scores is not None and complete else []
    notes += keep_comments(judgement, verdicts) if scores is not None else []
    print("\n".join([report(judgement, verdicts, scores), *notes]))
    if homeless := [candidate.model for candidate in judgement.panel.candidates if candidate.home is None]:
        print(f"not added to any evaluations.jsonl, as their runs are not here: {', '.join(homeless)}")
    sys.stdout.flush()
    if missing and over_budget is not None:
        print(
            f"--max-usd: {missing:,} verdicts are missing, and the next one may cost up to {money(over_budget)}"
            "; nothing is lost, raise --max-usd to continue"
        )
        return EXIT_STOPPED
    if missing:
        why = judgement.why_missing()
        raise BadInput(f"{missing:,} verdicts are missing: {why}; nothing is lost, rerun the same command to continue")
    if scores is None:
        raise BadInput(f"{judgement.judge.model} gave no verdict: {judgement.why_missing()}; pass another --model")
    if not complete:
        raise BadInput(
            f"{left_out:,} of {total:,} prompts ({left_out / total:.0%}) have no verdict, wanted at most "
            f"{allowed_percent:g} %: the result is not kept; rerun the same command, or raise --allow-left-out"
        )
    return EXIT_DONE
