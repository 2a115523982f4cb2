"""CORE: prompts and scores equal nanochat's; results are compared item by item, and files are checked."""

import json
import math
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from common.errors import BadInput
from evaluation.command_line import CoreCommand
from evaluation.comparison.compare import compare
from evaluation.core import bundle
from evaluation.core.bundle import LABELS, CoreTask, read_bundle
from evaluation.core.core import _read, answer_questions, measure, run
from evaluation.core.core_scores import is_published_data, reason_not_comparable, task_score
from evaluation.loss.held_out_loss import byte_lengths
from evaluation.shared.load import Trained
from evaluation.shared.model_location import ModelLocation
from model.config import ModelConfig
from model.generate import Sampling
from model.gpt import GPT, initialize
from tests.conftest import complete, write_run
from tests.evaluation.comparison.stored import core as scored
from tests.evaluation.comparison.stored import losses_on, output_of, refused, results, rows_of
from tests.evaluation.core.written_bundle import TASKS, items, write_bundle
from tests.loopback import serve_files
from tests.model.test_generate import generate
from tokens.tokenizer.loading import load_tokenizer
from training.config.train_config import load_run
from training.parallel.process_group import Ranks
from training.planning.stored_core import describe_core

CONTEXT = 128


def untrained(context: int = CONTEXT, *, head: bool = True) -> Trained:
    """Return a network with random weights and the tokenizer `bytes`. Without a head, all tokens are equally likely."""
    tokenizer = load_tokenizer("bytes")
    keys = {"context_length": context, "emb_dim": 32, "n_heads": 2, "n_layers": 2, "drop_rate": 0.0, "qkv_bias": True}
    network = GPT(ModelConfig(vocab_size=tokenizer.vocabulary_size, tie_weights=False, **keys))
    initialize(network, 0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.2)
        assert network.head is not None
        network.head.weight.mul_(float(head))
    return Trained(network.eval(), tokenizer, ModelLocation(Path("x"), None, Path("x")))


def tasks_of(folder: Path, names: str | None = None, count: int | None = None) -> dict[str, CoreTask]:
    return {task.entry.label: task for task in read_bundle(folder, names, count)[0]}


def spoken(row: dict[str, Any], delimiter: str) -> tuple[list[str], int]:
    """Return an item's texts, and the index of the correct text."""
    if "choices" in row:
        return [row["query"] + delimiter + choice for choice in row["choices"]], row["gold"]
    if "context_options" in row:
        return [option + delimiter + row["continuation"] for option in row["context_options"]], row["gold"]
    return [row["context"].strip() + delimiter + row["continuation"]], 0


@torch.no_grad()
def single(trained: Trained, row: list[int]) -> tuple[np.ndarray, list[int]]:
    """Return the loss of each token of a row except the first one, and the likeliest token at each position."""
    row_tokens = torch.tensor([row])
    logits = trained.network(row_tokens)[0, :-1].double()
    return -logits.log_softmax(1).gather(1, row_tokens[0, 1:, None])[:, 0].numpy(), logits.argmax(1).tolist()


def expected(trained: Trained, texts: list[str], gold: int, kind: str, before: str) -> tuple[bool, float]:
    """Return whether the answer is correct by nanochat's rule, and the bits per byte of the gold answer.

    The rows are computed one at a time.
    """
    end = trained.tokenizer.end_of_text_id
    rows = [[end, *text.encode()] for text in texts]
    if kind == "schema":
        common = next(n for n in range(1, 999) if len({tuple(row[-n - 1 :]) for row in rows}) > 1)
        counts = [common] * len(rows)
    else:
        common = next((n for n in range(min(map(len, rows))) if len({row[n] for row in rows}) > 1), None)
        counts = [len(row) - (min(map(len, rows)) if common is None else common) for row in rows]
    outputs = [single(trained, row[-CONTEXT:]) for row in rows]
    size = len(texts[gold].encode()) - len(before.rstrip().encode())
    bits = float(outputs[gold][0][-size:].sum()) / math.log(2) / min(size, CONTEXT - 1)
    if kind == "language_modeling":
        return outputs[0][1][-size:] == rows[0][-CONTEXT:][-size:], bits
    means = [float(nats[-n:].mean()) if n else math.nan for (nats, _), n in zip(outputs, counts, strict=True)]
    return means.index(min(means)) == gold, bits


