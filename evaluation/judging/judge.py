"""Judge evaluation, from answer files to the report: scores without a judge, its verdicts, their cost, results."""

import asyncio
import ipaddress
import os
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, BadInput
from common.output import show
from common.redaction import HIDDEN, SHORTEST_KEY, redacted
from common.text import dollars_at_most
from evaluation.command_line import JudgeCommand
from evaluation.instruct.reference_scores import ReferenceScores, reference_scores
from evaluation.judging.judgement import NOT_ASKED, Judgement
from evaluation.judging.prompt import Judge, Panel, find_files, read_panel
from evaluation.judging.scores import cost_line, keep_comments, keep_results, report, score, table_without_judge
from evaluation.judging.store import PRICES, UNKNOWN_PRICE, VerdictStore, read_price

OPENAI_URL = "https://api.openai.com/v1"
VERDICTS = Path(__file__).resolve().parents[2] / "runs" / "verdicts.jsonl"
AGAIN = "nothing is lost, rerun the same command to continue"


def run(command: JudgeCommand) -> int:
    """Print scores without a judge, ask what has no answer yet, keep and print its scores; return the exit status."""
    panel = read_panel(find_files(command.answers), common=command.common)
    if command.model is None:
        _print_without_judge(panel)
        show("no judge was asked: name one with --model")
        return EXIT_DONE
    url = (command.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
    judge = Judge(model=command.model, effort=command.effort, base_url=url)
    try:
        price = read_price(command.prices or PRICES, judge.model)
    except BadInput:  # a limit needs the price, and OpenAI's are known
        if url == OPENAI_URL or command.max_usd is not None or command.prices is not None:
            raise
        price = UNKNOWN_PRICE
    with closing(VerdictStore(command.verdicts or VERDICTS)) as store:
        judgement = Judgement(panel, judge, store, price, command)
        key = find_key(url) if judgement.outstanding() else ""  # fails before anything that takes time
        without_judge = _print_without_judge(panel)
        if any(len(candidate.seeds) > panel.slots for candidate in panel.candidates):
            show(f"judged: the first {panel.slots} of each model's seeds, as many as all models have")
        show(*judgement.plan().split("\n"))
        if judgement.outstanding():
            from evaluation.judging.client import Asker  # imports openai

            asyncio.run(Asker(judgement, key).ask())
        if judgement.interrupted:
            missing = sum(verdict.state == "missing" for verdict in judgement.verdicts())
            show(cost_line(judgement), f"interrupted: {missing:,} verdicts are missing; {AGAIN}")
            return EXIT_INTERRUPTED
        if judgement.fatal is not None:
            show(cost_line(judgement))
            raise judgement.fatal
        return _conclude(judgement, without_judge)


def find_key(base_url: str) -> str:
    """Return the API key, which OpenAI needs. Raises BadInput for one that cannot be sent, or would be sent in clear.

    A key that no header can hold would fail in each request, after its cost is reserved. A word of fewer than
    SHORTEST_KEY characters is not a secret, but what servers that need no key ask for, such as EMPTY.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    try:
        url = urlsplit(base_url)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # an odd port, or half an IPv6 address
        usable = False
    if not usable or redacted(base_url) != base_url:
        shown = redacted(base_url).replace(f"{HIDDEN}@", "")
        raise BadInput(f"--base-url: got '{shown}', wanted http:// or https://, without user, password and key")
    if not key and base_url == OPENAI_URL:
        raise BadInput("OPENAI_API_KEY: not set; set it to a key of the provider, or pass --base-url of another server")
    if wrong := next((character for character in key if not "!" <= character <= "~" or character in "\"'`"), None):
        problem = f"got the character {wrong!a} in it, wanted ASCII without spaces and quotation marks"
        raise BadInput(f"OPENAI_API_KEY: {problem}; nothing was sent: copy the key again")
    if len(key) >= SHORTEST_KEY and url.scheme == "http" and not _is_this_machine(url.hostname or ""):
        raise BadInput(
            f"{base_url}: OPENAI_API_KEY would cross the network unencrypted; use https://, or an SSH tunnel to "
            "localhost, or unset it if this server needs no key"
        )
    return key


def _is_this_machine(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _print_without_judge(panel: Panel) -> list[list[ReferenceScores]]:
    found = [[reference_scores(answers) for answers in candidate.seeds] for candidate in panel.candidates]
    show(f"{len(panel.questions):,} questions", *table_without_judge(panel, found).split("\n"))
    return found


def _conclude(judgement: Judgement, without_judge: list[list[ReferenceScores]]) -> int:
    """Keep and print scores and comments; return the exit status. Raises BadInput if too many verdicts are missing."""
    verdicts, allowed = judgement.verdicts(), judgement.options.allow_left_out
    left_out = [verdict for verdict in verdicts if verdict.state != "judged"]
    missing = sum(verdict.state == "missing" for verdict in left_out)
    complete = not missing and len(left_out) <= len(verdicts) * allowed / 100
    scores, notes = None, []
    if len(left_out) < len(verdicts):
        scores = score(judgement.panel, judgement.prompts, [verdict.grades for verdict in verdicts])
        notes += keep_results(judgement, verdicts, scores, without_judge) if complete else []
        notes += keep_comments(judgement, verdicts)
    if homeless := [candidate.model for candidate in judgement.panel.candidates if candidate.home is None]:
        notes.append(f"not added to any evaluations.jsonl, as their runs are not here: {', '.join(homeless)}")
    show(*report(judgement, verdicts, scores).split("\n"), *notes)
    if missing and judgement.over_budget is not None:
        show(
            f"--max-usd: {missing:,} verdicts are missing, and the next one may cost up to "
            f"{dollars_at_most(judgement.over_budget)}; nothing is lost, raise --max-usd to continue"
        )
        return EXIT_STOPPED
    reasons = Counter(verdict.why for verdict in left_out if verdict.why != NOT_ASKED)
    why = max(reasons, key=reasons.__getitem__, default=NOT_ASKED)
    if missing:
        raise BadInput(f"{missing:,} verdicts are missing: {why}; {AGAIN}")
    if scores is None:
        raise BadInput(f"{judgement.judge.model} gave no verdict: {why}; pass another --model")
    if not complete:
        raise BadInput(
            f"{len(left_out):,} of {len(verdicts):,} prompts ({len(left_out) / len(verdicts):.0%}) have no verdict, "
            f"wanted at most {allowed:g} %: the result is not kept; rerun the same command, or raise --allow-left-out"
        )
    return EXIT_DONE
