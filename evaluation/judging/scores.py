"""The scores of a judgment: means with intervals and ranks, the report, the stored results, and the comments."""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from statistics import fmean
from typing import Any

import attrs
import numpy as np
from tabulate import tabulate

from common.checks import structured
from common.errors import BadInput
from common.files import check_replaceable, replace_file, writing
from common.text import printable
from evaluation.instruct.reference_scores import ReferenceScores
from evaluation.judging.judgment import Judgment, PromptVerdict
from evaluation.judging.prompt import Grade, Panel, Prompt
from evaluation.shared.results import EvaluationResult, Measure, Measurement, Published, append_result, results_of
from evaluation.shared.significance import Interval, plus_minus, two_way_intervals
from training.telemetry.metrics_log import ANSWERS, GIVEN_TOKENIZER

CAVEAT = "With another judge, all scores can change by more than the intervals, and their order can change, too."
SEEDS_NOTE = "Intervals cover other questions of the same kind and other fine-tuning seeds."
TWO_SEEDS_ASSUMPTION = "assuming that scores vary equally between the seeds of all models"
TWO_SEEDS_NOTE = (
    "Intervals cover other questions of the same kind and other fine-tuning seeds,\n"
    f"{TWO_SEEDS_ASSUMPTION}.\n"
    "Two seeds are too few to check this. If one model's scores vary far more, up\n"
    "to 12% of such tables report a difference that does not exist. instruct --seeds 3 or more avoids this assumption."
)
ONE_SEED_NOTE = (
    "Intervals cover other questions of the same kind, but only one fine-tuning run.\n"
    "Another seed can change a difference by more than its interval, so there are no\n"
    "ranks, and no model is called better. For ranks, use instruct --seeds 2 or more."
)
COMMENTS_TITLE = "# Comments of "  # the beginning of every file of comments, followed by the judge's name
SUBJECT = ("judge", "questions", "orders", "seeds", "differences")  # keys whose values are equal in comparable results
IDENTITY = ("judge", "effort", "base_url", "questions", "orders", "seeds", "candidate", "answers_sha256")


@attrs.frozen(kw_only=True)
class Scores:
    """The scores of all candidates. The score of the reference answers shows whether the judge can be trusted."""

    means: list[Interval]  # mean score of each candidate over the judged questions, in the panel's order
    differences: dict[tuple[int, int], Interval]  # by the indices (a, b) of two candidates: a's score minus b's score
    anchor: float  # mean score of the reference answers

    def ranks(self, number: int) -> tuple[int, int]:
        """Return the best and the worst possible rank of a candidate.

        The best rank follows from the number of candidates that are significantly better, and the worst rank from the
        number of candidates that are significantly worse.
        """
        pairs = self.differences.items()
        significant = [
            difference if a == number else -difference
            for (a, b), difference in pairs
            if number in (a, b) and difference.excludes_zero
        ]
        better = sum(difference.value < 0 for difference in significant)
        worse = sum(difference.value > 0 for difference in significant)
        return 1 + better, len(self.means) - worse


def score(panel: Panel, prompts: list[Prompt], verdicts: list[list[Grade] | None]) -> Scores:
    """Return the scores that follow from the verdicts.

    `verdicts`: the grades for each prompt, or None if the prompt has no verdict; at least one prompt must have one. A
    prompt without a verdict is left out for all candidates alike.
    """
    models, repeats = len(panel.candidates), len(prompts) // (panel.slots * len(panel.questions))
    cells = np.full((models + 1, panel.slots, len(panel.questions), repeats), np.nan)  # the reference comes last
    for index, (prompt, verdict) in enumerate(zip(prompts, verdicts, strict=True)):
        if verdict is not None:
            position = prompt.slot, prompt.question, index % repeats
            cells[(list(prompt.order), *position)] = [grade.score for grade in verdict]
    by_question = np.ma.masked_invalid(cells).mean(3)  # (models + 1, seeds, questions)
    means, differences = two_way_intervals(by_question[:models].filled(np.nan))
    return Scores(means=means, differences=differences, anchor=float(by_question[models].mean(0).mean()))


