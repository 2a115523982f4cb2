#!/usr/bin/env python3
"""Bytes per token of tokenizers that are trained here, compared with GPT-2's tokenizer, on held-out files.

    python benchmarks/own_tokenizers.py --gpt2 gpt2.tiktoken Python=stdlib English=FOLDER German=FOLDER

Every tenth file of each text, in the order of the file names, is held out for the measurement. The other files are used
for training.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import BadInput
from tokens.documents.sources import resolve_sources
from tokens.prepare.command import TokenizerCommand
from tokens.prepare.trained_tokenizer import train_tokenizer
from tokens.tokenizer.loading import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", nargs="+", help="NAME=SOURCE")
    parser.add_argument("--gpt2", default="gpt2", help="file with GPT-2's ranks, if tiktoken has not cached them")
    parser.add_argument("--pattern", default="cl100k")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 32768])
    options = parser.parse_args()
    print(f"| text | GPT-2, 50,257 | {' | '.join(f'own, {size:,}' for size in options.sizes)} |")
    for text in options.texts:
        name, source = text.split("=", 1)
        paths = sorted(Path(item.path) for item in resolve_sources([source])[0].inputs)
        held_out = [path.read_text(encoding="utf-8", errors="replace") for path in paths[::10]]
        figures = [bytes_per_token(options.gpt2, held_out)]
        for size in options.sizes:
            with tempfile.TemporaryDirectory() as folder:
                for number, path in enumerate(paths):
                    if number % 10:
                        Path(folder, f"{number}{path.suffix}").symlink_to(path)
                output = Path(folder, "own.json")
                command = TokenizerCommand((folder,), vocab_size=size, output=output, pattern=options.pattern)
                try:
                    train_tokenizer(command)
                    figures.append(bytes_per_token(str(output), held_out))
                except BadInput as error:  # there is not enough text for this size
                    print(error, file=sys.stderr)
                    figures.append("-")
        print(f"| {name} | {' | '.join(figures)} |", flush=True)


def bytes_per_token(name: str, texts: list[str]) -> str:
    """Encode texts with the tokenizer of this name or file, and return the bytes per token."""
    tokenizer = load_tokenizer(name)
    return f"{sum(len(text.encode()) for text in texts) / sum(len(tokenizer.encode(text)) for text in texts):.2f}"


if __name__ == "__main__":
    main()
