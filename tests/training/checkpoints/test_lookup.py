"""Lookup of a run's checkpoints by name, link or step, also in copies of a run; damaged and missing ones are named."""

import shutil
from pathlib import Path

import pytest

from common.errors import BadInput
from tests.conftest import complete
from tests.training.checkpoints.conftest import flipped
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.lookup import find_before, find_to_evaluate, find_to_resume, linked_step
from training.checkpoints.saved_state import read_state, verify


def test_a_damaged_checkpoint_is_passed_over_loudly_and_set_aside(finished: Path, copied: Path) -> None:
    newest = copied / "checkpoints" / "step-00000008"
    weights = newest / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes(), -1000, 0))
    done = complete(copied, ranks=2)
    assert f"WARNING: {weights}: damaged: its sha256 is not the one in manifest.json" in done.stderr
    assert "falling back to step-00000004" in done.stderr
    assert verify(newest) is None  # written again
    assert len(list((copied / "archive").glob("*/checkpoints/step-00000008"))) == 1
    # Byte for byte what one rank had written: the layout of the files does not depend on who writes them.
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest / name).read_bytes() == (finished / "checkpoints" / newest.name / name).read_bytes()


def test_a_run_with_nothing_but_a_kept_copy_says_how_to_continue(copied: Path) -> None:
    directory = copied / "checkpoints"
    (directory / "step-00000008").rename(directory / "kept")
    shutil.rmtree(directory / "step-00000004")
    said = "refers to step-00000008, which does not exist; continue from a copy with --resume kept"
    with pytest.raises(BadInput, match=said):
        find_to_resume(checkpoints_of(copied), "auto")
    for link in ("latest", "best"):
        (directory / link).unlink()
    with pytest.raises(BadInput, match="only kept; continue from it with --resume kept, or start over"):
        find_to_resume(checkpoints_of(copied), "auto")


def test_a_run_whose_links_name_nothing_does_not_begin_anew_in_silence(copied: Path) -> None:
    for name in ("step-00000004", "step-00000008"):
        shutil.rmtree(copied / "checkpoints" / name)
    said = "latest: refers to step-00000008, which does not exist; copy it here again, or start over"
    with pytest.raises(BadInput, match=said):
        find_to_resume(checkpoints_of(copied), "auto")


def test_a_checkpoint_is_found_by_name_link_or_step(finished: Path) -> None:
    directory = checkpoints_of(finished)
    found = [find_to_resume(directory, wanted) for wanted in ("auto", "latest", "best", "step-00000004")]
    assert [checkpoint.name for checkpoint in found if checkpoint][::3] == ["step-00000008", "step-00000004"]
    assert str(found[1]) == str(finished / "checkpoints" / "step-00000008")
    said = "checkpoints/nothing: no such checkpoint; existing ones: best, latest, step-00000004"
    with pytest.raises(BadInput, match=said):
        find_to_resume(directory, "nothing")
    earlier = [find_before(directory, step) for step in (9, 8, 4)]
    assert [checkpoint and checkpoint.name for checkpoint in earlier] == ["step-00000008", "step-00000004", None]


def without_links(directory: Path, *links: str) -> None:
    """Turn a checkpoint directory into a copy that followed links, and that has no more than these of them."""
    targets = {link: (directory / link).resolve() for link in links}
    for link in ("latest", "best"):
        (directory / link).unlink()
    for link, target in targets.items():
        shutil.copytree(target, directory / link)
    for step in directory.glob("step-*"):
        shutil.rmtree(step)


@pytest.mark.parametrize("links", [("latest",), ("best",), ("latest", "best")])
def test_a_copied_run_resumes_from_its_newest_checkpoint(copied: Path, links: tuple[str, ...]) -> None:
    directory = copied / "checkpoints"
    (directory / "best").unlink()
    (directory / "best").symlink_to("step-00000004")  # its name sorts first, but it is the older one
    without_links(directory, *links)
    found = find_to_resume(directory, "auto")
    assert found == directory / links[0]
    assert read_state(found).position.step == (8 if "latest" in links else 4)
    before = find_before(directory, 8)
    assert before == (directory / "best" if "best" in links else None)


