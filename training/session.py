"""One process's part in a run, from a checked configuration to the last step: builds every object and hands them over."""

import json
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import attrs
import torch

from errors import EXIT_DONE, EXIT_STOPPED, BadInput
from model.config import flops_per_token
from model.gpt import GPT, initialize
from model.loss import next_token_loss, sequence_losses
from tokens.hub import download_dataset
from tokens.token_file import TokenStream, check_manifest, open_split, read_manifest
from tokens.tokenizer import RANKS_FILE
from training import checkpoint
from training.config import Run
from training.feed import FeedSource
from training.hardware import environment, git_commit
from training.ledger import PARTS, Ledger
from training.loop import Job, Loop
from training.optimizer import make_optimizer
from training.parallel import Parallel
from training.plan import Plan, describe, make_plan, window_order
from training.precision import LossScale, resolve
from training.progress import duration
from training.ranks import Ranks, StopRequest, from_coordinator, start, stop, together
from training.step import FiniteGuard, Trainer
from training.validation import Validation

ROOT = Path(__file__).parents[1]
DOWNLOADS = ROOT / "token_files"

# A change of these would read tokens twice or never after a resume: a step would no longer mean the same windows.
_POSITION_KEYS = ("global_batch_size", "start_train_token", "shuffle", "random_seed")


@attrs.frozen(kw_only=True)
class Options:
    """What the command line adds to a run directory."""

    token_files: Path | None
    resume: str  # "auto", "never" or a checkpoint's name
    device: str | None
    max_steps: int | None
    price_per_hour: float | None


@attrs.frozen
class TokenSet:
    """The token files of a run, opened and checked."""

    train: TokenStream
    validation: TokenStream | None
    tokenizer: dict[str, Any] | None  # the manifest's entry
    directory: Path


def run_session(run: Run, options: Options) -> int:
    """Train the run and return the exit status. Call it on every rank. Raises BadInput and Diverged."""
    ranks = start(options.device)
    try:
        return _train(run, options, ranks)
    finally:
        stop()


@attrs.frozen
class TokenPlace:
    """Where a run's token files are; `hub_dataset` names what has to be there, downloaded if need be."""

    directory: Path
    hub_dataset: str | None


def locate_tokens(run: Run, given: Path | None) -> TokenPlace:
    """Return the place of a run's tokens: `given`, a local directory, or that of a hub dataset under token_files/."""
    if given is not None:
        return TokenPlace(given, None)
    dataset = run.train.dataset
    for directory in (Path(dataset), ROOT / dataset):
        if directory.is_dir():
            return TokenPlace(directory, None)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", dataset) and not dataset.startswith("token_files/"):
        return TokenPlace(DOWNLOADS / dataset, dataset)
    raise BadInput(
        f"{run.directory / 'train.json'}: dataset: {dataset} is no directory here; prepare it with "
        f"prepare_data.py SOURCE... --output {dataset}, or pass --token-files DIR"
    )


def _train(run: Run, options: Options, ranks: Ranks) -> int:
    ledger = Ledger(earlier_seconds=0.0)
    with ledger.measure("start-up"):
        _say(ranks, list(run.notices))
        token_set = _open_tokens(run, options, ranks)
        plan = make_plan(run, ranks.world_size, token_set.train.length)
        _check_tokens(run, plan, token_set, ranks)
        _say(ranks, _introduction(run, plan, ranks))
        trainer = _make_trainer(run, plan, ranks)
        progress = _resume(run, options, plan, trainer)
        ledger.earlier_seconds = progress.elapsed_seconds
        last_step = plan.steps if options.max_steps is None else min(plan.steps, options.max_steps)
        if progress.step >= last_step:
            _say(ranks, [_nothing_to_do(run, plan, progress)])
            return EXIT_DONE
        job = _make_job(run, options, plan, token_set, ranks, last_step)
        if ranks.coordinates:
            _record(run, job, ranks, token_set)
    loop = Loop(trainer, job, progress, ledger)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: job.stop_request.ask())
    finished = loop.train()
    if loop.chart is not None:
        loop.chart.finish()
    _say(ranks, _summary(run, loop, finished))
    return EXIT_DONE if finished else EXIT_STOPPED


