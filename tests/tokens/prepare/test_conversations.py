"""Conversations are packed into rows with weights and are never divided, and every bad record is reported."""

import gzip
import json
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from safetensors.numpy import load_file

from common.errors import BadInput, UsageError
from tests.tokens.preparing import CRASH, PREPARE, files_of, run, succeed, write
from tokens.documents.text_file import LONGEST_LINE
from tokens.format.manifest import open_listed, read_manifest
from tokens.prepare.command import PrepareCommand
from tokens.prepare.growing_tokens import GrowingTokens
from tokens.prepare.verify import status, verify
from tokens.stats.stats import stats
from tokens.tokenizer.loading import recorded_tokenizer
from tokens.tokenizer.template import TEMPLATES

T = 64
TURNS: dict[str, Any] = {"template": "turns", "context_length": T}
OPTIONS = ("--template", "turns", "--context-length", str(T), "--tokenizer", "bytes")
INLINE = ("--executor", "inline")
POINTS = {"ledger written": 3, "cut noted": 1, "headers written": 1, "file named": 2, "manifest written": 1}


def talk(*texts: Any, roles: tuple[str, ...] = ("user", "assistant") * 9) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


TALKS = [talk(f"Question {number}?", "yes " * (number % 9 + 1)) for number in range(100)]


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def rows_of(directory: Path, split: str = "train") -> list[tuple[str, str]]:
    """For each row, return its text without padding, and the text of its tokens that count in the loss."""
    manifest = read_manifest(directory)
    assert manifest is not None
    stream, tokenizer = open_listed(directory, split, manifest), recorded_tokenizer(manifest.tokenizer, directory)
    length = stream.context_length or 0
    ids, weights = stream.read(0, stream.length), np.empty(stream.length, np.uint8)
    stream.read_weights_into(weights, 0)
    assert (len(ids) % length, ids[-1], weights[-1]) == (1, tokenizer.end_of_text_id, 0)
    rows = zip(ids[:-1].reshape(-1, length), weights[:-1].reshape(-1, length), strict=True)
    padding, decode = re.compile(f"({re.escape(tokenizer.end_of_text)})*$"), tokenizer.decode
    return [(padding.sub("", decode(row.tolist())), decode(row[on > 0].tolist())) for row, on in rows]


def test_a_row_has_complete_conversations_with_weighted_answers(tmp_path: Path) -> None:
    talks = [talk("Hello", "Hi", "More", "A"), talk("Be short", "1+1?", "2", roles=("system", "user", "assistant"))]
    manifest = write(tmp_path / "out", lines(tmp_path / "a.jsonl", talks), **TURNS)
    first = "<|user|>Hello<|end|><|assistant|>Hi<|end|><|user|>More<|end|><|assistant|>A<|end|><|endoftext|>"
    text = f"{first}<|system|>Be short<|end|><|user|>1+1?<|end|><|assistant|>2<|end|>"
    assert rows_of(tmp_path / "out") == [(text, "Hi<|end|>A<|end|>2<|end|>")]
    tensors = load_file(tmp_path / "out" / "train.safetensors")  # safetensors' own reader
    tensor_types = {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()}
    assert tensor_types == {"tokens": ("uint16", (T + 1,)), "weights": ("uint8", (T + 1,))}
    padding = T - (7 + 4 + 6 + 3 + 1) - (10 + 6 + 3 + 1)
    assert manifest.rows is not None and (manifest.rows.counted_tokens, manifest.rows.padding_tokens) == (7, padding)
    assert (manifest.documents, manifest.tokens, manifest.tokenizer.vocabulary_size) == (2, T + 1, 261)
    assert manifest.tokenizer.template == TEMPLATES["turns"].text


