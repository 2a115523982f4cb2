"""Checkouts of a trial: the files of a git revision, or of the working tree, each in a folder of its own.

Git keeps what it hashes. A trial must not fill the repository, so the working tree is hashed into a temporary folder of
objects, which is removed when the `Snapshots` are closed.
"""

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from common.errors import BadInput, refusing
from common.files import partial_directory, publish_folder, writing
from common.json_files import parse_json
from common.text import quoted
from experiments.shared.experiment_files import with_count
from experiments.shared.training_jobs import ROOT
from experiments.trial.new_files import needed_files

WORKING_TREE = "."
MOST_UNCOMMITTED_BYTES = 32_000_000  # that a trial copies of the working tree
NAMED_FILES = 3  # in notes and errors
CHECKOUT_WAIT_SECONDS = 600.0  # for another trial that writes the same files


class Snapshots:
    """Context manager that reads revisions and the working tree without adding anything to the repository."""

    def __init__(self) -> None:
        self.left_out: list[str] = []  # new files of the working tree that no program needs
        self.copied: list[str] = []  # files of the working tree that are not committed, and belong to its snapshot
        self._environment = dict(os.environ)

    def __enter__(self) -> "Snapshots":
        """Raise BadInput outside a git repository."""
        objects = ROOT / _git("rev-parse", "--git-path", "objects").decode().strip()
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-trial-")
        own = Path(self._folder.name) / "objects"
        (own / "info").mkdir(parents=True)
        (own / "info" / "alternates").write_text(f"{objects.resolve()}\n")
        self._environment |= {"GIT_OBJECT_DIRECTORY": str(own), "GIT_LITERAL_PATHSPECS": "1"}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._folder.cleanup()

    def tree_of(self, revision: str) -> str:
        """Return the hash of all files of a revision; of ".", of the files of the working tree that belong to it.

        These are the files that git tracks or has staged, as they are on the disk, and the new files that a program of
        them imports or names. Raises BadInput for an unknown revision, and for a working tree whose uncommitted files
        are too large to copy.
        """
        if revision == WORKING_TREE:
            return self._working_tree()
        advice = f"{quoted(revision)}: no such git revision; wanted a commit, branch or tag, or . for the working tree"
        words = ("rev-parse", "--verify", "--end-of-options", f"{revision}^{{tree}}")
        return self._git(*words, problem=advice).decode().strip()

    def changed_files(self, base: str, candidate: str) -> list[str]:
        """Return the paths in which two trees differ."""
        return self._paths("diff", "--name-only", "--no-renames", base, candidate)

    def read_json(self, tree: str, path: str) -> dict[str, Any] | None:
        """Return the JSON object in a file of a tree; None without the file. Raises BadInput for any other content."""
        if path not in self._paths("ls-tree", "--name-only", tree, path):
            return None
        with refusing(f"{path} of {tree[:8]}"):
            values: dict[str, Any] = parse_json(self._git("cat-file", "blob", f"{tree}:{path}"))
        return values

    def size_of(self, tree: str) -> str:
        """Return the number of files of a tree and their bytes, as text."""
        sizes = [line.split()[3] for line in self._paths("ls-tree", "-r", "-l", tree)]
        return described_size([int(size) for size in sizes if size.isdigit()])

    def check_out(self, tree: str, folder: Path) -> None:
        """Write the files of a tree, unless that was done; the folder token_files/ in it is the project's.

        Raises BadInput if the disk is full, or another trial does not finish writing the same tree.
        """
        if folder.exists():
            return
        archive, tokens = self._git("archive", tree), ROOT / "token_files"
        contention = (
            f"{folder}: another trial is still writing it after {CHECKOUT_WAIT_SECONDS:.0f} s; run the command again"
        )
        with writing(folder), partial_directory(folder, contention, wait_seconds=CHECKOUT_WAIT_SECONDS) as partial:
            if folder.exists():  # another trial has written it while this one waited
                return
            tokens.mkdir(exist_ok=True)
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extraction_filter = getattr(tarfile, "tar_filter", None)  # since Python 3.11.4
                files.extractall(partial)
            if not (partial / tokens.name).exists():
                (partial / tokens.name).symlink_to(tokens.resolve())  # that of another folder, in a worktree
            publish_folder(partial, folder)

    def _working_tree(self) -> str:
        changed: list[str] = []
        new: list[str] = []
        status = ("status", "--porcelain", "--untracked-files=all", "--no-renames", "--ignore-submodules")
        for entry in self._paths(*status):
            (new if entry.startswith("??") else changed).append(entry[3:])
        needed = needed_files(ROOT, self._paths("ls-files", "--cached"), new) if new else []
        self.left_out = [path for path in new if path not in needed]
        self.copied = sorted([*changed, *needed])
        _check_size(self.copied)
        with tempfile.TemporaryDirectory() as folder:
            index = Path(folder) / "index"  # a copy: what the user has staged stays as it is
            with suppress(FileNotFoundError):  # before the first commit
                shutil.copy2(ROOT / _git("rev-parse", "--git-path", "index").decode().strip(), index)
            self._git("add", "--update", index=index)
            if needed:
                names = b"".join(os.fsencode(path) + b"\0" for path in needed)
                words = ("add", "--pathspec-from-file=-", "--pathspec-file-nul")
                self._git(*words, index=index, text=names)
            return self._git("write-tree", index=index).decode().strip()

    def _paths(self, command: str, *arguments: str) -> list[str]:
        """Return the output of a git command that takes -z: its entries, each with a path."""
        entries = self._git("--no-optional-locks", command, "-z", *arguments).split(b"\0")
        return [os.fsdecode(entry) for entry in entries if entry]

    def _git(self, *arguments: str, index: Path | None = None, problem: str | None = None, text: bytes = b"") -> bytes:
        environment = self._environment | ({} if index is None else {"GIT_INDEX_FILE": str(index)})
        return _git(*arguments, environment=environment, problem=problem, text=text)


