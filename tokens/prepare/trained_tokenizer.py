"""Train a tokenizer on a sample of the sources with Hugging Face's tokenizers library, and write a tokenizer.json.

If two pairs are equally frequent, the pair with the lower ranks is merged first. The result therefore does not depend
on the number of threads or the order of the texts.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor
from pathlib import Path

from common.errors import BadInput
from common.files import replace_file, writing
from tokens.documents.document_sample import DocumentSample
from tokens.documents.reader import Reader
from tokens.documents.sources import resolve_sources
from tokens.prepare.command import SPECIAL, PrepareCommand, TokenizerCommand
from tokens.prepare.display import refuse_losses, report_problems
from tokens.prepare.executors import start_workers
from tokens.prepare.plan import make_plan, settings_of
from tokens.tokenizer.hugging_face_files import ranks_of, tokenizer_text
from tokens.tokenizer.known import PATTERNS
from tokens.tokenizer.loading import load_tokenizer
from tokens.tokenizer.template import TURN_TOKENS
from tokens.tokenizer.tokenizer import byte_pair_tokenizer

PART_CHARACTERS = 50_000  # longer texts are cut into parts of this length, because the trainer buffers 256 texts
# Matches 1,000 characters in a row without white space, or 1,000 white-space characters. A text is cut after each
# match, because the trainer's time is quadratic in the length of such a run.
LONG_RUN = re.compile(r"\S{1000}|\s{1000}")


def train_tokenizer(command: TokenizerCommand) -> list[str]:
    """Write a tokenizer and return lines to print. Raises BadInput, for example if too much text cannot be read."""
    path, size, pattern = command.output, command.vocab_size, PATTERNS[command.pattern]
    _refuse_existing(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    sample, source_bytes = _sample(command, pattern)
    ranks, sample = _train(sample, size - SPECIAL, pattern)
    report_problems(sample, "there are more examples")
    if not sample.text_bytes:
        raise BadInput(f"{', '.join(command.sources)}: no text could be read; nothing was written")
    tokenizer = byte_pair_tokenizer(path.stem, ranks, pattern).with_special_tokens(TURN_TOKENS)
    if tokenizer.vocabulary_size < size:
        largest_size = tokenizer.vocabulary_size
        got = f"{sample.text_bytes:,} bytes of text give only {largest_size:,} ids; after these, no pair occurs twice"
        advice = f"pass --vocab-size {largest_size} or less, or more text; nothing was written"
        raise BadInput(f"--vocab-size {size}: {got}; {advice}")
    text = tokenizer_text(tokenizer)
    with writing(path):
        replace_file(path, text, durable=True, keep_existing=True)
        if path.read_text(encoding="utf-8") != text:  # another command has written the file in the meantime
            _refuse_existing(path)
    refuse_losses(sample, source_bytes if sample.is_whole else sample.text_bytes, f"{path} is")
    share = "all" if sample.is_whole else f"{sample.text_bytes / source_bytes:.1%}, spread evenly,"
    return [
        f"{path}: {size:,} ids, {SPECIAL} of them special tokens from {tokenizer.end_of_text_id} on",
        f"  trained on {sample.text_bytes:,} bytes: {share} of {source_bytes:,} bytes of sources",
        f"  next: prepare_data.py SOURCE... --tokenizer {path} --output DIR",
    ]


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise BadInput(f"{path}: exists; pass another --output, or delete it to train the tokenizer again")


def _sample(command: TokenizerCommand, pattern: str) -> tuple[DocumentSample, int]:
    """Return the sample to train on, and the size of the sources in bytes."""
    field, separator = command.text_field, command.separator
    prepared = PrepareCommand(command.sources, output="", text_field=field, separator=separator)
    settings = settings_of(prepared, load_tokenizer("bytes"))
    plan = make_plan(resolve_sources(command.sources), settings)
    reader = Reader(plan.inputs, field, separator, pattern)
    return DocumentSample(reader, plan.units, plan.unit_bytes, command.sample_bytes), sum(plan.unit_bytes)


def _train(sample: DocumentSample, count: int, pattern: str) -> tuple[dict[bytes, int], DocumentSample]:
    """Train in a separate process, because the library's threads ignore Ctrl-C and may run out of memory."""
    pool, line = start_workers(1)
    try:
        return pool.submit(_train_here, sample, count, pattern).result()
    except BrokenExecutor as error:
        raise BadInput(
            "the process that trains the tokenizer was killed; if memory was short, lower --sample-bytes"
        ) from error
    finally:
        line.close()
        pool.shutdown(cancel_futures=True)


def _train_here(sample: DocumentSample, count: int, pattern: str) -> tuple[dict[bytes, int], DocumentSample]:
    """Return up to `count` ranks, single bytes first. Training stops early when no further pair occurs twice."""
    from tokenizers import Tokenizer, pre_tokenizers, trainers

    untrained = byte_pair_tokenizer("bytes", {bytes([byte]): byte for byte in range(256)}, pattern)
    tokenizer = Tokenizer.from_str(tokenizer_text(untrained))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=count, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_cut(sample.texts()), trainer)
    return ranks_of(tokenizer.get_vocab(with_added_tokens=False)), sample


def _cut(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for start in range(0, len(text), PART_CHARACTERS):
            part, begin = text[start : start + PART_CHARACTERS], 0
            for run in LONG_RUN.finditer(part):
                yield part[begin : run.end()]
                begin = run.end()
            yield part[begin:]
