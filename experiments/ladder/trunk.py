"""Trunk of a ladder: one warmup_stable_decay run of a size, and branches that decay earlier, one for each horizon.

Until its decay begins, a shorter horizon trains exactly as the longest one: same windows, same rate. So the longest
horizon's run, the trunk, pauses there, and its checkpoint begins a branch: an ordinary run directory, bit-identical to
one that was trained alone. The trunk goes on only when the branch has the checkpoint.
"""

import os
import shutil
from pathlib import Path

import attrs

from common.errors import BadInput
from common.files import replace_file, sync, writing
from experiments.ladder.ladder_file import LadderFile, scaled_batch, size_name, stated
from experiments.shared.experiment_files import BUCKET, Sections, check_unchanged, write_run_directory
from experiments.shared.run_progress import read_progress
from model.config import ModelConfig
from model.counts import flops_per_token, matmul_parameter_count
from training.checkpoints.atomic_commit import discard, partial_of, publish
from training.checkpoints.directory import checkpoints_of, name_of
from training.config.batch_plan import Plan, make_plan
from training.config.train_config import TrainConfig, contradictions
from training.data.locate_tokens import lengths_at_hand
from training.telemetry.metrics_log import METRICS

SCHEDULE = "warmup_stable_decay"


@attrs.frozen(kw_only=True)
class Horizon:
    """A run of a trunk: to so many tokens."""

    directory: Path
    sections: Sections
    plan: Plan

    @property
    def decay_begins(self) -> int:
        """Step where a trunk pauses for it."""
        return self.plan.steps - self.plan.schedule.decay_steps


@attrs.frozen(kw_only=True)
class Trunk:
    """A size with one rate and seed, and its horizons."""

    size: ModelConfig
    seed: int
    rate: float
    batch: dict[str, int]  # keys of train.json
    horizons: tuple[Horizon, ...]  # rising; the last one is the trunk's own run

    @property
    def directory(self) -> Path:
        return self.horizons[-1].directory

    def flops(self, *, branches: bool) -> float:
        """Return the FLOPs of training it."""
        steps = self.horizons[-1].plan.steps
        if branches:
            steps += sum(horizon.plan.schedule.decay_steps for horizon in self.horizons[:-1])
        return float(flops_per_token(self.size) * steps * self.horizons[-1].plan.tokens_per_step)


def trunks_of(ladder: LadderFile, size: ModelConfig, rate: float) -> list[Trunk]:
    """Return the trunks of a size, one for each seed; nothing is written.

    Raises BadInput for runs that could not be trained.
    """
    return [_trunk(ladder, size, rate, seed) for seed in ladder.seeds]


def _trunk(ladder: LadderFile, size: ModelConfig, rate: float, seed: int) -> Trunk:
    parameters, target = matmul_parameter_count(size), matmul_parameter_count(ladder.target.model)
    batch = scaled_batch(ladder.batch, parameters, target, ladder.microbatch_size, ladder.ranks)
    recipe = _recipe(ladder, rate, batch) | ({} if seed == ladder.target.train.random_seed else {"random_seed": seed})
    horizons: list[Horizon] = []
    name = f"{size_name(size)}-rate-{rate:g}" + (f"-seed-{seed}" if len(ladder.seeds) > 1 else "")
    for ratio in ladder.tokens_per_parameter:
        longest = ratio == ladder.tokens_per_parameter[-1]
        keys = {**recipe, "min_train_tokens": round(ratio * parameters)}
        plan = _plan(ladder, size, keys)
        if horizons:  # as many steps of warm-up as the shortest one, of which it is the target's share
            wanted = horizons[0].plan.schedule.warmup_steps
            # half a step more than the percentage of so many, which is rounded down
            keys["warmup_period_percent"] = round(100 * (wanted + 0.5) / plan.steps, 6) if wanted else 0
            plan = _plan(ladder, size, keys)
            assert plan.schedule.warmup_steps == wanted
        directory = ladder.output / (name if longest else f"{name}-{ratio:g}-tokens-per-parameter")
        sections: Sections = {"model": stated("model", attrs.asdict(size)), "train": keys}
        check_unchanged(directory, sections, dict.fromkeys(batch, f"--ranks {ladder.ranks}"))
        horizons.append(Horizon(directory=directory, sections=sections, plan=plan))
    begins = [horizon.decay_begins for horizon in horizons]
    if len({0, *begins}) <= len(begins):
        name = size_name(size)
        raise BadInput(f"{ladder.file}: tokens_per_parameter: too short or too close for {name}: raise or spread")
    return Trunk(size=size, seed=seed, rate=rate, batch=batch, horizons=tuple(horizons))


def write_branch(trunk: Trunk, horizon: Horizon) -> None:
    """Begin a branch with the trunk's checkpoint, as hard links, once. Raises BadInput where the trunk lacks it."""
    step = horizon.decay_begins
    if read_progress(horizon.directory).reached(step, horizon.plan.steps, validates=False):
        return
    source, branch = (checkpoints_of(each.directory) / name_of(step) for each in (trunk, horizon))
    if not source.is_dir():
        raise BadInput(
            f"{source}: no such checkpoint, and {horizon.directory} has not begun; move {trunk.directory} away"
        )
    write_run_directory(horizon.directory, horizon.sections)
    with writing(horizon.directory):
        replace_file(horizon.directory / METRICS, (trunk.directory / METRICS).read_bytes(), durable=True)
        discard(branch)  # of a call that was killed here
        shutil.copytree(source, partial_of(branch), copy_function=_link)
        sync(partial_of(branch))
        publish(branch)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)  # a published checkpoint never changes
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
        sync(Path(target))


def _recipe(ladder: LadderFile, rate: float, batch: dict[str, int]) -> dict[str, object]:
    """Return the target's train.json with the ladder's schedule, batch and rates; those of groups keep their ratio."""
    optimization = ladder.target.train.optimization
    keys = {key: value for key, value in ladder.train.items() if key not in ("gradient_accumulation_steps", BUCKET)}
    for group, other in optimization.group_learning_rates.items():
        keys[f"{group}_learning_rate"] = float(f"{other * rate / optimization.learning_rate:.4g}")
    if optimization.decay != SCHEDULE:
        keys.pop("final_learning_rate_percent", None)
    return keys | batch | {"learning_rate": rate, "schedule_learning_rate": SCHEDULE}


def _plan(ladder: LadderFile, size: ModelConfig, keys: dict[str, object]) -> Plan:
    try:
        train = TrainConfig.from_keys(keys, ladder.target.train.file)
        for problem in contradictions(size, train):  # train.py would refuse it, with the trunk paid for
            raise ValueError(problem)
        return make_plan(train, size.context_length, ladder.ranks, lengths_at_hand(train, None))
    except (BadInput, ValueError) as error:
        raise BadInput(f"{ladder.file}: {size_name(size)}: {error}") from error
