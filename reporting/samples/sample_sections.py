"""Sections of a report on checkpoints: continuations of prompts, and log-probabilities of a held-out text."""

from collections.abc import Sequence
from pathlib import Path

import attrs

from common.web_page import render, template_text
from reporting.run_history import run_names
from reporting.samples.gallery import gallery
from reporting.samples.heat_map import heat_map
from reporting.samples.sample_log import read_counted_samples
from reporting.samples.sample_recording import record_samples
from reporting.section import Section
from training.supervision.run_lock import is_locked


def sample_sections(runs: Sequence[Path], *, record: bool) -> tuple[list[Section], list[str]]:
    """Return the sections, and notes; first `record` what is missing.

    Raises BadInput where a log of the runs cannot be read at all.
    """
    notes = [note for run in runs for note in record_samples(run)] if record else []
    samples = []
    for name, run in zip(run_names(runs), runs, strict=True):
        found, lines = read_counted_samples(run)
        samples.append((name, found))
        notes += lines.notes(growing=is_locked(run))
    parts = (("Samples", "samples", gallery(samples)), ("Log-probabilities", "log-probabilities", heat_map(samples)))
    sections = [Section(title=title, anchor=anchor, html=html) for title, anchor, html in parts if html is not None]
    if notes:
        html = render("notes.html", notes=notes)
        sections.append(Section(title="Missing samples", anchor="missing-samples", html=html))
    if sections:
        sections[0] = attrs.evolve(sections[0], style=template_text("samples.css"))
    return sections, notes
