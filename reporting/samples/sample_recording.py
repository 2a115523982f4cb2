"""Recording of samples: each checkpoint on the disk that `samples.jsonl` lacks is loaded, asked and measured once.

On the CPU, in one thread and at low priority: the machine may be training. Checkpoints may be deleted meanwhile.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from common.errors import BadInput
from common.file_lock import lock
from common.files import sha256, write_error
from common.json_files import JsonLog
from reporting.run_history import read_resolved
from reporting.samples.sample_log import CheckpointSample, HeldOutText, Said, read_samples, weights_on_disk
from training.checkpoints.directory import CHECKPOINTS, WEIGHTS, checkpoints_of, link_target
from training.checkpoints.run_record import RESOLVED
from training.telemetry.metrics_log import SAMPLES, read_starts

if TYPE_CHECKING:
    from evaluation.shared.load import Trained
    from training.parallel.process_group import Ranks

SPLIT = "validation"
TEXT_TOKENS = 512  # of the held-out text that are predicted
SEED, TOP_K = 0, 25
DECIMALS = 3  # of log-probabilities
TIMEOUT_SECONDS = 3600  # of collectives, of which a group of one has none that waits


@attrs.frozen(kw_only=True)
class HeldOutTokens:
    """Tokens that a run does not train on: one for context, and those to be predicted."""

    directory: Path  # of token files
    start: int
    ids: list[int]


def record_samples(run: Path) -> list[str]:
    """Record the samples of a run that are missing, the newest and the best checkpoint first; return notes.

    One process at a time records; a second one leaves it to the first.
    """
    text, notes = _held_out_tokens(run)
    missing = _missing(run, text)
    if not missing:
        return notes if weights_on_disk(run) else [*notes, *_absent(run)]
    try:
        with _locked_log(run) as log, _alone() as ranks:
            for name in _missing(run, text):  # another process may have recorded some
                starts = len(read_starts(run))
                try:
                    sample = _sample(run, name, text, starts, ranks)
                except BadInput as error:
                    notes.append(str(error))
                    continue
                if sample is not None:
                    log.append(attrs.asdict(sample))
    except BadInput as error:
        notes.append(str(error))
    return notes


def lacks_samples(run: Path) -> bool:
    """Tell whether there are checkpoints to sample."""
    return bool(_missing(run, _held_out_tokens(run)[0]))


def _missing(run: Path, text: HeldOutTokens | None) -> list[str]:
    """Return the names of checkpoints to sample, in order of interest."""
    known = {sample.name: sample for sample in read_samples(run)}
    done = {name for name, sample in known.items() if sample.held_out is not None or text is None or sample.problem}
    names = [name for name, weights in weights_on_disk(run).items() if name not in done]
    best = link_target(checkpoints_of(run) / "best")
    newest_first = sorted(names, reverse=True)
    return sorted(newest_first, key=lambda name: name not in (max(names), best))


def _absent(run: Path) -> list[str]:
    """Return why a run without checkpoints on this disk has no samples; nothing where it has old ones."""
    if read_samples(run):
        return []
    return [f"{run / CHECKPOINTS}: no checkpoint on this disk, so no samples; report where the run is trained"]


@contextmanager
def _locked_log(run: Path) -> Iterator[JsonLog]:
    """Open the log for this process alone. Raises BadInput where another one has it, or it cannot be written."""
    path = run / SAMPLES
    try:
        log = JsonLog(path)
        try:
            lock(log.file, path, f"{path}: another report is recording samples; this one shows those that are there")
            yield log
        finally:
            log.close()
    except OSError as error:
        raise write_error(path, error) from error


def _held_out_tokens(run: Path) -> tuple[HeldOutTokens | None, list[str]]:
    """Return the first tokens of the run's validation stream; None and a note where they are not at hand."""
    from tokens.format.token_file import open_split

    record, job, _ = read_resolved(run)  # its notes are those of the history
    start, vocabulary = (0, 0) if record is None else (record.train["start_val_token"], record.model["vocab_size"])
    problem = f"{run / RESOLVED}: names no token files"
    for directory in job.token_files:
        try:
            stream = open_split(Path(directory), SPLIT)
        except BadInput as error:
            problem = str(error).replace(directory, Path(directory).name)  # the page may be published
            continue
        count = min(stream.length - start - 1, TEXT_TOKENS)
        if count > 0:
            ids = [int(token) for token in stream.read(start, count + 1)]
            if max(ids) < vocabulary:
                return HeldOutTokens(directory=Path(directory), start=start, ids=ids), []
            problem = f"{Path(directory).name}: holds ids beyond the vocabulary of {vocabulary:,}: not the run's tokens"
    return None, [f"no held-out text, so no log-probabilities: {problem}"]


