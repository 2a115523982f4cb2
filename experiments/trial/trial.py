"""A trial: two commits, each with its own files and its own version of one run directory."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput
from common.json_files import read_json
from common.output import progress, show, warning
from common.text import quoted
from experiments.shared.experiment_files import BUCKET, FIXED, Sections, with_count
from experiments.shared.training_jobs import ROOT
from experiments.trial.checkout import Snapshots, describe_left_out, uncommitted_size
from training.config.train_config import KEYS, load_run, one_form

FOLDER = ROOT / "trials"
CODE = FOLDER / "code"  # files of each tree, shared by trials
SIDES = ("base", "candidate")
# Decide on the final loss
MEASURE = ("training/validation.py", "training/loop.py", "model/loss.py", "tokens/batches/", "tokens/format/")


@attrs.frozen(kw_only=True)
class Trial:
    """Two commits and a run directory."""

    revisions: dict[str, str]  # of each side, as the user gave them
    trees: dict[str, str]  # hashes of their files
    run: Path
    sections: dict[str, Sections]  # of each side
    changed_files: tuple[str, ...] = ()  # paths in which the trees differ
    left_out: tuple[str, ...] = ()  # new files of the working tree that belong to no side
    sizes: Mapping[str, str] = attrs.field(factory=dict)  # of each side's files, as text
    uncommitted: str = ""  # number and size of the files of a side that are not committed, as text

    @classmethod
    def of(cls, snapshots: Snapshots, base: str, candidate: str, run: Path) -> "Trial":
        """Read two git revisions. Raises BadInput for unknown ones, and where final losses cannot be compared.

        Nothing is written: `check_out` does that.
        """
        load_run(run, ())
        revisions = dict(zip(SIDES, (base, candidate), strict=True))
        trees = {side: snapshots.tree_of(name) for side, name in revisions.items()}
        sections = {side: _read_sections(snapshots, tree, run) for side, tree in trees.items()}
        for side in SIDES:
            train = form_of("train", sections[side])
            if train["validation_interval"] is None or train["patience"] is not None:
                path = run.resolve() / "train.json"
                raise BadInput(f"{path}: wanted a validation_interval and no patience: final losses decide")
        if fixed := [key for key in differing_keys(sections) if key in FIXED]:
            section, _, key = fixed[0].partition(".")
            got, was = (quoted(sections[side][section].get(key)) for side in reversed(SIDES))
            why = "it changes the tokens that the final loss is measured on"
            path = run.resolve() / f"{section}.json"
            raise BadInput(f"{path}: {key}: got {got}, wanted {was}, as the base has it: {why}")
        return cls(
            revisions=revisions,
            trees=trees,
            run=run,
            sections=sections,
            changed_files=tuple(snapshots.changed_files(*trees.values())),
            left_out=tuple(snapshots.left_out),
            sizes={side: snapshots.size_of(tree) for side, tree in trees.items()},
            uncommitted=uncommitted_size(snapshots.copied),
        )

    def check_out(self, snapshots: Snapshots) -> None:
        """Write the files of both sides into folders of their own, unless they are there, and say how much that is."""
        for side, tree in self.trees.items():
            if not (folder := CODE / tree).exists():
                show(progress(f"{folder}: {self.sizes[side]}, the {side}"))
                snapshots.check_out(tree, folder)

    @property
    def name(self) -> str:
        """Name of the trial, equal for the same files and keys alone."""
        keys = hashlib.sha256(json.dumps(self.sections, sort_keys=True).encode()).hexdigest()
        return "-".join([self.run.resolve().name, *(tree[:8] for tree in self.trees.values()), keys[:8]])

    @property
    def output(self) -> Path:
        return FOLDER / self.name

    def directory(self, side: str, name: str) -> Path:
        """Return the directory of a run; those without a seed are no part of a report."""
        return self.output / ("" if name.startswith("seed-") else "probes") / f"{side}-{name}"

    def notes(self) -> list[str]:
        """Return notes on the change: keys, requirements, and files of the measure."""
        files, notes = self.changed_files, [*describe_left_out(self.left_out)]
        if keys := differing_keys(self.sections):
            notes.append(f"The run directories differ in {', '.join(keys)}.")
        if requirements := [path for path in files if path.rpartition("/")[2].startswith("requirements")]:
            notes.append(f"{', '.join(requirements)} differ: both sides ran with the packages that are installed.")
        if measures := [path for path in files if path.startswith(MEASURE)]:
            count = with_count(len(measures), "file")
            differ = f"{count} that the loss is measured with differ: {', '.join(measures[:3])}."
            notes.append(str(warning(differ)))
        return notes


def differing_keys(sections: dict[str, Sections]) -> list[str]:
    """Return the keys, as "train.KEY", in which the run directories differ."""
    differing = []
    for section in KEYS:
        base, candidate = (form_of(section, sections[side]) for side in SIDES)
        keys = [key for key in sorted({*base, *candidate}) if base.get(key) != candidate.get(key)]
        differing += [f"{section}.{key}" for key in keys]
    return differing


def form_of(section: str, sections: Sections) -> dict[str, Any]:
    """Return keys in one form, with defaults; as they are where only the commit's own code can read them."""
    return {key: field.default for key, field in KEYS[section].items()} | one_form(section, sections[section])


def _read_sections(snapshots: Snapshots, tree: str, run: Path) -> Sections:
    """Return the keys of a run directory as a tree has them, or as they are on the disk if it has no such directory."""
    path, sections = run.resolve(), {}
    for key in KEYS:
        own = None
        if path.is_relative_to(ROOT):
            own = snapshots.read_json(tree, f"{path.relative_to(ROOT).as_posix()}/{key}.json")
        sections[key] = read_json(path / f"{key}.json") if own is None else own
    sections["train"].pop(BUCKET, None)
    return sections
