"""Batch of a step as text: sequences' sources and token losses, rebuilt from the run's record without any lock."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from tqdm import tqdm

from common.checks import integer
from common.errors import EXIT_DONE, BadInput, refusing
from common.files import check_replaceable, replace_file, writing
from common.launch import environment_rank
from common.output import show
from common.web_page import HEAT_LEGEND, render
from evaluation.loss.token_losses import BATCH_TOKENS, log_probabilities, prediction_losses
from evaluation.shared.load import load_network
from evaluation.shared.model_location import ModelLocation
from evaluation.shared.model_tokenizer import tokenizer_of
from model.config import ModelConfig
from model.gpt import GPT
from reporting.run_history import read_resolved
from reporting.samples.sample_log import HeldOutText, special_among, spelled
from reporting.samples.sample_sections import cell
from tokens.batches.micro_batches import locate, ready
from tokens.batches.sampling import rank_shares, read_target_weights, read_windows
from tokens.format.manifest import TokenizerRecord
from tokens.format.token_file import SCAN_TOKENS, TokenStream
from training.checkpoints.compatibility import differences
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.initial_weights import InitialWeights, first_network
from training.checkpoints.lookup import find_before
from training.checkpoints.run_record import RESOLVED, RunRecord, make_record
from training.command import TrainCommand
from training.config.train_config import KEYS, Run, resolve_spelling
from training.data.open_tokens import TokenDirectory, make_reading, open_tokens
from training.data.verify_tokens import verify_tokens
from training.hardware.usable_gpus import choose_device
from training.parallel.process_group import RankGroup, Ranks
from training.supervision.run_lock import is_locked
from training.telemetry.metrics_log import Detail, RunEvent, event_of, read_metrics

LISTED = 10  # sequences of a large batch in the terminal, those of the highest loss
PRINTED_TOKENS = 1 << 12  # of a batch that is printed whole
STRETCH = 16  # tokens of a sequence that is not
COLOURS = (230, 229, 222, 221, 215, 209, 203, 196)  # backgrounds of a terminal with 256 colours
SIGN = b"Lockstep's <code>train.py --look</code>"


@attrs.frozen(eq=False)
class ReadSequence:
    number: int  # in the global batch
    rank: int
    directory: TokenDirectory
    first: int  # token of its train stream
    ids: list[int]  # T + 1: inputs and targets
    weights: np.ndarray  # of the targets, (T,)


def look(run: Run, command: TrainCommand, initial: InitialWeights | None) -> int:
    """Print the batch of a step, and write it as HTML where asked; return the exit status. Raises BadInput."""
    if environment_rank() > 0:
        return EXIT_DONE  # rank 0 shows it
    if command.html is not None:
        check_replaceable(command.html, SIGN, "a page of train.py --look", "--html")
    os.nice(10)  # the run may be training here
    record, job, notes = read_resolved(run.directory)
    if record is None:
        absent = f"{run.directory / RESOLVED}: not there: the run has not begun; train it"
        raise BadInput(*([notice.text for notice in notes] or [absent]))
    check_overrides(run, record, command.overrides)
    step, model = command.look or 0, record.model
    batch = read_batch(run, record, step, command.options.token_files)
    chosen = [one for one in batch if command.rank in (None, one.rank)]
    if not chosen:
        raise BadInput(f"--rank {command.rank}: wanted 0 to {batch[-1].rank}, a data-parallel rank that reads the step")
    network, under = weights_before(run, record, step, initial, job.tokenizer)
    device = command.options.device or ("cpu" if is_locked(run.directory) else choose_device(None))
    losses = batch_losses(network, torch.tensor([one.ids for one in chosen]), device)
    weights = np.stack([one.weights for one in chosen])
    first, last = chosen[0].rank, chosen[-1].rank
    readers = f"data-parallel rank{f' {first}' if first == last else f's {first} to {last}'}"
    name = f"{run.directory.resolve().name}, step {step:,}"
    lines = [
        f"{name}: {len(chosen)} sequences of {model.context_length:,} tokens, read by {readers}",
        f"losses {under}, mean {mean(losses, weights):.4f} nats per token",
    ]
    show(*lines)
    whole, shown = command.rank is not None or losses.size <= PRINTED_TOKENS, []
    texts = zip(describe(run, model, chosen), losses, weights, strict=True)
    for text, row, own in sorted(texts, key=lambda one: -np.nan_to_num(mean(*one[1:]), nan=np.inf)):
        known = zip(log_probabilities(row), own, strict=True)
        values = [None if weight == 0 else value for value, weight in known]
        cells = [cell(text, at, [value]) for at, value in enumerate([0.0, *values])]
        shown.append((f"{mean(row, own):.4f} {text.source}", cells))
        if whole or len(shown) <= LISTED:
            worst = 1 + int(np.convolve(row * own, np.ones(min(STRETCH, len(row))), "valid").argmax())
            show(f"--- {shown[-1][0]}")
            print(in_terminal(cells) if whole else in_terminal(cells[worst : worst + STRETCH]).replace("\n", ""))
    if command.html is not None:
        page = render("reporting/templates/batch.html", title=name, lines=lines, legend=HEAT_LEGEND, sequences=shown)
        with writing(command.html):
            replace_file(command.html, page)
        show(f"page {command.html}")
    elif not whole:
        show("the whole text: --html FILE; of one rank: --rank R")
    return EXIT_DONE


def check_overrides(run: Run, record: RunRecord, overrides: Sequence[str]) -> None:
    """Raise BadInput if --set asks for other values than those that were trained: --look would not use them.

    Only the dataset is taken from the command line, because it may have moved. A key that is gone has no value to
    compare: `load_run` ignores it with a NOTE.
    """
    values = {"model": attrs.asdict(run.model), "train": run.train.flat()}
    recorded = {"model": attrs.asdict(record.model), "train": record.train.flat()}
    problems = []
    for text in overrides:
        section, key = resolve_spelling(text.partition("=")[0])
        if key not in KEYS[section]:
            continue
        trained = recorded[section][key]
        if key != "dataset" and json.dumps(values[section][key]) != json.dumps(trained):
            shown = f"it was trained with {json.dumps(trained)}"
            problems.append(
                f"--set {text}: has no effect on --look, which shows what was trained: {shown}; leave it out"
            )
    if problems:
        raise BadInput(*problems)


def read_batch(run: Run, record: RunRecord, step: int, given: Path | None) -> list[ReadSequence]:
    """Rebuild the batch of a step >= 1; `given`: other token files. Raises BadInput unless the run has read them."""
    # The dataset may have moved, validation tokens are not read.
    keys = record.train.flat() | {"dataset": run.train.data.dataset, "validation_interval": None}
    run = attrs.evolve(run, model=record.model, train=run.train.replace(**keys))
    tensor_size, length = run.train.execution.tensor_parallel, run.model.context_length
    world_size, cpu = record.world_size or tensor_size, torch.device("cpu")
    data, tensor = (RankGroup(rank=0, size=size) for size in (world_size // tensor_size, tensor_size))
    alone = Ranks(rank=0, world_size=1, data_parallel=data, tensor=tensor, device=cpu, control=None, download=None)
    tokens = open_tokens(run, given, alone, follow=True)
    plan = tokens.plan
    if step > plan.steps:
        raise BadInput(f"--look {step}: wanted a step from 1 to {plan.steps}")
    token_set = verify_tokens(run, tokens, alone)
    differences(run.directory, record, make_record(run, plan, token_set, record.numerics), run.directory / RESOLVED)
    reading = make_reading(run.train, plan, token_set, run.model.vocab_size)
    if not ready(reading, step - 1):
        raise BadInput(f"--look {step}: its tokens are still being prepared; look again later")
    starts = [line for line in read_metrics(run.directory) if event_of(line) == RunEvent.START and line["step"] < step]
    sizes = [data.size, *(line.get(Detail.DATA_PARALLEL_SIZE, line.get(Detail.WORLD_SIZE)) for line in starts)]
    count, batch = plan.layout.microbatches, plan.layout.global_batch_size
    shares = rank_shares(count, next(size for size in reversed(sizes) if integer(1, count).holds(size)))
    readers = [rank for rank, share in enumerate(shares) for _ in range(len(share) * batch // count)]
    windows = locate(reading, np.arange((step - 1) * batch, step * batch))
    directories = {directory.train: directory for directory in token_set.directories}
    weights = read_target_weights(windows, length)
    rows = enumerate(zip(readers, windows, read_windows(windows, length).tolist(), weights, strict=True))
    return [
        ReadSequence(number, rank, directories[stream], first, ids, own)
        for number, (rank, (stream, first), ids, own) in rows
    ]


def mean(losses: np.ndarray, weights: np.ndarray) -> float:
    return float((losses * weights).sum() / max(1, weights.sum()))


def weights_before(
    run: Run, record: RunRecord, step: int, initial: InitialWeights | None, tokenizer: TokenizerRecord | None
) -> tuple[GPT, str]:
    """Return the weights of the newest checkpoint before a step, or the first ones, and which. Raises BadInput.

    `tokenizer`: of the run's tokens.
    """
    if (found := find_before(checkpoints_of(run.directory), step)) is not None:
        return load_network(ModelLocation(found, run.directory, run.directory)), f"under {found.name}"
    with refusing(f"--look {step}: no earlier checkpoint", kinds=(BadInput,)):
        network = first_network(record, initial, run.directory / "model.json", tokenizer)
    source = "the run's random initial weights" if initial is None else initial.source
    return network, f"under {source}: no earlier checkpoint"


def batch_losses(network: GPT, ids: torch.Tensor, device: str) -> np.ndarray:
    """Return the loss of each token of sequences (N, T + 1) but the first, nats, fp32 (N, T). Raises BadInput."""
    try:
        network = network.to(device).eval()
        parts = tqdm(ids.split(max(1, BATCH_TOKENS // ids.shape[1])), disable=None, leave=False)
        return torch.cat([prediction_losses(network, part).cpu() for part in parts]).numpy()
    except (RuntimeError, AssertionError) as error:  # no GPU, or too little memory
        raise BadInput(f"--look: {device}: {str(error).splitlines()[0]}; pass another --device") from error


def describe(run: Run, model: ModelConfig, sequences: list[ReadSequence]) -> Iterator[HeldOutText]:
    """Yield sequences as text, or as ids where no tokenizer is known."""
    tokenizer = tokenizer_of(ModelLocation(run.directory, run.directory, run.directory), None, model)
    before: dict[int, int] = {}
    if tokenizer is not None:
        for stream in {one.directory.train for one in sequences}:
            here = {one.number: one.first for one in sequences if one.directory.train is stream}
            counts = ends_before(stream, tokenizer.end_of_text_id, np.array([*here.values()]))
            before |= zip(here, counts.tolist(), strict=True)
    for one in sequences:
        document = "ids" if tokenizer is None else f"document {before[one.number] + 1:,}"
        if (length := one.directory.train.context_length) is not None:  # its padding ends no documents
            document = f"row {one.first // length + 1:,}"
        source = f"sequence {one.number}, rank {one.rank}: {one.directory.path.name}, {document}, token {one.first:,}"
        tokens = [f" {token}" for token in one.ids] if tokenizer is None else spelled(tokenizer, one.ids)
        special = [] if tokenizer is None else special_among(tokenizer, one.ids)
        yield HeldOutText(source=source, ids=one.ids, tokens=tokens, window=len(one.ids) - 1, special=special)


def ends_before(stream: TokenStream, end_of_text: int, places: np.ndarray) -> np.ndarray:
    """Return how many ids of a stream before each place end a text, int64; reads the stream up to the last place."""
    counts, last = np.zeros(len(places), np.int64), int(places.max(initial=0))
    for begin in tqdm(range(0, last, SCAN_TOKENS), desc="counting documents", disable=None, leave=False):
        block = stream.read(begin, min(SCAN_TOKENS, last - begin))
        counts += np.searchsorted(begin + np.flatnonzero(block == end_of_text), places)
    return counts


def in_terminal(cells: Sequence[dict[str, str]]) -> str:
    """Return tokens as a terminal shows them, with the colours of their losses if it has any."""
    coloured, parts = sys.stdout.isatty() and not os.environ.get("NO_COLOR"), []
    for one in cells:
        shown = one["text"].replace("·", " ") if "space" in one["classes"] else one["text"]
        level = re.search(r"p([1-8])", one["classes"]) if coloured else None
        start, end = (f"\x1b[30;48;5;{COLOURS[int(level[1]) - 1]}m", "\x1b[0m") if level else ("", "")
        parts.append(f"{start}{shown}{end}".replace("\n", f"{end}\n"))
    return "".join(parts)
