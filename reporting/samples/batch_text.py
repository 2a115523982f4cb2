"""The batch of a step as text: each sequence with its source and token losses.

The batch is rebuilt from the run's record. No lock is taken, so this also works while the run is training.
"""

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

LISTED = 10  # of a large batch, the terminal shows only this number of sequences, those with the highest loss
PRINTED_TOKENS = 1 << 12  # a batch of at most this number of tokens is printed completely
STRETCH = 16  # number of tokens to print for each sequence of a large batch
COLORS = (230, 229, 222, 221, 215, 209, 203, 196)  # background colors in a terminal with 256 colors
SIGN = b"Lockstep's <code>train.py --look</code>"


@attrs.frozen(eq=False)
class ReadSequence:
    """A sequence of the batch, and where it was read."""

    number: int  # in the global batch
    rank: int  # data-parallel rank that trained on it
    directory: TokenDirectory
    first: int  # position of its first token in the train stream of `directory`
    ids: list[int]  # T + 1: inputs and targets
    weights: np.ndarray  # of the targets, (T,)


def look(run: Run, command: TrainCommand, initial: InitialWeights | None) -> int:
    """Print the batch of a step; with --html, also write it as HTML. Return the exit status.

    Raise BadInput if the batch cannot be rebuilt.
    """
    if environment_rank() > 0:
        return EXIT_DONE  # only rank 0 prints the batch
    if command.html is not None:
        check_replaceable(command.html, SIGN, "a page of train.py --look", "--html")
    os.nice(10)  # gives a training run on the same machine priority over this process
    record, job, notes = read_resolved(run.directory)
    if record is None:
        not_begun = f"{run.directory / RESOLVED}: no such file: the run has not begun; train it first"
        raise BadInput(*([notice.text for notice in notes] or [not_begun]))
    check_overrides(run, record, command.overrides)
    step, model = command.look or 0, record.model
    batch = read_batch(run, record, step, command.options.token_files)
    chosen = [sequence for sequence in batch if command.rank in (None, sequence.rank)]
    if not chosen:
        raise BadInput(
            f"--rank {command.rank}: this rank read no sequence of the step; "
            f"pass a data-parallel rank from 0 to {batch[-1].rank}"
        )
    network, weights_source = weights_before(run, record, step, initial, job.tokenizer)
    device = command.options.device or ("cpu" if is_locked(run.directory) else choose_device(None))
    losses = batch_losses(network, torch.tensor([sequence.ids for sequence in chosen]), device)
    weights = np.stack([sequence.weights for sequence in chosen])
    first, last = chosen[0].rank, chosen[-1].rank
    readers = f"data-parallel rank{f' {first}' if first == last else f's {first} to {last}'}"
    name = f"{run.directory.resolve().name}, step {step:,}"
    lines = [
        f"{name}: {len(chosen)} sequences of {model.context_length:,} tokens, read by {readers}",
        f"losses {weights_source}, mean {mean(losses, weights):.4f} nats per token",
    ]
    show(*lines)
    print_all, sections = command.rank is not None or losses.size <= PRINTED_TOKENS, []
    texts = zip(describe(run, model, chosen), losses, weights, strict=True)
    highest_loss_first = sorted(texts, key=lambda sequence: -np.nan_to_num(mean(*sequence[1:]), nan=np.inf))
    for text, token_losses, token_weights in highest_loss_first:
        weighted = zip(log_probabilities(token_losses), token_weights, strict=True)
        values = [None if weight == 0 else value for value, weight in weighted]
        cells = [cell(text, at, [value]) for at, value in enumerate([0.0, *values])]
        sections.append((f"{mean(token_losses, token_weights):.4f} {text.source}", cells))
        if print_all or len(sections) <= LISTED:
            stretch = np.ones(min(STRETCH, len(token_losses)))
            worst = 1 + int(np.convolve(token_losses * token_weights, stretch, "valid").argmax())
            show(f"--- {sections[-1][0]}")
            print(in_terminal(cells) if print_all else in_terminal(cells[worst : worst + STRETCH]).replace("\n", ""))
    if command.html is not None:
        template = "reporting/templates/batch.html"
        page = render(template, title=name, lines=lines, legend=HEAT_LEGEND, sequences=sections)
        with writing(command.html):
            replace_file(command.html, page)
        show(f"page {command.html}")
    elif not print_all:
        show("--html FILE writes the complete text; --rank R prints the sequences of one rank")
    return EXIT_DONE


def check_overrides(run: Run, record: RunRecord, overrides: Sequence[str]) -> None:
    """Raise BadInput if --set changes a setting that the run was trained with, because --look would ignore it.

    Only the dataset is taken from the command line, because it may have moved. A key that this version no longer has
    cannot be compared; `load_run` has already printed a NOTE that it is ignored.
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
            problems.append(
                f"--set {text}: --look shows the run as it was trained, with {json.dumps(trained)}; "
                "leave this option out"
            )
    if problems:
        raise BadInput(*problems)


def read_batch(run: Run, record: RunRecord, step: int, token_files: Path | None) -> list[ReadSequence]:
    """Return the batch of a step (>= 1), rebuilt from the run's record.

    `token_files` replaces the directory of the run's token files. Raise BadInput if the token files are not those that
    the run has read.
    """
    # Use the current path of the dataset, because the dataset may have moved. Validation tokens are not read.
    keys = record.train.flat() | {"dataset": run.train.data.dataset, "validation_interval": None}
    run = attrs.evolve(run, model=record.model, train=run.train.replace(**keys))
    tensor_size, length = run.train.execution.tensor_parallel, run.model.context_length
    world_size, cpu = record.world_size or tensor_size, torch.device("cpu")
    data, tensor = (RankGroup(rank=0, size=size) for size in (world_size // tensor_size, tensor_size))
    ranks = Ranks(rank=0, world_size=1, data_parallel=data, tensor=tensor, device=cpu, control=None, download=None)
    tokens = open_tokens(run, token_files, ranks, follow=True)
    plan = tokens.plan
    if step > plan.steps:
        raise BadInput(f"--look {step}: the run has only {plan.steps} steps; pass a step from 1 to {plan.steps}")
    token_set = verify_tokens(run, tokens, ranks)
    differences(run.directory, record, make_record(run, plan, token_set, record.numerics), run.directory / RESOLVED)
    reading = make_reading(run.train, plan, token_set, run.model.vocab_size)
    if not ready(reading, step - 1):
        raise BadInput(f"--look {step}: the tokens of this step are still being prepared; try again later")
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
        ReadSequence(number, rank, directories[stream], first, ids, token_weights)
        for number, (rank, (stream, first), ids, token_weights) in rows
    ]


def mean(losses: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted mean of losses; 0 if no token has a weight."""
    return float((losses * weights).sum() / max(1, weights.sum()))


