"""evaluate.py judge"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common.arguments import number, whole_number
from common.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, BadInput
from evaluation.shared.command_line import check_alone

if TYPE_CHECKING:
    from evaluation.instruct.overlap import FreeScores
    from evaluation.judging.candidates import Panel
    from evaluation.judging.prices import Price
    from evaluation.judging.prompt import Judge
    from evaluation.judging.verdicts import VerdictStore

VERDICTS = Path(__file__).resolve().parents[2] / "runs" / "verdicts.jsonl"
HELP = "have a language model score several models' answers together"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("answers", metavar="ANSWERS", nargs="+", help="file of answers, or MODEL with all of its files")
    parser.add_argument("--model", metavar="NAME", help="the judge; without one, only what needs none is scored")
    parser.add_argument(
        "--base-url", metavar="URL", help="of a compatible server; default: $OPENAI_BASE_URL, or OpenAI's"
    )
    parser.add_argument("--api", choices=("responses", "chat"), default="responses", help="(%(default)s)")
    parser.add_argument("--effort", metavar="LEVEL", help="of reasoning; default: the server's")
    parser.add_argument("--batch", action="store_true", help="half price, within a day")
    parser.add_argument(
        "--poll-seconds", type=number(0, above=True), default=30.0, metavar="N", help="between looks at a batch (30)"
    )
    parser.add_argument(
        "--orders", type=whole_number(1), default=3, metavar="K", help="prompts for each question (%(default)s)"
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the orders (%(default)s)")
    parser.add_argument("--common", action="store_true", help="judge the questions that all files share, no others")
    parser.add_argument("--concurrency", type=whole_number(1), default=8, help="requests at a time (%(default)s)")
    parser.add_argument(
        "--timeout", type=number(0, above=True), default=120.0, metavar="SECONDS", help="of a request (120)"
    )
    parser.add_argument(
        "--max-usd", type=number(0, above=True), metavar="X", help="of all sessions: send nothing that could cost more"
    )
    parser.add_argument("--prices", type=Path, metavar="FILE", help="default: evaluation/judging/prices.json")
    parser.add_argument(
        "--retry-wrong", action="store_true", help="ask again where both replies to a prompt were no verdicts"
    )
    parser.add_argument(
        "--allow-left-out",
        type=number(0, 100),
        default=10.0,
        metavar="PERCENT",
        help="keep the result if no more prompts than this have no verdict (10)",
    )
    parser.add_argument(
        "--verdicts",
        type=Path,
        metavar="FILE",
        help="where they are kept; default: runs/verdicts.jsonl beside this script",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print free scores, ask the judge what is not known yet, keep and print its scores; return the exit status."""
    check_alone("judge")
    from evaluation.judging.candidates import find_files, read_panel
    from evaluation.judging.verdicts import VerdictStore

    panel = read_panel(find_files(arguments.answers), common=arguments.common)
    if arguments.model is None:
        _print_free(panel)
        print("no judge was asked: --model names one")
        return EXIT_DONE
    judge, price = _judge(arguments), _price(arguments)
    store = VerdictStore(arguments.verdicts or _default_store())
    try:
        return _judgement(arguments, panel, judge, price, store)
    finally:
        store.close()


def _print_free(panel: "Panel") -> "list[list[FreeScores]]":
    """Print what needs no judge and return it, by candidate and seed."""
    from evaluation.instruct.overlap import free_scores
    from evaluation.judging.report import free_table

    free = [[free_scores(answers) for answers in candidate.seeds] for candidate in panel.candidates]
    print(f"{len(panel.questions):,} questions")
    print(free_table(panel, free), flush=True)
    return free


def _default_store() -> Path:
    """Return the repository's file. Raises BadInput where verdicts of an earlier version would be paid for again."""
    here = Path("runs/verdicts.jsonl")
    if here.exists() and here.resolve() != VERDICTS.resolve():
        raise BadInput(
            f"{here}: holds verdicts, and so may {VERDICTS}, which is the default wherever the command is run; "
            "pass the one to use as --verdicts"
        )
    return VERDICTS


