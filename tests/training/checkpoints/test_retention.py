"""Retention: which checkpoints are kept, which are removed, and which files must not be removed."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from common.bucket import Version
from tests.launch import ROOT
from training.checkpoints.directory import MANIFEST, STATE, WEIGHTS, link_target, name_of
from training.checkpoints.lookup import bucket_link
from training.checkpoints.retention import CHECKPOINT_BYTES, kept_steps, prune_bucket, prune_disk
from training.config.key_groups import OPTIMIZERS
from training.optimizers.update_rule import rules_of

STEPS = [2, 4, 6, 8, 10]


class Objects:
    """A bucket in memory, with a list of the objects that were deleted."""

    def __init__(self, names: list[str]) -> None:
        self.contents = dict.fromkeys(names, b"")
        self.deleted: list[str] = []

    def objects(self) -> list[str]:
        return [*self.contents]

    def read(self, name: str) -> Version | None:
        return Version(self.contents[name], "") if name in self.contents else None

    def write(self, name: str, content: bytes) -> None:
        self.contents[name] = content

    def delete(self, names: list[str]) -> None:
        for name in names:
            del self.contents[name]
        self.deleted += names

    def steps(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.contents if "/" in name})


@pytest.mark.parametrize(
    ("newest", "best", "keep", "expected"),
    [
        (10, None, 1, {10}),
        (10, None, 3, {6, 8, 10}),
        (10, 2, 1, {2, 10}),  # the best one is kept, however old it is
        (10, 8, 2, {8, 10}),  # the best one is not counted twice
        (10, 3, 1, {10}),  # the best step has no checkpoint
        (10, None, 9, {2, 4, 6, 8, 10}),
        (6, 2, 1, {2, 6, 8, 10}),  # checkpoints of later steps are kept
        (7, None, 1, {6, 8, 10}),  # the newest step does not exist yet
    ],
)
def test_newest_best_and_later_checkpoints_are_kept(
    newest: int, best: int | None, keep: int, expected: set[int]
) -> None:
    assert kept_steps(STEPS, newest, best, keep) == expected
    assert kept_steps(STEPS[::-1], newest, best, keep) == expected  # the order of the listing does not matter


@given(some.sets(some.integers(0, 50)), some.integers(0, 50), some.integers(0, 50) | some.none(), some.integers(1, 9))
def test_kept_steps_exist_and_stay_kept(steps: set[int], newest: int, best: int | None, keep: int) -> None:
    to_keep = kept_steps(steps, newest, best, keep)
    assert to_keep <= steps and kept_steps(to_keep, newest, best, keep) == to_keep
    assert {newest, best} & steps <= to_keep
    assert len({step for step in to_keep if step <= newest}) <= keep + 1
    assert all(removed < step for removed in steps - to_keep for step in to_keep - {best})


@pytest.mark.parametrize(("newest", "best", "keep"), [(10, 4, 1), (10, None, 2), (10, 10, 1), (8, 2, 1), (10, 3, 1)])
def test_disk_and_bucket_keep_the_same_checkpoints(tmp_path: Path, newest: int, best: int | None, keep: int) -> None:
    names = [f"{name_of(step)}/{file}" for step in STEPS for file in (WEIGHTS, STATE, MANIFEST)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    bucket: Any = Objects(names)
    (tmp_path / "best").symlink_to(name_of(6))  # from an earlier save
    bucket.write("best", name_of(6).encode())
    prune_disk(tmp_path, newest, best, keep)
    prune_bucket(bucket, newest, best, keep)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()) == bucket.steps()
    for link in ("latest", "best"):
        assert link_target(tmp_path / link) == bucket_link(bucket, link)


def test_manifests_in_a_bucket_are_deleted_first() -> None:
    bucket: Any = Objects([f"{name_of(step)}/{file}" for step in (2, 4) for file in (WEIGHTS, MANIFEST)])
    bucket.write("lease.json", b"")
    bucket.write(f"{name_of(3)}/{WEIGHTS}", b"")  # from an upload that was killed
    prune_bucket(bucket, 4, None, 1)
    assert bucket.deleted == [f"{name_of(2)}/{MANIFEST}", f"{name_of(2)}/{WEIGHTS}", f"{name_of(3)}/{WEIGHTS}"]
    assert "lease.json" in bucket.contents


def test_other_programs_hidden_files_are_left_alone(tmp_path: Path) -> None:
    for name in (".partial-step-00000004", ".partial-mine", ".partial-step-00000004-aside", "step-00000004"):
        (tmp_path / name).mkdir()
    (tmp_path / ".partial-best").symlink_to("nowhere")
    prune_disk(tmp_path, 4, None, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-mine", "latest", "step-00000004"]


def test_no_optimizer_exceeds_the_expected_space() -> None:
    for optimizer in OPTIMIZERS:
        states = [sum(dtype.itemsize for dtype in rule.state.values()) for rule in rules_of(optimizer)]
        assert torch.float32.itemsize + max(states) <= CHECKPOINT_BYTES, optimizer


REMOVING = {"rmtree", "remove", "unlink", "delete"}  # not rmdir, which removes only empty folders
# The functions in training/checkpoints/ that remove files, except the functions of retention.py. The comments say what
# each function removes. None of these functions removes a complete checkpoint.
REMOVED_ELSEWHERE = {
    ("archive.py", "_move"),  # a link that was moved
    ("atomic_commit.py", "_restore_replaced"),  # an unfinished replacement, when the older checkpoint is restored
    ("bucket_upload.py", "release"),  # the lease of a bucket
    ("directory.py", "point"),  # a link
    ("directory.py", "rename"),  # the source after a copy to another file system
    ("run_disk.py", "find_disk"),  # a probe file that shows which nodes share a disk
}


def test_only_retention_removes_checkpoints() -> None:
    removing = set()
    for path in (ROOT / "training" / "checkpoints").rglob("*.py"):
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
            if names & REMOVING:
                removing.add((path.name, function.name))
    elsewhere = {(file, function) for file, function in removing if file != "retention.py"}
    assert elsewhere == REMOVED_ELSEWHERE and len(removing) > len(elsewhere)
