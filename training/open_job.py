"""Opening of a job: its ranks, disks, token files and plan, before a weight is made or loaded."""

from typing import TYPE_CHECKING

import attrs

from training.checkpoints.node_disks import NodeDisks, find_disks
from training.checkpoints.run_record import files_read_before
from training.command import Options
from training.config.batch_plan import Plan, make_plan
from training.config.train_config import Run, TrainConfig
from training.data.open_tokens import TokenSet, open_tokens
from training.data.verify_tokens import verify_tokens
from training.parallel.process_group import Ranks, from_coordinator
from training.step_intervals import Intervals
from training.supervision.heartbeat import Heartbeat
from training.supervision.supervision import Supervision
from training.telemetry.reporter import print_lines
from training.telemetry.time_ledger import TimeLedger

if TYPE_CHECKING:
    from training.checkpoints.bucket_upload import Uploader


@attrs.frozen(kw_only=True)
class OpenJob:
    """One launch of a run on this rank, opened."""

    run: Run
    options: Options
    supervision: Supervision
    heartbeat: Heartbeat
    ledger: TimeLedger
    disks: NodeDisks
    uploader: "Uploader | None"
    token_set: TokenSet
    plan: Plan

    @property
    def ranks(self) -> Ranks:
        return self.heartbeat.ranks

    @property
    def intervals(self) -> Intervals:
        return make_intervals(self.run.train, self.plan, self.options)


def make_intervals(train: TrainConfig, plan: Plan, options: Options) -> Intervals:
    """Return the steps after which a job logs, validates, saves and ends."""
    return Intervals(
        log=train.log_interval,
        checkpoint=train.checkpoints.checkpoint_interval,
        validation=train.validation.validation_interval,
        state_hash=options.hash_every,
        last_step=plan.steps if options.max_steps is None else min(plan.steps, options.max_steps),
    )


def open_job(run: Run, options: Options, supervision: Supervision, heartbeat: Heartbeat, ledger: TimeLedger) -> OpenJob:
    """Lock the disks, open and check the tokens, and plan. Call it on every rank. Raises BadInput."""
    ranks, replays = heartbeat.ranks, options.replay is not None
    disks = NodeDisks(ranks) if replays else find_disks(run, ranks)
    if not disks.shared:
        disks.on_each(lambda: supervision.lock_own_disk(run.directory))
    url, uploader = run.train.checkpoints.checkpoints, None
    if url is not None and not replays:
        from training.checkpoints.bucket_upload import open_uploader

        uploader = open_uploader(url, run, ranks)
    print_lines(ranks, run.notices)
    before = from_coordinator(ranks, lambda: files_read_before(run.directory))
    token_set = open_tokens(run, options.token_files, ranks, follow=options.follow, begun_with=before)
    plan = make_plan(run.train, run.model.context_length, ranks.data_parallel.size, token_set.lengths)
    return OpenJob(
        run=run,
        options=options,
        supervision=supervision,
        heartbeat=heartbeat,
        ledger=ledger,
        disks=disks,
        uploader=uploader,
        token_set=verify_tokens(run.train, plan, token_set, ranks, run.model.vocab_size),
        plan=plan,
    )