def table_without_judge(panel: Panel, scores: list[list[ReferenceScores]]) -> str:
    """Return a table of the scores that need no judge, with a row per candidate. Scores are means over seeds."""
    rows = [
        [
            candidate.title,
            len(seeds),
            f"{fmean(seed.exact for seed in seeds):.1%}",
            _with_error([(seed.chrf, seed.chrf_error) for seed in seeds], 1),
            _with_error([(seed.reference_loss, seed.reference_loss_error) for seed in seeds], 3),
        ]
        for candidate, seeds in zip(panel.candidates, scores, strict=True)
    ]
    return tabulate(rows, ["model", "seeds", "exact", "chrF", "reference loss"], disable_numparse=True)


def report(judgment: Judgment, verdicts: list[PromptVerdict], scores: Scores | None) -> str:
    """Return the text about a judgment: the number of verdicts, their cost, and the scores."""
    states, snapshots, judge = [verdict.state for verdict in verdicts], judgment.snapshots(), judgment.judge.model
    lines = [
        f"judge: {judge}, verdicts: {states.count('judged'):,} of {len(states):,}, refused: "
        f"{states.count('refused'):,}; prompts without a verdict are left out for all models"
    ]
    if snapshots not in ([], [judge]):
        lines.append(f"answered by: {', '.join(snapshots)}")
    lines.append(cost_line(judgment))
    if invalid := states.count("invalid"):
        advice = "to retry them, which costs money again, pass --retry-wrong"
        lines.append(f"prompts with only invalid verdicts: {invalid:,}; {advice}")
    if rejected := states.count("not taken"):
        first = states.index("not taken")
        question = judgment.panel.questions[judgment.prompts[first].question].instruction[:100]
        lines.append(f"prompts rejected by the server: {rejected:,}, for example {question!r}: {verdicts[first].why}")
    return "\n".join(lines) + ("" if scores is None else "\n\n" + describe(judgment.panel, scores))


def cost_line(judgment: Judgment) -> str:
    return f"cost, including earlier sessions: {judgment.cost}" if judgment.price.date else "cost: unknown"


def describe(panel: Panel, scores: Scores) -> str:
    """Return tables of the scores and differences, the highest first.

    There are no ranks if each model was fine-tuned with a single seed.
    """
    several_seeds, titles = panel.slots > 1, panel.titles
    order = sorted(range(len(titles)), key=lambda number: -scores.means[number].value)
    ranking, differences = [["rank", "model", "score"]], [["difference", "", ""]]
    for number in order:
        ranks = "-".join(map(str, dict.fromkeys(scores.ranks(number))))
        ranking.append([ranks, titles[number], scores.means[number].text(1)])
    for a, b in combinations(order, 2):
        difference = scores.differences.get((a, b)) or -scores.differences[b, a]
        remark = "" if difference.excludes_zero else "not significant"
        differences.append([f"{titles[a]} - {titles[b]}", difference.text(1, "+"), remark])
    if not several_seeds:
        ranking, differences = [row[1:] for row in ranking], [row[:2] for row in differences]
    tables = [rows for rows in (ranking, differences) if len(rows) > 1]
    anchor = f"score of the reference answers, which the judge sees among the models' answers: {scores.anchor:.1f}"
    seeds = ONE_SEED_NOTE if not several_seeds else TWO_SEEDS_NOTE if panel.slots == 2 else SEEDS_NOTE
    about = "\n".join([anchor, seeds, CAVEAT])
    return "\n\n".join([*(tabulate(rows, "firstrow", disable_numparse=True) for rows in tables), about])


@attrs.frozen(kw_only=True)
class JudgedCandidate:
    """A model in a session, with the differences that are used to compare it."""

    name: str  # unique in the session, even if several models have the same title
    # For the names (a, b) of any two models in the session: the score of a minus the score of b
    differences: dict[tuple[str, str], Interval]


def judged_difference(a: list[JudgedCandidate], b: list[JudgedCandidate], _: float) -> Interval | None:
    """Return the session's simultaneous interval of the difference between two models, or None if there is none.

    If `a` or `b` has several candidates, return the means of the values and of the bounds.
    """
    differences = [
        first.differences[pair]
        for first in a
        for second in b
        if (pair := (first.name, second.name)) in first.differences
    ]
    if not differences:
        return None
    value = fmean(difference.value for difference in differences)
    bounds = [
        (difference.low, difference.high)
        for difference in differences
        if difference.low is not None and difference.high is not None
    ]
    if len(bounds) < len(differences):
        return Interval(value=value)
    low, high = map(fmean, zip(*bounds, strict=True))
    return Interval(value=value, low=low, high=high)


