"""Token statistics: document lengths, duplicates, and contamination of held-out splits.

Computing them needs 8 bytes of memory for each document.
"""

import itertools
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from common.errors import BadInput
from common.files import check_replaceable, replace_file, write_problem
from common.line_chart import Line, LineChart, VerticalMark, is_own_png, png
from common.text import counted, printable
from tokens.format.manifest import PLAN, SPLITS, Manifest, TokenizerRecord, open_listed, read_manifest, split_of
from tokens.format.token_file import TokenStream
from tokens.stats.contamination import contamination, likeness
from tokens.tokenizer.known import recognized
from tokens.tokenizer.loading import CACHE_ADVICE, load_tokenizer, recorded_tokenizer

GPT2_END_OF_TEXT = 50256  # used for directories without a manifest
BLOCK_TOKENS = 1 << 19
PERCENTS = (5, 25, 50, 75, 95, 99)
BAR = 30  # length of the longest bar, in characters
CHART = "document-lengths.png"
BINS_PER_DOUBLING = 2
SAMPLE_BLOCKS = 16  # maximum number of sampled blocks, which are spread evenly over a stream
SAMPLE_BLOCK_TOKENS = 1 << 16


def stats(
    directory: Path, end_of_text_id: int | None = None, against: tuple[Path, ...] = (), *, near_duplicates: bool = False
) -> list[str]:
    """Return the statistics of a token directory as lines, and draw a chart. Raises BadInput if there are no tokens.

    `against` names files and token directories whose texts are searched for in the train split. With `near_duplicates`,
    the documents are also compared with each other.
    """
    manifest = read_manifest(directory)
    streams = _streams(directory, manifest)
    if end_of_text_id is None:
        end_of_text_id = manifest.tokenizer.end_of_text_id if manifest else GPT2_END_OF_TEXT
    # Hashes must be computed from the same type of ids in all splits.
    dtype = np.result_type(*(stream.read(0, 0).dtype for stream in streams.values()))
    lengths: Counter[int] = Counter()
    read = {split: read_split(stream, end_of_text_id, dtype, lengths) for split, stream in streams.items()}
    hashes = {split: split_hashes for split, (split_hashes, _) in read.items()}
    tokens, ends = sum(stream.length for stream in streams.values()), sum(count for _, count in read.values())
    if ends == 0:
        raise BadInput(
            f"{directory}: the end-of-text id {end_of_text_id} does not occur; pass the right one with --end-of-text ID"
        )
    values, counts = np.array(sorted(lengths.items()), np.int64).T
    documents = int(counts.sum())
    noun, headline = "document", counted(documents, "document")
    # A conversation may consist of several texts, because the alpaca template puts an end of text after each answer.
    if manifest is not None and manifest.rows is not None:
        noun, headline = "text", f"{counted(manifest.documents, 'conversation')} of {counted(documents, 'text')}"
    lines = [f"{directory}: {headline}, {counted(tokens, 'token')}, {ends:,} of them end-of-text {end_of_text_id}"]
    lines += _summary(values, counts, noun)
    if manifest is not None and tokens > ends:
        if manifest.text_bytes is not None and manifest.rows is None:
            lines.append(f"  bytes per token      {manifest.text_bytes / (tokens - ends):.2f}, without end-of-text ids")
        lines += _compare_with_gpt2(next(iter(streams.values())), manifest.tokenizer, directory)
    if manifest is not None and manifest.rows is not None:
        lines.append(f"  conversations        {manifest.documents:,} in {manifest.rows.shares(manifest.tokens)}")
    for name, stream in streams.items():
        share = stream.length / tokens
        lines.append(f"  {name:20} {counted(stream.length, 'token')} ({share:.2%}), {counted(len(hashes[name]), noun)}")
    lines += _copies(hashes, noun)
    if against or near_duplicates:
        tokenizer = recorded_tokenizer(manifest.tokenizer, directory) if manifest else load_tokenizer("gpt2")
        lines += contamination(directory, tokenizer, against) if against else []
        lines += likeness(streams, tokenizer, end_of_text_id) if near_duplicates else []
    lines += ["", *_histogram(values, counts, noun), ""]
    try:
        draw_chart(directory, values, counts, noun)
        lines.append(f"drawn in {directory / CHART}")
    except OSError as error:  # a directory without write permission can still be read
        lines.append(f"not drawn: {write_problem(directory / CHART, error)}")
    except BadInput as problem:  # a file that is not ours has the chart's name
        lines.append(f"not drawn: {problem}")
    return lines


