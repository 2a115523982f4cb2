"""Sections of a report on checkpoints: continuations of prompts, and log-probabilities of a held-out text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.web_page import render
from reporting.run_history import run_names
from reporting.samples.heat_map import heat_map
from reporting.samples.sample_log import CheckpointSample, read_counted_samples, spaced
from reporting.samples.sample_recording import record_samples
from training.supervision.run_lock import is_locked

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_SHOWN = 12  # checkpoints in the gallery; all of them are in samples.jsonl


def sample_sections(runs: Sequence[Path], *, record: bool) -> "tuple[dict[str, Markup], list[str]]":
    """Return the sections by title, and notes; first `record` what is missing.

    Raises BadInput where a log of the runs cannot be read at all.
    """
    notes = [note for run in runs for note in record_samples(run)] if record else []
    samples = []
    for name, run in zip(run_names(runs), runs, strict=True):
        found, lines = read_counted_samples(run)
        samples.append((name, found))
        notes += lines.notes(growing=is_locked(run))
    missing = render("reporting/templates/missing_samples.html", notes=notes) if notes else None
    parts = {"Samples": gallery(samples), "Log-probabilities": heat_map(samples), "Missing samples": missing}
    return {title: html for title, html in parts.items() if html is not None}, notes


def gallery(runs: Sequence[tuple[str, Sequence[CheckpointSample]]]) -> "Markup | None":
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
    template = "reporting/templates/gallery.html"
    return render(template, prompts=shown, problems=problems, count=count, shown=len(rows))