JUDGED = Measure(
    name="judge's score",
    unit="points",
    digits=2,
    difference=judged_difference,
    published=Published(
        values={"OpenAI GPT-2 small": "22.98", "OpenAI GPT-2 medium": "38.53"},
        source="gilesthomas.com, 9 January 2026, part 30: score of another judge, in another session",
    ),
)


def store_results(
    judgment: Judgment, verdicts: list[PromptVerdict], scores: Scores, reference_scores: list[list[ReferenceScores]]
) -> list[str]:
    """Append the result of each model to its log, and return notes. Raises BadInput.

    A result is not appended if the log already has a result of the same judgment that is at least as complete.
    """
    shared = _shared_values(judgment, verdicts, scores)
    notes = []
    for candidate, mean, seeds in zip(judgment.panel.candidates, scores.means, reference_scores, strict=True):
        if candidate.home is None:
            continue
        candidate_values = {"candidate": candidate.title, "score": mean.record()}
        if (tokenizer := candidate.seeds[0].settings.get(GIVEN_TOKENIZER)) is not None:
            candidate_values[GIVEN_TOKENIZER] = tokenizer
        values = {**candidate_values, "free": [attrs.asdict(seed) for seed in seeds], **shared}
        earlier = results_of(candidate.home, candidate.model, "judge")
        same = [result for result in earlier if _identity(result) == _identity(values)]
        if same and same[-1]["left_out"] <= values["left_out"]:
            notes.append(
                f"{candidate.title}: no result was added, because the result of {same[-1]['time']} leaves out "
                f"{same[-1]['left_out']:,} prompts, and the new result leaves out {values['left_out']:,}"
            )
        else:
            append_result(candidate.home, candidate.model, "judge", values, candidate.seeds[0].weights)
    return notes


def write_comments(judgment: Judgment, verdicts: list[PromptVerdict]) -> list[str]:
    """Write the judge's comments next to the answers of each model, and return notes. Raises BadInput.

    Models whose directory is not on this machine are left out.
    """
    panel, judge, options = judgment.panel, judgment.judge, judgment.options
    content = _sha256(panel) + _answers_sha256(panel)
    subject = [judge.effort, judge.base_url, content, panel.titles, options.orders, options.seed, panel.slots]
    digest = hashlib.sha256(json.dumps(subject).encode()).hexdigest()
    name = f"judged-by-{re.sub(r'[^A-Za-z0-9._-]+', '-', judge.model)[:80]}-{digest[:8]}.md"
    paths = dict.fromkeys(
        candidate.home / ANSWERS / name for candidate in panel.candidates if candidate.home is not None
    )
    notes = []
    for path in paths:
        try:
            check_replaceable(path, COMMENTS_TITLE.encode(), "a file of the judge's comments")
        except BadInput as problem:  # the scores are still shown, because they were paid for
            notes.append(f"the judge's comments were not written: {problem}")
            continue
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, _comments(judgment, verdicts))
        notes.append(f"the judge's comments: {path}")
    return notes


def read_results(record: dict[str, Any]) -> Iterator[EvaluationResult]:
    """Yield the result in a stored record."""
    count, seeds, left_out = record["questions"]["count"], record["seeds"], int(record.get("left_out") or 0)
    missing = f", without {left_out:,} prompts that were left out for all models" if left_out else ""
    one_seed = (
        "questions only, because each model has one fine-tuning run; to cover seeds, use instruct --seeds 2 or more"
    )
    coverage = "questions and fine-tuning seeds" if seeds > 1 else one_seed
    coverage += f", {TWO_SEEDS_ASSUMPTION}" if seeds == 2 else ""
    differences = {
        (entry["a"], entry["b"]): structured(entry, Interval, unknown_keys=True) for entry in record["differences"]
    }
    differences |= {(b, a): -difference for (a, b), difference in differences.items()}
    candidate = JudgedCandidate(name=record["candidate"], differences=differences)
    score = structured(record["score"], Interval)
    yield EvaluationResult.of(
        record,
        subject=json.dumps([record[key] for key in SUBJECT]),
        description=f"{count} questions in one session of {record['judge']}{missing}; 95% intervals over {coverage}",
        measurements=[Measurement(measure=JUDGED, value=score.value, interval=score, sample=candidate)],
        ranks_models=seeds > 1,
        left_out=left_out,
    )