def read_split(
    stream: TokenStream, end_of_text_id: int, dtype: np.dtype, lengths: Counter[int]
) -> tuple[np.ndarray, int]:
    """Return the sorted hashes (uint64) of a split's documents, and the number of end-of-text ids in the split.

    Also count the documents' lengths in `lengths`.
    """
    hashes, end_count = array("Q"), 0
    unfinished, length = xxhash.xxh3_64(), 0  # hash and length of a document that continues in the next block
    for at in range(0, stream.length, BLOCK_TOKENS):
        block = stream.read(at, min(BLOCK_TOKENS, stream.length - at)).astype(dtype, copy=False)
        data = block.view(np.uint8).data
        ends = np.flatnonzero(block == end_of_text_id)
        if len(ends) == 0:
            unfinished.update(data)
            length += len(block)
            continue
        edges = (ends * dtype.itemsize).tolist()
        unfinished.update(data[: edges[0]])
        hashes.append(unfinished.intdigest())
        for begin, end in itertools.pairwise(edges):
            hashes.append(xxhash.xxh3_64_intdigest(data[begin + dtype.itemsize : end]))
        lengths.update((np.diff(ends, prepend=-1 - length) - 1).tolist())
        end_count += len(ends)
        unfinished, length = xxhash.xxh3_64(data[edges[-1] + dtype.itemsize :]), len(block) - int(ends[-1]) - 1
    if length:  # if a document is divided among splits, only the last of these splits has its end-of-text id
        lengths[length] += 1
        hashes.append(unfinished.intdigest())
    ascending = np.frombuffer(hashes, np.uint64)
    if stream.weighted:  # two end-of-text ids in a row are padding, with no document between them
        lengths.pop(0, None)
        ascending = ascending[ascending != xxhash.xxh3_64_intdigest(b"")]
    ascending.sort()  # in place
    return ascending, end_count


def _streams(directory: Path, manifest: Manifest | None) -> dict[str, TokenStream]:
    names = manifest.files if manifest else [path.name for path in directory.glob("*.safetensors")]
    splits = [split for split in SPLITS if split in map(split_of, names)]
    if not splits and (directory / PLAN).exists():
        raise BadInput(
            f"{directory}: its preparation is not finished; to see its progress, run prepare_data.py status {directory}"
        )
    if not splits:
        raise BadInput(f"{directory}: no train.safetensors; write one with prepare_data.py SOURCE... --output DIR")
    return {split: open_listed(directory, split, manifest) for split in splits}


