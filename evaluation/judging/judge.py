"""Judge answers: read the files, print the scores that need no judge, collect verdicts, and report the results."""

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
from evaluation.judging.judgment import NOT_ASKED, Judgment
from evaluation.judging.prompt import Judge, Panel, find_files, read_panel
from evaluation.judging.scores import cost_line, report, score, store_results, table_without_judge, write_comments
from evaluation.judging.store import PRICES, UNKNOWN_PRICE, VerdictStore, read_price

OPENAI_URL = "https://api.openai.com/v1"
VERDICTS = Path(__file__).resolve().parents[2] / "runs" / "verdicts.jsonl"
NOTHING_LOST = "nothing is lost; run the same command again to continue"


def run(command: JudgeCommand) -> int:
    """Print the scores that need no judge. Then ask the judge for the missing verdicts, and store and print its scores.

    Return the exit status.
    """
    panel = read_panel(find_files(command.answers), common=command.common)
    if command.model is None:
        _print_without_judge(panel)
        show("no judge model was given; to have the answers judged, pass --model")
        return EXIT_DONE
    url = (command.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
    judge = Judge(model=command.model, effort=command.effort, base_url=url)
    try:
        price = read_price(command.prices or PRICES, judge.model)
    except BadInput:
        # An unknown price is an error if the server is OpenAI's, if --max-usd needs the price, or if the user passed a
        # price table.
        if url == OPENAI_URL or command.max_usd is not None or command.prices is not None:
            raise
        price = UNKNOWN_PRICE
    with closing(VerdictStore(command.verdicts or VERDICTS)) as store:
        judgment = Judgment(panel, judge, store, price, command)
        # A missing or unusable key is reported here, before anything that takes time.
        key = find_key(url) if judgment.outstanding() else ""
        without_judge = _print_without_judge(panel)
        if any(len(candidate.seeds) > panel.slots for candidate in panel.candidates):
            show(f"judging the first {panel.slots} seeds of each model, because not every model has more")
        show(*judgment.plan().split("\n"))
        if judgment.outstanding():
            from evaluation.judging.client import Asker  # imports openai

            asyncio.run(Asker(judgment, key).ask())
        if judgment.interrupted:
            missing = sum(verdict.state == "missing" for verdict in judgment.verdicts())
            show(cost_line(judgment), f"interrupted: {missing:,} verdicts are missing; {NOTHING_LOST}")
            return EXIT_INTERRUPTED
        if judgment.fatal is not None:
            show(cost_line(judgment))
            raise judgment.fatal
        return _conclude(judgment, without_judge)


def find_key(base_url: str) -> str:
    """Return the API key. Raises BadInput if it is missing, cannot be sent, or would be sent unencrypted.

    Without this check, a key that is not valid in a header would make every request fail, after the cost of the request
    had been reserved. A key of fewer than SHORTEST_KEY characters is not considered a secret: it is a placeholder,
    such as EMPTY, for a server that needs no key. Only OpenAI's server always needs a key.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    try:
        url = urlsplit(base_url)
        is_usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # an invalid port or an incomplete IPv6 address
        is_usable = False
    if not is_usable or redacted(base_url) != base_url:
        shown = redacted(base_url).replace(f"{HIDDEN}@", "")
        raise BadInput(f"--base-url: got '{shown}', wanted http:// or https://, without a user, password or key")
    if not key and base_url == OPENAI_URL:
        raise BadInput("OPENAI_API_KEY: not set; set it to your OpenAI API key, or pass --base-url for another server")
    if invalid := next((character for character in key if not "!" <= character <= "~" or character in "\"'`"), None):
        problem = f"contains the character {invalid!a}, wanted ASCII without spaces or quotation marks"
        raise BadInput(f"OPENAI_API_KEY: {problem}; nothing was sent: copy the key again")
    if len(key) >= SHORTEST_KEY and url.scheme == "http" and not _is_this_machine(url.hostname or ""):
        raise BadInput(
            f"{base_url}: OPENAI_API_KEY would cross the network unencrypted; use https:// or an SSH tunnel to "
            "localhost, or unset OPENAI_API_KEY if this server does not need a key"
        )
    return key


def _is_this_machine(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _print_without_judge(panel: Panel) -> list[list[ReferenceScores]]:
    """Print and return the scores that need no judge, by candidate and seed."""
    scores = [[reference_scores(answers) for answers in candidate.seeds] for candidate in panel.candidates]
    show(f"{len(panel.questions):,} questions", *table_without_judge(panel, scores).split("\n"))
    return scores


def _conclude(judgment: Judgment, without_judge: list[list[ReferenceScores]]) -> int:
    """Store and print scores and comments, and return the exit status.

    Raises BadInput if too many verdicts are missing.
    """
    verdicts, limit = judgment.verdicts(), judgment.options.allow_left_out
    left_out = [verdict for verdict in verdicts if verdict.state != "judged"]
    missing = sum(verdict.state == "missing" for verdict in left_out)
    is_complete = not missing and len(left_out) <= len(verdicts) * limit / 100
    scores, notes = None, []
    if len(left_out) < len(verdicts):
        scores = score(judgment.panel, judgment.prompts, [verdict.grades for verdict in verdicts])
        notes += store_results(judgment, verdicts, scores, without_judge) if is_complete else []
        notes += write_comments(judgment, verdicts)
    if without_home := [candidate.model for candidate in judgment.panel.candidates if candidate.home is None]:
        notes.append(f"results were not stored, because the run is not on this machine: {', '.join(without_home)}")
    show(*report(judgment, verdicts, scores).split("\n"), *notes)
    if missing and judgment.over_budget is not None:
        show(
            f"--max-usd: {missing:,} verdicts are missing, and the next one may cost up to "
            f"{dollars_at_most(judgment.over_budget)}; nothing is lost; raise --max-usd to continue"
        )
        return EXIT_STOPPED
    reasons = Counter(verdict.why for verdict in left_out if verdict.why != NOT_ASKED)
    why = max(reasons, key=reasons.__getitem__, default=NOT_ASKED)
    if missing:
        raise BadInput(f"{missing:,} verdicts are missing: {why}; {NOTHING_LOST}")
    if scores is None:
        raise BadInput(f"{judgment.judge.model} gave no verdict: {why}; pass another --model")
    if not is_complete:
        raise BadInput(
            f"{len(left_out):,} of {len(verdicts):,} prompts ({len(left_out) / len(verdicts):.0%}) have no verdict, "
            f"wanted at most {limit:g}%, so the result was not stored; run the same command again, or raise "
            "--allow-left-out"
        )
    return EXIT_DONE
