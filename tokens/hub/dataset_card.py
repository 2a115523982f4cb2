"""Dataset card: the README.md of a published token directory, from its manifest (template dataset_card.md.jinja)."""

from collections.abc import Iterable
from pathlib import Path

from tokens.format.manifest import SPLITS, Manifest, is_of
from tokens.prepare.plan import HASH
from tokens.stats.stats import CHART

TEMPLATE = Path(__file__).with_name("dataset_card.md.jinja")


def dataset_card(repository: str, names: Iterable[str], manifest: Manifest, license_name: str | None) -> str:
    """Return the card of a dataset with the named files."""
    from huggingface_hub import DatasetCard, DatasetCardData

    name, tokenizer = repository.partition("/")[2], manifest.tokenizer
    data = DatasetCardData(
        license=license_name,
        pretty_name=name,
        task_categories=["text-generation"],
        size_categories=[size_category(manifest.documents)],
        tags=["lockstep", "tokens", f"tokenizer-{tokenizer.name.removesuffix('.tiktoken')}"],
        viewer=False,  # it shows tables, not token files
    )
    card = DatasetCard.from_template(
        data,
        str(TEMPLATE),
        name=name,
        repository=repository,
        names=set(names),
        chart=CHART,
        manifest=manifest,
        tokenizer=tokenizer,
        shares=_shares(manifest),
        held_out=_held_out(manifest),
    )
    return str(card).rstrip() + "\n"


def size_category(documents: int) -> str:
    steps = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
    if documents < 1000:
        return "n<1K"
    power = len(str(documents)) - 1  # 3: thousands
    return f"{steps[power - 3]}<n<{steps[power - 2]}" if power < 12 else "n>1T"


def _shares(manifest: Manifest) -> str:
    tokens = {
        split: sum(entry.tokens for name, entry in manifest.files.items() if is_of(name, split)) for split in SPLITS
    }
    total = max(1, sum(tokens.values()))
    return ", ".join(f"{split} {count / total:.2%}" for split, count in tokens.items() if count)


def _held_out(manifest: Manifest) -> str:
    rule = manifest.split
    if rule is None or rule.kind != HASH:
        return "the last documents"
    if rule.from_tail:
        return f"the last documents ({' and '.join(rule.from_tail)})"
    return f"those of a hash (xxh3_64, seed {rule.seed}) of their text, so copies of a document are in one split"
