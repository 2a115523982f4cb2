"""The rows of a comparison: which stored results are used, and which runs have the same recipe."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import BadInput
from evaluation.comparison.compare import compare
from evaluation.comparison.rows import Row
from evaluation.loss.loss_measures import GPJT_RANGE
from evaluation.shared.results import append_result
from evaluation.shared.weights import WeightsIdentity
from evaluation.shared.weights_on_disk import files_sha256
from tests.conftest import seal_again
from tests.evaluation.comparison.stored import core, losses_on, newest_result, rows_of, without_hash, write


def test_recipe_contains_all_settings_except_the_seed(runs: dict[str, Path], tmp_path: Path) -> None:
    def row(changes: list[dict[str, Any]], **train: Any) -> Row:
        home = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(runs["long"], home, symlinks=True)
        file = home / "checkpoints" / "step-00000008" / "state.json"
        state = json.loads(file.read_text())
        state["config"]["model"] |= {key: train.pop(key) for key in ("emb_dim",) if key in train}
        state["config"]["model"].pop(train.pop("without", ""), None)
        state["config"]["train"] |= train
        state["config"]["changes"] = changes
        file.write_text(json.dumps(state))
        seal_again(file.parent)
        return rows_of(home)[0]

    def recipe(**train: Any) -> str | None:
        return row([], **train).recipe

    plain = recipe()
    # Older versions without this key had only GPT-2's activation.
    assert plain is not None and recipe(without="activation") == plain
    same = {"log_interval": 3, "keep_checkpoints": 9, "parallel": "fsdp", "timeout_seconds": 60, "spike_window": 9}
    same |= {"checkpoint_interval": 7, "recompute_blocks": True, "microbatch_size": 4, "dataset": "/elsewhere"}
    same |= {"random_seed": 9, "precision": "fp32", "clipping_max_norm": 1, "final_learning_rate_percent": 10}
    for key, value in same.items():
        assert recipe(**{key: value}) == plain, key
    for key, value in {"learning_rate": 0.02, "shuffle": True, "adam_beta2": 0.95, "emb_dim": 64}.items():
        assert recipe(**{key: value}) != plain, key
    changed = row([{"step": 4, "key": "learning_rate", "old": 0.02, "new": 0.01}])
    assert changed.recipe != plain and changed.changes == ["changed at step 4: learning_rate 0.02 -> 0.01"]
    assert f"{changed.label}: {changed.changes[0]}" in compare([changed]).notes
    assert row([{"step": 4, "key": "start_val_token", "old": 0, "new": 9}]).recipe == plain


def test_copy_without_links_has_the_same_recipe(runs: dict[str, Path], tmp_path: Path) -> None:
    """A finished run's recipe does not include the step, so a row must recognize a finished run even without links."""
    [original] = rows_of(runs["long"])
    for kind in ("files", "none"):
        shutil.copytree(runs["long"], home := tmp_path / kind / runs["long"].name, symlinks=True)
        for link in (home / "checkpoints" / "latest", home / "checkpoints" / "best"):
            target = link.readlink().name
            link.unlink()
            if kind == "files":
                link.write_text(target)
        [row] = rows_of(home)
        assert row.recipe == original.recipe is not None, kind


@pytest.mark.parametrize(
    "broken",
    [
        {"groups": {"nats": [1.0, 2.0], "tokens": [1], "text_bytes": [1]}},
        {"groups": {"nats": ["1"], "tokens": [0], "text_bytes": [1]}},
        {"groups": [1]},
        {"nats_per_token": "3.4"},
        {"range": None},
        {"nats_per_token": None, "range": []},
        {"nats_per_token": -3.4},
        {"nats_per_token_error": -0.1},
        {"groups": {"nats": [-1.0, 2.0], "tokens": [1, 1], "text_bytes": [1, 1]}},
        {"groups": {"nats": [1.0, 2.0], "tokens": [3, -1], "text_bytes": [1, 1]}},
        {"groups": {"nats": [], "tokens": [], "text_bytes": []}},
    ],
    ids=str,
)
def test_malformed_results_are_not_compared(tmp_path: Path, broken: dict[str, Any]) -> None:
    home = losses_on(core(tmp_path / "a", 1), **GPJT_RANGE)
    write(home, "loss", **{**newest_result(home), "evaluation": "loss", **broken})
    (row,) = rows_of(home)
    assert [result.evaluation for result in row.results] == ["core", "loss"]


def test_damaged_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = core(tmp_path / "a\x1b[2J", 1)
    with (home / "evaluations.jsonl").open("ab") as file:
        file.write(b"[1]\n\xff\n" + b"[" * 100_000 + b'\n{"evaluation": "lo')
    comparison = compare(rows_of(home))
    assert "\\x1b[2J" in comparison.rows[0][0].text and "\x1b" not in comparison.rows[0][0].text
    assert "evaluations.jsonl: skipped 4 damaged lines, starting at line 2" in capsys.readouterr().err


def test_results_belong_to_the_measured_weights(runs: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(runs["long"], home, symlinks=True)
    measured = newest_result(home)
    title = measured["model"]
    other_hashes = {"weights_sha256": "a" * 64, "weights_file_sha256": "b" * 64}
    append_result(home, title, "loss", measured | other_hashes | {"nats_per_token": 9.0})
    (row,) = rows_of(home)
    assert [result.measurements[0].value for result in row.results] == [measured["nats_per_token"]]
    assert f"{title}: results from other weights that had this name are left out: 1 (weights {'a' * 12})" in row.notes
    lines = [without_hash(measured) | other_hashes, measured | other_hashes]
    (home / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        BadInput, match=r"results from other weights .* are left out: 2 \(weights .*\); measure it first: python"
    ):
        rows_of(home)


def test_result_without_a_hash_has_unknown_weights(runs: dict[str, Path], tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(runs["long"], home, symlinks=True)
    measured = newest_result(home)
    (home / "evaluations.jsonl").write_text(json.dumps(without_hash(measured)) + "\n")
    (row,) = rows_of(home)
    assert [result.measurements[0].value for result in row.results] == [measured["nats_per_token"]]
    assert any("weights unknown" in note for note in compare([row]).notes)


def test_results_of_a_replaced_model_directory_are_left_out(tmp_path: Path) -> None:
    home = tmp_path / "gpt2"
    home.mkdir()
    (home / "config.json").write_text("{}")
    for content, value in ((b"old", 3.0), (b"new", 4.0)):
        (home / "model.safetensors").write_bytes(content)
        files = WeightsIdentity(files_sha256=files_sha256(home))
        losses_on(home)
        append_result(home, "gpt2", "loss", newest_result(home) | files.as_record() | {"nats_per_token": value})
    (row,) = rows_of(home)
    assert [result.measurements[0].value for result in row.results if result.weights] == [4.0]
    (home / "config.json").write_text('{"activation_function": "gelu"}')  # now, the same weights form another network
    (row,) = rows_of(home)
    assert not [result for result in row.results if result.weights]


def test_models_with_equal_weights_are_noted(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["long"], tmp_path / "copy", symlinks=True)
    comparison = compare(rows_of(runs["long"], tmp_path / "copy"))
    assert any("have the same weights" in note for note in comparison.notes)
