"""Retention: what is kept, what is removed, and what is not ours to remove."""

from pathlib import Path

from training.checkpoints.retention import prune_checkpoints


def test_hidden_names_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in (".partial-step-00000004", ".partial-mine", ".partial-step-00000004-aside", "step-00000004"):
        (tmp_path / name).mkdir()
    (tmp_path / ".partial-best").symlink_to("nowhere")
    prune_checkpoints(tmp_path, "step-00000004", None, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-mine", "latest", "step-00000004"]