def test_a_damaged_copy_is_refused_never_started_over(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copied / "checkpoints"
    shutil.copytree(directory / "step-00000004", copied / "spare")
    without_links(directory, "latest")
    for damage in ('{"format": 3, "config": null}', "", "{}"):
        (directory / "latest" / "state.json").write_text(damage)
        with pytest.raises(BadInput, match=r"latest/state\.json: got .*start over with --resume never"):
            find_to_resume(directory, "auto")
    (copied / "spare").rename(directory / "best")
    assert find_to_resume(directory, "auto") == directory / "best"
    assert "latest/state.json: got 2 bytes" in (said := capsys.readouterr().err) and "falling back to best" in said


def test_files_that_name_a_checkpoint_are_links(copied: Path) -> None:
    """A download from a bucket has them, and an archive that was unpacked where there are no links."""
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


def test_a_missing_newest_checkpoint_is_reported(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copied / "checkpoints"
    shutil.rmtree(directory / "step-00000008")
    assert find_to_resume(directory, "auto") == directory / "step-00000004"
    said = "latest: refers to step-00000008, which does not exist; falling back to step-00000004"
    assert said in capsys.readouterr().err


def test_links_that_a_copy_lost_are_found_by_step(copied: Path) -> None:
    directory = copied / "checkpoints"
    state = read_state(directory / "step-00000008")
    for link in ("latest", "best"):
        (directory / link).unlink()
    assert find_to_resume(directory, "latest") == directory / "step-00000008"
    assert find_to_resume(directory, "best") == directory / f"step-{state.position.best_step:08d}"


def test_checkpoints_in_a_wrong_place_are_named(copied: Path) -> None:
    directory = copied / "checkpoints"
    for wrong in (copied / "step-00000008", directory / "checkpoints" / "step-00000008"):
        wrong.parent.mkdir(exist_ok=True)
        shutil.move(directory / "step-00000008", wrong)
        for path in directory.iterdir():
            if path.is_symlink():
                path.unlink()
        shutil.rmtree(directory / "step-00000004", ignore_errors=True)
        with pytest.raises(BadInput, match=f"{wrong}: this checkpoint is not in {directory}; move it there"):
            find_to_resume(directory, "auto")
        shutil.move(wrong, directory / "step-00000008")


@pytest.mark.parametrize("links", ["links", "folders", "files", "none"])
def test_a_name_means_the_same_checkpoint_to_every_command(copied: Path, links: str) -> None:
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
        resumed = find_to_resume(directory, name)
        assert resumed == find_to_evaluate(directory, name), name
        assert read_state(resumed).position.step == (4 if name == "step-00000004" else 8), name
    assert find_to_evaluate(directory, None) == find_to_evaluate(directory, "best")
    assert [linked_step(directory, link) for link in ("latest", "best")] == [8, 8]


def test_what_is_not_the_name_of_a_checkpoint_is_refused(copied: Path, tmp_path: Path) -> None:
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


def test_a_link_to_another_folder_is_evaluated_there_and_never_resumed(copied: Path, tmp_path: Path) -> None:
    directory, other = checkpoints_of(copied), tmp_path / "other" / "step-00000004"  # a name that is taken here
    shutil.copytree(directory / "step-00000008", other)
    for target in (other, Path("../../other/step-00000004")):
        (directory / "kept").symlink_to(target)
        assert find_to_evaluate(directory, "kept") == other
        with pytest.raises(BadInput, match=r"kept: refers to .*, in another folder; copy it here"):
            find_to_resume(directory, "kept")
        (directory / "kept").unlink()


def test_links_without_a_checkpoint_mean_no_step(copied: Path) -> None:
    directory = checkpoints_of(copied)
    shutil.rmtree(directory / "step-00000008")
    assert linked_step(directory, "latest") is None
    for link in ("latest", "best"):
        (directory / link).unlink()
    (directory / "step-00000004" / "state.json").write_text("{}")
    with pytest.raises(BadInput, match="got format None"):
        linked_step(directory, "latest")