def test_alpaca_answers_end_with_the_end_of_text(tmp_path: Path) -> None:
    records = [{"instruction": "Add.", "input": "1, 2", "output": "3"}, {"instruction": "Say a.", "output": "a"}]
    write(tmp_path / "out", lines(tmp_path / "a.jsonl", records), template="alpaca", context_length=300)
    head = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    first = f"{head}\n\n### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n3"
    second = f"{head}\n\n### Instruction:\nSay a.\n\n### Response:\na"
    assert rows_of(tmp_path / "out") == [(first, "3<|endoftext|>"), (second, "a<|endoftext|>")]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    data = lines(tmp_path / "a.jsonl", ["", *TALKS]).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.json").write_text("\ufeff\n" + " " * LONGEST_LINE + json.dumps(TALKS))
    (tmp_path / "d.json.zst").write_bytes(zstandard.ZstdCompressor().compress(json.dumps(TALKS, indent=1).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TALKS), tmp_path / "e.parquet", row_group_size=30)
    sources = sorted(path for path in tmp_path.iterdir() if path.is_file())
    for path in sources:
        write(tmp_path / "out" / path.name, path, **TURNS)
        assert rows_of(tmp_path / "out" / path.name) == rows_of(tmp_path / "out" / "a.jsonl")
    assert len(sources) == 5


QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
BAD = [
    (talk("a", "b", "c", roles=("user", "user", "assistant")), "roles out of order: message 2: got user, wanted assis"),
    (talk("a", "b", "c", roles=("user", "assistant", "system")), "roles out of order: message 3: got system, wanted u"),
    (talk("a", "b", roles=("user", "tool")), "unknown role: message 2: got 'tool', wanted system, user, assistant"),
    (talk("a", " \n"), r"empty message: message 2: got ' .n', wanted text that is not blank"),
    (talk([{"type": "text"}], "b"), "not a string: message 1: got .*text"),
    (talk("a"), "no answer: no message has the role assistant"),
    (talk(), "no answer"),
    (talk("<|end|>", "b"), "special token in a text: message 1: contains <!end!>, which only the template may"),
    (talk("a", "b <|endoftext|>"), "special token in a text: message 2: contains <!endoftext!>"),
    (talk("a", "b" * T), rf"too long: got {T + 6} tokens, wanted at most {T} \(--context-length\)"),
    (talk("a", "b" + " " * 500_000), "no text: message 2: 500,000 or more characters of white space"),
    (
        {"messages": "a"},
        "no conversation: got messages, wanted a list 'messages', a list 'conversations', 'instruction",
    ),
    ("[1]", "no conversation: got .1., wanted"),
    ("{", "not JSON: "),
    (json.dumps(talk("a", "b"))[:-1] + ', "messages": []}', "field given twice: the record: has 'messages' twice"),
    (
        json.dumps(talk("a", "b")).replace('"b"', '"b", "content": "c"'),
        "field given twice: message 2: has 'content' twice; remove one of them",
    ),
    (talk("a", "b") | {"train": False}, "no conversation: got 'train': False, but every answer counts in the loss"),
    ({"instruction": "a", "output": 7}, "not a string: message 2: got 7"),
    ({"instruction": "a", "input": {"x": 1}, "output": "b"}, "not a string: input: got .*, wanted a string"),
    *[
        (talk("a", "b") | {name: value}, f"no conversation: got '{name}', which is not supported")
        for name, value in (("tools", [1]), ("images", ["a.png"]), ("rejected", [{}]), ("system", "S"))
    ],
    *[
        (
            {"messages": [QUESTION, ANSWER | {name: value}]},
            f"no message: message 2: got '{name}', wanted only role and c",
        )
        for name, value in (
            *[(name, "hm") for name in ("thinking", "reasoning_content", "name", "refusal", "of tomorrow")],
            *[
                ("tool_calls", [{}]),
                ("function_call", {"a": 1}),
                ("audio", {"id": 1}),
                ("ignored", False),
                ("extra", 0),
            ],
        )
    ],
    *[
        ({"messages": [QUESTION, ANSWER | {name: value}]}, f"no message: message 2: got '{name}': {value!r} for assis")
        for name, value in (("train", False), ("weight", 0), ("weight", 0.5), ("loss", "true"), ("training", "yes"))
    ],
    (
        {"messages": [QUESTION | {"train": True}, ANSWER]},
        "no message: message 1: got 'train': True for user, but every",
    ),
    (
        {"messages": [QUESTION | {"content": None}, ANSWER]},
        "not a string: message 1: got None, wanted a string, or a list",
    ),
    (
        {"messages": [QUESTION | {"content": 7}, ANSWER]},
        "not a string: message 1: got 7, wanted a string, or a list of",
    ),
    ({"messages": [QUESTION | {"role": ["user"]}, ANSWER]}, "unknown role: message 1: got .'user'., wanted system"),
    (
        talk([{"type": "image_url", "image_url": "x"}], "b"),
        "not a string: message 1: got a part .*image_url.*, wanted a",
    ),
    (
        talk([{"type": "text", "text": None}], "b"),
        "not a string: message 1: got a part .*None.*, wanted a string, or a",
    ),
    (talk([{"type": "text", "text": "a", "cache": 1}], "b"), "not a string: message 1: got a part with 'cache', want"),
    (talk([], "b"), "empty message: message 1: got ''"),
    (
        talk("a", "b") | {"prompt": "c", "completion": "d"},
        "no conversation: got a conversation both as 'messages' and as 'prompt' and",
    ),
    (
        {"prompt": "a", "completion": [ANSWER]},
        "not a string: prompt and completion: got 'a' and .*, wanted two strings, or",
    ),
    ({"prompt": "a", "completion": 7}, "not a string: prompt and completion"),
    (
        {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]},
        "answer in a prompt: every answer counts in the",
    ),
    ({"prompt": [QUESTION], "completion": [ANSWER, QUESTION]}, "question in a completion: wanted only an answer"),
    ({"prompt": "a"}, "no conversation: got prompt, wanted a list 'messages', .* or 'prompt' and 'completion'"),
    (
        {"conversations": [{"from": "tool", "value": "a"}]},
        "unknown role: message 1: got 'tool', wanted system, user, a",
    ),
    ({"conversations": [{"from": "human", "value": "a", "content": "b"}]}, "unknown role: message 1: got None"),
    ({"messages": [{"from": "human", "value": "a"}]}, "unknown role: message 1: got None, wanted system, user"),
]


