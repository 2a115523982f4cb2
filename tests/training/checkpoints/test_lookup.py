"""Checkpoints are found by name, link or step, even in a copy of a run, and damaged ones are reported."""

import shutil
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.conftest import complete
from tests.training.checkpoints.conftest import flipped
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.lookup import find_before, find_to_evaluate, find_to_resume, linked_step
from training.checkpoints.saved_state import read_state, verify


def test_damaged_checkpoint_is_reported_and_archived(finished: Path, copied: Path) -> None:
    newest = copied / "checkpoints" / "step-00000008"
    weights = newest / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes(), -1000, 0))
    done = complete(copied, ranks=2)
    assert f"WARNING: {weights}: damaged: its sha256 is not the one in manifest.json" in done.stderr
    assert "falling back to step-00000004" in done.stderr
    assert verify(newest) is None  # the checkpoint was written again
    assert len(list((copied / "archive").glob("*/checkpoints/step-00000008"))) == 1
    # Two ranks have written the same bytes as one rank, because the bytes do not depend on which rank writes them.
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest / name).read_bytes() == (finished / "checkpoints" / newest.name / name).read_bytes()


def test_run_with_only_a_copy_gives_advice(copied: Path) -> None:
    directory = copied / "checkpoints"
    (directory / "step-00000008").rename(directory / "kept")
    shutil.rmtree(directory / "step-00000004")
    message = "refers to step-00000008, which does not exist; continue from a copy with --resume kept"
    with pytest.raises(BadInput, match=message):
        find_to_resume(checkpoints_of(copied), "auto")
    for link in ("latest", "best"):
        (directory / link).unlink()
    with pytest.raises(BadInput, match="only kept; continue from a copy with --resume kept, or start over"):
        find_to_resume(checkpoints_of(copied), "auto")


def test_broken_links_do_not_start_over_silently(copied: Path) -> None:
    for name in ("step-00000004", "step-00000008"):
        shutil.rmtree(copied / "checkpoints" / name)
    message = "latest: refers to step-00000008, which does not exist; copy it here again, or start over"
    with pytest.raises(BadInput, match=message):
        find_to_resume(checkpoints_of(copied), "auto")


def test_checkpoint_is_found_by_name_link_or_step(finished: Path) -> None:
    directory = checkpoints_of(finished)
    checkpoints = [find_to_resume(directory, name) for name in ("auto", "latest", "best", "step-00000004")]
    assert [checkpoint.name for checkpoint in checkpoints if checkpoint][::3] == ["step-00000008", "step-00000004"]
    assert str(checkpoints[1]) == str(finished / "checkpoints" / "step-00000008")
    message = "checkpoints/nothing: no such checkpoint; existing ones: best, latest, step-00000004"
    with pytest.raises(BadInput, match=message):
        find_to_resume(directory, "nothing")
    earlier = [find_before(directory, step) for step in (9, 8, 4)]
    assert [checkpoint and checkpoint.name for checkpoint in earlier] == ["step-00000008", "step-00000004", None]


def without_links(directory: Path, *links: str) -> None:
    """Replace these links in a checkpoint directory with copies of their targets. Remove other links and all steps."""
    targets = {link: (directory / link).resolve() for link in links}
    for link in ("latest", "best"):
        (directory / link).unlink()
    for link, target in targets.items():
        shutil.copytree(target, directory / link)
    for step in directory.glob("step-*"):
        shutil.rmtree(step)


@pytest.mark.parametrize("links", [("latest",), ("best",), ("latest", "best")])
def test_copied_run_resumes_from_its_newest_checkpoint(copied: Path, links: tuple[str, ...]) -> None:
    directory = copied / "checkpoints"
    (directory / "best").unlink()
    (directory / "best").symlink_to("step-00000004")  # "best" sorts before "latest", but is older
    without_links(directory, *links)
    checkpoint = find_to_resume(directory, "auto")
    assert checkpoint == directory / links[0]
    assert read_state(checkpoint).position.step == (8 if "latest" in links else 4)
    before = find_before(directory, 8)
    assert before == (directory / "best" if "best" in links else None)


def test_damaged_copy_is_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copied / "checkpoints"
    shutil.copytree(directory / "step-00000004", copied / "spare")
    without_links(directory, "latest")
    for damage in ('{"format": 3, "config": null}', "", "{}"):
        (directory / "latest" / "state.json").write_text(damage)
        with pytest.raises(BadInput, match=r"latest/state\.json: got .*start over with --resume never"):
            find_to_resume(directory, "auto")
    (copied / "spare").rename(directory / "best")
    assert find_to_resume(directory, "auto") == directory / "best"
    errors = capsys.readouterr().err
    assert "latest/state.json: got 2 bytes" in errors and "falling back to best" in errors


