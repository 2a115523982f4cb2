"""Other people's tokenization, for benchmarks/tokenization.py.

python benchmarks/other_pipelines.py gpjt|nanogpt FILE.parquet OUTPUT TOKENIZER WORKERS
"""

from pathlib import Path
from typing import Any, Literal

import command
import numpy as np
from datasets import load_dataset

from tokens.tokenizer.tokenizer import BytePairTokenizer, load_tokenizer

VALIDATION = 0.01


def main(pipeline: Literal["gpjt", "nanogpt"], file: Path, output: Path, tokenizer: str, workers: int, /) -> None:
    """Tokenize a file."""
    loaded = load_tokenizer(tokenizer)
    assert isinstance(loaded, BytePairTokenizer)
    if pipeline == "gpjt":
        gpjt(loaded._encoding, file, output)
    else:
        nanogpt(loaded._encoding, file, output, workers)


def gpjt(encoding: Any, file: Path, output: Path) -> None:
    """Tokenize as gpjt does: batches of lists, in memory until the end."""
    import torch
    from safetensors.torch import save_file

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
        save_file({"tokens": torch.cat(batches)}, output / f"{split}.safetensors")


def nanogpt(encoding: Any, file: Path, output: Path, workers: int) -> None:
    """Tokenize as nanoGPT does: a mapped dataset, then a memory map."""

    def encode(example: dict[str, Any]) -> dict[str, Any]:
        ids = [*encoding.encode_ordinary(example["text"]), encoding.eot_token]
        return {"ids": ids, "len": len(ids)}

    documents = load_dataset("parquet", data_files=str(file), num_proc=workers)["train"]
    splits = documents.train_test_split(test_size=VALIDATION, seed=2357, shuffle=True)
    mapped = splits.map(encode, remove_columns=["text"], num_proc=workers)
    for split, rows in mapped.items():
        length = int(np.sum(rows["len"], dtype=np.uint64))
        tokens = np.memmap(output / f"{split}.bin", dtype=np.uint16, mode="w+", shape=(length,))
        shards, at = min(1024, len(rows)), 0
        for index in range(shards):
            shard = rows.shard(num_shards=shards, index=index, contiguous=True).with_format("numpy")
            ids = np.concatenate(shard["ids"])
            tokens[at : at + len(ids)] = ids
            at += len(ids)
        tokens.flush()


if __name__ == "__main__":
    command.run(main)