def test_items_are_scored_as_in_nanochat(tmp_path: Path) -> None:
    trained, cut = untrained(), 0
    lengths, rows = byte_lengths(trained.tokenizer), items(23)
    tasks = tasks_of(write_bundle(tmp_path / "bundle"))
    for label, kind, shots, delimiter in TASKS:
        task, data = tasks[label], [*rows[kind]]
        random.Random(1337).shuffle(data)
        measured = answer_questions(trained, task, lengths, list(range(len(data))))
        for number, row in enumerate(data):
            indices = [index for index in range(len(data)) if index != number]
            chosen = random.Random(1234 + number).sample(indices, shots)
            examples = [spoken(data[index], delimiter) for index in chosen]
            shown = "".join(f"{texts[gold]}\n\n" for texts, gold in examples)
            texts, gold = spoken(row, delimiter)
            assert ["".join(prompt) for prompt in task.prompts(number)] == [shown + text for text in texts]
            before = task.prompts(number)[gold][0]
            right, bits = expected(trained, [shown + text for text in texts], gold, task.entry.icl_task_type, before)
            assert measured[number][:2] == (right, pytest.approx(bits, rel=1e-5))
        cut += sum(answer[2] for answer in measured)
    assert 0 < cut < 23 * len(TASKS)


def test_greedy_continuation_is_a_hit(tmp_path: Path) -> None:
    trained, rows = untrained(), []
    for text in ("the first one", "another", "a third", "the last of these"):
        prompt = [trained.begin_id, *text.encode()]
        ids = generate(trained.network, prompt, 40, Sampling(temperature=0))
        size = next((n for n, byte in enumerate(ids) if not 33 <= byte < 127), 0)
        spelled = trained.decode(ids[:size])
        rows += [{"context": text, "continuation": spelled + more} for more in ("", "\x00") if spelled]
    task = tasks_of(write_bundle(tmp_path / "bundle", language=rows), "language_0")["language_0"]
    hits = [
        hit for hit, _, _ in answer_questions(trained, task, byte_lengths(trained.tokenizer), list(range(len(rows))))
    ]
    assert rows and hits == [not question.continuations[0].endswith("\x00") for question in task.questions]


def test_untrained_network_scores_zero(tmp_path: Path, alone: Ranks) -> None:
    tasks, data = read_bundle(write_bundle(tmp_path / "bundle", 200), "choice_0,schema_0,language_0", None)
    record, text = measure(untrained(64, head=False), (tasks, data), alone)
    assert 0 < record["core_error"] < 0.05
    assert abs(record["core"]) < 3 * record["core_error"]
    assert record["gold_bits_per_byte"] == pytest.approx(math.log2(257), rel=1e-5)
    assert "centered, mean of 3 tasks: " in text and "choice_0" in text


def test_items_in_the_training_data_are_left_out(tmp_path: Path, alone: Ranks) -> None:
    draw = random.Random(0)
    names = [f"{draw.getrandbits(128):x}" for _ in range(20)]
    choice = [{"query": name[:16], "choices": [name[16:], "no"], "gold": 0} for name in names[:10]]
    language = [{"context": name[:16], "continuation": name[16:]} for name in names[10:]]
    folder = write_bundle(tmp_path / "bundle", choice=choice, language=language)
    tasks, trained = read_bundle(folder, "choice_0,language_0", None), untrained(64)
    trained_on = "".join([*(f"{name[:16]} {name[16:]}" for name in names[:4]), *names[10:]])
    (folder := tmp_path / "train").mkdir()
    save_file({"tokens": np.frombuffer(trained_on.encode(), np.uint8).astype(np.uint16)}, folder / "train.safetensors")
    plain, _ = measure(trained, tasks, alone)
    record, text = measure(trained, tasks, alone, folder)
    clean = record.pop("untouched")
    assert record == plain and clean["items"] == {"choice_0": 6} and 0 < clean["gold_bits_per_byte"] < 20
    assert f"only the 6 items that do not share 13 tokens in a row with {folder}: centered, mean of 1 task:" in text


