"""HellaSwag is counted as build-nanogpt counts it, on any number of ranks; items are read whole, or one is named."""

import json
import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.numpy import save_file

from common.errors import BadInput
from common.files import sha256
from evaluation.comparison.compare import compare
from evaluation.hellaswag.hellaswag import Item, accuracy, completion, likeliest, read_items
from evaluation.loss.choice_losses import Choice
from evaluation.shared.load import load, locate
from tests.conftest import complete, shared, write_run
from tests.evaluation.comparison.stored import hellaswag as stored
from tests.evaluation.comparison.stored import refused, results, rows_of, said
from tests.evaluation.hellaswag.written_items import ITEM, write_items
from tests.hub_server import environment as at_hub
from tests.hub_server import serve
from tokens.search.overlap import forms, open_comparable, touched
from tokens.tokenizer.loading import load_tokenizer

CONTEXT = 96


def item(**changes: Any) -> Item:
    row = ITEM | changes
    return Item(**{field.name: row[field.name] for field in attrs.fields(Item)})


def hellaswag(*arguments: str | Path, ranks: int = 1, environment: dict[str, str] | None = None) -> str:
    return said("hellaswag", *arguments, "--device", "cpu", ranks=ranks, environment=environment)


@pytest.fixture(scope="module")
def trained(token_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, keys = tmp_path_factory.mktemp("hellaswag") / "run", {"context_length": CONTEXT}
    complete(write_run(run, token_files, keys, validation_sequences=2), "--max-steps", "2")
    return run


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
    assert f"; {cut} items were cut to the context" in done
    assert "GPT-2 124M: acc 0.2859, acc_norm 0.2955 on all 10,042" in done
    assert f": acc {first['completion']['acc']:.4f} ± " in done


def test_items_that_the_training_data_holds_are_left_out_of_a_second_accuracy(trained: Path, tmp_path: Path) -> None:
    rows = write_items(tmp_path / "items.jsonl")
    texts = [f"{row['ctx']} {row['endings'][row['label']]}" for row in rows]
    data = np.frombuffer(f"he said: {texts[0]} {texts[5]} {texts[36]}".encode(), np.uint8).astype(np.uint16)
    save_file({"tokens": data}, tmp_path / "train.safetensors")
    words: list[str | Path] = [trained, "--data", tmp_path / "items.jsonl"]
    done = [hellaswag(*words, "--against", tmp_path, ranks=ranks) for ranks in (1, 2)]
    hellaswag(*words)
    *twice, plain = results(trained)[-3:]
    found = twice[0].pop("untouched")
    assert found == twice[1].pop("untouched") and "untouched" not in plain
    assert {**twice[0], "time": ""} == {**plain, "time": ""}
    model = load(locate(str(trained), None), None, torch.device("cpu"))
    items = [forms(model.tokenizer, text) for text in texts]
    overlap = touched([open_comparable(tmp_path, "train", model.tokenizer)], items)
    hits = np.unpackbits(np.frombuffer(bytes.fromhex(plain["completion"]["hits"]), np.uint8))[: len(rows)]
    assert overlap[[0, 5, 36]].all() and found["items"] == len(rows) - overlap.sum() > 0
    assert found["completion"]["acc"] == hits[~overlap].mean()
    assert f"items without 13 tokens of {tmp_path}: acc {found['completion']['acc']:.4f}" in done[0]


def test_the_hubs_parquet_counts_as_the_file_does(trained: Path, tmp_path: Path) -> None:
    rows = write_items(tmp_path / "items.jsonl")
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist([{**row, "label": str(row["label"])} for row in rows])
    pyarrow.parquet.write_table(table, folder / "validation-00000-of-00001.parquet")
    pyarrow.parquet.write_table(table.slice(0, 1), folder / "train-00000-of-00001.parquet")
    with serve({"Rowan/hellaswag": tmp_path / "hub"}) as hub:
        hub.new = tmp_path / "cache"
        hellaswag(trained, "--count", "9", environment=at_hub(hub, None))
        absent = refused("hellaswag", trained, "--data", "owner/absent", environment=at_hub(hub, None))
        assert "owner/absent: no such file, and no dataset available on the hub" in absent
        assert not any("train-00000" in line for line in hub.requests if line.startswith("GET"))
    hellaswag(trained, "--count", "9", "--data", tmp_path / "items.jsonl")
    there, here = ({**result, "time": "", "data": ""} for result in results(trained)[-2:])
    assert there == here
    assert there["items"] == 9
    assert results(trained)[-2]["data"]["file"] == "Rowan/hellaswag validation-00000-of-00001.parquet"


def test_what_is_encoded_is_what_others_publish_and_of_equal_choices_the_first_counts() -> None:
    tokenizer = load_tokenizer(str(shared("gpt2.tiktoken")))
    spoken = [tokenizer.decode(choice.tokens.tolist()) for choice in completion(item(), tokenizer)]
    assert spoken[1] == "A man is on a roof. he sings."
    assert likeliest([np.array(nats) for nats in ([4.0], [1.5, 1.5], [1.0] * 4, [9.0])]) == (1, 2)
    assert likeliest([np.array(nats) for nats in ([4.0], [4.0], [4.0, 4.0], [9.0])]) == (0, 0)
    hit = np.array([True])
    none = {"acc_error": None, "acc_norm_error": None}
    assert accuracy(hit, ~hit) == {"acc": 1.0, "acc_norm": 0.0, "hits": "80", "hits_norm": "00", **none}


def test_items_are_compared_one_by_one(tmp_path: Path) -> None:
    a = stored(tmp_path / "a", set(range(300)))
    b = stored(tmp_path / "b", set(range(330)))  # right wherever a is
    c = stored(tmp_path / "c", set(range(400, 730)))
    found = compare(rows_of(a, b))
    # 30 of 1000 differ, and one half more each way: 0.03 ± t * sqrt((31 / 1002 - (30 / 1002)**2) / 1001)
    told = "HellaSwag, completion: a is below b by 0.0300 [0.0192, 0.0408] of all items; no winner"
    assert any(line.startswith(told) for line in found.statements)
    apart = compare(rows_of(a, c)).statements
    assert any("a and c do not differ significantly: -0.0300" in line for line in apart)  # the same means, other items
    assert "0.3000 ± 0.0150" in [cell.text for cell in found.rows[0]]
    same = compare(rows_of(a, stored(tmp_path / "d", set(range(300))))).statements  # the interval still has a width
    assert "HellaSwag, completion: a and d do not differ significantly: 0.0000 [-0.0020, 0.0020] of all items" in same
    assert [row[0].text for row in found.rows[2:]] == ["OpenAI GPT-2 small, published", "OpenAI GPT-2 XL, published"]


def test_items_are_those_of_the_file_up_to_a_count(tmp_path: Path) -> None:
    data = tmp_path / "items.jsonl"
    rows = write_items(data)
    items, source = read_items(str(data), 9)
    assert [(item.ctx, item.label) for item in items] == [(row["ctx"], str(row["label"])) for row in rows[:9]]
    assert source == {"file": str(data), "sha256": sha256(data)}
    table = pyarrow.Table.from_pylist([{**row, "label": str(row["label"])} for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "items.parquet")
    assert read_items(str(tmp_path / "items.parquet"), 9)[0] == items


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ITEM, '{"ind": 4, '], "line 2: not JSON"),
        ([ITEM, ITEM | {"endings": ["a", "b", "c"]}], "item 2: endings: got 3, wanted 4 texts"),
        ([ITEM | {"label": ""}], "item 1: label: got '', wanted 0 to 3; the test split has no labels"),
        ([ITEM | {"ctx": None}], "item 1: ctx: got None, wanted a string"),
        ([ITEM | {"ctx": " "}], "item 1: ctx: got ' ', wanted a text"),
        ([], "holds no items"),
        ([ITEM] * 4, "--count: got 5, but"),
    ],
    ids=["json", "endings", "label", "null", "ctx", "none", "count"],
)
def test_items_that_cannot_be_scored_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    data = tmp_path / "items.jsonl"
    data.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    with pytest.raises(BadInput) as raised:
        read_items(str(data), 5 if "count" in message else None)
    assert message in str(raised.value)
    (tmp_path / "items.parquet").write_bytes(b"PAR1")
    for name, problem in (("items.parquet", "items.parquet: damaged: "), ("a.jsonl", "a.jsonl: no such file; wanted")):
        with pytest.raises(BadInput, match=problem):
            read_items(str(tmp_path / name), None)