@pytest.mark.parametrize(("record", "message"), BAD, ids=[message.partition(":")[0] for _, message in BAD])
def test_a_bad_conversation_is_left_out_and_named(tmp_path: Path, record: Any, message: str) -> None:
    manifest = write(tmp_path / "out", lines(tmp_path / "a.jsonl", [TALKS[0], record, TALKS[1]]), **TURNS)
    assert (manifest.documents, manifest.lost_documents, manifest.text_bytes) == (2, 1, 12 + 4 + 12 + 8)
    [[example]] = manifest.examples.values()
    assert re.match(f"{tmp_path}/a.jsonl: line 2: {message}", example.replace("|", "!")), example


EMPTY: dict[str, Any] = {"tool_calls": [], "function_call": None, "thinking": " ", "audio": {}, "name": ""}
PARTS = [{"type": "text", "text": "a", "cache": None}, {"text": "", "type": "text"}]
SAME = [
    {"messages": [QUESTION | EMPTY, ANSWER | EMPTY | {"weight": 1, "train": True}]},
    {"messages": [QUESTION | {"weight": 0, "loss": False}, ANSWER]} | dict.fromkeys(("tools", "system"), " "),
    {
        "messages": [QUESTION | {"content": PARTS}, ANSWER | {"content": [{"type": "text", "text": "b"}]}],
        "instruction": "",
        "output": None,
    },
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}]},
    {"conversations": [QUESTION, ANSWER], "messages": []},
    {"prompt": "a", "completion": "b"},
    {"prompt": [QUESTION], "completion": [ANSWER]},
    *[{"instruction": "a", "input": nothing, "output": "b"} for nothing in ("", " ", None, [], {})],
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_form_gives_the_same_conversation(tmp_path: Path, kind: str) -> None:
    for number, record in enumerate(SAME):
        source = lines(tmp_path / f"{number}.jsonl", [record])
        if kind == "parquet":
            # Parquet cannot store some of these records.
            with suppress(pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
                source = tmp_path / "a.parquet"
        manifest = write(tmp_path / f"{number}", source, **TURNS)
        expected_row = ("<|user|>a<|end|><|assistant|>b<|end|>", "b<|end|>")
        assert rows_of(tmp_path / f"{number}") == [expected_row], (record, manifest.examples)


def test_developer_and_system_messages_are_the_same(tmp_path: Path) -> None:
    talks = [talk("S", "Q", "A", roles=(role, "user", "assistant")) for role in ("developer", "system")]
    share_gpt = [{"from": role, "value": text} for role, text in (("system", "S"), ("human", "Q"), ("gpt", "A"))]
    write(tmp_path / "out", lines(tmp_path / "a.jsonl", [*talks, {"conversations": share_gpt}]), **TURNS)
    row = "<|system|>S<|end|><|user|>Q<|end|><|assistant|>A<|end|>"
    assert [text.count(row) for text, _ in rows_of(tmp_path / "out")] == [3]


def test_unread_fields_are_counted_by_name(tmp_path: Path) -> None:
    more = {"id": 7, "text": "t", "prompt": "a", "tags": [], "input": "x"}
    talks = [{"messages": [QUESTION | {"id": "q"}, ANSWER | {"id": "a"}]} | more] * 3 + [talk("a", "b")] * 2
    counts = {"'id'": 3, "'input'": 3, "'messages[].id'": 3, "'prompt'": 3, "'text'": 3}
    expected_problems = {f"with a field {name} that is not read": count for name, count in counts.items()}
    manifest = write(tmp_path / "out", lines(tmp_path / "a.jsonl", talks), **TURNS)
    assert (manifest.documents, manifest.lost_documents, manifest.problems) == (5, 0, expected_problems)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(talks), tmp_path / "a.parquet")
    # An unread column is counted in every row, even where it is empty.
    columns = {"'id'", "'input'", "'prompt'", "'tags'", "'text'"}
    expected_problems = {f"with a field {name} that is not read": 5 for name in columns} | {
        list(expected_problems)[2]: 3
    }
    assert write(tmp_path / "columns", tmp_path / "a.parquet", **TURNS).problems == expected_problems
    many = [talk("a", "b") | {f"{number:02}" * 99: 1} for number in range(50)]
    assert len(write(tmp_path / "many", lines(tmp_path / "b.jsonl", many), **TURNS).problems) == 31