@pytest.mark.slow
def test_one_rank_and_two_store_the_same_bits(token_files: Path, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", write_bundle(tmp_path / "bundle")
    complete(write_run(run, token_files, {"context_length": CONTEXT}, validation_sequences=2), "--max-steps", "2")
    for ranks in (1, 2):
        done = output_of("core", run, "--bundle", folder, "--count", "20", "--device", "cpu", ranks=ranks)
    first, second = ({**result, "time": ""} for result in results(run))
    assert first == second  # all bits are equal
    assert "bundle: 120 items of 6 tasks" in done and "gold answers" in done
    assert "Published CORE scores are not comparable, because at most 20 items per task" in done
    [line] = describe_core(load_run(run, []))
    assert line.startswith(f"core         {first['core']:.4f} ± {first['core_error']:.4f}, run step-0000000")
    message = refused("core", run, "--bundle", folder, "--tasks", "choice_00")
    assert "--tasks: got 'choice_00'; did you mean 'choice_0'?" in message


def test_tasks_without_hits_have_an_error(tmp_path: Path) -> None:
    bits = np.ones(200)
    none, all_of_them = (task_score("f", 0.25, np.full(200, hit), bits) for hit in (False, True))
    assert (
        none["centered_error"] == pytest.approx(all_of_them["centered_error"]) == pytest.approx(0.0049 / 0.75, abs=1e-4)
    )
    a, b = scored(tmp_path / "a", 0, 1.0), scored(tmp_path / "b", 0, 1.01)
    (row, _), statements = compare(rows_of(a, b)).rows[:2], compare(rows_of(a, b)).statements
    assert re.fullmatch(r"-0\.3333 ± 0\.00[1-9]\d", row[1].text)
    statements = [line for line in statements if line.startswith("CORE: a and b do not differ significantly: 0.0000 [")]
    assert statements and "[0.0000, 0.0000]" not in statements[0]


def test_models_are_compared_item_by_item(tmp_path: Path) -> None:
    a, b = scored(tmp_path / "a", 120, 1.0), scored(tmp_path / "b", 130, 1.01)
    comparison = compare(rows_of(a, b))
    assert comparison.columns == ["model", "CORE", "gold bits/byte"]
    # The models differ on 10 of 200 items, each worth 4/3. There are 20 files with one task and a file with two tasks,
    # so the error is sqrt(20 + 4) / 22 times the error of a single file. For the error, two items are added: one on
    # which the models agree, and one on which they differ, which counts half for each model.
    difference, error = 0.05 / 0.75, math.sqrt((11 / 202 - (10 / 202) ** 2) / 202) / 0.75 * math.sqrt(24) / 22
    bounds = f"{difference:.4f} [{difference - 1.96 * error:.4f}, {difference + 1.96 * error:.4f}]"
    assert any(
        line.startswith(f"CORE: a is below b by {bounds} of the centered score") for line in comparison.statements
    )
    assert any(line.startswith("gold bits/byte: a is below b by 0.0100 [0.0100,") for line in comparison.statements)
    assert [row[0].text for row in comparison.rows[2:]] == [
        f"OpenAI GPT-2 {size}, published" for size in ("small", "medium", "large", "XL")
    ]
    part = compare(rows_of(scored(tmp_path / "c", 90, 1.0, count=200), scored(tmp_path / "d", 90, 1.0, count=200)))
    assert part.columns == ["model", "CORE, part", "gold bits/byte, part"] and len(part.rows) == 2
    assert (
        compare(rows_of(losses_on(a), losses_on(scored(tmp_path / "e", 9, 1.0, sha256="c")))).notes[0].startswith("l")
    )


def test_download_is_recorded_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_bundle(tmp_path / "bundle")
    monkeypatch.chdir(tmp_path)
    with serve_files(tmp_path) as server:
        monkeypatch.setattr(bundle, "URL", f"{server.url}/eval_bundle.zip")
        downloaded, data = read_bundle(None, None, 9)
    local, source = read_bundle(folder, None, 9)
    assert downloaded == local and data == source | {"file": "runs/eval_bundle.zip"}
    assert read_bundle(None, "schema_0", None)[0] == read_bundle(folder, "schema_0", None)[0]  # the server has stopped
    with Path("runs/eval_bundle.zip").open("ab") as file:
        file.write(b"x")
    with pytest.raises(BadInput, match="its sha256 differs from the one in eval_bundle"):
        read_bundle(None, None, None)


def test_nanochat_archive_is_recognized_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    folder, different = write_bundle(tmp_path / "bundle"), write_bundle(tmp_path / "mine" / "bundle", 24)
    archive, downloaded = tmp_path / "eval_bundle.zip", Path("runs/eval_bundle.zip")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evaluation.core.core_scores.LABELS", labels := [task[0] for task in TASKS])

    def is_known(path: Path | None) -> bool:
        return is_published_data(read_bundle(path, None, None)[1], labels)

    downloaded.parent.mkdir()
    shutil.copy(archive, downloaded)
    assert not is_known(None) and not is_known(downloaded)  # the user has put the archive there
    assert "move it away" in reason_not_comparable(read_bundle(None, None, None)[1], LABELS)
    downloaded.unlink()
    with serve_files(tmp_path) as server:
        monkeypatch.setattr(bundle, "URL", f"{server.url}/eval_bundle.zip")
        assert is_known(None)
    assert is_known(None) and is_known(archive) and is_known(folder)
    assert not is_known(different) and not is_known(different.with_name("eval_bundle.zip"))
    downloaded.unlink()
    assert is_known(archive) and not is_known(folder)


BROKEN = [
    ("core.yaml", "icl_tasks: [", "core.yaml: while parsing"),
    ("core.yaml", "icl_tasks: [{label: x}]", "core.yaml: icl_task_type: missing"),
    (
        "eval_meta_data.csv",
        "Eval Task,Random baseline\nchoice_0,x\n",
        "choice_0: wanted a baseline",
    ),
    ("eval_meta_data.csv", "Eval Task,Random baseline\nchoice_0,100\n", "baseline 1, wanted"),
    ("eval_data/some/choice.jsonl", '{"query": "a"', "choice.jsonl: item 1: query, choices, gold: not JSON"),
    ("eval_data/some/choice.jsonl", '{"query": "a", "choices": ["b"]}', "gold: gold: got None, wanted an integer"),
    ("eval_data/some/choice.jsonl", '{"query": "a", "choices": ["b"], "gold": 1}', "got gold 1, wanted the index of"),
    ("eval_data/some/choice.jsonl", '{"query": 5, "choices": ["b"], "gold": 0}', "got 5, wanted a string"),
    ("eval_data/some/choice.jsonl", r'{"query": "\ud800", "choices": ["b"], "gold": 0}', "half a surrogate pair"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN, ids=map(str, range(len(BROKEN))))
def test_bundle_errors_name_file_and_item(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = write_bundle(tmp_path / "bundle")
    (folder / name).write_text(content)
    with pytest.raises(BadInput) as raised:
        read_bundle(folder, None, None)
    assert message in str(raised.value) and str(raised.value).isprintable()


def test_other_files_and_too_few_items_are_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle")
    (folder / "eval_data/some/schema.jsonl").unlink()
    (tmp_path / "other.zip").write_text(json.dumps({}))
    for path, count, message in (
        (folder, None, "eval_data/some/schema.jsonl: cannot be read: No such file"),
        (tmp_path / "other.zip", None, "core.yaml: cannot be read: File is not a zip file"),
        (tmp_path / "absent", None, "core.yaml: cannot be read: No such file"),
        (folder, 2, "choice_2: got 2 items, 2 examples before each, baseline 0.25, wanted more items than examples"),
    ):
        with pytest.raises(BadInput) as raised:
            read_bundle(path, None, count)
        assert message in str(raised.value)


def test_tasks_are_checked_before_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle, "URL", "http://127.0.0.1:9/eval_bundle.zip")
    monkeypatch.setattr("evaluation.core.core.measure_each", lambda *_: pytest.fail("a model would be loaded"))
    folder = write_bundle(tmp_path / "bundle")
    for at_hand, name, meant in ((None, "hellaswagg", "hellaswag"), (folder, "choice_00", "choice_0")):
        with pytest.raises(BadInput, match=f"--tasks: got '{name}'; did you mean '{meant}'"):
            run(CoreCommand(("owner/model",), tasks=name, bundle=at_hand))


def test_published_scores_need_the_same_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = {"file": "runs/eval_bundle.zip", "sha256": "a", "count": None}
    assert is_published_data(complete, LABELS)
    for changed in (complete | {"count": 60}, complete | {"file": "mine/eval_bundle.zip"}):
        assert not is_published_data(changed, LABELS)
    assert not is_published_data(complete, LABELS[1:])
    assert not is_published_data(complete, [*LABELS[1:], "mine"])

    printed = []
    for command in (CoreCommand(("m",)), CoreCommand(("m",), count=60), CoreCommand(("m",), bundle=Path("b.zip"))):
        data = complete | {"count": command.count, "file": str(command.bundle or "runs/eval_bundle.zip")}
        tasks = [SimpleNamespace(entry=SimpleNamespace(label=label), questions=[]) for label in LABELS]
        monkeypatch.setattr("evaluation.core.core.read_bundle", lambda *_, bundle_content=(tasks, data): bundle_content)
        _read(command, [])
        printed.append(capsys.readouterr().out.splitlines()[1])
    assert "GPT-2 XL 0.2565" in printed[0]
    assert printed[1:] == [
        "Published CORE scores are not comparable, because at most 60 items per task are measured here",
        "Published CORE scores are not comparable, because b.zip is not known to be nanochat's archive; to use the "
        "archive, leave out --bundle",
    ]
    compared = compare(
        rows_of(scored(tmp_path / "a", 9, 1.0, file="b.zip"), scored(tmp_path / "b", 9, 1.0, file="b.zip"))
    )
    assert len(compared.rows) == 2
    assert any(note.startswith("The published CORE scores of OpenAI's GPT-2 are left out") for note in compared.notes)
