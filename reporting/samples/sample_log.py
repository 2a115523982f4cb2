"""The sample log, `samples.jsonl`: what each checkpoint generated, and its log-probabilities of a held-out text."""

import math
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import attrs
import numpy as np
import torch

from common.checks import structured
from common.errors import BadInput
from common.files import lock, sha256, writing
from common.json_files import JsonLines, JsonLog, read_json_lines
from common.text import LARGEST_INTEGER
from evaluation.generation.smoke import AskedPrompt, smoke
from evaluation.loss.token_losses import log_probabilities, range_losses
from evaluation.loss.token_range import Range
from evaluation.shared.load import Trained, load
from evaluation.shared.model_location import ModelLocation
from model.generate import Sampling
from reporting.run_history import read_resolved
from tokens.format.manifest import read_manifest
from tokens.format.token_file import TokenStream, open_split
from tokens.tokenizer.tokenizer import Tokenizer
from training.checkpoints.directory import WEIGHTS, checkpoints_of, name_of, step_of
from training.checkpoints.lookup import checkpoints_by_step, linked_step
from training.checkpoints.run_record import RESOLVED, RunRecord, manifest_of
from training.checkpoints.saved_state import weights_digest
from training.parallel.process_group import Ranks
from training.telemetry.metrics_log import SAMPLES, read_starts

Item = TypeVar("Item")
SPLIT = "validation"
TEXT_TOKENS = 512  # length of the held-out text that each checkpoint predicts
SEED, TOP_K = 0, 25
PROMPTS, PROMPT_CHARACTERS = 6, 32
PROMPT_TOKENS = 1 << 16  # prompts are taken from this number of held-out tokens
DECIMALS = 3  # of recorded log-probabilities


@attrs.frozen(kw_only=True)
class Said:
    """A continuation of a prompt. The names of the fields are keys in `samples.jsonl`."""

    prompt: str
    temperature: float  # 0: the most likely token each time
    text: str


@attrs.frozen(kw_only=True)
class HeldOutText:
    """A text that the run does not train on, as tokens."""

    source: str  # where its tokens were read
    ids: list[int]
    tokens: list[str]  # the bytes of each token, decoded as Latin-1; older lines have "" for a special token
    window: int  # number of tokens that are predicted together; the first prediction in a window sees only one token
    special: list[int] = attrs.field(factory=list)  # the ids in `ids` that are special tokens, ascending


@attrs.frozen(kw_only=True)
class CheckpointSample:
    """One line of the log: the samples of one checkpoint."""

    step: int
    name: str
    weights_sha256: str
    starts: int  # number of the run's jobs when this line was recorded: a later job may replace the checkpoint
    said: list[Said]
    held_out: HeldOutText | None  # None if the run's tokens could not be read
    # In nats, for the text's second token and all later ones (the first is not predicted); None: not finite
    log_probabilities: list[float | None] | None
    problem: str | None = None  # why there is nothing to show

    @property
    def mean_nats(self) -> float | None:
        """The mean surprise of the text's tokens, in nats; None if no log-probability was recorded."""
        finite = [value for value in self.log_probabilities or [] if value is not None]
        return -math.fsum(finite) / len(finite) if finite else None


def read_samples(run: Path) -> tuple[list[CheckpointSample], JsonLines]:
    """Return a run's samples in the order of steps, and the lines of the log.

    Samples of checkpoints that a later job has replaced are left out. Raise BadInput if the log cannot be read.
    """
    lines = read_json_lines(run / SAMPLES, _parsed)
    starts = read_starts(run) if lines.records else []
    weights = weights_on_disk(run) if lines.records else {}
    samples: dict[int, CheckpointSample] = {}
    for sample in lines.records:
        if any(step < sample.step for step in starts[sample.starts :]):
            continue
        if weights.get(sample.name, sample.weights_sha256) == sample.weights_sha256:
            samples[sample.step] = sample
    return [samples[step] for step in sorted(samples)], lines