def weights_before(
    run: Run, record: RunRecord, step: int, initial: InitialWeights | None, tokenizer: TokenizerRecord | None
) -> tuple[GPT, str]:
    """Return the network before a step, and a phrase that names its weights.

    These are the weights of the newest checkpoint before the step, or else the run's initial weights. `tokenizer` is
    the tokenizer of the run's tokens. Raise BadInput if the weights cannot be read.
    """
    if (checkpoint := find_before(checkpoints_of(run.directory), step)) is not None:
        return load_network(ModelLocation(checkpoint, run.directory, run.directory)), f"under {checkpoint.name}"
    with refusing(f"--look {step}: no earlier checkpoint", kinds=(BadInput,)):
        network = first_network(record, initial, run.directory / "model.json", tokenizer)
    source = "the run's random initial weights" if initial is None else initial.source
    return network, f"under {source} (no earlier checkpoint)"


def batch_losses(network: GPT, ids: torch.Tensor, device: str) -> np.ndarray:
    """Return the loss of every token except the first one of each sequence, in nats, fp32 (N, T).

    `ids`: the sequences, (N, T + 1). Raise BadInput if the device cannot compute the losses, for example because it has
    too little memory.
    """
    try:
        network = network.to(device).eval()
        parts = tqdm(ids.split(max(1, BATCH_TOKENS // ids.shape[1])), disable=None, leave=False)
        return torch.cat([prediction_losses(network, part).cpu() for part in parts]).numpy()
    except (RuntimeError, AssertionError) as error:  # there is no GPU, or it has too little memory
        raise BadInput(f"--look: {device}: {str(error).splitlines()[0]}; pass another --device") from error


def describe(run: Run, model: ModelConfig, sequences: list[ReadSequence]) -> Iterator[HeldOutText]:
    """Yield sequences as text, or as ids if the tokenizer is unknown."""
    tokenizer = tokenizer_of(ModelLocation(run.directory, run.directory, run.directory), None, model)
    documents_before: dict[int, int] = {}
    if tokenizer is not None:
        for stream in {sequence.directory.train for sequence in sequences}:
            starts = {sequence.number: sequence.first for sequence in sequences if sequence.directory.train is stream}
            counts = ends_before(stream, tokenizer.end_of_text_id, np.array([*starts.values()]))
            documents_before |= zip(starts, counts.tolist(), strict=True)
    for sequence in sequences:
        document = "ids" if tokenizer is None else f"document {documents_before[sequence.number] + 1:,}"
        if (length := sequence.directory.train.context_length) is not None:
            # Documents cannot be counted in rows of conversations, because the ids of the padding do not end documents.
            document = f"row {sequence.first // length + 1:,}"
        source = (
            f"sequence {sequence.number}, rank {sequence.rank}: {sequence.directory.path.name}, {document}, "
            f"token {sequence.first:,}"
        )
        ids = sequence.ids
        tokens = [f" {token}" for token in ids] if tokenizer is None else spelled(tokenizer, ids)
        special = [] if tokenizer is None else special_among(tokenizer, ids)
        yield HeldOutText(source=source, ids=ids, tokens=tokens, window=len(ids) - 1, special=special)


def ends_before(stream: TokenStream, end_of_text: int, positions: np.ndarray) -> np.ndarray:
    """Return the number of end-of-text ids before each position of a stream, int64.

    This reads the stream up to the last position.
    """
    counts, last = np.zeros(len(positions), np.int64), int(positions.max(initial=0))
    for begin in tqdm(range(0, last, SCAN_TOKENS), desc="counting documents", disable=None, leave=False):
        block = stream.read(begin, min(SCAN_TOKENS, last - begin))
        counts += np.searchsorted(begin + np.flatnonzero(block == end_of_text), positions)
    return counts


def in_terminal(cells: Sequence[dict[str, str]]) -> str:
    """Return tokens as text for a terminal, colored by their losses if the terminal supports colors."""
    colored, parts = sys.stdout.isatty() and not os.environ.get("NO_COLOR"), []
    for token in cells:
        shown = token["text"].replace("·", " ") if "space" in token["classes"] else token["text"]
        level = re.search(r"p([1-8])", token["classes"]) if colored else None
        start, end = (f"\x1b[30;48;5;{COLORS[int(level[1]) - 1]}m", "\x1b[0m") if level else ("", "")
        parts.append(f"{start}{shown}{end}".replace("\n", f"{end}\n"))
    return "".join(parts)
