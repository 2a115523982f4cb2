"""The launch environment: defaults without torchrun, contradictory variables, missing nodes, and the age of a job."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

from common import launch
from common.errors import BadInput
from tests.conftest import ROOT, MakeRun, complete, train
from training.supervision.run_lock import take_run_lock

LAUNCHER = """
import subprocess, sys, time

clock = lambda: str(time.clock_gettime(time.CLOCK_BOOTTIME))
began = clock()
time.sleep(0.5)
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1], began, clock()]).returncode)
"""
RANK = """
import sys, time
from common.launch import job_seconds

clock = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
launcher_start, process_start = map(float, sys.argv[1:])
print(clock() - launcher_start, job_seconds(), clock() - process_start)
"""
TICK_SECONDS = 0.02  # the system records the start of a process in ticks


def test_a_job_is_as_old_as_its_torchrun() -> None:
    job = {"TORCHELASTIC_RUN_ID": "some"}
    cases = [("torchrun", job), ("torchrun", {**job, "TORCHELASTIC_RESTART_COUNT": "1"}), ("srun", job)]
    cases += [("a script that calls torchrun as well", {})]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, RANK, name],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, environment in cases
    ]
    outputs = [map(float, process.communicate()[0].split()) for process in started]
    for (name, environment), (launcher, job_age, process_age) in zip(cases, outputs, strict=True):
        if (name, environment) == cases[0]:
            assert job_age >= launcher - TICK_SECONDS
        else:
            assert 0 < job_age <= process_age + TICK_SECONDS


def joined(ranks: int, of_this_node: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(of_this_node)}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"SLURM_JOB_NUM_NODES": "2"},
            "SLURM_JOB_NUM_NODES is 2, but only 1 node has joined; start torchrun on every node",
        ),
        ({"PET_NNODES": "1:4"}, None),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "1"}, None),  # a Slurm step on one of two allocated nodes
        (
            {"SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_STEP_NUM_TASKS is 2, but only 1 task has joined, so each task would train",
        ),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "SLURM_NTASKS is 2"),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}, None),  # the batch script itself
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE is 4"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is 2"),
        ({"PMI_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}, None),  # the ranks of a job without torchrun
        (
            {"PMI_SIZE": "2", "RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"},
            "PMI_",
        ),
        (joined(4, 2) | {"PET_NNODES": "3:4"}, "PET_NNODES is 3:4, but only 2 nodes have joined"),
        (joined(16, 8) | {"PET_NNODES": "2"}, None),
        # In the next two cases, three nodes have 8 + 1 + 1 ranks, but only GROUP_WORLD_SIZE shows that there are three.
        (joined(10, 8) | {"PET_NNODES": "3"}, "PET_NNODES is 3, but only 2 nodes have joined"),
        (joined(10, 8) | {"PET_NNODES": "3", "GROUP_WORLD_SIZE": "3"}, None),
    ],
)
def test_nodes_and_tasks_that_train_alone_are_refused(
    environment: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(environment, monkeypatch)
    with nullcontext() if message is None else pytest.raises(BadInput, match=message):
        launch.check_launcher()


def _set(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*launch.NODE_COUNTS, *launch.TASK_COUNTS, *launch.NUMBERS, "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


RANK_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (RANK_1, None),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "a"}, None),
        ({"RANK": "0"}, "RANK is 0, but WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not set; start torchrun"),
        (RANK_1 | {"MASTER_ADDR": ""}, "RANK is 1, but MASTER_ADDR is not set"),
        ({name: RANK_1[name] for name in RANK_1 if name != "LOCAL_RANK"}, "RANK is 1, but LOCAL_RANK is not set"),
        ({"RANK": ""}, "RANK is '', wanted a whole number of at least 0"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1, but RANK is not set"),
        (RANK_1 | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', wanted a whole number of at least 1"),
        (RANK_1 | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '999"),
        (RANK_1 | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'"),
        (
            RANK_1 | {"MASTER_PORT": "65536"},
            "MASTER_PORT is '65536', wanted a whole number of at least 1, at most 65,535",
        ),
        (RANK_1 | {"RANK": "2"}, "RANK is 2, wanted less than WORLD_SIZE, which is 2"),
        (RANK_1 | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1, wanted less than LOCAL_WORLD_SIZE, which is 1"),
        ({"TORCHELASTIC_RESTART_COUNT": "-1"}, "TORCHELASTIC_RESTART_COUNT is '-1'"),
    ],
)
def test_rank_variables_are_complete_numbers(
    environment: dict[str, str], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(environment, monkeypatch)
    if problem is None:
        launch.check_environment()
        return
    with pytest.raises(BadInput, match=problem) as message:
        launch.check_environment()
    assert message.value.alone


def test_launch_errors_precede_any_writing(make_run: MakeRun) -> None:
    run = make_run()
    with take_run_lock(run).file:  # as if the first task had the lock
        task = train(run, environment={"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert task.stderr.startswith("train.py: SLURM_STEP_NUM_TASKS is 2, but only 1 task has joined")
    assert train(run, environment={"RANK": ""}).stderr.startswith("train.py: RANK is '', wanted a whole number ")
    alone = train(run, environment={"SKYPILOT_NUM_NODES": "2"})
    assert alone.returncode == 1
    assert alone.stderr.startswith("train.py: SKYPILOT_NUM_NODES is 2, but only 1 node has joined; ")
    assert not (run / "metrics.jsonl").exists()
    complete(run, "--dry-run", environment={"SKYPILOT_NUM_NODES": "2"})
    complete(run, environment={"SKYPILOT_NUM_NODES": "1"})
    complete(run, "--replay", "1", "2", environment={"SKYPILOT_NUM_NODES": "2"})


def test_torchrun_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"WORLD_SIZE": "8", "RANK": "3", "TORCHELASTIC_RUN_ID": "night", "TORCHELASTIC_RESTART_COUNT": "2"}
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    assert (launch.environment_world_size(), launch.environment_rank()) == (1, 0)
    assert (launch.torchrun_job(), launch.restarts()) == (None, 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launch.environment_world_size(), launch.environment_rank()) == (8, 3)
    assert (launch.torchrun_job(), launch.restarts()) == ("night", 2)
