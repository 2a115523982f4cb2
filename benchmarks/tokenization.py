#!/usr/bin/env python3
"""Tokenization speed of prepare_data.py beside two other pipelines, on the same text in the same run.

`python benchmarks/tokenization.py [FILE.parquet ...] [--workers 2] [--rounds 2] [--megabytes 200] [--tokenizer FILE]`

Without a file, a Parquet file of distinct texts is made from documentation and sources on this machine. The pipelines
run in turn, each in a process of its own. CPU seconds include all child processes, but not Ray's workers. Memory is the
peak of their anonymous memory, disk the peak of files beside the input; both are sampled in a separate round, which is
not timed. Steady state, of prepare_data.py alone: tokens committed per second by all workers, without start-up and end;
below a gigabyte of text there are too few commits for it.

gpjt      the loop of gpjt/ddp-base-model-from-scratch's prepare_datasets.py: datasets -> encode_batch of 1,000
          documents in 8 threads -> lists -> a tensor -> all tensors together, one file a split
nanoGPT   the two phases of nanoGPT's data/openwebtext/prepare.py: datasets.map of one document at a time in `workers`
          processes, then 1,024 shards of the result into a memory map
lockstep  prepare_data.py; with tiktoken alone, with fastokens where it is installed, and with that on Ray
"""

import argparse
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from process_cost import SAMPLE_SECONDS, Peaks, Process, measure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

TEXT_NAMES = (".py", ".pyi", ".txt", ".md", ".rst", ".html", ".h", ".c", ".js", ".pl", ".po", ".xml")
LONGEST_FILE = 2_000_000  # bytes; longer ones are data
VALIDATION = 0.01
STEADY = (0.15, 0.9)  # first and last share of the tokens


@attrs.frozen
class TokenizationCost:
    """Cost of one run."""

    wall_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    peak_disk_bytes: int
    tokens: int
    steady_rate: float  # tokens committed per second; 0 if unknown


