"""A trial: two commits, each with its own files and its own version of one run directory."""

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput, quoted
from common.files import is_folder
from common.json_files import read_json
from experiments.shared.experiment_files import BUCKET, FIXED, Sections, counted
from experiments.shared.training_jobs import ROOT
from experiments.trial.checkout import changed_files, check_out, tree_of
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

    @classmethod
    def of(cls, base: str, candidate: str, run: Path) -> "Trial":
        """Check out two git revisions. Raises BadInput for unknown ones, and where final losses cannot be compared."""
        load_run(run, ())
        revisions, path = dict(zip(SIDES, (base, candidate), strict=True)), run.resolve()
        trees, sections = {side: tree_of(name) for side, name in revisions.items()}, {}
        for side, tree in trees.items():
            check_out(tree, code := CODE / tree)
            own = code / path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            # As on the disk where a commit does not have it
            sections[side] = {key: read_json((own if is_folder(own) else path) / f"{key}.json") for key in KEYS}
            sections[side]["train"].pop(BUCKET, None)
            train = form_of("train", sections[side])
            if train["validation_interval"] is None or train["patience"] is not None:
                raise BadInput(f"{path}/train.json: wanted a validation_interval and no patience: final losses decide")
        if fixed := [key for key in differing_keys(sections) if key in FIXED]:
            section, _, key = fixed[0].partition(".")
            got, was = (quoted(sections[side][section].get(key)) for side in reversed(SIDES))
            why = "it changes the tokens that the final loss is measured on"
            raise BadInput(f"{path / section}.json: {key}: got {got}, wanted {was}, as the base has it: {why}")
        return cls(revisions=revisions, trees=trees, run=run, sections=sections)

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
        files, notes = changed_files(*self.trees.values()), []
        if keys := differing_keys(self.sections):
            notes.append(f"The run directories differ in {', '.join(keys)}.")
        if requirements := [path for path in files if path.rpartition("/")[2].startswith("requirements")]:
            notes.append(f"{', '.join(requirements)} differ: both sides ran with the packages that are installed.")
        if measures := [path for path in files if path.startswith(MEASURE)]:
            count = counted(len(measures), "file")
            notes.append(f"WARNING: {count} that the loss is measured with differ: {', '.join(measures[:3])}.")
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
