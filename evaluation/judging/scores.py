"""Scores of a judgement, means with intervals and ranks, and their report for people."""

from itertools import combinations
from statistics import fmean

import attrs
import numpy as np
from tabulate import tabulate

from evaluation.instruct.reference_scores import ReferenceScores
from evaluation.judging.judgement import Judgement, PromptVerdict
from evaluation.judging.panel import Panel
from evaluation.judging.prompt import Grade, Prompt
from evaluation.shared.significance import Interval, plus_minus, two_way_intervals

CAVEAT = "Another judge can move all scores, and their order, by more than the intervals."
OF_SEEDS = "Intervals cover other questions and fine-tuning seeds of the same kind."
OF_ONE_SEED = (
    "Intervals cover other questions of the same kind, for this one fine-tuning only:\n"
    "another seed can move a difference by more, so no rank is given and no model is\n"
    "called better. instruct --seeds 2 or more is what tells."
)


@attrs.frozen(kw_only=True)
class Scores:
    """Scores of all candidates, and of the reference answers as a check of the judge."""

    means: list[Interval]  # of the candidates, in the panel's order, over the questions that were judged
    differences: dict[tuple[int, int], Interval]  # of candidates a - b, by their numbers
    anchor: float  # mean score of the reference answers

    def ranks(self, number: int) -> tuple[int, int]:
        """Return the best and worst rank of a candidate: those that are surely better or worse are counted."""
        pairs = self.differences.items()
        ours = [one if a == number else -one for (a, b), one in pairs if number in (a, b) and one.apart]
        return 1 + sum(one.value < 0 for one in ours), len(self.means) - sum(one.value > 0 for one in ours)


def score(panel: Panel, prompts: list[Prompt], verdicts: list[list[Grade] | None]) -> Scores:
    """Return the scores of verdicts by prompt, at least one; None is left out for all candidates alike."""
    models, repeats = len(panel.candidates), len(prompts) // (panel.slots * len(panel.questions))
    cells = np.full((models + 1, panel.slots, len(panel.questions), repeats), np.nan)  # the reference comes last
    for index, (prompt, verdict) in enumerate(zip(prompts, verdicts, strict=True)):
        if verdict is not None:
            place = prompt.slot, prompt.question, index % repeats
            cells[(list(prompt.order), *place)] = [grade.score for grade in verdict]
    by_question = np.ma.masked_invalid(cells).mean(3)  # (models + 1, seeds, questions)
    means, differences = two_way_intervals(by_question[:models].filled(np.nan))
    return Scores(means=means, differences=differences, anchor=float(by_question[models].mean(0).mean()))


def table_without_judge(panel: Panel, scores: list[list[ReferenceScores]]) -> str:
    """Return the scores that need no judge, by candidate and seed, a line per candidate: means over its seeds."""
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


def report(judgement: Judgement, verdicts: list[PromptVerdict], scores: Scores | None) -> str:
    states, snapshots, judge = [verdict.state for verdict in verdicts], judgement.snapshots(), judgement.judge.model
    lines = [
        f"judge: {judge}, verdicts: {states.count('judged'):,} of {len(states):,}, refused: "
        f"{states.count('refused'):,}; a prompt without a verdict is left out for all models alike"
    ]
    if snapshots not in ([], [judge]):
        lines.append(f"answered by: {', '.join(snapshots)}")
    lines.append(cost_line(judgement))
    if invalid := states.count("invalid"):
        lines.append(f"invalid verdicts only: {invalid:,} prompts, which are not paid for again unless --retry-wrong")
    if not_taken := states.count("not taken"):
        first = states.index("not taken")
        question = judgement.panel.questions[judgement.prompts[first].question].instruction[:100]
        lines.append(f"rejected by the server: {not_taken:,} prompts, such as {question!r}: {verdicts[first].why}")
    return "\n".join(lines) + ("" if scores is None else "\n\n" + describe(judgement.panel, scores))


def cost_line(judgement: Judgement) -> str:
    return f"cost, including earlier sessions: {judgement.cost}" if judgement.price.date else "cost: unknown"


def describe(panel: Panel, scores: Scores) -> str:
    """Return the scores and their differences as tables, the highest first, and the check of the judge.

    Of one fine-tuning each there are no ranks, and none is told apart.
    """
    several, titles = panel.slots > 1, panel.titles
    order = sorted(range(len(titles)), key=lambda number: -scores.means[number].value)
    ranking, differences = [["rank", "model", "score"]], [["difference", "", ""]]
    for number in order:
        ranks = "-".join(map(str, dict.fromkeys(scores.ranks(number))))
        ranking.append([ranks, titles[number], scores.means[number].text(1)])
    for a, b in combinations(order, 2):
        one = scores.differences.get((a, b)) or -scores.differences[b, a]
        differences.append([f"{titles[a]} - {titles[b]}", one.text(1, "+"), "" if one.apart else "not told apart"])
    if not several:
        ranking, differences = [row[1:] for row in ranking], [row[:2] for row in differences]
    tables = [rows for rows in (ranking, differences) if len(rows) > 1]
    anchor = f"reference answers, shown to the judge among the others: {scores.anchor:.1f}"
    about = "\n".join([anchor, OF_SEEDS if several else OF_ONE_SEED, CAVEAT])
    return "\n\n".join([*(tabulate(rows, "firstrow", disable_numparse=True) for rows in tables), about])


def _with_error(values: list[tuple[float | None, float | None]], digits: int) -> str:
    """Return a mean over seeds; empty if one has none. Seeds have the same questions: errors do not average out."""
    means, errors = ([one for one in column if one is not None] for column in zip(*values, strict=True))
    if len(means) < len(values):
        return ""
    return plus_minus(fmean(means), fmean(errors) if len(errors) == len(values) else None, digits)
