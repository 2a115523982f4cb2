"""Speed of tokenizers' encoders on one core: bytes of text per second of CPU time, and tokens per second of CPU time.

    python benchmarks/encoders.py --texts book.txt code.txt --tokenizers gpt2 cl100k token_files/tokenizer.json

The tokenizers take turns, and each turn begins with a new encoder whose cache is empty. Ratios are relative to the
first tokenizer.
"""

import statistics
import tempfile
import time
from pathlib import Path

import attrs
import bench

from tokens.format.manifest import RANKS_FILE, TokenizerRecord
from tokens.prepare.encode_unit import BATCH_CHARACTERS
from tokens.tokenizer.fast_encoder import encoders, write_recipe
from tokens.tokenizer.loading import load_tokenizer, record_of
from tokens.tokenizer.ranks import ranks_text
from tokens.tokenizer.tokenizer import Encoder, fingerprint


@attrs.frozen
class TimedEncoder:
    """A tokenizer, written to a folder in the form that the workers of prepare_data.py read."""

    name: str
    record: TokenizerRecord
    directory: Path

    def encoder(self) -> Encoder:
        """Return a new encoder, of the first kind that encodes texts to the same ids as the tokenizer."""
        candidates = encoders(self.record, self.directory, self.directory / "recipe.json")
        return next(encoder for encoder in candidates if fingerprint(encoder) == self.record.fingerprint)


def main(*, texts: list[Path], tokenizers: list[str], rounds: int = 7) -> None:
    """Print the speed of each tokenizer on each text, with the encoder that prepare_data.py would choose."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        candidates = [_write_tokenizer(name, Path(folder) / str(number)) for number, name in enumerate(tokenizers)]
        for path in texts:
            text = path.read_text(errors="replace")
            measured = [[_measure(candidate, text) for candidate in candidates] for _ in range(rounds)]
            seconds = [statistics.median(entry[1] for entry in column) for column in zip(*measured, strict=True)]
            for candidate, (tokens, _, encoder), median in zip(candidates, measured[0], seconds, strict=True):
                speeds = [f"{len(text.encode()) / median / 1e6:.1f}", f"{tokens / median / 1e6:.1f}"]
                ratio = f"{seconds[0] / median:.2f}"
                rows.append([path.name, candidate.name, encoder, f"{tokens:,}", *speeds, ratio])
    print(bench.table(["text", "tokenizer", "encoder", "tokens", "MB/s", "M tokens/s", "ratio"], rows))


def _write_tokenizer(name: str, directory: Path) -> TimedEncoder:
    directory.mkdir()
    tokenizer = load_tokenizer(name)
    (directory / RANKS_FILE).write_bytes(ranks_text(tokenizer.coder.ranks))
    write_recipe(tokenizer, directory / "recipe.json")
    return TimedEncoder(Path(name).name, record_of(tokenizer, ranks=True), directory)


def _measure(candidate: TimedEncoder, text: str) -> tuple[int, float, str]:
    """Return the number of tokens in a text, the CPU seconds for encoding it, and the kind of encoder."""
    parts = [text[begin : begin + BATCH_CHARACTERS] for begin in range(0, len(text), BATCH_CHARACTERS)]
    encoder = candidate.encoder()
    began = time.process_time()
    tokens = sum(len(encoder.encode_batch([part])[0]) for part in parts)
    return tokens, time.process_time() - began, type(encoder).__name__


if __name__ == "__main__":
    bench.run(main)
