"""A trial: two commits, each with its own files and its own version of the same run directory."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from common.errors import BadInput
from common.json_files import read_json
from common.output import progress, show, warning
from common.text import counted, quoted
from experiments.shared.experiment_files import BUCKET, FIXED, Sections
from experiments.shared.training_jobs import ROOT
from experiments.trial.checkout import Snapshots, describe_left_out, uncommitted_size
from training.config.train_config import KEYS, load_run, normalized_values

FOLDER = ROOT / "trials"
CODE = FOLDER / "code"  # checked-out files of each tree, shared by all trials
SIDES = ("base", "candidate")
# These files and folders determine how the final loss is measured.
MEASURE = ("training/validation.py", "training/loop.py", "model/loss.py", "tokens/batches/", "tokens/format/")


@attrs.frozen(kw_only=True)
class Trial:
    """Two commits and a run directory. The keys of every mapping are SIDES."""

    revisions: dict[str, str]  # as the user entered them
    trees: dict[str, str]  # hashes of the files
    run: Path
    sections: dict[str, Sections]  # contents of model.json and train.json
    changed_files: tuple[str, ...] = ()  # paths of the files that differ between the trees
    left_out: tuple[str, ...] = ()  # new files of the working tree that are not part of the trial
    sizes: Mapping[str, str] = attrs.field(factory=dict)  # number and size of the files, as text
    uncommitted: str = ""  # number and size of the uncommitted files that are part of the trial, as text

    @classmethod
    def of(cls, snapshots: Snapshots, base: str, candidate: str, run: Path) -> "Trial":
        """Read two git revisions without writing any files. `check_out` writes them.

        Raise BadInput if a revision is unknown, or if the final losses of the two sides could not be compared.
        """
        load_run(run, ())
        revisions = dict(zip(SIDES, (base, candidate), strict=True))
        trees = {side: snapshots.tree_of(name) for side, name in revisions.items()}
        sections = {side: _read_sections(snapshots, tree, run) for side, tree in trees.items()}
        for side in SIDES:
            train = form_of("train", sections[side])
            if train["validation_interval"] is None or train["patience"] is not None:
                path = run.resolve() / "train.json"
                raise BadInput(
                    f"{path}: a trial compares final losses; set validation_interval, and set patience to null"
                )
        if fixed := [key for key in differing_keys(sections) if key in FIXED]:
            section, _, key = fixed[0].partition(".")
            candidate_value, base_value = (quoted(sections[side][section].get(key)) for side in reversed(SIDES))
            path = run.resolve() / f"{section}.json"
            raise BadInput(
                f"{path}: {key}: the candidate has {candidate_value}, but the base has {base_value}; both need the "
                "same value, because this key determines the tokens on which the final loss is measured"
            )
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
        """Write the files of each side into a folder, unless the folder exists, and print their number and size."""
        for side, tree in self.trees.items():
            if not (folder := CODE / tree).exists():
                show(progress(f"{folder}: writing the {side}, {self.sizes[side]}"))
                snapshots.check_out(tree, folder)

    @property
    def name(self) -> str:
        """The name of the trial. Two trials have the same name only if their files and settings are the same."""
        keys = hashlib.sha256(json.dumps(self.sections, sort_keys=True).encode()).hexdigest()
        return "-".join([self.run.resolve().name, *(tree[:8] for tree in self.trees.values()), keys[:8]])

    @property
    def output(self) -> Path:
        return FOLDER / self.name

    def directory(self, side: str, name: str) -> Path:
        """Return the directory of a run. Runs without a seed are in `probes/`, which a report leaves out."""
        return self.output / ("" if name.startswith("seed-") else "probes") / f"{side}-{name}"

    def notes(self) -> list[str]:
        """Return notes about differences in settings, in requirements, and in the code that measures the loss."""
        files, notes = self.changed_files, [*describe_left_out(self.left_out)]
        if keys := differing_keys(self.sections):
            notes.append(f"The run directories differ in {', '.join(keys)}.")
        if requirements := [path for path in files if path.rpartition("/")[2].startswith("requirements")]:
            notes.append(
                f"The requirements differ ({', '.join(requirements)}), but both sides ran with the installed packages."
            )
        if measures := [path for path in files if path.startswith(MEASURE)]:
            count = counted(len(measures), "file")
            problem = f"The code that measures the loss differs in {count}: {', '.join(measures[:3])}."
            notes.append(str(warning(problem)))
        return notes


def differing_keys(sections: dict[str, Sections]) -> list[str]:
    """Return the settings, as "train.KEY", in which the run directories of the two sides differ."""
    differing = []
    for section in KEYS:
        base, candidate = (form_of(section, sections[side]) for side in SIDES)
        keys = [key for key in sorted({*base, *candidate}) if base.get(key) != candidate.get(key)]
        differing += [f"{section}.{key}" for key in keys]
    return differing


def form_of(section: str, sections: Sections) -> dict[str, Any]:
    """Return a section's settings in a form that can be compared, with defaults filled in and old key names replaced.

    If only the commit's own code can read the settings, they are returned unchanged.
    """
    return {key: field.default for key, field in KEYS[section].items()} | normalized_values(section, sections[section])


def _read_sections(snapshots: Snapshots, tree: str, run: Path) -> Sections:
    """Return the settings of a run directory in a tree. If the tree does not have the directory, read it from disk."""
    path, sections = run.resolve(), {}
    for name in KEYS:
        values = None
        if path.is_relative_to(ROOT):
            values = snapshots.read_json(tree, f"{path.relative_to(ROOT).as_posix()}/{name}.json")
        sections[name] = read_json(path / f"{name}.json") if values is None else values
    sections["train"].pop(BUCKET, None)
    return sections