def test_a_template_with_a_different_prompt_is_refused(tmp_path: Path) -> None:
    text = TEMPLATES["turns"].text.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|>\n' }}")
    (tmp_path / "a.jinja").write_text(text)
    source = lines(tmp_path / "a.jsonl", TALKS)
    with pytest.raises(
        BadInput, match=r"a\.jinja: .* differs from the prompt that asks for it: the prompt ends '.*<.assistant.>.n'"
    ):
        write(tmp_path / "out", source, template=str(tmp_path / "a.jinja"), context_length=T)
    (tmp_path / "a.jinja").write_text(TEMPLATES["turns"].text + "{{ 'no' if '7' in messages[-1].content }}")
    manifest = write(tmp_path / "some", source, template=str(tmp_path / "a.jinja"), context_length=T)
    # The prompt of a question with a 7 ends with "no", but the text of the conversation does not.
    assert manifest.problems == {"cannot be encoded": 19}


def test_an_unsupported_column_is_refused_only_with_values(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([talk("a", "b") | {"system": system} for system in ("Be brief.", "", None)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    manifest = write(tmp_path / "out", tmp_path / "a.parquet", **TURNS)
    assert (manifest.documents, manifest.problems) == (2, {"no conversation": 1})


@pytest.mark.parametrize("field", ["train", "weight", "training", "loss", "tools", "id"])
def test_a_field_means_the_same_in_every_format(tmp_path: Path, field: str) -> None:
    values = ["k", "k"] if field in ("tools", "id") else [0, 1]
    talks = [talk("a", "b") | {field: value} for value in values] + [talk("c", "d")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(talks), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(talks))
    outcomes = []
    for number, source in enumerate((tmp_path / "a.json", tmp_path / "a.parquet", lines(tmp_path / "a.jsonl", talks))):
        manifest = write(tmp_path / f"{number}", source, **TURNS)
        outcomes.append((manifest.documents, manifest.lost_documents, rows_of(tmp_path / f"{number}")))
        assert (field == "id") == (manifest.lost_documents == 0)
        assert (field == "tools") == (f"with a field '{field}' that is not read" not in manifest.problems)
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_refused_and_unanswered_messages_are_counted(tmp_path: Path) -> None:
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (tmp_path / "a.jinja").write_text(refusal + TEMPLATES["turns"].text)
    talks = [talk("a", "b", "c"), talk("s", "a", "b", roles=("system", "user", "assistant"))]
    source = lines(tmp_path / "a.jsonl", talks)
    manifest = write(tmp_path / "out", source, template=str(tmp_path / "a.jinja"), context_length=T)
    assert rows_of(tmp_path / "out") == [("<|user|>a<|end|><|assistant|>b<|end|>", "b<|end|>")]
    assert (manifest.problems, manifest.lost_documents) == ({"unanswered message": 1, "cannot be encoded": 1}, 1)
    (tmp_path / "a.jinja").write_text(TEMPLATES["turns"].text.replace("<|end|>", "\n\n"))
    with pytest.raises(BadInput, match="not every answer ends with a special token, so a model would not learn"):
        write(tmp_path / "endless", source, template=str(tmp_path / "a.jinja"), context_length=T)


def test_too_many_bad_conversations_give_status_1(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text(json.dumps(TALKS)[:-9])
    (tmp_path / "no.json.gz").write_text("text")
    broken = run(PREPARE, tmp_path, lines(tmp_path / "a.jsonl", TALKS), "--output", tmp_path / "0", *OPTIONS, *INLINE)
    assert broken.returncode == 1 and "broken.json: after record 0: damaged file: not a JSON array: " in broken.stderr
    assert "no.json.gz: damaged file: Not a gzipped file" in broken.stderr
    for bad in (1, 2):
        source = lines(tmp_path / f"{bad}.jsonl", [*TALKS, *[talk("", "b")] * bad])
        done = run(PREPARE, source, "--output", tmp_path / f"{bad}", *OPTIONS, *INLINE)
        assert done.returncode == bad - 1 and f"{source}: line 101: empty message: message 1: got ''" in done.stderr


@pytest.mark.slow
def test_workers_kills_and_shards_do_not_change_rows(tmp_path: Path) -> None:
    fractions = ("--validation-fraction", "0.1", "--test-fraction", "0.015")  # test gets one row
    command = (lines(tmp_path / "a.jsonl", TALKS), *OPTIONS, *fractions, "--unit-bytes", "3000")
    succeed(PREPARE, *command, *INLINE, "--output", tmp_path / "inline")
    expected_files, names = files_of(tmp_path / "inline"), {path.name for path in (tmp_path / "inline").iterdir()}
    assert len(expected_files) == 3 and len(names) == 7
    for workers in "123":
        succeed(PREPARE, *command, "--workers", workers, "--output", tmp_path / workers)
        assert files_of(tmp_path / workers) == expected_files
    for point, time in POINTS.items():
        out = tmp_path / point
        killed = run(CRASH, *command, *INLINE, "--output", out, CRASH_AT=point, CRASH_TIME=str(time))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        succeed(PREPARE, *command, *INLINE, "--output", out)
        assert (files_of(out), {path.name for path in out.iterdir()}) == (expected_files, names), point
    succeed(PREPARE, *command, *INLINE, "--output", tmp_path / "shards", "--shard-tokens", str(2 * T))
    for split in ("train", "validation", "test"):
        assert rows_of(tmp_path / "shards", split) == rows_of(tmp_path / "inline", split)


def test_the_first_user_message_decides_the_split(tmp_path: Path) -> None:
    # The system message is always the same, so it must not decide the split.
    roles = ("system", "user", "assistant")
    talks = [talk("Be short.", f"Question {number % 50}?", f"{number}", roles=roles) for number in range(100)]
    source = lines(tmp_path / "a.jsonl", talks)
    write(tmp_path / "out", source, split="hash", validation_fraction=0.3, **TURNS)
    split_texts = {
        split: "".join(text for text, _ in rows_of(tmp_path / "out", split)) for split in ("train", "validation")
    }
    questions = {split: set(re.findall(r"Question \d+", text)) for split, text in split_texts.items()}
    assert not questions["train"] & questions["validation"] and len(questions["train"] | questions["validation"]) == 50
    write(tmp_path / "all", source, **TURNS)
    for split, seed in (("tail", 0), ("hash", 4)):  # with seed 4, the hash selects no document for validation
        manifest = write(tmp_path / split, source, split=split, split_seed=seed, validation_fraction=0.01, **TURNS)
        assert rows_of(tmp_path / split) + rows_of(tmp_path / split, "validation") == rows_of(tmp_path / "all")
        assert manifest.split is not None and manifest.split.from_tail == ["validation"] * (split == "hash")


def test_a_full_row_is_held_out_completely(tmp_path: Path) -> None:
    records = [{"instruction": str(number), "output": "a" * 31} for number in range(9)]  # each has 173 tokens
    options = {"template": "alpaca", "context_length": 173, "validation_fraction": 0.1}
    write(tmp_path / "out", lines(tmp_path / "a.jsonl", records), **options)
    assert [len(rows_of(tmp_path / "out", split)) for split in ("train", "validation")] == [8, 1]


def test_stats_distinguish_conversations_from_texts(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [talk("a", "b", "c", "d")] * 3)
    write(tmp_path / "out", source, template="alpaca", context_length=300)
    printed = "\n".join(stats(tmp_path / "out"))
    assert "out: 3 conversations of 6 texts, " in printed and "tokens per text " in printed
    assert "4 texts of train (66.67%), copies of" in printed and "document" not in printed.partition("drawn in")[0]


def test_other_commands_understand_conversations(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, lines(tmp_path / "a.jsonl", TALKS), **TURNS)
    assert "all unchanged" in verify(str(out))[0] and "in 100 documents" in "".join(status(str(out)))
    printed = "\n".join(stats(out))
    assert re.search(r"conversations +100 in rows of 64 tokens: \d+\.\d\d% count in the loss, \d+\.\d\d% are", printed)
    assert re.search(r"train .* 100 texts", printed)
    with pytest.raises(BadInput, match="conversations get their weights at the end; wait until then"):
        GrowingTokens(out)
    for changed in ({"template": "alpaca"}, {"context_length": 2 * T}, {"template": None, "context_length": None}):
        with pytest.raises(BadInput, match=r"started this preparation: (vocab|template|context|special)"):
            write(out, tmp_path / "a.jsonl", **TURNS | changed)
    data = bytearray((out / "train.safetensors").read_bytes())
    data[-9] ^= 1  # damages a weight
    (out / "train.safetensors").write_bytes(data)
    with pytest.raises(BadInput, match=r"train\.safetensors: damaged: got sha256"):
        verify(str(out))


UNFIT: list[tuple[dict[str, Any], str]] = [
    *[({name: None}, "--template and --context-length: conversations need both") for name in TURNS],
    ({"shard_tokens": 100}, "--shard-tokens 100: must be a multiple of --context-length 64"),
    *[
        ({name: "chars"}, "--template turns: cannot be combined with")
        for name in ("separator", "text_field", "tokenizer")
    ],
    ({"output": "s3://a/b", "shard_tokens": T}, "--template turns: cannot be combined with"),
]


def test_conflicting_options_are_refused_before_writing(tmp_path: Path) -> None:
    for options, message in UNFIT:
        with pytest.raises(UsageError, match=message):
            PrepareCommand(("a",), **{"output": "out"} | TURNS | options)
    (tmp_path / "a.md").write_text("text")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "b.parquet")
    lines(tmp_path / "c.jsonl", TALKS[:1])
    for name, message in {
        "a.md": r"a\.md: is text, but conversations are in .*name these, or use",
        "b.parquet": r"b\.parquet: has none of the columns messages, conversations, instruction, .*; it has text",
        "c.jsonl": "1 rows of 64 tokens are too few to hold out 1 for validation",
    }.items():
        with pytest.raises(BadInput, match=message):
            write(tmp_path / "out", tmp_path / name, validation_fraction=0.1, **TURNS)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock"}