def spaced(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` of the items, evenly spaced, including the first and the last."""
    chosen = np.linspace(0, len(items) - 1, min(most, len(items))).round()
    return [items[int(number)] for number in chosen]


def weights_on_disk(run: Path) -> dict[str, str]:
    """Return the sha256 of each checkpoint's weights, as recorded in its manifest.

    Checkpoints that are damaged or are just being deleted are left out.
    """
    checkpoints = checkpoints_by_step(checkpoints_of(run))
    digests = {name_of(step): weights_digest(checkpoint) for step, checkpoint in checkpoints.items()}
    return {name: digest for name, digest in digests.items() if digest is not None}


def record_samples(run: Path) -> list[str]:
    """Record the samples that are missing, and return notes.

    The newest and the best checkpoint come first. If another process is recording samples of this run, do nothing.
    """
    text, notes = _held_out_tokens(run)
    if not _missing(run, text):
        if not weights_on_disk(run) and not read_samples(run)[0]:
            notes.append(
                f"{checkpoints_of(run)}: no checkpoint on this disk, so there are no samples; "
                "run report.py on the machine that trains the run"
            )
        return notes
    path = run / SAMPLES
    try:
        with writing(path), closing(JsonLog(path)) as log:
            contention = f"{path}: another report.py is recording samples; this page shows the samples recorded so far"
            lock(log.file, path, contention)
            # List the missing samples again, because another process may have recorded some of them.
            for name in _missing(run, text):
                starts = len(read_starts(run))
                try:
                    if (sample := _sample(run, name, text, starts)) is not None:
                        log.append(attrs.asdict(sample))
                except BadInput as error:
                    notes.append(str(error))
    except BadInput as error:
        notes.append(str(error))
    return notes


def has_missing_samples(run: Path) -> bool:
    """Return whether `record_samples` would have checkpoints to sample."""
    return bool(_missing(run, _held_out_tokens(run)[0]))


def _parsed(record: dict[str, Any]) -> CheckpointSample | None:
    """Return a line of the log as a sample. For a damaged line, return None or raise ValueError."""
    sample = structured(record, CheckpointSample, unknown_keys=True)
    if not 0 <= sample.step <= LARGEST_INTEGER or sample.starts < 0:
        return None
    text, values = sample.held_out, sample.log_probabilities or []
    # A log-probability is at most 0, but fp32 may round to slightly more.
    if not all(value is None or value < 1 for value in values):
        return None
    if text is None:
        return sample
    complete = len(text.ids) == len(text.tokens) and len(values) == len(text.ids) - 1 and text.window > 0
    if not complete or any(max(token, default="") > "\xff" for token in text.tokens):
        return None
    # Remove folders from the source, because the page may be published.
    source = ": ".join(Path(part).name for part in text.source.split(": "))
    return attrs.evolve(sample, held_out=attrs.evolve(text, source=source))


def _missing(run: Path, text: Range | None) -> list[str]:
    """Return the names of the checkpoints to sample: first the newest and the best, then the rest from new to old."""
    samples = {sample.name: sample for sample in read_samples(run)[0]}
    done = {name for name, sample in samples.items() if sample.held_out is not None or text is None or sample.problem}
    names = [name for name, weights in weights_on_disk(run).items() if name not in done]
    best = None
    with suppress(BadInput):  # even if the best checkpoint is damaged, the rest can be sampled
        if (step := linked_step(checkpoints_of(run), "best")) is not None:
            best = name_of(step)
    newest_first = sorted(names, reverse=True)
    return sorted(newest_first, key=lambda name: name not in (max(names), best))


def _held_out_tokens(run: Path) -> tuple[Range | None, list[str]]:
    """Return the first tokens of the run's validation stream, or None and a note if they cannot be read."""
    record, job, _ = read_resolved(run)  # its notes are ignored here, because the run's history also has them
    start, vocabulary = (0, 0) if record is None else (record.train.validation.start_val_token, record.model.vocab_size)
    problem = f"{run / RESOLVED}: lists no token files"
    for directory in job.token_directories:
        try:
            stream = open_split(directory, SPLIT)
        except BadInput as error:
            problem = str(error).replace(str(directory), directory.name)  # the page may be published
            continue
        count = min(stream.length - start - 1, TEXT_TOKENS)
        if count > 0 and record is not None and not _is_of(record, directory):
            problem = f"{directory.name}: the token files have changed since the run was validated on them"
        elif count > 0:
            if max(stream.read(start, count + 1)) < vocabulary:
                return Range(directory=directory, split=SPLIT, start=start, count=count), []
            problem = f"{directory.name}: has ids beyond the vocabulary of {vocabulary:,}, so it is not the run's data"
    return None, [f"no held-out text, so there are no log-probabilities: {problem}"]


def _is_of(record: RunRecord, directory: Path) -> bool:
    """Return whether a directory still holds a run's tokens, according to its manifest.

    Without a manifest, assume that it does.
    """
    if read_manifest(directory) is None:
        return True
    streams = [stream for stream in record.validation_streams or record.train_streams if stream.sha256 or stream.plan]
    return not streams or any(manifest_of(stream, directory) is not None for stream in streams)


def held_out_prompts(trained: Trained, text: Range | None) -> list[AskedPrompt]:
    """Return prompts from the held-out text, evenly spaced; none if there is no such text.

    A prompt is the beginning of a line. In conversations, a prompt has the same ids as a row of the tokens, up to the
    row's first answer.
    """
    if text is None:
        return []
    stream = open_split(text.directory, SPLIT)
    count = min(stream.length - text.start, PROMPT_TOKENS)
    if stream.context_length is not None:
        return spaced(_questions(trained, stream, range(text.start, text.start + count)), PROMPTS)
    ids = stream.read(text.start, count).tolist()
    lines = trained.decode(ids).replace(trained.tokenizer.end_of_text, "\n").splitlines()
    beginnings = dict.fromkeys(line.strip()[:PROMPT_CHARACTERS] for line in lines if line.strip())
    return [AskedPrompt.of(trained, beginning) for beginning in spaced([*beginnings], PROMPTS)]


def _questions(trained: Trained, stream: TokenStream, span: range) -> list[AskedPrompt]:
    """Return the first question of each complete row of conversations in `span`, without repetitions."""
    length = stream.context_length
    assert length is not None
    questions: dict[str, AskedPrompt] = {}
    for start in range(-(-span.start // length) * length, span.stop - length + 1, length):
        weights = np.empty(length, np.uint8)
        stream.read_weights_into(weights, start)
        first = int(weights.argmax())  # the first token that adds to the loss; the question ends before it
        if weights[first] and first > 0:
            ids = stream.read(start, first).tolist()
            shown = trained.decode(ids)
            questions.setdefault(shown, AskedPrompt(shown, ids))
    return [*questions.values()]


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return the text of each id as a sample stores it: its bytes decoded as Latin-1, or a special token's name."""
    return [tokenizer.spell(token).decode("latin-1") for token in ids]


def special_among(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the ids of special tokens that occur in `ids`, ascending."""
    return sorted({*ids} & {*tokenizer.special_tokens.values()})


def _sample(run: Path, name: str, text: Range | None, starts: int) -> CheckpointSample | None:
    """Return the samples of one checkpoint, or None if it was deleted meanwhile.

    Raise BadInput if the checkpoint cannot be read.
    """
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"), control=None, download=None)
    directory = checkpoints_of(run)
    path = checkpoints_by_step(directory).get(step_of(name), directory / name)
    expected_sha256 = weights_on_disk(run).get(name)
    try:
        trained = load(ModelLocation(path, run, run), None, ranks.device)
        prompts = held_out_prompts(trained, text)
        if expected_sha256 is None or sha256(path / WEIGHTS) != expected_sha256:
            raise BadInput(f"{path / WEIGHTS}: damaged: its sha256 differs from the one in its manifest")
    except Exception as error:  # any exception, because a checkpoint may be deleted while it is read
        if weights_on_disk(run).get(name) != expected_sha256 or expected_sha256 is None:
            return None
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{path}: cannot be read: {error}") from error
    # Measure first, because `smoke` changes the layout of the network for generation.
    held_out, values = (None, None) if text is None else _measure(trained, text, ranks)
    continuations, problem = [], None
    try:
        continuations = smoke(trained, prompts, None, Sampling(top_k=TOP_K, seed=SEED), ranks)
    except BadInput as error:  # the logits are not finite
        problem = str(error)
    return CheckpointSample(
        step=step_of(name),
        name=name,
        weights_sha256=expected_sha256,
        starts=starts,
        said=[Said(prompt=text.prompt, temperature=text.temperature, text=text.text) for text in continuations],
        held_out=held_out,
        log_probabilities=values,
        problem=problem,
    )


def _measure(trained: Trained, text: Range, ranks: Ranks) -> tuple[HeldOutText, list[float | None]]:
    """Return the text and the log-probability of each predicted token."""
    stream = open_split(text.directory, SPLIT)
    losses, ids = range_losses(trained, stream, text, ranks), stream.read(text.start, text.count + 1).tolist()
    held_out = HeldOutText(
        source=str(text),
        ids=ids,
        tokens=spelled(trained.tokenizer, ids),
        window=trained.network.config.context_length,
        special=special_among(trained.tokenizer, ids),
    )
    return held_out, [None if value is None else round(value, DECIMALS) for value in log_probabilities(losses)]