def describe_left_out(paths: Sequence[str]) -> Iterator[str]:
    """Yield a note on the new files that do not belong to the snapshot of the working tree, if there are any."""
    if paths:
        verb, them = ("is", "it") if len(paths) == 1 else ("are", "them")
        yield (
            f"{with_count(len(paths), 'new file')} of the working tree {verb} not part of it, because no program of it "
            f"imports or names {them}: {named(paths)}. To include one: git add FILE"
        )


def described_size(sizes: Sequence[int]) -> str:
    return f"{with_count(len(sizes), 'file')} of {sum(sizes) / 1e6:,.1f} MB"


def named(paths: Sequence[str]) -> str:
    """Return the first paths as text, and how many more there are."""
    more = len(paths) - NAMED_FILES
    return ", ".join(paths[:NAMED_FILES]) + (f" and {more:,} more" if more > 0 else "")


def uncommitted_size(paths: Sequence[str]) -> str:
    """Return the number and size of files of the working tree as text."""
    return described_size([*_sizes(paths).values()])


def _check_size(paths: Sequence[str]) -> None:
    sizes = _sizes(paths)
    if sum(sizes.values()) > MOST_UNCOMMITTED_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])
        shown = named([f"{path} ({sizes[path] / 1e6:,.1f} MB)" for path in largest])
        raise BadInput(
            f"{ROOT}: the working tree has {described_size([*sizes.values()])} that are not committed; wanted at most "
            f"{MOST_UNCOMMITTED_BYTES / 1e6:,.0f} MB, because a trial copies them; the largest: {shown}; move them "
            "away, or name them in .gitignore"
        )


def _sizes(paths: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each file that exists."""
    sizes = {}
    for path in paths:
        with suppress(OSError):  # deleted, or about to be
            sizes[path] = (ROOT / path).lstat().st_size
    return sizes


def _git(
    *arguments: str, environment: dict[str, str] | None = None, problem: str | None = None, text: bytes = b""
) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        result = subprocess.run(command, env=environment, input=text, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise BadInput("git: not installed; experiment.py trial compares git revisions") from error
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip() or f"exit status {result.returncode}"
        raise BadInput(problem or f"git {arguments[0]}: {said.splitlines()[0]}")
    return result.stdout