def main() -> None:
    """Measure and print; with --run, run one of the other pipelines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parquet", nargs="*", type=Path)
    parser.add_argument("--tokenizer", default="gpt2", metavar="gpt2|FILE.tiktoken")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--run", choices=("gpjt", "nanogpt"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        {"gpjt": gpjt, "nanogpt": nanogpt}[arguments.run](arguments, arguments.parquet[0])
        return
    with tempfile.TemporaryDirectory() as folder:
        files = arguments.parquet
        if not files:
            files = [Path(folder) / "text.parquet"]
            make_text(files[0], arguments.megabytes * 1_000_000)
        for file in files:
            compare(arguments, file, Path(folder))


def compare(arguments: argparse.Namespace, file: Path, folder: Path) -> None:
    """Run all pipelines in turn on a file; print a table of medians."""
    costs: dict[str, list[TokenizationCost]] = {way: [] for way in arguments.ways}
    for turn in range(arguments.rounds + 1):
        for way, taken in costs.items():
            output = folder / "output"
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir()
            taken.append(measure_way(WAYS[way](arguments, file, output), output, look=turn == 0))
    medians = {}
    for way, (looked_at, *timed) in costs.items():
        names = ("wall_seconds", "cpu_seconds", "steady_rate")
        middle = {name: statistics.median(getattr(cost, name) for cost in timed) for name in names}
        medians[way] = attrs.evolve(looked_at, **middle)
    first = next(iter(medians.values()))
    print(f"{file.name}: {arguments.workers} workers, medians of {arguments.rounds} rounds")
    print(
        "way                     wall s   CPU s  wall x   CPU x  steady M tokens/s  memory MB  disk MB         tokens"
    )
    for way, cost in medians.items():
        times = f"{cost.wall_seconds:6.1f}  {cost.cpu_seconds:6.1f}"
        ratios = f"{first.wall_seconds / cost.wall_seconds:6.1f}  {first.cpu_seconds / cost.cpu_seconds:6.1f}"
        rate = f"{cost.steady_rate / 1e6:17.1f}" if cost.steady_rate else " " * 17
        space = f"{cost.peak_memory_bytes / 1e6:9.0f}  {cost.peak_disk_bytes / 1e6:7.0f}"
        print(f"{way:22}  {times}  {ratios}  {rate}  {space}  {cost.tokens:13,}")


def measure_way(command: list[str], output: Path, *, look: bool) -> TokenizationCost:
    """Run a command and return its cost; with `look` also memory and disk, whose sampling takes time."""
    environment = {**os.environ, "HF_HOME": str(output / "cache"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "1"}
    peaks = Peaks(output)
    commits: list[tuple[float, int]] = []
    watch = peaks.watch if look else partial(follow, output, commits)
    wall, cpu = measure(command, ROOT, environment, watch)
    peaks.look_at_disk()
    return TokenizationCost(wall, cpu, peaks.memory, peaks.disk, count_tokens(output), steady_rate(commits))


def follow(output: Path, commits: list[tuple[float, int]], process: Process) -> None:
    """Record times and counts of committed tokens while a process of prepare_data.py runs."""
    # Imported here so that the other pipelines do not pay for it.
    from tokens.prepare.commit_log import LEDGER, entries_after
    from tokens.prepare.encode_unit import Result

    seen, tokens = 0, 0
    while process.poll() is None:
        time.sleep(SAMPLE_SECONDS)
        for entry, end in entries_after(output / LEDGER, seen):
            seen = end
            tokens += sum(part.tokens for part in entry.parts.values()) if isinstance(entry, Result) else 0
        if tokens and (not commits or commits[-1][1] < tokens):
            commits.append((time.perf_counter(), tokens))


def steady_rate(commits: list[tuple[float, int]]) -> float:
    """Return the tokens committed per second between the shares of STEADY; 0 without commits."""
    if not commits:
        return 0.0
    (began, before), (ended, after) = (
        next(commit for commit in commits if commit[1] >= share * commits[-1][1]) for share in STEADY
    )
    return (after - before) / (ended - began) if ended > began else 0.0


def count_tokens(output: Path) -> int:
    from tokens.format.header import read_header

    files = [read_header(path).length for path in output.glob("*.safetensors")]
    return sum(files) if files else sum(path.stat().st_size // 2 for path in output.glob("*.bin"))


def make_text(path: Path, wanted_bytes: int) -> None:
    """Write a Parquet file of distinct documents: the text files of this machine."""
    import pyarrow
    import pyarrow.parquet

    texts, known, size = [], set(), 0
    for root in (Path(sys.base_prefix) / "lib", Path("/usr/share"), Path("/usr/lib"), Path(sys.prefix) / "lib"):
        for file in sorted(root.rglob("*")):
            if size >= wanted_bytes:
                break
            try:
                if not file.name.endswith(TEXT_NAMES) or file.is_symlink() or file.stat().st_size > LONGEST_FILE:
                    continue
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest not in known:
                known.add(digest)
                texts.append(text)
                size += len(text.encode())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=500)
    print(f"{len(texts):,} documents, {size / 1e6:.0f} MB of distinct text from this machine")


def load(arguments: argparse.Namespace) -> Any:
    from tokens.tokenizer.tokenizer import BytePairTokenizer, load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer)
    assert isinstance(tokenizer, BytePairTokenizer)
    return tokenizer._encoding


def gpjt(arguments: argparse.Namespace, file: Path) -> None:
    """Tokenize as gpjt does: batches of lists, in memory until the end."""
    import torch
    from datasets import load_dataset
    from safetensors.torch import save_file

    encoding = load(arguments)
    share = round(100 * (1 - VALIDATION))
    splits = {"train": f"train[:{share}%]", "validation": f"train[{share}%:]"}
    documents = load_dataset("parquet", data_files=str(file), split=splits)
    for split in ("validation", "train"):
        batches = []
        for start in range(0, len(documents[split]), 1000):
            texts = documents[split][start : start + 1000]["text"]
            joined = []
            for ids in encoding.encode_batch(texts, allowed_special={"<|endoftext|>"}):
                joined.extend(ids)
                joined.append(encoding.eot_token)
            batches.append(torch.tensor(joined, dtype=torch.uint16))
        save_file({"tokens": torch.cat(batches)}, arguments.output / f"{split}.safetensors")


def nanogpt(arguments: argparse.Namespace, file: Path) -> None:
    """Tokenize as nanoGPT does: a mapped dataset, then a memory map."""
    import numpy as np
    from datasets import load_dataset

    encoding = load(arguments)

    def encode(example: dict[str, Any]) -> dict[str, Any]:
        ids = [*encoding.encode_ordinary(example["text"]), encoding.eot_token]
        return {"ids": ids, "len": len(ids)}

    documents = load_dataset("parquet", data_files=str(file), num_proc=arguments.workers)["train"]
    splits = documents.train_test_split(test_size=VALIDATION, seed=2357, shuffle=True)
    mapped = splits.map(encode, remove_columns=["text"], num_proc=arguments.workers)
    for split, rows in mapped.items():
        length = int(np.sum(rows["len"], dtype=np.uint64))
        tokens = np.memmap(arguments.output / f"{split}.bin", dtype=np.uint16, mode="w+", shape=(length,))
        shards, at = min(1024, len(rows)), 0
        for index in range(shards):
            shard = rows.shard(num_shards=shards, index=index, contiguous=True).with_format("numpy")
            ids = np.concatenate(shard["ids"])
            tokens[at : at + len(ids)] = ids
            at += len(ids)
        tokens.flush()


def other(name: str, arguments: argparse.Namespace, file: Path, output: Path) -> list[str]:
    """Return the command of another pipeline, in this file."""
    options = ["--run", name, "--tokenizer", arguments.tokenizer, "--workers", str(arguments.workers)]
    return [sys.executable, __file__, str(file), *options, "--output", str(output)]


def lockstep(arguments: argparse.Namespace, file: Path, output: Path, *, executor: str, fast: bool) -> list[str]:
    command = [sys.executable, str(ROOT / "prepare_data.py")]
    if not fast:  # a module that cannot be imported stands before it, for workers as well
        hidden = output.parent / "hidden"
        hidden.mkdir(exist_ok=True)
        (hidden / "fastokens.py").write_text("raise ImportError")
        command = ["env", f"PYTHONPATH={hidden}", *command]
    options = ["--tokenizer", arguments.tokenizer, "--executor", executor, "--workers", str(arguments.workers)]
    return [*command, str(file), "--output", str(output), *options]


WAYS = {
    "gpjt": partial(other, "gpjt"),
    "nanoGPT": partial(other, "nanogpt"),
    "lockstep, tiktoken": partial(lockstep, executor="process", fast=False),
    "lockstep, fastokens": partial(lockstep, executor="process", fast=True),
    "lockstep, Ray": partial(lockstep, executor="ray", fast=True),
}


if __name__ == "__main__":
    main()
