"""Batch of a step as text: where each sequence comes from, and each token's loss under the checkpoint before.

Rebuilt by arithmetic from the run's record, also while the run trains: no process group, no lock, no file but `--html`.
"""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from tqdm import tqdm

from common.checks import integer
from common.errors import EXIT_DONE, BadInput, printable
from common.files import check_replaceable, is_folder, replace_file, writing
from common.web_page import render
from evaluation.loss.held_out_loss import BATCH_TOKENS, prediction_losses
from evaluation.shared.load import ModelLocation, load_network, tokenizer_of
from model.config import ModelConfig
from model.counts import parameter_count
from model.gpt import GPT, initialize
from reporting.run_history import LastJob, read_resolved
from reporting.samples.sample_log import HeldOutText
from reporting.samples.sample_sections import LEGEND, cell
from tokens.batches.micro_batches import locate, micro_batches, ready
from tokens.batches.sampling import rank_shares
from tokens.format.token_file import SCAN_TOKENS, TokenStream
from training.checkpoints.compatibility import differences
from training.checkpoints.directory import checkpoints_of
from training.checkpoints.run_record import RESOLVED, RunRecord, make_record
from training.checkpoints.saved_state import find_before
from training.command import TrainCommand
from training.config.batch_plan import make_plan
from training.config.train_config import Run
from training.data.open_tokens import TokenDirectory, make_reading, open_tokens
from training.data.verify_tokens import verify_tokens
from training.hardware.usable_gpus import choose_device, is_memory_error
from training.initial_weights import InitialWeights
from training.parallel.process_group import RankGroup, Ranks
from training.supervision.run_lock import is_locked
from training.telemetry.metrics_log import read_metrics

LISTED = 10  # sequences of a large batch in the terminal, those of the highest loss
PRINTED_TOKENS = 1 << 12  # of a batch that is printed whole
STRETCH = 16  # tokens of a sequence that is not
# Backgrounds of a terminal with 256 colours
COLOURS = {
    "p1": 230,
    "p2": 229,
    "p3": 222,
    "p4": 221,
    "p5": 215,
    "p6": 209,
    "p7": 203,
    "p8": 196,
}
SIGN = b"Lockstep's <code>train.py --look</code>"


@attrs.frozen(kw_only=True, eq=False)
class RecordedBatch:
    """The sequences of a step, all ranks, in the order of the global batch."""

    run: Run  # as its last job had it
    ids: np.ndarray  # (G, T + 1) int64: inputs and targets
    ranks: list[int]  # that read each sequence
    directories: list[TokenDirectory]  # of each sequence
    firsts: np.ndarray  # first token of each in its train stream, (G,) int64


