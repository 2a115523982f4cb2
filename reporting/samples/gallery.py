"""Gallery: continuations of fixed prompts by the checkpoints of runs, by step."""

from collections.abc import Sequence

from common.web_page import render
from reporting.samples.sample_log import CheckpointSample, spaced

MOST_SHOWN = 12  # checkpoints; all of them are in samples.jsonl


def gallery(runs: Sequence[tuple[str, Sequence[CheckpointSample]]]) -> str | None:
    """Return the continuations of named runs as HTML, by prompt; None where there are none."""
    rows = []
    for name, samples in runs:
        said = [sample for sample in samples if sample.said]
        for sample in spaced(said, max(2, MOST_SHOWN // len(runs))):
            rows.append((f"{name}, step {sample.step:,}" if len(runs) > 1 else f"step {sample.step:,}", sample))
    if not rows:
        return None
    prompts = list(dict.fromkeys(one.prompt for _, sample in rows for one in sample.said))
    shown = [
        (prompt, [(label, [one for one in sample.said if one.prompt == prompt]) for label, sample in rows])
        for prompt in prompts
    ]
    problems = [(name, sample) for name, samples in runs for sample in samples if sample.problem]
    count = sum(len(samples) for _, samples in runs)
    return render("gallery.html", prompts=shown, problems=problems, count=count, shown=len(rows))
