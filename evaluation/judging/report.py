"""Judgement report for people: reference-based scores, standings, differences, and checks of the judge."""

from statistics import fmean

from tabulate import tabulate

from evaluation.instruct.reference_scores import ReferenceScores
from evaluation.judging.judgement import Judgement, PromptVerdict
from evaluation.judging.panel import Panel
from evaluation.judging.scores import GOOD_REFERENCE, Scores
from evaluation.shared.significance import plus_minus

CAVEAT = "Another judge can move all scores, and their order, by more than the intervals."
OF_SEEDS = "Intervals cover other questions and fine-tuning seeds of the same kind."
OF_ONE_SEED = (
    "Intervals cover other questions of the same kind, for this one fine-tuning only:\n"
    "another seed can move a difference by more, so no rank is given and no model is\n"
    "called better. instruct --seeds 2 or more is what tells."
)
MOST_DOUBTFUL = 3  # questions that are shown


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
    """Return standings, differences, and diagnostics of the judge."""
    order = sorted(range(len(scores.standings)), key=lambda number: -scores.standings[number].score.value)
    rows = []
    for standing in (scores.standings[number] for number in order):
        row = [standing.title, standing.score.text(1)]
        if standing.ranks is not None:
            spread = "" if standing.spread is None else f"{standing.spread:.1f}"
            row = ["-".join(map(str, dict.fromkeys(standing.ranks))), *row, spread]
        rows.append(row)
    heads = ["rank", "model", "score", "between seeds"] if panel.slots > 1 else ["model", "score"]
    parts = [tabulate(rows, heads, disable_numparse=True)]
    if scores.differences:
        heads = ["difference", "", ""][: 3 if panel.slots > 1 else 2]
        parts.append(tabulate(_differences(scores, order), heads, disable_numparse=True))
    return "\n\n".join([*parts, "\n".join(_diagnostics(panel, scores))])


def _differences(scores: Scores, order: list[int]) -> list[list[str]]:
    """Return a row for each pair, the higher score first; only several seeds can tell models apart."""
    rows = []
    for place, a in enumerate(order):
        for b in order[place + 1 :]:
            difference = scores.differences.get((a, b)) or -scores.differences[b, a]
            row = [f"{scores.standings[a].title} - {scores.standings[b].title}", difference.text(1, "+")]
            if scores.standings[a].ranks is not None:
                row.append("" if difference.apart else "not told apart")
            rows.append(row)
    return rows


def _diagnostics(panel: Panel, scores: Scores) -> list[str]:
    lines = [f"reference answers, shown to the judge among the others: {scores.anchor:.1f}"]
    if scores.doubtful:
        lines.append(f"questions whose reference scored under {GOOD_REFERENCE}: {len(scores.doubtful)}, such as")
        lines += [f"  {panel.questions[number].instruction[:100]!r}" for number in scores.doubtful[:MOST_DOUBTFUL]]
    bias = ", ".join(plus_minus(value, error, 1, signed=True) for value, error in scores.bias)
    lines.append(f"position bias, first to last: {bias}")
    if scores.disagreement is not None:
        lines.append(f"the same answer's score between orders: standard deviation {scores.disagreement:.1f}")
    return [*lines, OF_SEEDS if panel.slots > 1 else OF_ONE_SEED, CAVEAT]


def _with_error(values: list[tuple[float | None, float | None]], digits: int) -> str:
    """Return a mean over seeds; empty if one has none. Seeds have the same questions: errors do not average out."""
    means, errors = ([one for one in column if one is not None] for column in zip(*values, strict=True))
    if len(means) < len(values):
        return ""
    return plus_minus(fmean(means), fmean(errors) if len(errors) == len(values) else None, digits)
