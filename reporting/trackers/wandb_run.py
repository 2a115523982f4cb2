"""Weights & Biases: online where a key is known, else an offline run in `wandb/` of the run directory."""

import os
import shutil
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from common.errors import BadInput, refusing
from common.output import note, show
from reporting.trackers.tracker_sync import Store, TrackedRow, TrackedRun

# For the server to answer; to take what was sent. Variables of W&B's own go first.
SECONDS = {"init_timeout": 60.0, "finish_timeout": 300.0}
ADVICE = "rerun the same command when it answers, or set WANDB_MODE=offline"
SETTLE_SECONDS = 30.0  # for the server to show what it has taken


class WandbRun(Store):
    """One run of W&B. Online it is continued by its id, after the last step there.

    The server is asked for that step at the end: where it refuses data, W&B's client goes on and succeeds, and with
    `silent` says nothing (wandb issue 9335).

    Offline there is one folder: of several with one id, `wandb sync` keeps the last (wandb issue 3841).
    """

    at_once: ClassVar[bool] = False
    _count_open: ClassVar[int] = 0  # runs of this process

    def __init__(self, run: TrackedRun):
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = run
        self._wandb: Any = wandb  # its types depend on the installed version
        self._open: Any = None
        self._last_step, self._version = -1, run.version  # sent by this process; of the data there
        with refusing("W&B", ADVICE, (Exception,)):
            has_key = os.environ.get("WANDB_MODE") != "offline" and wandb.login(prompt=False)  # without asking for one
        self._offline = not has_key
        if self._offline:
            show(note(f"no key of W&B: offline, in {run.directory / 'wandb'}; wandb sync sends it"))

    @property
    def grows(self) -> bool:
        return not self._offline or self._open is not None

    @property
    def _id(self) -> str:
        return f"{self._run.identity}-{self._version + 1}" if self._version else self._run.identity

    def held(self) -> Any:
        if self._open is not None:
            return ["open", self._last_step]
        if not self._offline:
            return ["online", self._run.project, self._step_there()]
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
        if self._offline and self._last_step >= 0 and self.held() is None:
            raise BadInput(f"W&B: has written no file in {self._run.directory / 'wandb'}; {ADVICE}")

    def _finish(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            WandbRun._count_open -= 1
            with refusing("W&B", ADVICE, (BaseException,)):
                opened.finish()
                if not WandbRun._count_open:  # W&B's own process, which serves all runs
                    self._wandb.teardown()
            if not self._offline:
                self._check_arrival()

    def _check_arrival(self) -> None:
        """Raise BadInput where the server's last step is before the last one that was sent to it."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (there := self._step_there()) < self._last_step:
            if time.monotonic() > deadline:
                got = f"was sent steps up to {self._last_step:,} and has {max(there, 0):,}"
                raise BadInput(f"W&B: {got}; {ADVICE}")
            time.sleep(1)

    def _step_there(self) -> int:
        """Return the last step that the server has; -1 without one."""
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
                    reinit="create_new",  # by default, the run that is open
                    settings=self._wandb.Settings(
                        **limits,
                        finish_timeout_raises=True,
                        x_disable_stats=True,  # of this machine, now
                        x_disable_meta=True,
                        x_disable_machine_info=True,
                        x_save_requirements=False,  # likewise
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
    """Tell whether the server has no run of this name. W&B's error has no field that says so, only its words do."""
    return "could not find run" in str(error).lower()
