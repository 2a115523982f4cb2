"""Tokenization speed of prepare_data.py beside two other pipelines, on the same text in the same run.

python benchmarks/tokenization.py [FILE.parquet ...] [--workers 2] [--rounds 2] [--megabytes 200] [--tokenizer FILE]

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

import hashlib
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

import attrs
import command
from cyclopts import Parameter
from process_cost import SAMPLE_SECONDS, Peaks, Process, measure

from tokens.format.header import read_header
from tokens.prepare.commit_log import LEDGER, entries_after
from tokens.prepare.encode_unit import Result

TEXT_NAMES = (".py", ".pyi", ".txt", ".md", ".rst", ".html", ".h", ".c", ".js", ".pl", ".po", ".xml")
LONGEST_FILE = 2_000_000  # bytes; longer ones are data
STEADY = (0.15, 0.9)  # first and last share of the tokens
Way = Literal["gpjt", "nanoGPT", "lockstep, tiktoken", "lockstep, fastokens", "lockstep, Ray"]
WAYS: tuple[Way, ...] = ("gpjt", "nanoGPT", "lockstep, tiktoken", "lockstep, fastokens", "lockstep, Ray")
COLUMNS = ["way", "wall s", "CPU s", "wall x", "CPU x", "steady M tokens/s", "memory MB", "disk MB", "tokens"]


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class TokenizationBenchmark:
    """Command-line options."""

    tokenizer: str = "gpt2"
    """gpt2, or a file of tiktoken's"""
    workers: int = 2
    rounds: int = 2
    megabytes: int = 200
    ways: tuple[Way, ...] = WAYS


@attrs.frozen
class TokenizationCost:
    """Cost of one run."""

    wall_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    peak_disk_bytes: int
    tokens: int
    steady_rate: float  # tokens committed per second; 0 if unknown


def main(*parquet: Path, options: TokenizationBenchmark = TokenizationBenchmark()) -> None:
    """Measure and print."""
    with TemporaryDirectory() as folder:
        files = list(parquet)
        if not files:
            files = [Path(folder) / "text.parquet"]
            make_text(files[0], options.megabytes * 1_000_000)
        for file in files:
            compare(options, file.resolve())


def compare(options: TokenizationBenchmark, file: Path) -> None:
    """Run all pipelines in turn on a file; print a table of medians."""
    costs: dict[Way, list[TokenizationCost]] = {way: [] for way in options.ways}
    for turn in range(options.rounds + 1):
        for way, taken in costs.items():
            with TemporaryDirectory() as folder:
                output = Path(folder) / "output"
                output.mkdir()
                taken.append(measure_way(_command(way, options, file, output), output, look=turn == 0))
    medians = {}
    for way, (looked_at, *timed) in costs.items():
        names = ("wall_seconds", "cpu_seconds", "steady_rate")
        medians[way] = attrs.evolve(looked_at, **{name: median(getattr(one, name) for one in timed) for name in names})
    first = next(iter(medians.values()))
    rows = []
    for way, cost in medians.items():
        ratios = first.wall_seconds / cost.wall_seconds, first.cpu_seconds / cost.cpu_seconds
        cells = [f"{value:.1f}" for value in (cost.wall_seconds, cost.cpu_seconds, *ratios)]
        cells.append(f"{cost.steady_rate / 1e6:.1f}" if cost.steady_rate else "")
        space = [f"{size / 1e6:.0f}" for size in (cost.peak_memory_bytes, cost.peak_disk_bytes)]
        rows.append([way, *cells, *space, f"{cost.tokens:,}"])
    print(f"{file.name}: {options.workers} workers, medians of {options.rounds} rounds")
    print(command.table(COLUMNS, rows), flush=True)


def measure_way(words: list[str], output: Path, *, look: bool) -> TokenizationCost:
    """Run a command and return its cost; with `look` also memory and disk, whose sampling takes time."""
    environment = {**os.environ, "HF_HOME": str(output / "cache"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "1"}
    peaks = Peaks(output)
    commits: list[tuple[float, int]] = []
    watch = peaks.watch if look else partial(follow, output, commits)
    wall, cpu = measure(words, command.ROOT, environment, watch)
    peaks.look_at_disk()
    files = [read_header(path).length for path in output.glob("*.safetensors")]
    tokens = sum(files) or sum(path.stat().st_size // 2 for path in output.glob("*.bin"))
    return TokenizationCost(wall, cpu, peaks.memory, peaks.disk, tokens, steady_rate(commits))


def follow(output: Path, commits: list[tuple[float, int]], process: Process) -> None:
    """Record times and counts of committed tokens while a process of prepare_data.py runs."""
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


def _command(way: Way, options: TokenizationBenchmark, file: Path, output: Path) -> list[str]:
    if not way.startswith("lockstep"):
        script = str(Path(__file__).with_name("other_pipelines.py"))
        arguments = [way.lower(), str(file), str(output), options.tokenizer, str(options.workers)]
        return [sys.executable, script, *arguments]
    words = [sys.executable, "prepare_data.py"]
    if way == "lockstep, tiktoken":  # a module that cannot be imported stands before fastokens, for workers as well
        hidden = output.parent / "hidden"
        hidden.mkdir()
        (hidden / "fastokens.py").write_text("raise ImportError")
        words = ["env", f"PYTHONPATH={hidden}", *words]
    executor = "ray" if way == "lockstep, Ray" else "process"
    how = ["--tokenizer", options.tokenizer, "--executor", executor, "--workers", str(options.workers)]
    return [*words, str(file), "--output", str(output), *how]


if __name__ == "__main__":
    command.run(main)