def test_files_that_name_a_checkpoint_act_as_links(copied: Path) -> None:
    """In a bucket, or on a system without links, a link is replaced with a file that contains the checkpoint's name."""
    directory = copied / "checkpoints"
    for link, name in (("latest", "step-00000008\n"), ("best", "step-00000004")):
        (directory / link).unlink()
        (directory / link).write_text(name)
    assert find_to_resume(directory, "latest") == find_to_resume(directory, "auto") == directory / "step-00000008"
    assert find_to_resume(directory, "best") == directory / "step-00000004"
    shutil.rmtree(directory / "step-00000008")
    shutil.rmtree(directory / "step-00000004")
    with pytest.raises(BadInput, match="latest: refers to step-00000008, which does not exist"):
        find_to_resume(directory, "auto")


def test_missing_newest_checkpoint_is_reported(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copied / "checkpoints"
    shutil.rmtree(directory / "step-00000008")
    assert find_to_resume(directory, "auto") == directory / "step-00000004"
    message = "latest: refers to step-00000008, which does not exist; falling back to step-00000004"
    assert message in capsys.readouterr().err


def test_missing_links_are_resolved_by_step(copied: Path) -> None:
    directory = copied / "checkpoints"
    state = read_state(directory / "step-00000008")
    for link in ("latest", "best"):
        (directory / link).unlink()
    assert find_to_resume(directory, "latest") == directory / "step-00000008"
    assert find_to_resume(directory, "best") == directory / f"step-{state.position.best_step:08d}"


def test_misplaced_checkpoints_are_named(copied: Path) -> None:
    directory = copied / "checkpoints"
    for misplaced in (copied / "step-00000008", directory / "checkpoints" / "step-00000008"):
        misplaced.parent.mkdir(exist_ok=True)
        shutil.move(directory / "step-00000008", misplaced)
        for path in directory.iterdir():
            if path.is_symlink():
                path.unlink()
        shutil.rmtree(directory / "step-00000004", ignore_errors=True)
        with pytest.raises(BadInput, match=f"{misplaced}: this checkpoint is not in {directory}; move it there"):
            find_to_resume(directory, "auto")
        shutil.move(misplaced, directory / "step-00000008")


@pytest.mark.parametrize("links", ["links", "folders", "files", "none"])
def test_name_means_the_same_for_every_command(copied: Path, links: str) -> None:
    directory = checkpoints_of(copied)
    for link, target in (("latest", "step-00000008"), ("best", "step-00000008")):
        (directory / link).unlink()
        if links == "links":
            (directory / link).symlink_to(target)
        elif links == "folders":
            shutil.copytree(directory / target, directory / link)
        elif links == "files":
            (directory / link).write_text(f"{target}\n")
    for name in ("latest", "best", "step-00000004"):
        checkpoint = find_to_resume(directory, name)
        assert checkpoint == find_to_evaluate(directory, name), name
        assert read_state(checkpoint).position.step == (4 if name == "step-00000004" else 8), name
    assert find_to_evaluate(directory, None) == find_to_evaluate(directory, "best")
    assert [linked_step(directory, link) for link in ("latest", "best")] == [8, 8]


def test_invalid_checkpoint_name_is_refused(copied: Path, tmp_path: Path) -> None:
    directory = checkpoints_of(copied)
    (directory / ".partial-step-00000012").mkdir()
    for name in ("", ".", "..", ".partial-step-00000012", "../checkpoints", "step-12", "n" * 300):
        with pytest.raises(
            BadInput, match="no such checkpoint; existing ones: best, latest, step-00000004, step-00000008"
        ):
            find_to_evaluate(directory, name)
    for name in ("step-12", "n" * 300):
        with pytest.raises(
            BadInput, match="no such checkpoint; existing ones: best, latest, step-00000004, step-00000008"
        ):
            find_to_resume(directory, name)
    with pytest.raises(BadInput, match="no checkpoint yet; train the run first"):
        find_to_evaluate(tmp_path / "nowhere", None)


def test_link_to_another_folder_is_never_resumed(copied: Path, tmp_path: Path) -> None:
    # The checkpoint directory has a step-00000004, too.
    directory, elsewhere = checkpoints_of(copied), tmp_path / "other" / "step-00000004"
    shutil.copytree(directory / "step-00000008", elsewhere)
    for target in (elsewhere, Path("../../other/step-00000004")):
        (directory / "kept").symlink_to(target)
        assert find_to_evaluate(directory, "kept") == elsewhere
        with pytest.raises(BadInput, match=r"kept: refers to .*, in another folder; copy it here"):
            find_to_resume(directory, "kept")
        (directory / "kept").unlink()


def test_links_without_a_checkpoint_have_no_step(copied: Path) -> None:
    directory = checkpoints_of(copied)
    shutil.rmtree(directory / "step-00000008")
    assert linked_step(directory, "latest") is None
    for link in ("latest", "best"):
        (directory / link).unlink()
    (directory / "step-00000004" / "state.json").write_text("{}")
    with pytest.raises(BadInput, match="got format None"):
        linked_step(directory, "latest")
