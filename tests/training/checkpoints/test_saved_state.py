"""`state.json` and the run record in it: what was written is read back, what was edited is refused.

Manifest: damage of any file is found and named; a damaged checkpoint is passed over, a missing one explained.
"""

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest

from common.checks import structured
from common.errors import BadInput
from common.files import sha256
from model.config import ModelConfig
from tests.conftest import TINY_MODEL, TINY_TRAIN, complete, forge_manifest, one_line, train
from tests.training.checkpoints.conftest import FILES, flipped
from training.checkpoints.directory import OPTIMIZER, WEIGHTS, checkpoints_of
from training.checkpoints.run_record import RunRecord, record_fields
from training.checkpoints.saved_state import fields_sha256, find, find_before, parse_state, read_state, verify
from training.config.train_config import TrainConfig

STREAM = {"directory": "tokens", "tokens": 100, "files": ["train.safetensors"], "sha256": ["a"], "plan": None}
SETTINGS = {  # with a key of an earlier version, which is gone
    "model": attrs.asdict(ModelConfig(**TINY_MODEL)),
    "train": TrainConfig.from_keys({"dataset": "d", **TINY_TRAIN}).flat() | {"on_spike": "skip"},
}
OLDEST = SETTINGS | {"global_batch_size": 8, "numerics": {"determinism": "run"}}
FORGED: dict[str, list[Any]] = {
    "step": [7, "8", None, -1, True, 8.0, 10**30],
    "optimizer_steps": [7, 9, "8", None],
    "tokens": [1, "x"],
    "elapsed_seconds": ["1", -1, 10**400],
    "best_step": [9, "8"],
    "loss_scale": [None, {"scale": 0, "finite_steps": 0}, {"scale": "1", "finite_steps": 0}],
    "config": [
        None,
        {},
        {"model": {}, "train": {}, "global_batch_size": 8},
        {"model": [], "train": {}, "global_batch_size": 8},
    ],
    "state_sha256": [None, "0" * 64],
    "fields_sha256": ["0" * 64],
}


def test_a_state_is_written_as_it_was_read(finished: Path) -> None:
    path = finished / "checkpoints" / "step-00000008"
    assert read_state(path).text() == (path / "state.json").read_text()


def test_a_state_belongs_to_its_step_and_its_tensor_files(copied: Path) -> None:
    directory = copied / "checkpoints"
    digests = {name: sha256(directory / "step-00000008" / name) for name in (WEIGHTS, OPTIMIZER)}
    read_state(directory / "step-00000008", digests)
    read_state((directory / "step-00000008").rename(directory / "kept"), digests)
    with pytest.raises(BadInput, match="state_sha256: does not match"):
        read_state(directory / "kept", digests | {WEIGHTS: "c"})
    (directory / "kept").rename(directory / "step-00000007")
    with pytest.raises(BadInput, match="step: got 8, wanted 7 by the folder's name"):
        read_state(directory / "step-00000007", digests)


def test_the_spike_window_of_an_earlier_checkpoint_is_ignored(finished: Path) -> None:
    values = json.loads((finished / "checkpoints" / "latest" / "state.json").read_text())
    with_window = values | {"guard": {"losses": [1.0], "grad_norms": [2.0], "skipped_steps": 3}}
    with_window["config"] = values["config"] | {"train": values["config"]["train"] | {"on_spike": "skip"}}
    assert parse_state(with_window | {"fields_sha256": fields_sha256(with_window)}).position.step == 8


