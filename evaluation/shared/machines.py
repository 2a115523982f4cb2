"""The machines and software that a run's jobs used.

A run has several machines if it was resumed on a different machine.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from training.checkpoints.run_record import JobEnvironment
from training.telemetry.metrics_log import Detail, RunEvent, event_of


@attrs.frozen(kw_only=True)
class TrainedOn:
    """Descriptions of the machines, software and commits that the jobs of a run have used. None means unknown."""

    machines: str | None
    software: str | None
    commits: str | None
    devices: tuple[str, ...]  # the names of all known devices, without duplicates


def trained_on(
    records: Sequence[dict[str, Any]], step: int, environment: JobEnvironment | None, git_commit: str | None
) -> TrainedOn:
    """Return the machines, software and commits of the jobs that trained a run up to a step.

    `records`: the run's metrics from `current_records`. `environment` and `git_commit` come from `resolved.json` and
    describe only the last job. They are needed for runs of earlier versions, whose metrics do not name a machine.
    Without an environment, the commit is not used either.
    """
    starts = [line for line in records if event_of(line) == RunEvent.START]
    jobs = [line for line in starts if line["step"] < step] or starts[:1]
    recorded = environment if not jobs or jobs[-1] is starts[-1] else None
    last, commit = (JobEnvironment(), None) if recorded is None else (recorded, git_commit)

    def describe_jobs(describe: Callable[[Mapping[str, Any]], str | None], last_default: str | None) -> str | None:
        values = [(line["step"], describe(line)) for line in jobs] or [(0, None)]
        if values[-1][1] is None:
            values[-1] = values[-1][0], last_default
        return _over_steps(values)

    names = [name for line in jobs for name in line.get(Detail.DEVICES) or {}]
    if last.device and not (jobs and jobs[-1].get(Detail.DEVICES)):
        names.append(last.device)
    torch, python = last.packages.get("torch"), last.python
    return TrainedOn(
        machines=describe_jobs(_devices, f"{last.world_size} x {last.device}" if last.device else None),
        software=describe_jobs(_software, f"torch {torch}, Python {python}" if torch and python else None),
        commits=describe_jobs(lambda line: line.get(Detail.COMMIT), commit),
        devices=tuple(dict.fromkeys(names)),
    )


def describe_drift(records: Sequence[dict[str, Any]], step: int) -> list[str]:
    """Return a line for each resumed job before `step` that changed the numerics, for example the precision."""
    drifts = [line for line in records if event_of(line) == RunEvent.NUMERICS_DRIFT and line.get("step", 0) < step]
    return [
        f"changed at step {line.get('step', 0):,}: {', '.join(map(str, line.get(Detail.CHANGES) or []))}"
        for line in drifts
    ]


def _devices(start: Mapping[str, Any]) -> str | None:
    devices = start.get(Detail.DEVICES)
    return " and ".join(f"{count} x {name}" for name, count in devices.items()) if devices else None


def _software(start: Mapping[str, Any]) -> str | None:
    return start.get(Detail.SOFTWARE)


def _over_steps(values: Sequence[tuple[int, str | None]]) -> str | None:
    """Return a text such as "A, from step 500 on B", or None if none of the values is known.

    `values`: the first step of each job, and its value.
    """
    if all(value is None for _, value in values):
        return None
    texts = [(step, value or "not recorded") for step, value in values]
    changes = [text for number, text in enumerate(texts) if number == 0 or text[1] != texts[number - 1][1]]
    first, *later = changes
    return ", ".join([first[1], *(f"from step {step:,} on {value}" for step, value in later)])
