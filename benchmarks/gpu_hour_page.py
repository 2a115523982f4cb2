"""Page of the first GPU hour: machine, outcome and output of each step; and the tarball to send home."""

import platform
import tarfile
from collections.abc import Sequence
from pathlib import Path

import torch
from command import markdown_table
from gpu_hour_steps import HourStep
from gpu_state import describe_gpus, indented, summarize
from limited_command import Outcome

from training.hardware.environment import cpu_name, git_commit

PAGE = "page.md"
LAST_LINES = 100  # shown of a step that is not done

Outcomes = Sequence[tuple[HourStep, Outcome]]


def machine_lines() -> list[str]:
    """Return paragraphs: versions, commit, hardware. Uses no GPU itself: that would take some of its memory."""
    torch_line = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    return [f"commit {git_commit()}, {torch_line}", f"{cpu_name()}, {platform.platform()}", *describe_gpus()]


def samples_file(folder: Path, step: HourStep) -> Path:
    """Return the file of nvidia-smi's samples during a step."""
    return folder / f"{step.name}.gpus.csv"


def make_page(head: Sequence[str], outcomes: Outcomes, folder: Path, price_per_hour: float | None) -> str:
    """Return the page as Markdown: the machine, a table of all steps, then what each printed."""
    columns = ["step", "outcome", "seconds", *(["USD"] if price_per_hour else []), "GPUs while busy", "fills"]
    rows = []
    for step, outcome in outcomes:
        cost = [f"{outcome.seconds / 3600 * price_per_hour:.2f}"] if price_per_hour else []
        busy = summarize(_lines(samples_file(folder, step), outcome))
        rows.append([step.name, outcome.state, f"{outcome.seconds:.0f}", *cost, busy, step.fills])
    total = sum(outcome.seconds for _, outcome in outcomes)
    cost = [f"{total / 3600 * price_per_hour:.2f}"] if price_per_hour else []
    rows.append(["all", "", f"{total:.0f}", *cost, "", ""])
    parts = ["# First GPU hour", *head, markdown_table(columns, rows)]
    for step, outcome in outcomes:
        lines = _lines(folder / f"{step.name}.txt", outcome)
        shown = lines if outcome.state == "done" else lines[-LAST_LINES:]
        parts.append(f"## {step.name}: {outcome.state}")
        parts.append(indented([f"python {' '.join(outcome.command)}", "", *shown]))
    return "\n\n".join(parts) + "\n"


def pack(folder: Path) -> Path:
    """Write FOLDER.tar.gz: the page, what the steps printed and how they ended; return its path."""
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".md", ".txt", ".json", ".csv") and path.is_file():
                tar.add(path, f"{folder.name}/{path.name}")
    return archive


def _lines(path: Path, outcome: Outcome) -> list[str]:
    """Return the lines of a step's file; none of an earlier command's."""
    there = outcome.state != "not started" and path.exists()
    return path.read_text(errors="replace").splitlines() if there else []