def test_a_field_that_is_missing_or_of_a_wrong_kind_is_named_with_its_keys(finished: Path) -> None:
    values = json.loads((finished / "checkpoints" / "latest" / "state.json").read_text())
    for key in ("step", "config", "state_sha256"):
        with pytest.raises(ValueError, match=f"^{key}: missing"):
            parse_state({name: value for name, value in values.items() if name != key})
    streams = {"train_stream": {"tokens": 1, "sha256": 3}}
    for key, value, problem in (
        ("config", values["config"] | streams, "config.train_streams[0].sha256: got 3, wanted an array"),
        ("config", values["config"] | {"model": []}, "config.model: got [], wanted an object"),
        ("loss_scale", [], "loss_scale: got [], wanted an object"),
        ("loss_scale", {"scale": "1", "finite_steps": 0}, "loss_scale.scale: got '1', wanted a number"),
    ):
        with pytest.raises(ValueError, match=re.escape(problem)):
            parse_state(values | {key: value})


def test_a_state_that_was_edited_is_refused_though_its_manifest_was_made_anew(copied: Path) -> None:
    path = copied / "checkpoints" / "step-00000008"
    intact = json.loads((path / "state.json").read_text())
    for key, values in FORGED.items():
        for value in values:
            (path / "state.json").write_text(json.dumps(intact | {key: value}))
            forge_manifest(path)
            problem = verify(path)
            assert problem is not None and f"{path / 'state.json'}: " in problem, (key, value)


def read_record(values: dict[str, Any]) -> RunRecord:
    return structured(record_fields(values), RunRecord, unknown_keys=True)


@pytest.mark.parametrize("streams", [STREAM, [STREAM, STREAM | {"tokens": None}]])
def test_a_record_is_written_as_it_was_read(streams: Any) -> None:
    recorded = {"accumulation": 1, "world_size": 2, "steps": 9, "shares": [[0, [1, 1]]], "sources": []}
    described = {"train_stream": streams, "validation_stream": streams}
    others = {"git_commit": "c", "self_test": {"held": True}, "initial_weights": {"source": "gpt2", "sha256": "d"}}
    others |= {"changes": [{"step": 5, "key": "learning_rate", "old": 0.1, "new": 0.2}]}
    values = OLDEST | recorded | described | others
    assert read_record(values).to_json() == values


@pytest.mark.parametrize(
    "change", [{"model": []}, {"numerics": {}}, {"train_stream": {"tokens": "many", "sha256": []}}, {"train_stream": 1}]
)
def test_any_other_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(model|numerics|train_streams)\b.*: "):
        read_record(OLDEST | change)


def test_a_full_disk_at_a_start_is_one_line(copied: Path) -> None:
    before = (copied / "resolved.json").read_text()
    refused = one_line(train(copied, "--resume", "step-00000004", ranks=2, file_bytes=500))
    assert f"train.py: {copied / 'resolved.json'}: cannot be written: File too large; make room" in refused
    assert (copied / "resolved.json").read_text() == before


