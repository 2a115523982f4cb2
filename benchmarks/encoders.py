"""Encoders of tokenizers side by side on one core: text and tokens in a second of CPU time.

    python benchmarks/encoders.py --texts book.txt code.txt --tokenizers gpt2 cl100k token_files/tokenizer.json

Rounds alternate between the tokenizers; each begins with an encoder that has met no word. The ratio is to the first.
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
    """A tokenizer, written as workers of a preparation find it."""

    name: str
    record: TokenizerRecord
    directory: Path

    def encoder(self) -> Encoder:
        """Return the first encoder with the tokenizer's ids, new."""
        ways = encoders(self.record, self.directory, self.directory / "recipe.json")
        return next(each for each in ways if fingerprint(each) == self.record.fingerprint)


def main(*, texts: list[Path], tokenizers: list[str], rounds: int = 7) -> None:
    """Print the speed of each tokenizer's encoder, as a preparation chooses it, on each text."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        candidates = [_written(name, Path(folder) / str(number)) for number, name in enumerate(tokenizers)]
        for path in texts:
            text = path.read_text(errors="replace")
            found = [[_measured(each, text) for each in candidates] for _ in range(rounds)]
            seconds = [statistics.median(each[1] for each in column) for column in zip(*found, strict=True)]
            for each, (tokens, _, encoder), median in zip(candidates, found[0], seconds, strict=True):
                speeds = [f"{len(text.encode()) / median / 1e6:.1f}", f"{tokens / median / 1e6:.1f}"]
                rows.append([path.name, each.name, encoder, f"{tokens:,}", *speeds, f"{seconds[0] / median:.2f}"])
    print(bench.table(["text", "tokenizer", "encoder", "tokens", "MB/s", "M tokens/s", "ratio"], rows))


def _written(name: str, directory: Path) -> TimedEncoder:
    directory.mkdir()
    tokenizer = load_tokenizer(name)
    (directory / RANKS_FILE).write_bytes(ranks_text(tokenizer.coder.ranks))
    write_recipe(tokenizer, directory / "recipe.json")
    return TimedEncoder(Path(name).name, record_of(tokenizer, ranks=True), directory)


def _measured(candidate: TimedEncoder, text: str) -> tuple[int, float, str]:
    """Return the tokens of a text, the CPU seconds of encoding it, and the kind of encoder."""
    parts = [text[begin : begin + BATCH_CHARACTERS] for begin in range(0, len(text), BATCH_CHARACTERS)]
    encoder = candidate.encoder()
    begun = time.process_time()
    tokens = sum(len(encoder.encode_batch([part])[0]) for part in parts)
    return tokens, time.process_time() - begun, type(encoder).__name__


if __name__ == "__main__":
    bench.run(main)