def _with_error(values: list[tuple[float | None, float | None]], digits: int) -> str:
    """Return the mean over seeds and its error as text, or "" if a seed has no value.

    All seeds answer the same questions, so averaging over seeds does not reduce the error.
    """
    means, errors = ([number for number in column if number is not None] for column in zip(*values, strict=True))
    if len(means) < len(values):
        return ""
    return plus_minus(fmean(means), fmean(errors) if len(errors) == len(values) else None, digits)


def _shared_values(judgment: Judgment, verdicts: list[PromptVerdict], scores: Scores) -> dict[str, Any]:
    """Return the fields of a result that are the same for all candidates of a session."""
    panel, judge, cost, is_priced = judgment.panel, judgment.judge, judgment.cost, bool(judgment.price.date)
    states = [verdict.state for verdict in verdicts]
    return {
        "judge": judge.model,
        "judge_snapshots": judgment.snapshots(),
        "effort": judge.effort,
        "base_url": judge.base_url,
        "questions": {"count": len(panel.questions), "sha256": _sha256(panel)},
        "answers_sha256": _answers_sha256(panel),  # other answers to the same questions have another hash
        "orders": judgment.options.orders,
        "seeds": panel.slots,
        "anchor": scores.anchor,
        "candidates": [
            {"model": title, "score": mean.value, "low": mean.low, "high": mean.high}
            for title, mean in zip(panel.titles, scores.means, strict=True)
        ],
        "differences": [
            {"a": panel.titles[a], "b": panel.titles[b], **difference.record()}
            for (a, b), difference in scores.differences.items()
        ],
        "left_out": len(states) - states.count("judged"),
        "refused": states.count("refused"),
        "usd": cost.usd if is_priced else None,
        "usd_uncounted": sum(cost.open) if is_priced else None,
    }


def _identity(result: dict[str, Any]) -> list[Any]:
    """Return the values that are equal in all results of a judgment."""
    panel = [candidate["model"] for candidate in result.get("candidates", [])]
    return [panel, *(result.get(key) for key in IDENTITY)]


def _sha256(panel: Panel) -> str:
    questions = [attrs.astuple(record) for record in panel.questions]
    return hashlib.sha256(json.dumps(questions).encode()).hexdigest()


def _answers_sha256(panel: Panel) -> str:
    numbers = range(len(panel.questions))
    answers = [
        [[panel.text(question, slot, candidate) for question in numbers] for slot in range(panel.slots)]
        for candidate in range(len(panel.candidates))
    ]
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()


def _comments(judgment: Judgment, verdicts: list[PromptVerdict]) -> str:
    """Return a text with every question and its answers.

    Each answer is followed by its scores and comments, one for each order in which the judge saw the answers.
    """
    panel = judgment.panel
    grades: defaultdict[tuple[int, int, int], list[str]] = defaultdict(list)  # by question, seed and answer
    for prompt, verdict in zip(judgment.prompts, verdicts, strict=True):
        for answer, grade in zip(prompt.order, verdict.grades or (), strict=False):
            grades[prompt.question, prompt.slot, answer].append(f"- {grade.score:g}: {printable(grade.comment)}")
    lines = [f"{COMMENTS_TITLE}{printable(judgment.judge.model)}", ""]
    for question, record in enumerate(panel.questions):
        lines += [f"## {question + 1}. {printable(record.instruction)}", ""]
        lines += [*_quoted(record.input), ""] if record.input else []
        for slot in range(panel.slots):
            for answer, title in enumerate([*panel.titles, "reference"]):
                is_model = answer < len(panel.candidates)
                seed = f", seed {panel.candidates[answer].seeds[slot].seed}" if is_model else ""
                lines += [f"**{printable(title)}**{seed}", "", *_quoted(panel.text(question, slot, answer)), ""]
                lines += [*(grades[question, slot, answer] or ["- no verdict"]), ""]
    return "\n".join(lines)


def _quoted(text: str) -> list[str]:
    return [f"> {printable(line)}".rstrip() for line in text.splitlines() or [""]]
