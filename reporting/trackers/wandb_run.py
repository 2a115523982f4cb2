"""Weights & Biases: an online run if an API key is configured, else an offline run in the run's folder `wandb/`."""

import os
import shutil
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from common.errors import BadInput, refusing
from common.output import note, show
from reporting.trackers.tracker_sync import Store, TrackedRow, TrackedRun

# The server must answer and receive the data within these times. W&B's own environment variables take precedence.
SECONDS = {"init_timeout": 60.0, "finish_timeout": 300.0}
ADVICE = "rerun the same command when the server answers, or set WANDB_MODE=offline"
SETTLE_SECONDS = 30.0  # longest time until the server shows the data that it has received


class WandbRun(Store):
    """One run of W&B. An online run is continued by its id, after the last step that the server has.

    At the end, the server is asked for its last step. Without this check, rejected data would go unnoticed: W&B's
    client continues, reports success, and with `silent` prints nothing (wandb issue 9335).

    An offline run has one folder, because `wandb sync` keeps only the last of several folders with the same id (wandb
    issue 3841).
    """

    at_once: ClassVar[bool] = False
    _count_open: ClassVar[int] = 0  # open runs of this process

    def __init__(self, run: TrackedRun):
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = run
        self._wandb: Any = wandb  # Any, because its types depend on the installed version
        self._open: Any = None
        self._last_step = -1  # sent by this process
        self._version = run.version  # version of the data that the server or the folder has
        with refusing("W&B", ADVICE, (Exception,)):
            has_key = os.environ.get("WANDB_MODE") != "offline" and wandb.login(prompt=False)  # never ask for a key
        self._offline = not has_key
        if self._offline:
            folder = run.directory / "wandb"
            show(note(f"W&B: no API key is configured, so the run is written to {folder}; `wandb sync` uploads it"))

    @property
    def grows(self) -> bool:
        return not self._offline or self._open is not None

    @property
    def _id(self) -> str:
        return f"{self._run.identity}-{self._version + 1}" if self._version else self._run.identity

    def fingerprint(self) -> Any:
        if self._open is not None:
            return ["open", self._last_step]
        if not self._offline:
            return ["online", self._run.project, self._step_on_server()]
        files = sorted(self._run.directory.glob(f"wandb/offline-run-*-{self._run.identity}*/*.wandb"))
        return ["offline", self._run.project, *([path.name, path.stat().st_size] for path in files)] if files else None

    def begin(self, version: int) -> None:
        self._finish()
        self._last_step, self._version = -1, version
        for folder in self._run.directory.glob(f"wandb/offline-run-*-{self._run.identity}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def append(self, rows: Sequence[TrackedRow]) -> None:
        opened = self._opened()
        first = int(opened.starting_step)  # 0 in a new run
        with refusing("W&B", ADVICE, (Exception,)):
            for row in rows:
                times = {} if row.time is None else {"_timestamp": row.time}
                events = {"events": "\n".join(row.events)} if row.events else {}
                if row.step >= first:
                    opened.log({**row.values, **events, **times}, step=row.step)
        self._last_step = rows[-1].step

    def close(self) -> None:
        self._finish()
        if self._offline and self._last_step >= 0 and self.fingerprint() is None:
            raise BadInput(f"W&B: no file was written to {self._run.directory / 'wandb'}; rerun the same command")

    def _finish(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            WandbRun._count_open -= 1
            with refusing("W&B", ADVICE, (BaseException,)):
                opened.finish()
                if not WandbRun._count_open:
                    self._wandb.teardown()  # ends W&B's own process, which serves all runs
            if not self._offline:
                self._check_arrival()

    def _check_arrival(self) -> None:
        """Raise BadInput if the server does not have the last step that was sent to it."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (server_step := self._step_on_server()) < self._last_step:
            if time.monotonic() > deadline:
                raise BadInput(
                    f"W&B: steps up to {self._last_step:,} were sent, but the server has only steps up to "
                    f"{max(server_step, 0):,}; {ADVICE}"
                )
            time.sleep(1)

    def _step_on_server(self) -> int:
        """Return the last step that the server has; -1 if it has none."""
        with refusing("W&B", ADVICE, (Exception,)):
            api = self._wandb.Api(timeout=int(SECONDS["init_timeout"]))
            try:
                return int(api.run(f"{self._run.project}/{self._id}").lastHistoryStep)
            except Exception as error:
                if _is_unknown_run(error):
                    return -1
                raise

    def _opened(self) -> Any:
        if self._open is None:
            limits = {name: value for name, value in SECONDS.items() if f"WANDB_{name.upper()}" not in os.environ}
            with refusing("W&B", ADVICE, (Exception,)):
                self._open = self._wandb.init(
                    project=self._run.project,
                    name=self._run.name,
                    id=self._id,
                    config=self._run.config,
                    dir=str(self._run.directory),
                    mode="offline" if self._offline else "online",
                    resume=None if self._offline else "allow",
                    reinit="create_new",  # by default, init would return the run that is open already
                    settings=self._wandb.Settings(
                        **limits,
                        finish_timeout_raises=True,
                        # Do not send the state of this machine, because another machine may have trained the run.
                        x_disable_stats=True,
                        x_disable_meta=True,
                        x_disable_machine_info=True,
                        x_save_requirements=False,
                        console="off",
                        disable_git=True,
                        disable_code=True,
                        save_code=False,
                        silent=True,
                    ),
                )
            WandbRun._count_open += 1
        return self._open


def _is_unknown_run(error: Exception) -> bool:
    """Return whether an error means that the server has no such run. Only the message of W&B's error says so."""
    return "could not find run" in str(error).lower()