def _compare_with_gpt2(stream: TokenStream, record: TokenizerRecord, directory: Path) -> list[str]:
    """Return a line that compares a directory's tokenizer with GPT-2's, or no line if the two are the same."""
    try:
        tokenizer = recorded_tokenizer(record, directory)
        if recognized(tokenizer.coder.ranks) == "gpt2":
            return []
    except BadInput as error:
        return [f"  versus GPT-2         not compared: {error}"]
    try:
        gpt2 = load_tokenizer("gpt2")
    except BadInput as error:  # the usual advice is to use --tokenizer, which this command does not have
        problem = replace(error.problems[0], advice=CACHE_ADVICE)
        return [f"  versus GPT-2         not compared: {problem}"]
    text_bytes = tokens = gpt2_tokens = 0
    count = min(SAMPLE_BLOCK_TOKENS, stream.length)
    starts = np.linspace(0, stream.length - count, min(SAMPLE_BLOCKS, -(-stream.length // count))).astype(int)
    for ids in (stream.read(start, count) for start in starts.tolist()):
        edges = np.flatnonzero(np.isin(ids, [*tokenizer.special_tokens.values()])).tolist()
        for begin, end in itertools.pairwise([-1, *edges, count]):
            text = tokenizer.decode(ids[begin + 1 : end].tolist())
            text_bytes += len(text.encode(errors="replace"))
            tokens += end - begin - 1
            gpt2_tokens += len(gpt2.encode(text))
    rate, gpt2_rate = (f"{text_bytes / max(1, count):.2f}" for count in (tokens, gpt2_tokens))
    return [
        f"  versus GPT-2         {rate} bytes per token; GPT-2 has {gpt2_rate} on the same {text_bytes:,} bytes of text"
    ]


def _summary(values: np.ndarray, counts: np.ndarray, noun: str) -> list[str]:
    below = np.cumsum(counts)
    at = {percent: int(values[np.searchsorted(below, below[-1] * percent / 100)]) for percent in PERCENTS}
    percentiles = ", ".join(f"{percent}% {value:,}" for percent, value in at.items() if percent != 50)
    mean = float(values @ counts) / below[-1]
    return [
        f"  tokens per {noun:10}mean {mean:,.1f}, median {at[50]:,}, without end-of-text",
        f"  percentiles          {percentiles}; shortest {values[0]:,}, longest {values[-1]:,}",
    ]


def _copies(hashes: dict[str, np.ndarray], noun: str) -> list[str]:
    """Return lines that count the duplicates within each split, and the documents that are in two splits."""
    lines = []
    for name, split_hashes in hashes.items():
        copies = int(np.count_nonzero(split_hashes[1:] == split_hashes[:-1]))
        share = copies / max(1, len(split_hashes))
        lines.append(f"  duplicates           {counted(copies, noun)} of {name} ({share:.2%}), copies of earlier ones")
    for (reference, first), (held_out, second) in itertools.combinations(hashes.items(), 2):
        places = np.minimum(np.searchsorted(first, second), len(first) - 1)
        shared = int(np.count_nonzero(first[places] == second))
        if shared:
            share = shared / len(second)
            lines.append(
                f"  CONTAMINATION        {counted(shared, noun)} of {held_out} ({share:.2%}) also in {reference}"
            )
        else:
            lines.append(f"  contamination        none: no {noun} of {held_out} is in {reference}")
    return lines


def _histogram(values: np.ndarray, counts: np.ndarray, noun: str) -> list[str]:
    """Return a line for each doubling of the length: the number of documents, and their share of the tokens."""
    edges = [0, *(1 << power for power in range(int(values[-1]).bit_length() + 1))]
    documents: Any = np.histogram(values, edges, weights=counts)[0]
    tokens: Any = np.histogram(values, edges, weights=counts * values)[0]
    lines = [f"  {f'tokens per {noun}':>23}  {f'{noun}s':>14}  {'share':>7}  {'of tokens':>9}"]
    for (begin, end), count, token_count in zip(itertools.pairwise(edges), documents, tokens, strict=True):
        if not count and not documents[: edges.index(begin)].any():
            continue  # the histogram begins at the shortest document
        span = f"{begin:,}" if end == begin + 1 else f"{begin:,} to {end - 1:,}"
        bar = "#" * round(BAR * count / documents.max())
        document_share, token_share = count / documents.sum(), token_count / max(1, tokens.sum())
        row = f"{span:>23}  {int(count):>14,}  {document_share:>7.2%}  {token_share:>9.2%}"
        lines.append(f"  {row}  {bar}".rstrip())
    return lines


def draw_chart(directory: Path, values: np.ndarray, counts: np.ndarray, noun: str = "document") -> None:
    """Draw a histogram of document lengths in logarithmic bins whose edges are whole lengths.

    `values` are the lengths in ascending order, and `counts` are the numbers of documents with these lengths. Raises
    BadInput if the chart's name belongs to a file that is not such a chart.
    """
    check_replaceable(directory / CHART, is_own_png, "a chart of prepare_data.py stats")
    documents, longest = int(counts.sum()), int(values[-1])
    powers = np.arange(0, np.log2(max(2, longest)) + 2 / BINS_PER_DOUBLING, 1 / BINS_PER_DOUBLING)
    edges = np.unique(np.ceil(2**powers - 1e-9).astype(np.int64))
    shortest = max([1, *values[values > 0][:1]])
    edges = edges[np.searchsorted(edges, shortest, "right") - 1 : np.searchsorted(edges, longest, "right") + 1]
    heights = np.pad(np.repeat(np.histogram(values, edges, weights=counts)[0], 2), 1).astype(float)
    line = Line(name=f"{noun}s", x=np.repeat(edges, 2).astype(float), y=heights, color=0, filled=True)
    median = int(values[np.searchsorted(np.cumsum(counts), documents / 2)])
    marked_lengths = {median: "median", longest: "longest"}
    marks = [VerticalMark(x=max(1, at), style="", text=f"{name} {at:,}") for at, name in marked_lengths.items()]
    empty = f" ({counts[0]:,} empty ones not shown)" * bool(values[0] == 0)
    title = f"{printable(directory.resolve().name)}: {documents:,} {noun}s{empty}"
    axis = f"tokens per {noun} (without end-of-text)"
    chart = LineChart(title=f"{noun}s", axis=axis, lines=[line], marks=marks, logarithmic_x=True)
    replace_file(directory / CHART, png([chart], title))