def _base_url(arguments: argparse.Namespace) -> str:
    from evaluation.judging.transport import OPENAI_URL

    return arguments.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL


def _judge(arguments: argparse.Namespace) -> "Judge":
    from evaluation.judging.prompt import Judge
    from evaluation.judging.transport import split_credentials

    url = _base_url(arguments)
    if not url.startswith(("http://", "https://")):
        shown = url.rpartition("@")[2]
        raise BadInput(f"--base-url: got '{shown}', wanted http:// or https://, as http://localhost:8000/v1")
    plain, _ = split_credentials(url)
    return Judge(model=arguments.model, effort=arguments.effort, base_url=plain.rstrip("/"), api=arguments.api)


def _price(arguments: argparse.Namespace) -> "Price | None":
    """Return the judge's price; None where another server has its own, which nobody asked to be counted."""
    from evaluation.judging.prices import PRICES, read_price
    from evaluation.judging.transport import OPENAI_URL

    path = arguments.prices or PRICES
    try:
        return read_price(path, arguments.model)
    except BadInput:
        if _judge(arguments).base_url == OPENAI_URL or arguments.max_usd is not None or arguments.prices is not None:
            raise
        return None


def _judgement(
    arguments: argparse.Namespace, panel: "Panel", judge: "Judge", price: "Price | None", store: "VerdictStore"
) -> int:
    from evaluation.judging.judgement import Judgement, Sending
    from evaluation.judging.prices import money
    from evaluation.judging.transport import find_key, split_credentials

    sending = Sending(
        concurrency=arguments.concurrency,
        timeout_seconds=arguments.timeout,
        batch=arguments.batch,
        poll_seconds=arguments.poll_seconds,
        most_usd=arguments.max_usd,
        retry_wrong=arguments.retry_wrong,
        credentials=split_credentials(_base_url(arguments))[1],
    )
    judgement = Judgement(panel, judge, store, arguments.orders, arguments.seed)
    if judgement.missing:
        find_key(judge.base_url, sending.credentials)  # before anything that takes time
    free = _print_free(panel)
    if any(len(candidate.seeds) > panel.slots for candidate in panel.candidates):
        print(f"judged: {panel.slots} of each model's seeds, the first ones, as many as all models have")
    print(judgement.plan(price, sending), flush=True)
    ending = judgement.ask(sending, price)
    missing, scores = judgement.missing, judgement.scores()
    if ending.interrupted or ending.fatal is not None:
        print(judgement.cost_line(price))
    if ending.interrupted:
        print(f"interrupted: {missing:,} verdicts are missing; nothing is lost, the same command goes on")
        return EXIT_INTERRUPTED
    if ending.fatal is not None:
        sys.stdout.flush()
        raise ending.fatal
    allowed = judgement.left_out <= len(judgement.prompts) * arguments.allow_left_out / 100
    complete = scores is not None and not missing and allowed
    notes = judgement.keep_results(scores, free, price) if scores is not None and complete else []
    notes += judgement.keep_comments() if scores is not None else []
    print("\n".join([judgement.report(scores, price), *notes]))
    if homeless := [candidate.model for candidate in panel.candidates if candidate.home is None]:
        print(f"kept in no evaluations.jsonl, as their runs are not here: {', '.join(homeless)}")
    sys.stdout.flush()
    if missing and ending.over_budget is not None:
        print(
            f"--max-usd: {missing:,} verdicts are missing, and the next one may cost up to {money(ending.over_budget)}"
            "; nothing is lost, raise --max-usd to go on"
        )
        return EXIT_STOPPED
    if missing:
        raise BadInput(f"{missing:,} verdicts are missing: {judgement.why(ending)}; nothing is lost, run it again")
    if scores is None:
        raise BadInput(f"{judge.model} gave no verdict: {judgement.why(ending)}; ask another --model")
    if not complete:
        share = judgement.left_out / len(judgement.prompts)
        raise BadInput(
            f"{judgement.left_out:,} of {len(judgement.prompts):,} prompts ({share:.0%}) have no verdict, wanted at "
            f"most {arguments.allow_left_out:g} %: the result is not kept; run it again, or raise --allow-left-out"
        )
    return EXIT_DONE