def _open_tokens(run: Run, options: Options, ranks: Ranks) -> TokenSet:
    place = locate_tokens(run, options.token_files)
    directory, dataset = place.directory, place.hub_dataset
    if dataset is not None:  # once per machine, while its other ranks wait on gloo
        together(ranks, lambda: download_dataset(dataset, directory), only=ranks.local_rank == 0)
    validating = run.train.validation_interval is not None

    def open_all() -> TokenSet:
        manifest = read_manifest(directory)
        tokenizer = (manifest or {}).get("tokenizer")
        if tokenizer is not None and tokenizer["vocabulary_size"] > run.model.vocab_size:
            raise BadInput(
                f"{run.directory / 'model.json'}: vocab_size: got {run.model.vocab_size}, wanted at least "
                f"{tokenizer['vocabulary_size']}, the vocabulary of tokenizer {tokenizer['name']} in {directory}"
            )
        streams = [open_split(directory, "train"), open_split(directory, "validation") if validating else None]
        assert streams[0] is not None
        return TokenSet(streams[0], streams[1], tokenizer, directory)

    token_sets: list[TokenSet] = []
    together(ranks, lambda: token_sets.append(open_all()))
    return token_sets[0]


def _check_tokens(run: Run, plan: Plan, token_set: TokenSet, ranks: Ranks) -> None:
    """Raise BadInput before step 0 for too few tokens or an id beyond the vocabulary, on whichever rank finds it."""
    length, context = token_set.train.length, plan.layout.context_length
    wanted = plan.start_token + plan.train_tokens + 1
    if length < wanted:
        raise BadInput(
            f"{token_set.train.files[0].path}: got {length:,} tokens, wanted at least {wanted:,} = "
            f"{plan.start_token:,} + {plan.steps:,} steps x {plan.tokens_per_step:,} + 1; prepare more, or lower "
            f"min_train_tokens in {run.directory / 'train.json'}"
        )
    ranges = [(token_set.train, plan.start_token, plan.train_tokens + 1)]
    if run.train.shuffle:  # any window of the stream may come
        ranges = [(token_set.train, plan.start_token, length - plan.start_token)]
    if token_set.validation is not None:
        count = plan.validation_sequences * context + 1
        begin = run.train.start_val_token
        if token_set.validation.length < begin + count:
            raise BadInput(
                f"{token_set.validation.files[0].path}: got {token_set.validation.length:,} tokens, wanted at least "
                f"{begin + count:,} = {begin:,} + {plan.validation_sequences:,} sequences x {context:,} + 1; hold out "
                f"more with --validation-fraction, or lower validation_sequences in {run.directory / 'train.json'}"
            )
        ranges.append((token_set.validation, begin, count))
    manifest = read_manifest(token_set.directory)

    def check() -> None:
        for stream, begin, count in ranges:
            largest = check_manifest(stream, manifest)
            if largest is not None and largest < run.model.vocab_size:
                continue
            share = -(-count // ranks.local_world_size)  # each machine looks at its copy once
            first = begin + ranks.local_rank * share
            stream.check_ids(first, max(0, min(share, begin + count - first)), run.model.vocab_size)

    together(ranks, check)


def _introduction(run: Run, plan: Plan, ranks: Ranks) -> list[str]:
    precision = resolve(run.train.precision, ranks.device)
    compiled = "compiled" if _compiled(run, ranks) else "not compiled"
    name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    wrapper = run.train.parallel if ranks.world_size > 1 or run.train.parallel == "fsdp" else "one process"
    lines = [f"{run.directory}: {ranks.world_size} x {name}, {wrapper}, {precision}, {compiled}", *describe(run, plan)]
    idle = torch.cuda.device_count() - ranks.local_world_size if ranks.device.type == "cuda" else 0
    if idle > 0:
        lines.append(
            f"WARNING: {idle} of this machine's {torch.cuda.device_count()} GPUs stand idle; "
            f"start with torchrun --nproc_per_node={torch.cuda.device_count()}"
        )
    return lines


def _make_trainer(run: Run, plan: Plan, ranks: Ranks) -> Trainer:
    precision = resolve(run.train.precision, ranks.device)
    # Matrix products that autocast leaves in fp32 may use TF32; a run that asks for fp32 gets fp32.
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.manual_seed(run.train.random_seed)
    network = GPT(run.model)
    initialize(network, run.train.random_seed)
    compiled = _compiled(run, ranks)
    parallel = Parallel(network, run.train.parallel, ranks, compiled=compiled)
    return Trainer(
        ranks=ranks,
        parallel=parallel,
        optimizer=make_optimizer(parallel.named_parameters(), run.train, ranks.device),
        layout=plan.layout,
        precision=precision,
        loss_scale=LossScale(precision, ranks.device),
        loss=torch.compile(next_token_loss, dynamic=False) if compiled else next_token_loss,
        guard=FiniteGuard(ranks),
        drop_rate=run.model.drop_rate,
        seed=run.train.random_seed,
        clipping_max_norm=run.train.clipping_max_norm,
    )


def _compiled(run: Run, ranks: Ranks) -> bool:
    return ranks.device.type == "cuda" if run.train.compile is None else run.train.compile


def _resume(run: Run, options: Options, plan: Plan, trainer: Trainer) -> checkpoint.Progress:
    ranks = trainer.ranks
    path = None
    if options.resume == "never":
        archived = from_coordinator(ranks, lambda: checkpoint.archive(run.directory))
        if archived is not None:
            _say(ranks, [f"--resume never: what earlier runs wrote is now in {archived}"])
    else:
        path = from_coordinator(ranks, lambda: checkpoint.find(run.directory, options.resume))
    if path is None:
        return checkpoint.Progress(
            step=0, tokens=0, elapsed_seconds=0.0, validation_loss=None, best_step=None, best_validation_loss=None
        )
    _say(ranks, _differences(run, plan, path))
    progress = checkpoint.load(path, trainer)
    _say(ranks, [f"resuming from {path} at step {progress.step:,} of {plan.steps:,}"])
    return progress


def _differences(run: Run, plan: Plan, path: Path) -> list[str]:
    """Return what changed since the checkpoint, a line each. Raises BadInput for what makes it unusable."""
    before = checkpoint.read_state(path)["config"]
    now = _config(run, plan)
    lines = []
    for file, key, old, new in _changed_keys(before, now):
        where = f"{run.directory / file}: {key}"
        if (file == "model.json" and key != "drop_rate") or key in _POSITION_KEYS:
            raise BadInput(
                f"{where}: got {new}, but {path} was made with {old}; set it back to resume, "
                "or start anew with --resume never"
            )
        lines.append(f"NOTE: {where} was {old} at {path.name} and is {new} now")
    return lines


def _changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """Return (file, key, old, new) of each difference between two resolved configurations."""
    pairs = [
        (f"{section}.json", key, before[section].get(key), value)
        for section in ("model", "train")
        for key, value in now[section].items()
        if key != "global_batch_size"
    ]
    # as resolved: a directory without it follows the world size
    pairs.append(("train.json", "global_batch_size", before["global_batch_size"], now["global_batch_size"]))
    return [pair for pair in pairs if pair[2] != pair[3]]


def _make_job(
    run: Run, options: Options, plan: Plan, token_set: TokenSet, ranks: Ranks, last_step: int
) -> Job:
    validation = None
    if token_set.validation is not None:
        validation = Validation(token_set.validation, run.train.start_val_token, plan.validation_sequences)
    return Job(
        directory=run.directory,
        plan=plan,
        feed_source=FeedSource(
            stream=token_set.train,
            start_token=plan.start_token,
            order=window_order(run, plan, token_set.train.length),
            layout=plan.layout,
            vocabulary_size=run.model.vocab_size,
        ),
        validation=validation,
        stop_request=StopRequest(ranks),
        last_step=last_step,
        log_interval=run.train.log_interval,
        validation_interval=run.train.validation_interval,
        checkpoint_interval=run.train.checkpoint_interval,
        keep_checkpoints=run.train.keep_checkpoints,
        flops_per_token=flops_per_token(run.model),
        price_per_hour=options.price_per_hour,
        config=_config(run, plan),
    )


def _config(run: Run, plan: Plan) -> dict[str, Any]:
    """Return the resolved configuration as JSON."""
    return {
        "model": attrs.asdict(run.model),
        "train": attrs.asdict(run.train),
        "global_batch_size": plan.layout.global_batch_size,
        "accumulation": plan.layout.accumulation,
        "world_size": plan.layout.world_size,
        "steps": plan.steps,
        "git_commit": git_commit(),
    }


def _record(run: Run, job: Job, ranks: Ranks, token_set: TokenSet) -> None:
    """Write `resolved.json`, and the tokenizer's ranks beside it, so that the run can be read without its tokens."""
    record = {
        **job.config,
        "token_files": str(token_set.directory.resolve()),
        "tokenizer": token_set.tokenizer,
        "environment": environment(ranks),
        "command": sys.argv,
    }
    (run.directory / checkpoint.RESOLVED).write_text(json.dumps(record, indent=2) + "\n")
    if (token_set.tokenizer or {}).get("ranks_file"):
        shutil.copyfile(token_set.directory / RANKS_FILE, run.directory / RANKS_FILE)


def _nothing_to_do(run: Run, plan: Plan, progress: checkpoint.Progress) -> str:
    if progress.step < plan.steps:
        return f"{run.directory}: at step {progress.step:,} of {plan.steps:,}; --max-steps asks for no more"
    best = "" if progress.best_validation_loss is None else f", best validation loss {progress.best_validation_loss:.4f}"
    return f"{run.directory}: the run is complete: {plan.steps:,} steps{best}; start anew with --resume never"


def _summary(run: Run, loop: Loop, finished: bool) -> list[str]:
    progress, ledger = loop.progress, loop.ledger
    parts = ledger.breakdown(loop.feed.waited_seconds)
    total = ledger.process_seconds()
    tokens = (progress.step - loop.first_step) * loop.job.plan.tokens_per_step
    losses = f"train loss {loop.last_loss:.4f}"
    if progress.best_validation_loss is not None:
        losses += f", best validation loss {progress.best_validation_loss:.4f} at step {progress.best_step:,}"
    state = "done" if finished and progress.step == loop.job.plan.steps else "stopped early; the same command continues"
    lines = [
        f"{run.directory}: {state}: step {progress.step:,} of {loop.job.plan.steps:,}, {losses}",
        f"{tokens:,} tokens in {duration(total)}, {tokens / ledger.training_seconds():,.0f} tokens/s while training",
        "time: " + ", ".join(f"{part} {duration(parts[part])} ({parts[part] / total:.0%})" for part in PARTS),
    ]
    if loop.job.price_per_hour is not None:
        lines.append(f"cost: ${loop.job.price_per_hour * ledger.elapsed_seconds() / 3600:,.2f} for the run so far")
    lines.append(f"checkpoints {run.directory / 'checkpoints'}, chart {run.directory / 'training-run-chart.png'}")
    return lines


def _say(ranks: Ranks, lines: list[str]) -> None:
    if ranks.coordinates:
        for line in lines:
            print(line, file=sys.stderr if line.startswith("WARNING") else sys.stdout, flush=True)
