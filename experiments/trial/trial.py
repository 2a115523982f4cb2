"""A trial: two commits, each with its own files and its own version of one run directory."""

from pathlib import Path

import attrs

from common.errors import BadInput, quoted
from common.files import is_folder
from common.json_files import read_json
from experiments.shared.experiment_files import BUCKET, Sections, counted
from experiments.shared.run_progress import Target
from experiments.shared.training_jobs import ROOT
from experiments.sweep.sweep_file import FIXED
from experiments.trial.checkout import changed_files, check_out, tree_of
from training.config.train_config import KEYS, load_run, one_form

FOLDER = ROOT / "trials"
SIDES = ("base", "candidate")
MEASURE = ("training/validation.py", "model/loss.py", "tokens/batches/", "tokens/format/")  # decide on the final loss


@attrs.frozen(kw_only=True)
class Trial:
    """Two commits and a run directory."""

    revisions: dict[str, str]  # of each side, as the user gave them
    trees: dict[str, str]  # hashes of their files
    run: Path

    @classmethod
    def of(cls, base: str, candidate: str, run: Path) -> "Trial":
        """Return the trial of two git revisions. Raises BadInput for an unknown one, and for a wrong run directory."""
        load_run(run, ())
        revisions = dict(zip(SIDES, (base, candidate), strict=True))
        return cls(revisions=revisions, trees={side: tree_of(name) for side, name in revisions.items()}, run=run)

    @property
    def name(self) -> str:
        return "-".join([self.run.resolve().name, *(tree[:8] for tree in self.trees.values())])

    @property
    def output(self) -> Path:
        return FOLDER / self.name

    def target(self, side: str, name: str, last_step: int, step: int) -> Target:
        """Return the target of a run with the code of its side."""
        return Target(self.directory(side, name), last_step, step, validates=True, code=self._code(side))

    def directory(self, side: str, name: str) -> Path:
        """Return the directory of a run; those without a seed are no part of a report."""
        return self.output / ("" if name.startswith("seed-") else "probes") / f"{side}-{name}"

    def check_out(self) -> dict[str, Sections]:
        """Write the files of both sides; return the keys of their run directories, the disk's where a commit has none.

        Raises BadInput where the final losses could not be compared.
        """
        path, sections = self.run.resolve(), {}
        for side, tree in self.trees.items():
            check_out(tree, self._code(side))
            own = self._code(side) / path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            sections[side] = {key: read_json((own if is_folder(own) else path) / f"{key}.json") for key in KEYS}
            sections[side]["train"].pop(BUCKET, None)
        forms = [one_form("train", sections[side]["train"]) for side in SIDES]
        if any(form["validation_interval"] is None or form["patience"] is not None for form in forms):
            raise BadInput(
                f"{path}/train.json: wanted a validation_interval, and no patience: final losses are compared"
            )
        if fixed := [key for key in differing_keys(sections) if key in FIXED]:
            section, _, key = fixed[0].partition(".")
            got, was = (quoted(sections[side][section].get(key)) for side in reversed(SIDES))
            why = "it changes the tokens that the final loss is measured on"
            raise BadInput(f"{path / section}.json: {key}: got {got}, wanted {was}, as the base has it: {why}")
        return sections

    def notes(self, sections: dict[str, Sections]) -> list[str]:
        """Return what a reader of the verdict is to know about the change."""
        files, notes = changed_files(*self.trees.values()), []
        if keys := differing_keys(sections):
            notes.append(f"The run directories differ in {', '.join(keys)}.")
        if requirements := [path for path in files if path.rpartition("/")[2].startswith("requirements")]:
            notes.append(f"{', '.join(requirements)} differ: both sides ran with the packages that are installed.")
        if measures := [path for path in files if path.startswith(MEASURE)]:
            count = counted(len(measures), "file")
            notes.append(f"WARNING: {count} that the loss is measured with differ: {', '.join(measures[:3])}.")
        return notes

    def _code(self, side: str) -> Path:
        return self.output / "code" / side


def differing_keys(sections: dict[str, Sections]) -> list[str]:
    """Return the keys, as "train.KEY", in which the run directories differ."""
    differing = []
    for section in KEYS:
        base, candidate = (one_form(section, sections[side][section]) for side in SIDES)
        keys = [key for key in sorted({*base, *candidate}) if base.get(key) != candidate.get(key)]
        differing += [f"{section}.{key}" for key in keys]
    return differing
