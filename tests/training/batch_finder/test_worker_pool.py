"""Worker pool: trials go to one process per rank, answers come back, and processes that end or hang are noticed."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import BadInput
from tests import launch
from training.batch_finder import worker_pool
from training.batch_finder.worker import Trial
from training.batch_finder.worker_pool import WorkerPool

# A worker by its protocol alone: micro-batches below 4 fit, 4 is too much for rank 1, from 5 on it does something else.
WORKER = """
import json, os, sys, time
from torch.distributed import PrefixStore, TCPStore

settings = json.loads(sys.argv[sys.argv.index("--probe") + 1])
rank = int(os.environ["RANK"])
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
store = PrefixStore(settings["prefix"], store)
number = settings["first_trial"]

def verdict(**values):
    store.compare_set(f"verdict {number}", "", json.dumps(values))

while True:
    trial = json.loads(store.get(f"trial {number}"))
    size = trial["microbatch_size"]
    if trial["group"] != settings["group"]:
        time.sleep(600)
    if size == 5:
        sys.exit(7)
    if size == 6:
        verdict(outcome="error", rank=rank, reason="no such kernel")
    elif size == 4 and rank == 1:
        verdict(outcome="memory", rank=1, reason="out of memory")
    elif size < 4:
        report = {"allocated": os.getpid(), "reserved": None, "usable": None}
        store.set(f"report {number} {rank}", json.dumps(report))
        if store.add(f"done {number}", 1) == 2:
            verdict(outcome="fits")
    if size >= 4:
        time.sleep(600)
    number += 1
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    fork = SimpleNamespace(Popen=lambda command, env, **_: launch.Process(command[1:], env, 1, None))
    monkeypatch.setattr(worker_pool, "subprocess", fork)
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    made = WorkerPool([str(script)], 2)
    yield made
    made.kill()


def test_workers_are_kept_until_one_does_not_fit_or_fresh_ones_are_wanted(pool: WorkerPool) -> None:
    assert pool.leads and pool.world_size == 2
    pids = []
    for size, fresh in ((1, False), (2, False), (3, True)):
        verdict, reports = pool.run_trial(size, 1, fresh=fresh)
        assert verdict.outcome == "fits"
        pids.append([report.allocated for report in reports])
    assert pids[0] == pids[1]
    assert not set(pids[1]) & set(pids[2])
    verdict, reports = pool.run_trial(4, 1)
    assert (verdict.outcome, verdict.rank, reports) == ("memory", 1, [])
    verdict, reports = pool.run_trial(2, 1)
    assert verdict.outcome == "fits"
    assert not {report.allocated for report in reports} & set(pids[2])  # killed, as their peers hang


def test_a_worker_that_ends_or_reports_an_error_is_named(pool: WorkerPool) -> None:
    with pytest.raises(BadInput, match=r"micro-batch 5: rank [01]: its process ended with status 7"):
        pool.run_trial(5, 1)
    with pytest.raises(BadInput, match=r"micro-batch 6: rank [01]: no such kernel"):
        pool.run_trial(6, 1)


def test_workers_can_be_killed_as_soon_as_they_are_started(pool: WorkerPool) -> None:
    pool._start(Trial(number=0, group=0, microbatch_size=1, steps=1, extra_sums=0))
    assert [os.getpgid(process.pid) for process in pool._processes] == [process.pid for process in pool._processes]
    pool.kill()


def test_a_trial_that_nobody_answers_is_late(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.run_trial(1, 1)
    monkeypatch.setattr(worker_pool, "TRIAL_SECONDS", 0.2)
    verdict, _ = pool.run_trial(7, 1)
    assert verdict.outcome == "late"
    assert "not all ranks have answered within" in verdict.reason


def test_a_launcher_without_torchruns_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(BadInput, match="the search needs torchrun, or no launcher"):
        WorkerPool(["worker.py"], 2)
