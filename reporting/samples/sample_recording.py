"""Recording of samples: each checkpoint on the disk that `samples.jsonl` lacks is loaded, asked and measured once.

On the CPU, in one thread and at low priority: the machine may be training. Checkpoints may be deleted meanwhile.
"""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from common.errors import BadInput
from common.file_lock import lock
from common.files import sha256, writing
from common.json_files import JsonLog
from model.generate import Sampling
from reporting.run_history import read_resolved
from reporting.samples.sample_log import CheckpointSample, HeldOutText, Said, read_samples, weights_on_disk
from tokens.format.token_file import open_split
from training.checkpoints.directory import CHECKPOINTS, WEIGHTS, checkpoints_of, link_target
from training.checkpoints.run_record import RESOLVED
from training.parallel.process_group import Ranks, start, stop
from training.telemetry.metrics_log import SAMPLES, read_starts

if TYPE_CHECKING:
    from evaluation.loss.token_range import Range
    from evaluation.shared.load import Trained

SPLIT = "validation"
TEXT_TOKENS = 512  # of the held-out text that are predicted
SEED, TOP_K = 0, 25
DECIMALS = 3  # of log-probabilities
TIMEOUT_SECONDS = 3600  # of collectives, of which a group of one has none that waits


def record_samples(run: Path) -> list[str]:
    """Record the samples of a run that are missing, the newest and the best checkpoint first; return notes.

    One process at a time records; a second one leaves it to the first.
    """
    text, notes = _held_out_tokens(run)
    missing = _missing(run, text)
    if not missing:
        if not weights_on_disk(run) and not read_samples(run)[0]:
            notes.append(
                f"{run / CHECKPOINTS}: no checkpoint on this disk, so no samples; report where the run is trained"
            )
        return notes
    path = run / SAMPLES
    try:
        with writing(path), ExitStack() as stack:
            log = JsonLog(path)
            stack.callback(log.close)
            lock(log.file, path, f"{path}: another report is recording samples; this one shows those that are there")
            ranks = start("cpu", TIMEOUT_SECONDS)
            stack.callback(stop)
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


def _missing(run: Path, text: "Range | None") -> list[str]:
    """Return the names of checkpoints to sample, in order of interest."""
    known = {sample.name: sample for sample in read_samples(run)[0]}
    done = {name for name, sample in known.items() if sample.held_out is not None or text is None or sample.problem}
    names = [name for name, weights in weights_on_disk(run).items() if name not in done]
    best = link_target(checkpoints_of(run) / "best")
    newest_first = sorted(names, reverse=True)
    return sorted(newest_first, key=lambda name: name not in (max(names), best))


def _held_out_tokens(run: Path) -> "tuple[Range | None, list[str]]":
    """Return the first tokens of the run's validation stream; None and a note where they are not at hand."""
    from evaluation.loss.token_range import Range

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
            if max(stream.read(start, count + 1)) < vocabulary:
                return Range(directory=Path(directory), split=SPLIT, start=start, count=count), []
            problem = f"{Path(directory).name}: holds ids beyond the vocabulary of {vocabulary:,}: not the run's tokens"
    return None, [f"no held-out text, so no log-probabilities: {problem}"]


def _sample(run: Path, name: str, text: "Range | None", starts: int, ranks: Ranks) -> CheckpointSample | None:
    """Ask and measure one checkpoint; None if it vanished. Raises BadInput where it cannot be read."""
    from evaluation.shared.load import ModelLocation, load
    from evaluation.smoke.smoke import smoke

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
    held_out, values = None, None
    if text is not None:  # before the network is laid out for generation
        held_out, values = _measure(trained, text, ranks)
    said, problem = [], None
    try:
        said = smoke(trained, (), None, Sampling(top_k=TOP_K, seed=SEED), ranks)
    except BadInput as error:  # logits that are not finite
        problem = str(error)
    return CheckpointSample(
        step=int(name[-8:]),
        name=name,
        weights_sha256=wanted,
        starts=starts,
        said=[Said(prompt=one.prompt, temperature=one.temperature, text=one.text) for one in said],
        held_out=held_out,
        log_probabilities=values,
        problem=problem,
    )


def _measure(trained: "Trained", text: "Range", ranks: Ranks) -> tuple[HeldOutText, list[float | None]]:
    """Return the text and the log-probability of each predicted token."""
    from evaluation.loss.held_out_loss import token_losses

    stream = open_split(text.directory, SPLIT)
    losses, ids = token_losses(trained, stream, text, ranks), stream.read(text.start, text.count + 1).tolist()
    bytes_of = {number: token.decode("latin-1") for token, number in trained.tokenizer.ranks().items()}
    held_out = HeldOutText(
        source=str(text),
        ids=ids,
        tokens=[bytes_of.get(token, "") for token in ids],
        window=trained.network.config.context_length,
    )
    return held_out, [round(-float(loss), DECIMALS) if math.isfinite(loss) else None for loss in losses]
