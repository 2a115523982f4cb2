"""Locate a model: a run, a checkpoint, a model directory, or a model on the Hugging Face hub."""

import os
from pathlib import Path

import attrs

from common.errors import BadInput, refusing
from common.hub_client import MODEL, download_snapshot, hub_name, is_own_export, note_local
from evaluation.shared.chat_template import GENERATION
from evaluation.shared.foreign import check_foreign
from evaluation.shared.model_files import CONFIG_FILES, INDEX
from evaluation.shared.model_files import NANOGPT as NANOGPT_MODEL
from tokens.format.manifest import TokenizerRecord
from tokens.tokenizer.hugging_face_files import ADDED, CHAT_TEMPLATE, SPECIAL, VOCABULARY
from training.checkpoints.directory import CHECKPOINTS, MANIFEST, STATE, WEIGHTS
from training.checkpoints.lookup import find_to_evaluate
from training.checkpoints.run_record import RESOLVED, JobRecord, read_job
from training.checkpoints.saved_state import verify

RUNS = Path("runs")
HUB_FILES = [*CONFIG_FILES, INDEX, VOCABULARY, SPECIAL, ADDED, CHAT_TEMPLATE, GENERATION]
HUB_FILES += ["*.safetensors", "tokenizer*.json"]


@attrs.frozen
class ModelLocation:
    """The directories of a model, its run and its results."""

    path: Path  # the checkpoint or model directory
    run: Path | None  # the run directory of a checkpoint
    home: Path  # directory of the results: the run, the model directory, or a folder in runs/ for a model on the hub

    @property
    def is_lockstep_checkpoint(self) -> bool:
        """True for a checkpoint of Lockstep, even a damaged one. Other models have no record of their training."""
        marks = (STATE,) if self.run is None else (STATE, MANIFEST)
        return any(os.path.lexists(self.path / file) for file in marks)

    @property
    def title(self) -> str:
        """The model's name in the output. For a run, it consists of the names of the run and the checkpoint."""
        name = self.home.resolve().name
        return name.replace("--", "/") if self.run is None else f"{name} {self.path.resolve().name}"

    @property
    def job(self) -> JobRecord:
        """The last job of the run, from its `resolved.json`; an empty record if there is none. Raises BadInput."""
        return JobRecord() if self.run is None else read_job(self.run)

    @property
    def tokenizer(self) -> TokenizerRecord | None:
        """The tokenizer of the run's tokens, or None if it is unknown. Raises BadInput."""
        job = self.job
        with refusing(f"{self.run}/{RESOLVED}"):
            job.check("tokenizer")
        return job.tokenizer


def locate(reference: str, name: str | None) -> ModelLocation:
    """Find a model in its directory, or download OWNER/NAME from the hub. Raises BadInput.

    `name`: the checkpoint to use if the model is a run; None: the best one.
    """
    home = home_of(reference)
    path = Path(reference)
    if not path.exists():
        absent = "there is no such directory, and no such model is available on the hub"
        path = Path(download_snapshot(_hub_name(reference), "model", HUB_FILES, absent))
    run = path if _is_run(path) else None
    if run is not None:
        path = find_to_evaluate(run / CHECKPOINTS, name)
    elif name is not None:
        raise BadInput(f"{path}: not a run directory, so --checkpoint {name} does not apply; remove the option")
    elif (parent_run := _run_of(path)) is not None:
        path = parent_run / CHECKPOINTS / path.resolve().name
        run = home = parent_run
    location = ModelLocation(path, run, home)
    if location.is_lockstep_checkpoint:
        if problem := verify(path):
            raise BadInput(f"{problem}; choose another checkpoint")
    else:
        check_foreign(path, run)
    return location


def home_of(reference: str) -> Path:
    """Return the directory of a model's results, which may not exist yet. Raises BadInput for an invalid name."""
    path = Path(reference)
    with refusing(f"{reference}: cannot be read", kinds=(OSError,)):
        is_folder = path.is_dir()
    if is_folder:
        is_ours = _is_run(path) or _run_of(path) is not None or is_own_export(path)
        if not is_ours:
            note_local(reference, MODEL)
        return _run_of(path) or path
    return path if path.exists() else RUNS / _hub_name(reference).replace("/", "--")


def is_model(path: Path) -> bool:
    """Return whether a folder is a run or a model. A folder with only the results of a model on the hub is neither."""
    return any((path / name).exists() for name in (CHECKPOINTS, "train.json", WEIGHTS, NANOGPT_MODEL, *CONFIG_FILES))


def _is_run(path: Path) -> bool:
    return (path / CHECKPOINTS).is_dir() or (path / "train.json").is_file()


def _hub_name(reference: str) -> str:
    return hub_name(reference, MODEL, [RUNS], is_model)


def _run_of(checkpoint: Path) -> Path | None:
    """Return the run directory that a checkpoint is in, or None. The folder `checkpoints` may be a symbolic link."""
    # Path.resolve follows the link, so the path is also tried without following links.
    paths = (Path(os.path.abspath(checkpoint)), checkpoint.resolve())  # noqa: PTH100
    return next((path.parents[1].resolve() for path in paths if path.parent.name == CHECKPOINTS), None)