def look(run: Run, command: TrainCommand, initial: InitialWeights | None) -> int:
    """Print the batch of a step, and write it as HTML where asked; return the exit status. Raises BadInput."""
    if command.html is not None:
        check_replaceable(command.html, SIGN, "a page of train.py --look", "--html")
    os.nice(10)  # the run may be training here
    record, job, notes = read_resolved(run.directory)
    if record is None:
        raise BadInput(notes[0] if notes else f"{run.directory / RESOLVED}: not there: the run has not begun; train it")
    step = command.look or 0
    batch = read_batch(run, record, job, step, command.options.token_files)
    chosen = [number for number, rank in enumerate(batch.ranks) if command.rank in (None, rank)]
    if not chosen:
        raise BadInput(f"--rank {command.rank}: wanted 0 to {max(batch.ranks)}, a rank of those that read the step")
    device = command.options.device or ("cpu" if is_locked(run.directory) else choose_device(None))
    count = parameter_count(batch.run.model)
    print(
        f"the network has {count:,} parameters, {4e-9 * count:.1f} GB in fp32 on {device}", file=sys.stderr, flush=True
    )
    network, under = weights_before(batch.run, record, step, initial)
    losses = np.zeros((len(chosen), 0))
    if network is not None:
        losses = token_losses(network, torch.from_numpy(batch.ids[chosen]), device)
    length, size = batch.ids.shape[1] - 1, max(batch.ranks) + 1
    reader = f"{size} rank{'s' * (size > 1)}" if command.rank is None else f"rank {command.rank} of {size}"
    mean = f"losses {under}" + (f", mean {losses.mean():.4f} nats per token" if losses.size else "")
    name = f"{run.directory.resolve().name}, step {step:,}"
    lines = [f"{name}: {len(chosen)} sequences of {length:,} tokens, read by {reader}", mean]
    print(*map(printable, lines), sep="\n")
    whole, shown = command.rank is not None or len(chosen) * length <= PRINTED_TOKENS, []
    texts = list(zip(describe(batch, chosen), losses, strict=True))
    for text, row in sorted(texts, key=lambda pair: -np.nan_to_num(pair[1].sum(), nan=np.inf)):
        values = [[-loss if math.isfinite(loss) else None] for loss in [0.0, *row.tolist()]]
        cells = [cell(text, at, values[at] if len(row) else []) for at in range(length + 1)]
        shown.append((f"{row.mean():.4f} {text.source}" if len(row) else text.source, cells))
        if whole or len(shown) <= LISTED:
            worst = 1 + int(np.convolve(row, np.ones(min(STRETCH, length)), "valid").argmax()) if len(row) else 0
            print(f"--- {printable(shown[-1][0])}")
            print(in_terminal(cells) if whole else in_terminal(cells[worst : worst + STRETCH]).replace("\n", ""))
    if command.html is not None:
        legend = LEGEND if losses.size else []
        page = render("reporting/templates/batch.html", title=name, lines=lines, legend=legend, sequences=shown)
        with writing(command.html):
            replace_file(command.html, page)
        print(printable(f"page {command.html}"))
    elif not whole:
        print("the whole text: --html FILE; of one rank: --rank R")
    return EXIT_DONE


