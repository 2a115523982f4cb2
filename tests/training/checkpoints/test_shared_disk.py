"""Run directories that only look the same on two machines are refused before the first step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machines import two_machines

SECONDS = 300  # a hang


@pytest.mark.slow
def test_a_disk_that_the_nodes_do_not_share_is_named_before_the_first_step(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run()
    with two_machines(tmp_path) as (first, second):
        for name in ("model.json", "train.json"):
            (tmp_path / "disk-b").mkdir(exist_ok=True)
            (tmp_path / "disk-b" / name).write_text((run / name).read_text())
        nodes = [
            first.train(run, master=first.address),
            second.train(run, master=first.address, own_disk=run),
        ]
        errors = [node.communicate(timeout=SECONDS)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    assert f"train.py: {run}: on b it is not the run directory of the first node" in errors[0]
    assert not (run / "checkpoints").exists() and not [path for path in run.iterdir() if "shared-disk" in path.name]
