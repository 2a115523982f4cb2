"""Without a shared disk, each node has complete checkpoints. All nodes resume from the newest intact checkpoint."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.bucket_server import BucketServer
from tests.conftest import MakeRun, complete, metrics
from tests.machines import Machines
from training.checkpoints.directory import MANIFEST, WEIGHTS, steps_in
from training.checkpoints.nodes import node_copies
from training.checkpoints.saved_state import SavedState, read_state

SECONDS = 300  # a job that takes longer counts as hanging


def train_on(machines: Machines, run: Path, *options: str, ranks: int = 1, status: int = 0) -> tuple[str, str]:
    """Train on both machines, which do not share a disk. Return the output and the errors of the first one."""
    first, second = machines
    nodes = [
        first.train(run, *options, master=first.address, ranks=ranks),
        second.train(run, *options, master=first.address, ranks=ranks, own_disk=run),
    ]
    texts = [node.communicate(timeout=SECONDS) for node in nodes]
    assert [node.returncode for node in nodes] == [status, status], texts
    return texts[0]


def test_unreadable_step_does_not_hide_others(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = finished / "checkpoints"
    first, *_, newest = steps_in(directory)

    def read(checkpoint: Path) -> SavedState:
        if checkpoint.name == first:
            raise PermissionError(checkpoint)
        return read_state(checkpoint)

    monkeypatch.setattr(node_copies, "read_state", read)
    assert node_copies._list_disk(directory, "auto").choice == (8, newest)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 1), ("hsdp", 2)])
def test_every_node_has_complete_checkpoints(make_run: MakeRun, machines: Machines, parallel: str, ranks: int) -> None:
    keys = {"checkpoint_interval": 2, "validation_interval": 2, "parallel": parallel}
    alone, run = make_run("alone", **keys), make_run("run", **keys)
    second_disk = machines[1].disk
    complete(alone, "--hash-every", "1")

    def continue_until(step: int) -> str:
        return train_on(machines, run, "--hash-every", "1", "--max-steps", str(step), ranks=ranks)[0]

    continue_until(2)
    newest = "checkpoints/step-00000002"
    assert (second_disk / newest / MANIFEST).read_bytes() == (run / newest / MANIFEST).read_bytes()
    assert (second_disk / newest / WEIGHTS).read_bytes() == (run / newest / WEIGHTS).read_bytes()
    names_1, names_2 = ({path.name for path in (disk / "checkpoints").iterdir()} for disk in (run, second_disk))
    assert names_1 == names_2
    with (run / newest / WEIGHTS).open("r+b") as damaged:
        damaged.seek(-1, 2)
        damaged.write(b"\x55")
    assert "copying step-00000002 to 1 of 2 nodes" in continue_until(4)
    [archived] = run.glob("archive/*/checkpoints/step-00000002")
    assert (archived / WEIGHTS).read_bytes()[-1] == 0x55  # damaged, but not deleted
    shutil.rmtree(second_disk / "checkpoints")
    assert "copying step-00000004 to 1 of 2 nodes" in continue_until(6)
    shutil.rmtree(run / "checkpoints")
    assert "copying step-00000006 to 1 of 2 nodes" in continue_until(8)
    assert metrics(run, "state_sha256") == metrics(alone, "state_sha256")
    assert metrics(run, "validation_loss") == metrics(alone, "validation_loss")
    process = machines[1].start(sys.executable, "train.py", str(run), own_disk=run)
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert "the run is complete: 8 steps" in output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkpoints_of_another_run_are_archived(make_run: MakeRun, machines: Machines) -> None:
    keys = {"checkpoint_interval": 2, "keep_checkpoints": 1}
    other_run, run = make_run("other", **keys | {"random_seed": 7}), make_run("run", **keys)
    disk = machines[1].disk
    complete(other_run, "--max-steps", "4")
    shutil.copytree(other_run / "checkpoints", disk / "checkpoints", symlinks=True)
    complete(run, "--max-steps", "6")
    assert "copying step-00000006 to 1 of 2 nodes" in train_on(machines, run)[0]
    [archived] = disk.glob("archive/*/checkpoints/step-00000004")
    assert (archived / WEIGHTS).read_bytes() == (other_run / "checkpoints/step-00000004" / WEIGHTS).read_bytes()
    shutil.rmtree(disk / "checkpoints")
    complete(other_run)
    shutil.copytree(other_run / "checkpoints", disk / "checkpoints", symlinks=True)
    _, errors = train_on(machines, run, status=1)
    assert "step-00000008: the nodes have different checkpoints of this name" in errors


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_blank_nodes_download_and_the_first_node_uploads(
    make_run: MakeRun, machines: Machines, bucket_server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"checkpoint_interval": 2, "validation_interval": 4, "parallel": "hsdp"}
    alone = make_run("alone", **keys)
    complete(alone, "--hash-every", "1")
    host, port = (listener := machines[0].listen()).getsockname()
    proxy = bucket_server.serve(listener)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    hashes = {}
    for name, last_step in (("begun", "4"), ("resumed", "8")):
        run = make_run(name, **keys, checkpoints="s3://runs/nodes")
        shutil.rmtree(machines[1].folder / "disk-b", ignore_errors=True)
        bucket_server.calm()
        train_on(machines, run, "--hash-every", "1", "--max-steps", last_step, ranks=2)
        hashes |= metrics(run, "state_sha256")
    assert hashes == metrics(alone, "state_sha256")
    downloads = [line for line in bucket_server.requests if line.startswith("GET") and "4/model.safetensors" in line]
    assert len(downloads) == 2
    proxy.shutdown()
    proxy.server_close()
