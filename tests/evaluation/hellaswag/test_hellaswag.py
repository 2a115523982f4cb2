"""HellaSwag is counted as build-nanogpt counts it, on any number of ranks, from a file as from the hub."""

import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from evaluation.hellaswag.hellaswag import Choice, accuracy, completion
from evaluation.hellaswag.items import Item
from evaluation.shared.load import load, locate
from tests.conftest import shared, train, write_run
from tests.evaluation.comparison.stored import evaluate, results
from tests.evaluation.hellaswag.written_items import ITEM, write_items
from tests.hub_server import environment as at_hub
from tests.hub_server import serve
from tokens.tokenizer.tokenizer import load_tokenizer

CONTEXT = 96


def item(**changes: Any) -> Item:
    row = ITEM | changes
    return Item(**{field.name: row[field.name] for field in attrs.fields(Item)})


def hellaswag(*arguments: str | Path, ranks: int = 1, environment: dict[str, str] | None = None) -> Any:
    return evaluate("hellaswag", *arguments, "--device", "cpu", ranks=ranks, environment=environment)


@pytest.fixture(scope="module")
def trained(token_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hellaswag") / "run"
    write_run(directory, token_files, {"context_length": CONTEXT}, validation_sequences=2)
    assert train(directory, "--max-steps", "2").returncode == 0
    return directory


@torch.no_grad()
def alone(network: Any, choice: Choice) -> float:
    """Return the log-probability of an ending, without a batch."""
    tokens = torch.from_numpy(choice.tokens[-(CONTEXT + 1) :].astype(np.int64))[None]
    logs = network(tokens[:, :-1])[0].double().log_softmax(1)
    each = logs.gather(1, tokens[0, 1:, None])[:, 0]
    return float(each[-choice.scored :].sum())


def test_hits_are_those_of_single_endings_on_any_number_of_ranks(trained: Path, tmp_path: Path) -> None:
    data = tmp_path / "items.jsonl"
    rows = write_items(data)
    for ranks in (1, 3):
        done = hellaswag(trained, "--data", data, ranks=ranks)
        assert done.returncode == 0, done.stderr
    first, other = ({**result, "time": ""} for result in results(trained))
    assert first == other  # every bit
    model = load(locate(str(trained), None), None, torch.device("cpu"))
    hits: dict[str, list[bool]] = {"hits": [], "hits_norm": []}
    cut = 0
    for row in rows:
        choices = completion(item(**row), model.tokenizer)
        likelihoods = [alone(model.network, choice) for choice in choices]
        means = [value / choice.scored for value, choice in zip(likelihoods, choices, strict=True)]
        hits["hits"].append(likelihoods.index(max(likelihoods)) == row["label"])
        hits["hits_norm"].append(means.index(max(means)) == row["label"])
        cut += any(len(choice.tokens) > CONTEXT + 1 for choice in choices)
    for key, short in (("hits", "acc"), ("hits_norm", "acc_norm")):
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(first["completion"][key]), np.uint8))[: len(rows)]
        assert bits.tolist() == hits[key]
        mean = sum(hits[key]) / len(rows)
        assert first["completion"][short] == mean
        assert first["completion"][f"{short}_error"] == pytest.approx(math.sqrt(mean * (1 - mean) / (len(rows) - 1)))
    assert 0 < cut < len(rows)
    assert first["cut"] == cut
    assert f"; {cut} items were cut to the context" in done.stdout
    assert "GPT-2 124M: acc 0.2859, acc_norm 0.2955 on all 10,042" in done.stdout
    assert f": acc {first['completion']['acc']:.4f} ± " in done.stdout


def test_the_hubs_parquet_counts_as_the_file_does(trained: Path, tmp_path: Path) -> None:
    rows = write_items(tmp_path / "items.jsonl")
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist([{**row, "label": str(row["label"])} for row in rows])
    pyarrow.parquet.write_table(table, folder / "validation-00000-of-00001.parquet")
    pyarrow.parquet.write_table(table.slice(0, 1), folder / "train-00000-of-00001.parquet")
    with serve({"Rowan/hellaswag": tmp_path / "hub"}) as hub:
        hub.new = tmp_path / "cache"
        done = hellaswag(trained, "--count", "9", environment=at_hub(hub, None))
        assert done.returncode == 0, done.stderr
        absent = hellaswag(trained, "--data", "owner/absent", environment=at_hub(hub, None))
        assert "owner/absent: no such file, and no dataset available on the hub" in absent.stderr
        assert not any("train-00000" in line for line in hub.requests if line.startswith("GET"))
    assert hellaswag(trained, "--count", "9", "--data", tmp_path / "items.jsonl").returncode == 0
    there, here = ({**result, "time": "", "data": ""} for result in results(trained)[-2:])
    assert there == here
    assert there["items"] == 9
    assert results(trained)[-2]["data"]["file"] == "Rowan/hellaswag validation-00000-of-00001.parquet"


def test_what_others_publish_is_what_is_encoded() -> None:
    tokenizer = load_tokenizer(str(shared("gpt2.tiktoken")))
    spoken = [tokenizer.decode(choice.tokens.tolist()) for choice in completion(item(), tokenizer)]
    assert spoken[1] == "A man is on a roof. he sings."


def test_of_equal_choices_the_first_counts() -> None:
    choices = [Choice(np.zeros(9), scored) for scored in (1, 2, 4, 1)]
    found = accuracy(np.array([-4.0, -3.0, -4.0, -9.0]), choices, [2])
    assert (found.acc, found.acc_norm, found.acc_error) == (0.0, 1.0, None)
    assert accuracy(np.array([-4.0, -4.0, -4.0, -9.0]), choices, [0]).acc == 1.0
