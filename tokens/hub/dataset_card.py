"""The README.md of a published token directory, from its manifest."""

import json
from collections.abc import Iterable
from typing import Any

from tokens.format.manifest import is_of
from tokens.format.splits import HASH, SPLITS
from tokens.stats.length_chart import CHART
from tokens.tokenizer.tokenizer import RANKS_FILE


def dataset_card(repository: str, names: Iterable[str], manifest: dict[str, Any], license_name: str | None) -> str:
    """Return the card of a dataset with the named files; the front matter is what the hub reads."""
    name = repository.partition("/")[2]
    tokenizer, documents, tokens = manifest["tokenizer"], manifest["documents"], _tokens(manifest)
    front = [
        "---",
        *([f"license: {license_name}"] if license_name else []),
        f"pretty_name: {json.dumps(name)}",
        "task_categories:\n- text-generation",
        f"size_categories:\n- {size_category(documents)}",
        f"tags:\n- lockstep\n- tokens\n- {json.dumps('tokenizer-' + tokenizer['name'].removesuffix('.tiktoken'))}",
        "viewer: false",  # it shows tables, not token files
        "---",
    ]
    body = [
        f"# {name}",
        f"Text as tokens, ready to train on: {documents:,} documents, {tokens:,} tokens of the tokenizer "
        f"`{tokenizer['name']}`, written by Lockstep's `prepare_data.py`.",
        *([f"![How long the documents are]({CHART})"] if CHART in names else []),
        "## Sources",
        "| source | files | bytes |\n|---|---:|---:|\n"
        + "\n".join(
            f"| `{_cell(source['name'])}` | {source['files']:,} | {source['bytes']:,} |"
            for source in manifest["sources"]
        ),
        *(
            [f"{manifest['lost_documents']:,} documents could not be read and are left out."]
            if manifest.get("lost_documents")
            else []
        ),
        "## Tokens",
        f"- tokenizer `{tokenizer['name']}`: {tokenizer['vocabulary_size']:,} ids"
        + (f"; its byte-pair ranks are in `{RANKS_FILE}`" if tokenizer["ranks_file"] else "")
        + f"\n- every document is followed by the end-of-text id {tokenizer['end_of_text_id']}, which occurs nowhere "
        f"else\n- {_split_rule(manifest)}",
        "## Files",
        "| file | tokens | type | bytes | sha256 |\n|---|---:|---|---:|---|\n"
        + "\n".join(
            f"| `{file}` | {entry['tokens']:,} | {entry['dtype']} | {entry['size_bytes']:,} | `{entry['sha256']}` |"
            for file, entry in manifest["files"].items()
        ),
        "Each holds one tensor, `tokens`. `manifest.json` has all of this for programs, `ledger.jsonl` the digest of "
        "every unit of work.",
        "## Use",
        f'Lockstep downloads, checks and trains on it with `"dataset": "{repository}"` in `train.json` and a '
        f"`vocab_size` of at least {tokenizer['vocabulary_size']} in `model.json`. Elsewhere:",
        _code(repository, next(iter(manifest["files"])), tokenizer["end_of_text_id"]),
    ]
    return "\n".join(front) + "\n\n" + "\n\n".join(body) + "\n"


def size_category(documents: int) -> str:
    """Return the hub's word for so many documents."""
    steps = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
    if documents < 1000:
        return "n<1K"
    power = len(str(documents)) - 1  # 3: thousands
    return f"{steps[power - 3]}<n<{steps[power - 2]}" if power < 12 else "n>1T"


def _tokens(manifest: dict[str, Any]) -> int:
    return sum(entry["tokens"] for entry in manifest["files"].values())


def _split_rule(manifest: dict[str, Any]) -> str:
    rule, total = manifest.get("split", {}), max(1, _tokens(manifest))
    tokens = {
        split: sum(entry["tokens"] for name, entry in manifest["files"].items() if is_of(name, split))
        for split in SPLITS
    }
    shares = ", ".join(f"{split} {count / total:.2%}" for split, count in tokens.items() if count)
    if rule.get("kind") != HASH or rule.get("from_tail"):
        how = "the last documents" + (f" ({' and '.join(rule['from_tail'])})" if rule.get("kind") == HASH else "")
    else:
        how = f"those of a hash (xxh3_64, seed {rule['seed']}) of their text, so copies of a document are on one side"
    return f"split: {shares}; held out are {how}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'").replace("\n", " ")


def _code(repository: str, file: str, end_of_text_id: int) -> str:
    return f"""```python
import numpy
from huggingface_hub import hf_hub_download
from safetensors.numpy import load_file

path = hf_hub_download("{repository}", "{file}", repo_type="dataset")
tokens = load_file(path)["tokens"]  # 1-D
documents = numpy.split(tokens, numpy.flatnonzero(tokens == {end_of_text_id}) + 1)
```"""