def read_batch(run: Run, record: RunRecord, job: LastJob, step: int, given: Path | None) -> RecordedBatch:
    """Rebuild the batch of a step, the first of which is 1. `given`: token files, instead of those of the record.

    Raises BadInput for a step that the run does not have, and for other tokens than it has read.
    """
    resolved, world_size, places = run.directory / RESOLVED, record.world_size or 1, job.token_files
    if given is None and len(places) == 1 and is_folder(Path(places[0])):
        given = Path(places[0])
    keys = {key: record.train[key] for key in run.train.flat() if key in record.train}
    keys |= {"dataset": run.train.data.dataset, "validation_interval": None}  # it may have moved; is not read
    run = attrs.evolve(run, model=ModelConfig(**record.model), train=run.train.replace(**keys))
    ranks, vocabulary = RankGroup(rank=0, size=world_size), run.model.vocab_size
    alone = Ranks(rank=0, world_size=1, data_parallel=ranks, device=torch.device("cpu"), control=None, download=None)
    begun_with = [stream.files for stream in record.train_streams]
    token_set = open_tokens(run, given, alone, follow=True, begun_with=begun_with)
    plan = make_plan(run.train, run.model.context_length, world_size, token_set.lengths)
    if step > plan.steps:
        raise BadInput(f"--look {step}: wanted a step from 1 to {plan.steps}")
    token_set = verify_tokens(run.train, plan, token_set, alone, vocabulary)
    differences(run.directory, record, make_record(run, plan, token_set, record.numerics), resolved)
    reading = make_reading(run.train, plan, token_set, vocabulary)
    if not ready(reading, step - 1):
        raise BadInput(f"--look {step}: its tokens are still being prepared; look again later")
    starts = [line for line in read_metrics(run.directory) if line.get("event") == "start" and line["step"] < step]
    sizes = [world_size, *(line.get("world_size") for line in starts)]
    count, batch = plan.layout.microbatches, plan.layout.global_batch_size
    shares = rank_shares(count, next(size for size in reversed(sizes) if integer(1, count).holds(size)))
    windows = locate(reading, np.arange((step - 1) * batch, step * batch))
    directories = {id(directory.train): directory for directory in token_set.directories}
    whole = attrs.evolve(reading, layout=attrs.evolve(plan.layout, data_parallel_size=1))
    read = micro_batches(whole, 0, range(step - 1, step))
    return RecordedBatch(
        run=run,
        ids=np.concatenate([np.column_stack([each.inputs, each.targets[:, -1]]) for each in read]),
        ranks=[rank for rank, share in enumerate(shares) for _ in range(len(share) * batch // count)],
        directories=[directories[id(stream)] for stream, _ in windows],
        firsts=np.array([first for _, first in windows]),
    )


def weights_before(run: Run, record: RunRecord, step: int, initial: InitialWeights | None) -> tuple[GPT | None, str]:
    """Return the weights of the newest checkpoint before a step, or the initial ones, and which; None: unknown."""
    found, origin = find_before(checkpoints_of(run.directory), step), record.initial_weights
    if found is not None:
        return load_network(ModelLocation(found, run.directory, run.directory)), f"under {found.name}"
    if initial is not None:
        return initial.load(), f"under {initial.source}: no earlier checkpoint"
    if origin is not None:
        return None, f"not known: no earlier checkpoint; pass --init-from {origin.source}, as the run began"
    network = GPT(run.model)
    initialize(network, run.train.random_seed)
    return network, "under the run's random initial weights: no earlier checkpoint"


def token_losses(network: GPT, ids: torch.Tensor, device: str) -> np.ndarray:
    """Return the loss of each token of sequences (N, T + 1) but the first, nats, fp32 (N, T). Raises BadInput."""
    try:
        network = network.to(device).eval()
        parts = tqdm(ids.split(max(1, BATCH_TOKENS // ids.shape[1])), disable=None, leave=False)
        return torch.cat([prediction_losses(network, part).cpu() for part in parts]).numpy()
    except Exception as error:
        if not is_memory_error(error):
            raise
        raise BadInput(f"--look: the memory of {device} does not hold the network; pass --device cpu") from error


def describe(batch: RecordedBatch, chosen: list[int]) -> list[HeldOutText]:
    """Return some sequences as text, or as ids where no tokenizer is known."""
    run, known, end = batch.run.directory, {}, -1
    if (tokenizer := tokenizer_of(ModelLocation(run, run, run), None, batch.run.model)) is not None:
        known = {number: token.decode("latin-1") for token, number in tokenizer.ranks().items()}
        end = tokenizer.end_of_text_id
    texts: list[HeldOutText] = []
    before: dict[int, int] = {}
    for directory in {id(one): one for one in batch.directories}.values():
        here = [number for number in chosen if batch.directories[number] is directory]
        before |= zip(here, ends_before(directory.train, end, batch.firsts[here]).tolist(), strict=True)
    for number in chosen:
        ids, directory = batch.ids[number].tolist(), batch.directories[number]
        first = before[number] + 1
        last = first + ids[:-1].count(end)
        document = f"document {first:,}" + (f" to {last:,}" if last > first else "") if known else "ids"
        file = directory.train.locate(int(batch.firsts[number])).rpartition("/")[2]
        source = f"sequence {number}, rank {batch.ranks[number]}: {directory.path.name}, {document}, {file}"
        tokens = [known.get(token, "") if known else f" {token}" for token in ids]
        texts.append(HeldOutText(source=source, ids=ids, tokens=tokens, window=len(ids) - 1))
    return texts


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
        classes = one["classes"].split()
        shown = one["text"].replace("·", " ") if "space" in classes else one["text"]
        colour = next((COLOURS[name] for name in classes if name in COLOURS and coloured), None)
        parts.append(f"\x1b[30;48;5;{colour}m{shown}\x1b[0m".replace("\n", "\x1b[0m\n") if colour else shown)
    return "".join(parts)
