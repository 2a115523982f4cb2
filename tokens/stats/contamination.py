"""Contamination of a train split by items or held-out documents, and near-duplicates of documents, told in lines."""

from pathlib import Path

import numpy as np

from common.errors import BadInput, refusing
from common.json_files import read_every_line, scalars_in
from tokens.format.manifest import SPLITS, has_split, read_manifest
from tokens.format.token_file import TokenStream
from tokens.search.excerpt import excerpt
from tokens.search.near_duplicates import BANDS, ROWS, SHINGLE, SIMILARITY, near_duplicates
from tokens.search.overlap import GRAM, LEAST, Item, documents, find_overlap, forms, open_comparable
from tokens.tokenizer.tokenizer import Tokenizer

SHOWN_PLACES = 5


def contamination(directory: Path, tokenizer: Tokenizer, sources: tuple[Path, ...]) -> list[str]:
    """Return lines on the items of each source that share an n-gram with a directory's train split. Raises BadInput."""
    lines, train = [], open_comparable(directory, "train", tokenizer)
    for name, noun, items in [found for source in sources for found in read_items(source, tokenizer)]:
        overlap = find_overlap([train], items)
        shared, short = np.flatnonzero(overlap.touched), np.count_nonzero(overlap.lengths == 0)
        whole = np.count_nonzero(overlap.lengths < GRAM) - short
        label = "CONTAMINATION" if len(shared) else "contamination"
        share = f"{len(shared):,} of {len(items):,} {noun}s ({len(shared) / max(1, len(items)):.2%})"
        lines.append(f"  {label:20} {name}: {share} share {GRAM} tokens in a row with train")
        if whole or short:
            told = f"{whole:,} of less than {GRAM} were searched for whole, {short:,} of less than {LEAST} not at all"
            lines.append(f"{'':23}{told}")
        for item in shared[:SHOWN_PLACES].tolist():
            length = int(overlap.lengths[item])
            lines.append(f"    {noun} {item + 1:<12,} {excerpt([train], int(overlap.places[item]), length, tokenizer)}")
    return lines


def read_items(source: Path, tokenizer: Tokenizer) -> list[tuple[str, str, list[Item]]]:
    """Return the name, noun and items of a file of JSON Lines, or of each held-out split of a token directory.

    Of a directory without one, the items are the documents of its train split. Raises BadInput.
    """
    if not source.is_dir():
        items: list[Item] = []
        for record in read_every_line(source, advice="wanted JSON Lines of texts, or a token directory"):
            with refusing(f"{source}: item {len(items) + 1}", kinds=(BadInput,)):
                texts = [value for value in scalars_in(record) if isinstance(value, str)]
                items.append([ids for text in texts for ids in forms(tokenizer, text)])
        if not items:
            raise BadInput(f"{source}: holds no items; wanted JSON Lines of texts, or a token directory")
        return [(str(source), "item", items)]
    splits = [split for split in SPLITS[1:] if has_split(source, split, read_manifest(source))] or ["train"]
    streams = [open_comparable(source, split, tokenizer) for split in splits]
    end = tokenizer.end_of_text_id
    return [
        (f"{source} {split}", "document", documents(stream, end)) for split, stream in zip(splits, streams, strict=True)
    ]


def likeness(streams: dict[str, TokenStream], tokenizer: Tokenizer, end_of_text_id: int) -> list[str]:
    """Return lines on the near-duplicates among the documents of all splits. Raises BadInput as `in_blocks`."""
    splits = [*streams.values()]
    found = near_duplicates(splits, end_of_text_id)
    later, begin = found.like != np.arange(len(found.like)), 0
    chances = ", ".join(f"{1 - (1 - s**ROWS) ** BANDS:.3%} of pairs at {s:g}" for s in (SIMILARITY, 0.7, 0.8))
    lines = []
    for name, stream in streams.items():
        first, last = np.searchsorted(found.starts, (begin, begin + stream.length)).tolist()
        begin += stream.length
        count, share = np.count_nonzero(later[first:last]), later[first:last].sum() / max(1, last - first)
        lines.append(f"  near-duplicates      {count:,} documents of {name} ({share:.2%}) resemble an earlier one")
    short = np.count_nonzero(found.lengths < SHINGLE)
    lines.append(f"{'':23}Jaccard similarity of {SHINGLE}-grams from {SIMILARITY:g} on; found: {chances}")
    lines.append(f"{'':23}{short:,} documents of less than {SHINGLE} tokens are compared with none" * bool(short))
    for similarity, *pair in found.pairs:
        lines.append(f"    similarity {similarity:.2f}")
        for number in pair:
            lines.append(f"      {excerpt(splits, int(found.starts[number]), int(found.lengths[number]), tokenizer)}")
    return [line for line in lines if line]
