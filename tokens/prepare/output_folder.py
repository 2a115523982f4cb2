"""Output folder of a preparation: locked, never mixed with other tokens, emptied when nothing was prepared."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import BadInput
from common.file_lock import open_locked
from common.files import is_folder, writing
from tokens.format.manifest import MANIFEST, PLAN, RANKS_FILE
from tokens.prepare.bucket_output import IN_USE, scratch_of
from tokens.prepare.command import PrepareCommand
from tokens.prepare.commit_log import COMMITS
from tokens.prepare.growing_files import LOCK, UNITS, partial_files


def check_output(command: PrepareCommand) -> None:
    """Raise BadInput for an output that is a file, a source, or the scratch folder of a bucket."""
    directory = command.directory
    with writing(directory):
        if directory.exists() and not directory.is_dir():
            raise BadInput(f"{directory}: is no folder; pass another --output")
        resolved = directory.resolve()
    if any(is_folder(Path(name)) and Path(name).resolve() == resolved for name in command.sources):
        raise BadInput(f"{directory}: is a source and the output as well; pass another --output")
    if command.bucket is None and (url := scratch_of(resolved)) is not None:
        raise BadInput(f"{directory}: is the --scratch of {url}; pass another --output")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a token directory. Raises BadInput while another process holds it."""
    with open_locked(directory / LOCK, f"{directory}: {IN_USE}"):
        yield


def refuse_other_tokens(directory: Path) -> None:
    """Raise BadInput for a folder with tokens but without a plan; delete hidden files, which no plan can resume."""
    taken = [*directory.glob("[!.]*.safetensors"), *directory.glob(MANIFEST), *directory.glob(COMMITS)]
    if taken:
        raise BadInput(f"{taken[0]}: exists; pass another --output, or delete it to prepare these tokens anew")
    for path in partial_files(directory):
        path.unlink()


def delete_units(directory: Path) -> None:
    """Delete computed units that were not committed: they are computed again."""
    if (directory / UNITS).is_symlink():  # nothing is written through a link of that name
        (directory / UNITS).unlink()
    shutil.rmtree(directory / UNITS, ignore_errors=True)


def discard(directory: Path) -> None:
    """Delete a preparation without tokens, so that another command may begin here."""
    for path in (*partial_files(directory), directory / COMMITS, directory / RANKS_FILE, directory / PLAN):
        path.unlink(missing_ok=True)
    shutil.rmtree(directory / UNITS)