@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_found_by_name(copied: Path, name: str) -> None:
    checkpoint = copied / "checkpoints" / "step-00000008"
    assert verify(checkpoint) is None
    file = checkpoint / name
    intact = file.read_bytes()
    draw = random.Random(name)
    positions = range(len(intact)) if len(intact) < 2000 else [draw.randrange(len(intact)) for _ in range(200)]
    damaged = [flipped(intact, position, draw.randrange(8)) for position in positions]
    page = draw.randrange(max(1, len(intact) // 4096)) * 4096
    damaged.append(intact[:page] + bytes(len(intact[page : page + 4096])) + intact[page + 4096 :])
    damaged += [intact[:-1], b"", intact + b"\0"]
    for content in damaged:
        file.write_bytes(content)
        problem = verify(checkpoint)
        assert problem is not None
        assert name in problem
    file.unlink()
    assert name in str(verify(checkpoint))


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file_is_refused_without_waiting(copied: Path, name: str) -> None:
    path = copied / "checkpoints" / "step-00000008"
    (path / name).unlink()
    os.mkfifo(path / name)
    assert str(path / name) in str(verify(path))


def test_deeply_nested_json_in_a_checkpoint_is_damage(copied: Path) -> None:
    for name in ("manifest.json", "state.json"):
        path = copied / "checkpoints" / ("step-00000008" if name == "manifest.json" else "step-00000004")
        (path / name).write_text("[" * 100_000)
        forge_manifest(path) if name == "state.json" else None
        assert f"{path / name}: " in str(verify(path))
        assert "nested deeper than 100" in str(verify(path))


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
        find(checkpoints_of(copied), "auto")
    for link in ("latest", "best"):
        (directory / link).unlink()
    with pytest.raises(BadInput, match="only kept; continue from it with --resume kept, or start anew"):
        find(checkpoints_of(copied), "auto")


def test_a_run_whose_links_name_nothing_does_not_begin_anew_in_silence(copied: Path) -> None:
    for name in ("step-00000004", "step-00000008"):
        shutil.rmtree(copied / "checkpoints" / name)
    said = "latest: refers to step-00000008, which does not exist; copy it here again, or start anew"
    with pytest.raises(BadInput, match=said):
        find(checkpoints_of(copied), "auto")


def test_a_checkpoint_is_found_by_name_link_or_step(finished: Path) -> None:
    directory = checkpoints_of(finished)
    found = [find(directory, wanted) for wanted in ("auto", "latest", "best", "step-00000004")]
    assert [checkpoint.name for checkpoint in found if checkpoint][::3] == ["step-00000008", "step-00000004"]
    assert str(found[1]) == str(finished / "checkpoints" / "step-00000008")
    said = "checkpoints/nothing: no such checkpoint; there are best, latest, step-00000004"
    with pytest.raises(BadInput, match=said):
        find(directory, "nothing")
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
    found = find(directory, "auto")
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
        with pytest.raises(BadInput, match=r"latest/state\.json: got .*start anew with --resume never"):
            find(directory, "auto")
    (copied / "spare").rename(directory / "best")
    assert find(directory, "auto") == directory / "best"
    assert "latest/state.json: got 2 bytes" in (said := capsys.readouterr().err) and "falling back to best" in said


def test_files_that_name_a_checkpoint_are_links(copied: Path) -> None:
    """A download from a bucket has them, and an archive that was unpacked where there are no links."""
    directory = copied / "checkpoints"
    for link, name in (("latest", "step-00000008\n"), ("best", "step-00000004")):
        (directory / link).unlink()
        (directory / link).write_text(name)
    assert find(directory, "latest") == find(directory, "auto") == directory / "step-00000008"
    assert find(directory, "best") == directory / "step-00000004"
    shutil.rmtree(directory / "step-00000008")
    shutil.rmtree(directory / "step-00000004")
    with pytest.raises(BadInput, match="latest: refers to step-00000008, which does not exist"):
        find(directory, "auto")


def test_a_missing_newest_checkpoint_is_reported(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copied / "checkpoints"
    shutil.rmtree(directory / "step-00000008")
    assert find(directory, "auto") == directory / "step-00000004"
    said = "latest: refers to step-00000008, which does not exist; falling back to step-00000004"
    assert said in capsys.readouterr().err


def test_links_that_a_copy_lost_are_found_by_step(copied: Path) -> None:
    directory = copied / "checkpoints"
    state = read_state(directory / "step-00000008")
    for link in ("latest", "best"):
        (directory / link).unlink()
    assert find(directory, "latest") == directory / "step-00000008"
    assert find(directory, "best") == directory / f"step-{state.position.best_step:08d}"


def test_checkpoints_in_a_wrong_place_are_named(copied: Path) -> None:
    directory = copied / "checkpoints"
    for wrong in (copied / "step-00000008", directory / "checkpoints" / "step-00000008"):
        wrong.parent.mkdir(exist_ok=True)
        shutil.move(directory / "step-00000008", wrong)
        for path in directory.iterdir():
            if path.is_symlink():
                path.unlink()
        shutil.rmtree(directory / "step-00000004", ignore_errors=True)
        with pytest.raises(BadInput, match=f"{wrong}: a checkpoint, but not in {directory}; move it there"):
            find(directory, "auto")
        shutil.move(wrong, directory / "step-00000008")