def _sample(run: Path, name: str, text: HeldOutTokens | None, starts: int, ranks: "Ranks") -> CheckpointSample | None:
    """Ask and measure one checkpoint; None if it vanished. Raises BadInput where it cannot be read."""
    from evaluation.shared.load import ModelLocation, load

    path = run / CHECKPOINTS / name
    wanted = weights_on_disk(run).get(name)
    try:
        trained = load(ModelLocation(path, run, run), None, ranks.device)
        if wanted is None or sha256(path / WEIGHTS) != wanted:
            raise BadInput(f"{path / WEIGHTS}: damaged: its sha256 is not the one in its manifest")
    except Exception as error:  # safetensors' own, FileNotFoundError, BadInput: of a checkpoint that is going, any
        if weights_on_disk(run).get(name) != wanted or wanted is None:
            return None
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{path}: cannot be read: {error}") from error
    sample: dict[str, Any] = {"name": name, "step": int(name[-8:]), "weights_sha256": wanted, "starts": starts}
    held_out, values = None, None
    if text is not None:  # before the network is laid out for generation
        held_out, values = _measure(trained, text, ranks)
    try:
        said = _say(trained, ranks)
    except BadInput as error:
        return CheckpointSample(**sample, said=[], held_out=held_out, log_probabilities=values, problem=str(error))
    return CheckpointSample(**sample, said=said, held_out=held_out, log_probabilities=values)


def _say(trained: "Trained", ranks: "Ranks") -> list[Said]:
    """Return the continuations of the gallery. Raises BadInput for logits that are not finite."""
    from evaluation.smoke.smoke import smoke
    from model.generate import Sampling

    said = smoke(trained, (), None, Sampling(top_k=TOP_K, seed=SEED), ranks)
    return [Said(prompt=one.prompt, temperature=one.temperature, text=one.text) for one in said]


def _measure(trained: "Trained", text: HeldOutTokens, ranks: "Ranks") -> tuple[HeldOutText, list[float | None]]:
    """Return the text and the log-probability of each predicted token."""
    from evaluation.loss.held_out_loss import token_losses
    from evaluation.loss.token_range import Range
    from tokens.format.token_file import open_split

    tokens = Range(directory=text.directory, split=SPLIT, start=text.start, count=len(text.ids) - 1)
    losses = token_losses(trained, open_split(text.directory, SPLIT), tokens, ranks)
    bytes_of = {number: token.decode("latin-1") for token, number in trained.tokenizer.ranks().items()}
    held_out = HeldOutText(
        source=str(tokens),
        ids=text.ids,
        tokens=[bytes_of.get(token, "") for token in text.ids],
        window=trained.network.config.context_length,
    )
    return held_out, [round(-float(loss), DECIMALS) if math.isfinite(loss) else None for loss in losses]


@contextmanager
def _alone() -> "Iterator[Ranks]":
    """Be a group of one process, on the CPU."""
    from training.parallel.process_group import start, stop

    ranks = start("cpu", TIMEOUT_SECONDS)
    try:
        yield ranks
    finally:
        stop()
