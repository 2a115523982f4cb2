"""Lines that report near-duplicate documents, and contamination of a train split by items or held-out documents."""

from pathlib import Path

import numpy as np

from common.errors import BadInput, refusing
from common.json_files import read_every_line, scalars_in
from common.text import counted
from tokens.format.manifest import SPLITS, has_split, read_manifest
from tokens.format.token_file import TokenStream
from tokens.search.excerpt import excerpt
from tokens.search.near_duplicates import BANDS, ROWS, SHINGLE, SIMILARITY, near_duplicates
from tokens.search.overlap import GRAM, LEAST, Item, documents, find_overlap, forms, open_comparable
from tokens.tokenizer.tokenizer import Tokenizer

SHOWN_PLACES = 5


def contamination(directory: Path, tokenizer: Tokenizer, sources: tuple[Path, ...]) -> list[str]:
    """For each source, return lines that count and show its items that share an n-gram with a directory's train split.

    Raises BadInput if a source or the train split cannot be read.
    """
    lines, train = [], open_comparable(directory, "train", tokenizer)
    for name, noun, items in [item_set for source in sources for item_set in read_items(source, tokenizer)]:
        overlap = find_overlap([train], items)
        shared, short = np.flatnonzero(overlap.touched), np.count_nonzero(overlap.lengths == 0)
        searched_whole = np.count_nonzero(overlap.lengths < GRAM) - short
        label = "CONTAMINATION" if len(shared) else "contamination"
        share = f"{len(shared):,} of {len(items):,} {noun}s ({len(shared) / max(1, len(items)):.2%})"
        lines.append(f"  {label:20} {name}: {share} share {GRAM} tokens in a row with train")
        if searched_whole or short:
            note = f"{searched_whole:,} with fewer than {GRAM} tokens were searched for as a whole"
            note += f", and {short:,} with fewer than {LEAST} were not searched for"
            lines.append(f"{'':23}{note}")
        for item in shared[:SHOWN_PLACES].tolist():
            length = int(overlap.lengths[item])
            lines.append(f"    {noun} {item + 1:<12,} {excerpt([train], int(overlap.places[item]), length, tokenizer)}")
    return lines


def read_items(source: Path, tokenizer: Tokenizer) -> list[tuple[str, str, list[Item]]]:
    """Return the items of a JSON Lines file, or of each held-out split of a token directory.

    Each tuple contains the name of the file or split, a noun for the items, and the items. If a token directory has no
    held-out split, the items are the documents of its train split. Raises BadInput if the source cannot be read or has
    no items.
    """
    if not source.is_dir():
        items: list[Item] = []
        for record in read_every_line(source, advice="wanted JSON Lines of texts, or a token directory"):
            with refusing(f"{source}: item {len(items) + 1}", kinds=(BadInput,)):
                texts = [value for value in scalars_in(record) if isinstance(value, str)]
                items.append([ids for text in texts for ids in forms(tokenizer, text)])
        if not items:
            raise BadInput(f"{source}: contains no items; wanted JSON Lines of texts, or a token directory")
        return [(str(source), "item", items)]
    splits = [split for split in SPLITS[1:] if has_split(source, split, read_manifest(source))] or ["train"]
    streams = [open_comparable(source, split, tokenizer) for split in splits]
    end = tokenizer.end_of_text_id
    return [
        (f"{source} {split}", "document", documents(stream, end)) for split, stream in zip(splits, streams, strict=True)
    ]


def likeness(streams: dict[str, TokenStream], tokenizer: Tokenizer, end_of_text_id: int) -> list[str]:
    """Return lines that count and show near-duplicates among the documents of all splits.

    Raises BadInput like `in_blocks`.
    """
    splits = [*streams.values()]
    duplicates = near_duplicates(splits, end_of_text_id)
    repeats, begin = duplicates.originals != np.arange(len(duplicates.originals)), 0
    detection_rates = ", ".join(
        f"{1 - (1 - s**ROWS) ** BANDS:.3%} of the pairs at {s:g}" for s in (SIMILARITY, 0.7, 0.8)
    )
    lines = []
    for name, stream in streams.items():
        first, last = np.searchsorted(duplicates.starts, (begin, begin + stream.length)).tolist()
        begin += stream.length
        count, share = int(np.count_nonzero(repeats[first:last])), repeats[first:last].sum() / max(1, last - first)
        lines.append(
            f"  near-duplicates      {counted(count, 'document')} of {name} ({share:.2%}) similar to an earlier one"
        )
    short = int(np.count_nonzero(duplicates.lengths < SHINGLE))
    definition = f"similar: the Jaccard index of their {SHINGLE}-grams is at least {SIMILARITY:g}"
    lines.append(f"{'':23}{definition}; the search finds {detection_rates}")
    lines.append(f"{'':23}{counted(short, 'document')} with fewer than {SHINGLE} tokens not compared" * bool(short))
    for similarity, *pair in duplicates.pairs:
        lines.append(f"    similarity {similarity:.2f}")
        for number in pair:
            lines.append(
                f"      {excerpt(splits, int(duplicates.starts[number]), int(duplicates.lengths[number]), tokenizer)}"
            )
    return [line for line in lines if line]
