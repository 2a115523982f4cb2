"""The checkouts of a trial: the files of a git revision, or of the working tree, in separate folders.

Git stores a copy of every file that it hashes. Because a trial must not fill the repository, the objects of the working
tree are stored in a temporary folder, which is removed when the `Snapshots` are closed.
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
from common.text import counted, quoted
from experiments.shared.training_jobs import ROOT
from experiments.trial.new_files import needed_files

WORKING_TREE = "."
MOST_UNCOMMITTED_BYTES = 32_000_000  # a trial copies at most this many bytes of uncommitted files
NAMED_FILES = 3  # notes and errors name at most this many files
CHECKOUT_WAIT_SECONDS = 600.0  # how long to wait for another trial that is writing the same files


class Snapshots:
    """Context manager that reads revisions and the working tree without adding anything to the repository."""

    def __init__(self) -> None:
        self.left_out: list[str] = []  # new files of the working tree that no program imports or names
        self.copied: list[str] = []  # uncommitted files that are part of the snapshot of the working tree
        self._environment = dict(os.environ)

    def __enter__(self) -> "Snapshots":
        """Create a temporary folder for git objects. Raise BadInput if this is not a git repository."""
        repository_objects = ROOT / _git("rev-parse", "--git-path", "objects").decode().strip()
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-trial-")
        objects = Path(self._folder.name) / "objects"
        (objects / "info").mkdir(parents=True)
        (objects / "info" / "alternates").write_text(f"{repository_objects.resolve()}\n")
        self._environment |= {"GIT_OBJECT_DIRECTORY": str(objects), "GIT_LITERAL_PATHSPECS": "1"}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._folder.cleanup()

    def tree_of(self, revision: str) -> str:
        """Return the hash of all files of a revision or, for ".", of the working tree.

        The working tree consists of all tracked or staged files, with their contents on disk, and of the new files that
        one of its programs imports or names. Raise BadInput if the revision is unknown, or if the uncommitted files of
        the working tree are too large to copy.
        """
        if revision == WORKING_TREE:
            return self._working_tree()
        problem = f"{quoted(revision)}: no such git revision; pass a commit, branch or tag, or . for the working tree"
        words = ("rev-parse", "--verify", "--end-of-options", f"{revision}^{{tree}}")
        return self._git(*words, problem=problem).decode().strip()

    def changed_files(self, base: str, candidate: str) -> list[str]:
        """Return the paths of the files that differ between two trees."""
        return self._paths("diff", "--name-only", "--no-renames", base, candidate)

    def read_json(self, tree: str, path: str) -> dict[str, Any] | None:
        """Return the JSON object in a file of a tree, or None if there is no such file.

        Raise BadInput if the file contains anything else.
        """
        if path not in self._paths("ls-tree", "--name-only", tree, path):
            return None
        with refusing(f"{path} of {tree[:8]}"):
            values: dict[str, Any] = parse_json(self._git("cat-file", "blob", f"{tree}:{path}"))
        return values

    def size_of(self, tree: str) -> str:
        """Return the number of files in a tree and their total size, as text."""
        sizes = [line.split()[3] for line in self._paths("ls-tree", "-r", "-l", tree)]
        return describe_size([int(size) for size in sizes if size.isdigit()])

    def check_out(self, tree: str, folder: Path) -> None:
        """Write the files of a tree to a folder, unless the folder exists.

        The folder's token_files/ is a link to the token_files/ of this project. Raise BadInput if the disk is full, or
        if another trial does not finish writing the same tree in time.
        """
        if folder.exists():
            return
        archive, tokens = self._git("archive", tree), ROOT / "token_files"
        contention = (
            f"{folder}: another trial is still writing this folder after {CHECKOUT_WAIT_SECONDS:.0f} s; run the "
            "command again"
        )
        with writing(folder), partial_directory(folder, contention, wait_seconds=CHECKOUT_WAIT_SECONDS) as partial:
            if folder.exists():  # another trial wrote the folder while this trial waited
                return
            tokens.mkdir(exist_ok=True)
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extraction_filter = getattr(tarfile, "tar_filter", None)  # exists since Python 3.11.4
                files.extractall(partial)
            if not (partial / tokens.name).exists():
                (partial / tokens.name).symlink_to(tokens.resolve())  # in a worktree, token_files may itself be a link
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
            index = Path(folder) / "index"  # a copy, so that the user's own index does not change
            with suppress(FileNotFoundError):  # there is no index before the first commit
                shutil.copy2(ROOT / _git("rev-parse", "--git-path", "index").decode().strip(), index)
            self._git("add", "--update", index=index)
            if needed:
                names = b"".join(os.fsencode(path) + b"\0" for path in needed)
                words = ("add", "--pathspec-from-file=-", "--pathspec-file-nul")
                self._git(*words, index=index, text=names)
            return self._git("write-tree", index=index).decode().strip()

    def _paths(self, command: str, *arguments: str) -> list[str]:
        """Run a git command with the option -z, and return the entries of its output. Each entry contains a path."""
        entries = self._git("--no-optional-locks", command, "-z", *arguments).split(b"\0")
        return [os.fsdecode(entry) for entry in entries if entry]

    def _git(self, *arguments: str, index: Path | None = None, problem: str | None = None, text: bytes = b"") -> bytes:
        environment = self._environment | ({} if index is None else {"GIT_INDEX_FILE": str(index)})
        return _git(*arguments, environment=environment, problem=problem, text=text)


def describe_left_out(paths: Sequence[str]) -> Iterator[str]:
    """Yield a note about the new files that are not part of the snapshot of the working tree, if there are any."""
    if paths:
        verb, them = ("is", "it") if len(paths) == 1 else ("are", "them")
        yield (
            f"{counted(len(paths), 'new file')} in the working tree {verb} not part of the trial, because no "
            f"program imports or names {them}: {first_paths(paths)}. To include a file: git add FILE"
        )


def describe_size(sizes: Sequence[int]) -> str:
    """Return the number of files and their total size, such as "3 files of 1.2 MB"."""
    return f"{counted(len(sizes), 'file')} of {sum(sizes) / 1e6:,.1f} MB"


def first_paths(paths: Sequence[str]) -> str:
    """Return a text with the first paths and the number of remaining paths."""
    more = len(paths) - NAMED_FILES
    return ", ".join(paths[:NAMED_FILES]) + (f" and {more:,} more" if more > 0 else "")


def uncommitted_size(paths: Sequence[str]) -> str:
    """Return the number and the total size of the given files of the working tree, as text."""
    return describe_size([*_sizes(paths).values()])


def _check_size(paths: Sequence[str]) -> None:
    sizes = _sizes(paths)
    if sum(sizes.values()) > MOST_UNCOMMITTED_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])
        shown = first_paths([f"{path} ({sizes[path] / 1e6:,.1f} MB)" for path in largest])
        raise BadInput(
            f"{ROOT}: the working tree has {describe_size([*sizes.values()])} that are not committed. A trial copies "
            f"them, and at most {MOST_UNCOMMITTED_BYTES / 1e6:,.0f} MB are allowed; move the largest files away, or "
            f"add them to .gitignore: {shown}"
        )


def _sizes(paths: Sequence[str]) -> dict[str, int]:
    """Return the size in bytes of each file that exists."""
    sizes = {}
    for path in paths:
        with suppress(OSError):  # the file was deleted
            sizes[path] = (ROOT / path).lstat().st_size
    return sizes


def _git(
    *arguments: str, environment: dict[str, str] | None = None, problem: str | None = None, text: bytes = b""
) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        process = subprocess.run(command, env=environment, input=text, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise BadInput("git: not installed; experiment.py trial needs it to compare git revisions") from error
    if process.returncode:
        message = process.stderr.decode(errors="replace").strip() or f"exit status {process.returncode}"
        raise BadInput(problem or f"git {arguments[0]}: {message.splitlines()[0]}")
    return process.stdout
