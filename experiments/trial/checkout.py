"""Checkouts of a trial: the files of a git revision, or of the working tree, in a folder of their own."""

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

from common.errors import BadInput, quoted
from common.files import writing
from experiments.shared.training_jobs import ROOT

WORKING_TREE = "."


def tree_of(revision: str) -> str:
    """Return the hash of all files of a revision; of ".", of those in the working tree that git does not ignore.

    Raises BadInput for an unknown revision, and outside git.
    """
    own = ROOT / _git("rev-parse", "--git-path", "index").decode().strip()
    if revision != WORKING_TREE:
        advice = f"{quoted(revision)}: no such git revision; wanted a commit, branch or tag, or . for the working tree"
        words = ("rev-parse", "--verify", "--end-of-options", f"{revision}^{{tree}}")
        return _git(*words, problem=advice).decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"  # a copy: what the user has staged stays as it is
        with suppress(FileNotFoundError):  # before the first commit
            shutil.copy2(own, index)
        _git("add", "--all", index=index)
        return _git("write-tree", index=index).decode().strip()


def changed_files(base: str, candidate: str) -> list[str]:
    """Return the paths in which two trees differ."""
    return _git("diff", "--name-only", "-z", base, candidate).decode(errors="replace").split("\0")[:-1]


def check_out(tree: str, folder: Path) -> None:
    """Write the files of a tree, unless that was done; token_files/ there is the project's."""
    if folder.exists():
        return
    archive, tokens = _git("archive", tree), ROOT / "token_files"
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        tokens.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as partial:
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extraction_filter = getattr(tarfile, "tar_filter", None)  # since Python 3.11.4
                files.extractall(made := Path(partial) / "files")
            if not (made / tokens.name).exists():
                (made / tokens.name).symlink_to(tokens)
            if not folder.exists():  # by another trial
                made.rename(folder)


def _git(*arguments: str, index: Path | None = None, problem: str | None = None) -> bytes:
    environment = os.environ | ({} if index is None else {"GIT_INDEX_FILE": str(index)})
    try:
        result = subprocess.run(["git", "-C", str(ROOT), *arguments], env=environment, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise BadInput("git: not installed; experiment.py trial compares git revisions") from error
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip() or f"exit status {result.returncode}"
        raise BadInput(problem or f"git {arguments[0]}: {said.splitlines()[0]}")
    return result.stdout
