"""evaluate.py judge: an OpenAI-compatible language model scores several models' answers side by side."""

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from common.arguments import number, whole_number
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
HELP = "have a language model score several models' answers side by side"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    positive, count = number(0, above=True), whole_number(1)
    add = parser.add_argument
    add("answers", metavar="ANSWERS", nargs="+", help="answer file, or MODEL for all of its answer files")
    add("--model", metavar="NAME", help="the judge; default: none, print only the scores that need no judge")
    add("--base-url", metavar="URL", help="OpenAI-compatible server; default: $OPENAI_BASE_URL, or OpenAI")
    add("--api", choices=("responses", "chat"), default="responses", help="OpenAI API to use (%(default)s)")
    add("--effort", metavar="LEVEL", help="reasoning effort; default: the server's")
    add("--batch", action="store_true", help="use the Batch API: half the price, replies within a day")
    add("--poll-seconds", type=positive, default=30.0, metavar="N", help="interval between polls of a batch (30)")
    add("--orders", type=count, default=3, metavar="K", help="prompts per question, with reordered answers (3)")
    add("--seed", type=whole_number(0), default=0, help="random seed of the orders (%(default)s)")
    add("--common", action="store_true", help="judge only the questions that all files share")
    add("--concurrency", type=count, default=8, help="maximum requests in flight (%(default)s)")
    add("--timeout", type=positive, default=120.0, metavar="SECONDS", help="deadline of a request (120)")
    add("--max-usd", type=positive, metavar="X", help="budget in dollars, over all sessions: never exceeded")
    add("--prices", type=Path, metavar="FILE", help="price table; default: evaluation/judging/prices.json")
    add("--retry-wrong", action="store_true", help="retry prompts that got only invalid replies")
    add(
        "--allow-left-out",
        type=number(0, 100),
        default=10.0,
        metavar="PERCENT",
        help="keep the result if at most so many prompts have no verdict (10)",
    )
    add("--verdicts", type=Path, metavar="FILE", help="verdict store; default: runs/verdicts.jsonl of the repository")


def run(arguments: argparse.Namespace) -> int:
    """Print the scores that need no judge, send what is not answered yet, keep and print the judge's scores."""
    check_alone("judge")
    from evaluation.judging.panel import find_files, read_panel
    from evaluation.judging.store import VerdictStore

    panel = read_panel(find_files(arguments.answers), common=arguments.common)
    if arguments.model is None:
        _print_free(panel)
        print("no judge was asked: name one with --model")
        return EXIT_DONE
    from evaluation.judging.client import find_key
    from evaluation.judging.judgement import Judgement
    from evaluation.judging.report import cost_line

    judge, credentials = _server(arguments)
    price = _price(arguments, judge.base_url)
    with closing(VerdictStore(arguments.verdicts or default_store())) as store:
        judgement = Judgement(panel, judge, store, price, _options(arguments))
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
            print(f"interrupted: {missing:,} verdicts are missing; nothing is lost, rerun the same command to continue")
            return EXIT_INTERRUPTED
        if judgement.ending.fatal is not None:
            raise judgement.ending.fatal
        return _conclude(judgement, free, arguments.allow_left_out)


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


def _server(arguments: argparse.Namespace) -> "tuple[Judge, Credentials]":
    """Return the judge, and the user and password that its URL holds."""
    from evaluation.judging.client import OPENAI_URL, split_credentials
    from evaluation.judging.prompt import Judge

    url = arguments.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    if not url.startswith(("http://", "https://")):
        shown = url.rpartition("@")[2]
        raise BadInput(f"--base-url: got '{shown}', wanted http:// or https://, as http://localhost:8000/v1")
    plain, credentials = split_credentials(url)
    judge = Judge(model=arguments.model, effort=arguments.effort, base_url=plain.rstrip("/"), api=arguments.api)
    return judge, credentials


def _price(arguments: argparse.Namespace, base_url: str) -> "Price":
    """Return the judge's price. It may be unknown for a server other than OpenAI's, if no limit needs it."""
    from evaluation.judging.client import OPENAI_URL
    from evaluation.judging.prices import PRICES, UNKNOWN_PRICE, read_price

    try:
        return read_price(arguments.prices or PRICES, arguments.model)
    except BadInput:
        if base_url == OPENAI_URL or arguments.max_usd is not None or arguments.prices is not None:
            raise
        return UNKNOWN_PRICE


def _options(arguments: argparse.Namespace) -> "JudgeOptions":
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
