"""The machines and software of all jobs that trained a run, including jobs of earlier versions."""

from typing import Any

import attrs

from evaluation.shared.machines import TrainedOn, describe_drift, trained_on
from training.checkpoints.run_record import JobEnvironment
from training.telemetry.metrics_log import current_records

RECORD = (JobEnvironment(world_size=2, device="H100", python="3.12", packages={"torch": "2.13"}), "c")
LAST = TrainedOn(machines="2 x H100", software="torch 2.13, Python 3.12", commits="c", devices=("H100",))


def start(step: int, devices: dict[str, int], software: str = "torch 2.12, Python 3.11", commit: str = "a") -> Any:
    return {"event": "start", "step": step, "devices": devices, "software": software, "commit": commit}


def test_all_machines_of_a_run_are_listed() -> None:
    first, second = start(0, {"A100": 8}), start(500, {"H100": 4, "L4": 1}, commit="b")
    again = start(600, {"A100": 8}, "torch 2.13, Python 3.11", commit="b")
    trained = trained_on([first, {"step": 1}, second, again], 700, *RECORD)
    assert trained.machines == "8 x A100, from step 500 on 4 x H100 and 1 x L4, from step 600 on 8 x A100"
    assert trained.software == "torch 2.12, Python 3.11, from step 600 on torch 2.13, Python 3.11"
    assert trained.commits == "a, from step 500 on b" and trained.devices == ("A100", "H100", "L4")
    assert trained_on([first, second, again], 600, *RECORD).devices == ("A100", "H100", "L4")
    assert trained_on([first, second, again], 500, *RECORD).machines == "8 x A100"  # the next job began at this step
    assert trained_on([start(0, {"A100": 8}), start(9, {"A100": 8})], 20, *RECORD).machines == "8 x A100"


def test_old_runs_list_machines_as_not_recorded() -> None:
    old = [{"event": "start", "step": step, "world_size": 2, "commit": "c"} for step in (0, 100)]
    assert trained_on(old[:1], 90, *RECORD) == trained_on([], 90, *RECORD) == LAST
    assert trained_on(old, 200, *RECORD).machines == "not recorded, from step 100 on 2 x H100"
    before_the_last_job = attrs.evolve(LAST, machines=None, software=None, devices=())
    assert trained_on(old, 100, *RECORD) == before_the_last_job
    assert (
        trained_on([old[0], start(100, {"A100": 1})], 200, *RECORD).machines
        == "not recorded, from step 100 on 1 x A100"
    )
    assert trained_on([], 90, None, "c") == TrainedOn(machines=None, software=None, commits=None, devices=())


def test_changes_of_numerics_are_described() -> None:
    drift = {"event": "numerics-drift", "step": 40, "changes": ["precision: bf16 -> fp32"]}
    assert describe_drift([drift], 41) == ["changed at step 40: precision: bf16 -> fp32"]
    assert describe_drift([drift], 40) == []


def test_jobs_with_only_repeated_steps_are_ignored() -> None:
    killed, first, last = start(0, {"A100": 8}, commit="b"), start(0, {"H100": 8}), start(500, {"H100": 8})
    lines = [killed, first, {"step": 500, "train_loss": 1.0}, start(500, {"L4": 1}, "torch 2.9, Python 3.10", "c")]
    trained = trained_on(current_records([*lines, {"step": 600, "train_loss": 1.0}, last]), 700, *RECORD)
    assert trained == trained_on([first, last], 700, *RECORD)
    assert (trained.machines, trained.commits, trained.devices) == ("8 x H100", "a", ("H100",))

    def drift(name: str) -> dict[str, Any]:
        return {"event": "numerics-drift", "step": 500, "changes": [f"precision: bf16 -> {name}"]}

    repeated = [first, drift("fp32"), start(500, {"L4": 1})]
    assert describe_drift(current_records(repeated), 700) == ["changed at step 500: precision: bf16 -> fp32"]
    assert describe_drift(current_records([*repeated, {"step": 501}, last]), 700) == []
    again = current_records([*repeated, drift("fp16"), last])
    assert describe_drift(again, 700) == ["changed at step 500: precision: bf16 -> fp16"]
