"""Bad inputs for the four scripts: what is damaged, and the command that meets it."""

import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import zstandard

from tests.conftest import forge_manifest, seal_again
from tests.long.fuzz.damage import (
    DEEP,
    ESCAPE,
    HUGE,
    JSON_DAMAGES,
    LARGE,
    MISSING,
    NO_FILE,
    NO_JSON,
    NO_OBJECT,
    Damage,
    at,
    cut,
    flip_bit,
    none,
    with_keys,
)
from tests.long.fuzz.workspace import Case
from training.config.foreign_keys import FOREIGN_KEYS
from training.config.train_config import KEYS

TRAIN = ("train.py", "{}/run", "--device", "cpu")
DRY_RUN = ("train.py", "{}/run", "--dry-run")
PREDICT = ("find_batch_size.py", "{}/run", "--predict", "l4")
MODEL_KEYS = {
    "export": ("n_embd", "n_head", "n_layer", "n_positions", "vocab_size", "activation_function", "model_type"),
    "rotary-export": (
        *("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size", "hidden_act"),
        *("intermediate_size", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
    ),
}
SMOKE = ("evaluate.py", "smoke", "{}/export", "--tokens", "2")
JUDGE = ("evaluate.py", "judge", "{}/answers/one.json", "{}/answers/two.json")
ASKING = (*JUDGE, "--model", "gpt-5.4-mini", "--prices", "{}/prices.json", "--verdicts", "{}/verdicts.jsonl")
PREPARE = ("prepare_data.py", "{}/texts/a.txt", "--output", "{}/prepared", "--tokenizer", "bytes")
NEWEST = "run/checkpoints/step-00000004"

WRONG = {  # values by the type that a key wants
    "int": (1.5, "8", True, [], {}, -1, HUGE, ESCAPE),
    "float": ("x", True, [], -1, float("nan"), HUGE**20),
    "bool": (0, 1, "true", [], HUGE),
    "str": (1, [], {}, "", ESCAPE, "x" * 100_000),
}
DATASETS = (1, "", [], {}, [{}], [1], ESCAPE, "absent", "x" * 5000, [{"dataset": "x", "weight": HUGE}])
COUNTS = ("0", "-1", "1.5", "x", "", str(HUGE), "9" * 5000, ESCAPE)
NUMBERS = ("0", "-1", "nan", "inf", "x", "", "1e999")
PLACES = ("/absent", "/dev/null", ESCAPE, "x" * 300, "{}/texts", "{}/texts/a.txt")
OVERRIDES = (
    *("x", "=", "a.b.c=1", "learning_rate=", "emb_dim=1", "model.emb_dim=31", f"{ESCAPE}=1", DEEP[:9000], "lr=1"),
    *("train.learning_rate=" + "[" * 5000, "cpu_threads=1000000000", f"random_seed={HUGE}", "microbatch_size=3"),
    *(f"global_batch_size={1 << 30}", "model.n_layers=10000000", f"model.vocab_size={1 << 24}"),
)
OPTIONS: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    TRAIN: {
        "--max-steps": COUNTS,
        "--hash-every": COUNTS,
        "--price-per-hour": NUMBERS,
        "--max-hours": NUMBERS,
        "--device": ("tpu", ESCAPE),
        "--resume": ("absent", "../..", ESCAPE, "/", "step-99999999", "x" * 300),
        "--token-files": PLACES,
        "--unknown": ("1",),
    },
    ("find_batch_size.py", "{}/run"): {"--predict": ("", ",", "gtx9000", ESCAPE, "l4,,x"), "--world-size": COUNTS},
    PREPARE: {
        "--validation-fraction": ("1", "-0.1", "nan", "x"),
        "--unit-bytes": COUNTS,
        "--shard-tokens": COUNTS,
        "--workers": COUNTS,
        "--split-seed": ("-1", "x", str(HUGE)),
        "--tokenizer": ("absent.tiktoken", "/dev/null", "{}/texts/a.txt", ESCAPE, "{}"),
        "--output": ("/dev/null", "{}/texts/a.txt", "{}/texts/a.txt/x", "/proc/x", "s3:///", "x" * 300),
        "--executor": ("x",),
    },
    ("evaluate.py", "smoke", "{}/run"): {
        "--tokens": COUNTS,
        "--top-k": COUNTS,
        "--temperature": ("-1", "nan", "x"),
        "--checkpoint": ("absent", "../../x", ESCAPE),
        "--tokenizer": ("absent", "/dev/null", ESCAPE),
    },
    ("evaluate.py", "loss", "{}/run"): {"--tokens": ("/absent", "/dev/null", ESCAPE), "--count": COUNTS},
    JUDGE: {"--orders": COUNTS, "--max-usd": NUMBERS, "--timeout": NUMBERS, "--concurrency": COUNTS},
}
WITH_A_PLACE = (
    *(("train.py",), ("find_batch_size.py",), ("prepare_data.py", "verify"), ("prepare_data.py", "status")),
    *(("evaluate.py", "smoke"), ("evaluate.py", "loss"), ("evaluate.py", "compare")),
)
METRICS_LINES = (
    *("[1,2]", DEEP, '"x"', "null", ESCAPE, '{"event": "start"}', '{"event": "start", "step": {}}'),
    *('{"step": "x", "train_loss": []}', '{"step": 3, "validation_loss": "x"}', '{"step": 1e400, "train_loss": 1}'),
)
STATE_KEYS = ("step", "optimizer_steps", "best_step", "loss_scale", "config", "state_sha256", "format")
HEADERS = (
    *('{"tokens": 1}', DEEP, "[]", ESCAPE, '{"x": {"dtype": "U16", "shape": [1], "data_offsets": [0, 2]}}'),
    '{"tokens": {"dtype": "U16", "shape": [-5], "data_offsets": [0, -10]}}',
    '{"tokens": {"dtype": "U16", "shape": [1e30], "data_offsets": [0, 2]}}',
)
LINES = b'{"text": "one line of text"}\n' * 200
SOURCES: dict[str, Callable[[random.Random], bytes]] = {  # that hold no text
    "utf16.txt": lambda _: ("some text " * 500).encode("utf-16"),
    "utf32.md": lambda _: ("some text " * 500).encode("utf-32"),
    "nuls.txt": lambda _: b"\0" * 5000,
    "half-nuls.txt": lambda _: b"a\0" * 5000,
    "latin.txt": lambda _: "é".encode("latin-1") * 500,
    "random.txt": lambda draw: draw.randbytes(5000),
    "random.jsonl": lambda draw: draw.randbytes(5000),
    "list.jsonl": lambda _: b"[1, 2]\n" * 200,
    "deep.jsonl": lambda _: DEEP.encode() + b"\n",
    "nofield.jsonl": lambda _: b'{"body": "x"}\n' * 200,
    "number.jsonl": lambda _: b'{"text": 5}\n' * 200,
    "cut.jsonl.gz": lambda draw: gzip.compress(LINES)[: draw.randrange(20, 60)],
    "random.jsonl.gz": lambda draw: draw.randbytes(500),
    "cut.jsonl.zst": lambda draw: zstandard.compress(LINES)[: draw.randrange(10, 30)],
    "random.jsonl.zst": lambda draw: draw.randbytes(500),
    "random.parquet": lambda draw: draw.randbytes(5000),
    "empty.parquet": lambda _: b"",
    "train.bin": lambda draw: draw.randbytes(5000),
    f"{ESCAPE.replace('/', '')}.txt": lambda _: b"\0" * 100,
}
ADDRESSES = ("/absent", "/dev/zero", "/dev/null", "{}/no/*.txt", "http://127.0.0.1:9/x/", "hf:a/b", "ftp://x/y")
PRICE_LISTS: tuple[dict[str, Any], ...] = (
    *({"date": 7}, {"date": ESCAPE}, {"machines": []}, {"machines": {}}, {"machines": {"x": 1}}, {"x": 1}),
    {"machines": {"x": {"gpu": ESCAPE, "gpus": 1, "usd_per_hour": 1}}},
    {"machines": {"x": {"gpu": "l4", "gpus": HUGE, "usd_per_hour": 1}}},
    {"machines": {"x": {"gpu": "l4", "gpus": 1, "usd_per_hour": -1}}},
)


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for generate in (
        _run_directories,
        _command_lines,
        _checkpoints,
        _records,
        _token_files,
        _sources,
        _output_folders,
        _price_lists,
        _models,
        _evaluation_inputs,
    ):
        yield from generate()


def _run_directories() -> Iterator[Case]:
    area = "run directory"
    for file in ("model.json", "train.json"):
        for name, damage in JSON_DAMAGES.items():
            for command in (TRAIN, DRY_RUN, PREDICT):
                yield Case(area, f"{command[0]} {command[-1]} {file}: {name}", command, at(f"run/{file}", damage))
        for name, keys in {
            "20,000 unknown keys": {f"key {n}": n for n in range(20_000)},
            "a key of control characters": {ESCAPE: 1},
            "a key of 1 MB": {"k" * 1_000_000: 1},
        }.items():
            yield Case(area, f"{file}: {name}", TRAIN, at(f"run/{file}", with_keys(**keys)))
    for file, keys in (("model.json", KEYS["model"]), ("train.json", KEYS["train"])):
        for key, field in keys.items():
            for value in _wrong_values(key, str(field.type)):
                command = TRAIN if key == "dataset" else DRY_RUN
                yield Case(
                    area, f"{file}: {key} = {str(value)[:20]!r}", command, at(f"run/{file}", with_keys(**{key: value}))
                )
    for override in OVERRIDES:
        yield Case(area, f"--set {override[:20]!r}", (*TRAIN, "--set", override), none)
    for key in FOREIGN_KEYS:
        yield Case(area, f"train.json: {key} of others", DRY_RUN, at("run/train.json", with_keys(**{key: 1})))
        yield Case(area, f"--set {key} of others", (*DRY_RUN, "--set", f"{key}=1"), none)


def _wrong_values(key: str, wanted: str) -> list[Any]:
    if key == "dataset":
        return list(DATASETS)
    values = next(values for name, values in WRONG.items() if name in wanted)
    fits = {"compile": (True,)}.get(key, ())
    return [value for value in values if not any(value is fit for fit in fits)]


def _command_lines() -> Iterator[Case]:
    area = "command line"
    for command, options in OPTIONS.items():
        for option, texts in options.items():
            for text in texts:
                name = f"{' '.join(command[:2])} {option} {text[:20]!r}"
                yield Case(area, name, (*command, f"{option}={text}"), none)
    for place in PLACES:
        for command in WITH_A_PLACE:
            yield Case(area, f"{' '.join(command)} {place[:20]!r}", (*command, place), none)
        yield Case(area, f"export {place[:20]!r}", ("evaluate.py", "export", place, "{}/new"), none)
        yield Case(
            area, f"instruct {place[:20]!r}", ("evaluate.py", "instruct", place, "--data", "{}/records.json"), none
        )


def _checkpoints() -> Iterator[Case]:
    """Yield damaged checkpoints: the run goes on from an intact one with the same bits, or refuses; nothing is lost."""
    area = "checkpoints"
    for file in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        for repeat in range(3):
            yield Case(area, f"{file}: a flipped bit {repeat}", TRAIN, at(f"{NEWEST}/{file}", flip_bit), True)
            yield Case(area, f"{file}: cut short {repeat}", TRAIN, at(f"{NEWEST}/{file}", cut), True)
        for name, damage in (NO_FILE | MISSING | (NO_JSON | NO_OBJECT if file.endswith("json") else {})).items():
            yield Case(area, f"{file}: {name}", TRAIN, at(f"{NEWEST}/{file}", damage), True)
    for key in STATE_KEYS:
        for value in ("8", -1, HUGE, [], {}, True, 1.5, ESCAPE):
            yield Case(area, f"forged {key} = {str(value)[:12]!r}", TRAIN, _forged(**{key: value}), True)
    for step in (1, 3, 5, 8):
        yield Case(area, f"forged step = {step}", TRAIN, _forged(step=step), True)
        yield Case(area, f"edited optimizer_steps = {step}", TRAIN, _edited(optimizer_steps=step), True)
    for link in ("latest", "best"):
        for alone in (True, False):
            name = f"{link} is a folder{', alone' if alone else ''}"
            yield Case(area, name, TRAIN, _links_followed(link, alone=alone), True)


def _forged(**keys: Any) -> Damage:
    """Return the damage of a checkpoint whose state was changed, and all its hashes made anew."""

    def damage(workspace: Path, draw: random.Random) -> None:
        with_keys(**keys)(workspace / NEWEST / "state.json", draw)
        seal_again(workspace / NEWEST)

    return damage


def _edited(**keys: Any) -> Damage:
    """Return the damage of a checkpoint whose state was changed, with a forged manifest and no other hash."""

    def damage(workspace: Path, draw: random.Random) -> None:
        with_keys(**keys)(workspace / NEWEST / "state.json", draw)
        forge_manifest(workspace / NEWEST)

    return damage


def _links_followed(link: str, *, alone: bool) -> Damage:
    """Return the damage of a copy that followed links; `alone`: of which nothing else has arrived."""

    def damage(workspace: Path, _: random.Random) -> None:
        folder = workspace / "run" / "checkpoints"
        target = (folder / link).resolve()
        (folder / link).unlink()
        shutil.copytree(target, folder / link)
        for other in folder.iterdir() if alone else ():
            if other.is_symlink():
                other.unlink()
            elif other.name != link:
                shutil.rmtree(other)

    return damage


def _records() -> Iterator[Case]:
    """Yield damage of what a run writes beside its checkpoints: none stands in the way of a resume, or it says why."""
    area = "records"
    for file in ("metrics.jsonl", "resolved.json", "exit.json"):
        for name, damage in (NO_FILE | NO_JSON | NO_OBJECT | MISSING).items():
            yield Case(area, f"{file}: {name}", TRAIN, at(f"run/{file}", damage), True)
    for repeat in range(6):
        yield Case(area, f"metrics.jsonl: a flipped bit {repeat}", TRAIN, at("run/metrics.jsonl", flip_bit), True)
    for line in METRICS_LINES:

        def append(path: Path, _: random.Random, line: str = line) -> None:
            with path.open("a") as file:
                file.write(line + "\n")

        for command in (TRAIN, (*TRAIN, "--replay", "1", "2"), ("evaluate.py", "compare", "{}/run")):
            yield Case(
                area,
                f"{' '.join(command[:2])}{len(command)}: metrics {line[:25]!r}",
                command,
                at("run/metrics.jsonl", append),
                True,
            )


def _token_files() -> Iterator[Case]:
    """Yield damaged token files, met by training and by the commands that look after them."""
    area = "token files"
    for reader in (TRAIN, ("prepare_data.py", "verify", "{}/tokens"), ("prepare_data.py", "stats", "{}/tokens")):
        of = f"{reader[0]} {reader[1]}"
        for repeat in range(3):
            yield Case(area, f"{of}: cut short {repeat}", reader, at("tokens/train.safetensors", cut))
            if reader[1] != "stats":  # which reads files that have no manifest as well
                yield Case(area, f"{of}: a flipped bit {repeat}", reader, at("tokens/train.safetensors", flip_bit))
        for name, damage in (NO_FILE | NO_JSON | LARGE).items():
            yield Case(area, f"{of}: manifest.json: {name}", reader, at("tokens/manifest.json", damage))
        for name in ("train-00000-of-99999999999.safetensors", "train-00000-of-00002.safetensors"):
            yield Case(area, f"{of}: {name}", reader, at("tokens", _renamed(name)))
        for header in HEADERS:
            yield Case(area, f"{of}: header {header[:40]!r}", reader, at("tokens", _beheaded(header)))


def _renamed(name: str) -> Damage:
    def damage(tokens: Path, _: random.Random) -> None:
        (tokens / "manifest.json").unlink()
        (tokens / "train.safetensors").rename(tokens / name)

    return damage


def _beheaded(header: str) -> Damage:
    def damage(tokens: Path, _: random.Random) -> None:
        (tokens / "manifest.json").unlink()
        content = header.encode()
        (tokens / "train.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + b"\0\0")

    return damage


def _sources() -> Iterator[Case]:
    area = "sources"
    options = PREPARE[2:]
    for name, content in SOURCES.items():
        for executor in ("inline", "process"):

            def write(path: Path, draw: random.Random, content: Any = content) -> None:
                path.write_bytes(content(draw))

            command = ("prepare_data.py", f"{{}}/texts/{name}", *options, "--workers", "1", "--executor", executor)
            yield Case(area, f"{executor} {name!r}", command, at(f"texts/{name}", write))
    for damage_name, bad in {"a byte that is not UTF-8": b"\xff", "a NUL": b"\0"}.items():
        for place, at_byte in {"first": 0, "in the head": 1000, "last": -1}.items():

            def spoil(path: Path, _: random.Random, bad: bytes = bad, at_byte: int = at_byte) -> None:
                content = bytearray(path.read_bytes())
                content[at_byte] = bad[0]
                path.write_bytes(content)

            yield Case(
                area, f"{damage_name}, {place}", PREPARE, at("texts/a.txt", spoil), check=_nearly_all_is_prepared
            )
    for source in ADDRESSES:
        yield Case(area, source, ("prepare_data.py", source, *options), none)


def _nearly_all_is_prepared(workspace: Path) -> bool:
    manifest = workspace / "prepared" / "manifest.json"
    if not manifest.is_file():
        return False
    wanted = (workspace / "texts" / "a.txt").stat().st_size  # tokenizer bytes
    return bool(json.loads(manifest.read_text())["tokens"] > 0.999 * wanted)


def _output_folders() -> Iterator[Case]:
    """Yield what stands in the place of a finished preparation's own files, met by the same command and by status."""
    area = "output folders"
    same = ("prepare_data.py", "{}/texts/b.jsonl", "--output", "{}/tokens", "--tokenizer", "bytes")
    same = (*same, "--validation-fraction", "0.1", "--executor", "inline")
    for file in (".lock", ".scratch", "plan.json", "ledger.jsonl", "manifest.json"):
        for name, damage in NO_FILE.items():
            for command in (same, ("prepare_data.py", "status", "{}/tokens")):
                yield Case(area, f"{command[1]}: {file}: {name}", command, at(f"tokens/{file}", damage), True)
    for name, damage in NO_FILE.items():
        yield Case(area, f"train: .lock: {name}", TRAIN, at("run/.lock", damage))


def _price_lists() -> Iterator[Case]:
    area = "price lists"
    plan = ("train.py", "{}/run", "--plan", "--machines", "{}/machines.json")
    for name, damage in JSON_DAMAGES.items():
        yield Case(area, f"machines.json: {name}", plan, at("machines.json", damage))
        yield Case(area, f"prices.json: {name}", ASKING, at("prices.json", damage))
    for keys in PRICE_LISTS:
        yield Case(area, f"machines.json: {str(keys)[:60]!r}", plan, at("machines.json", with_keys(**keys)))


def _models() -> Iterator[Case]:
    """Yield damaged directories of Hugging Face's."""
    area = "models"
    for name, damage in JSON_DAMAGES.items():
        yield Case(area, f"config.json: {name}", SMOKE, at("export/config.json", damage))
    for name, damage in NO_JSON.items():
        yield Case(area, f"tokenizer.json: {name}", SMOKE, at("export/tokenizer.json", damage))
    for name, damage in NO_FILE.items():  # the same tokenizer is in vocab.json
        yield Case(area, f"tokenizer.json: {name}", SMOKE, at("export/tokenizer.json", damage), True)
    for export, keys in MODEL_KEYS.items():
        for key, value in product(keys, ("x", -1, 0, HUGE, [], ESCAPE)):
            damage, smoke = with_keys(**{key: value}), ("evaluate.py", "smoke", f"{{}}/{export}", "--tokens", "2")
            yield Case(area, f"{export}: {key} = {str(value)[:12]!r}", smoke, at(f"{export}/config.json", damage))

    def pickled(path: Path, _: random.Random) -> None:
        path.write_bytes(b"\x80\x04\x95cposix\nsystem\n(S'touch owned'\ntR.")

    for name, damage in {"cut short": cut, "a pickle": pickled, **NO_FILE, **MISSING}.items():
        yield Case(area, f"model.safetensors: {name}", SMOKE, at("export/model.safetensors", damage))


def _evaluation_inputs() -> Iterator[Case]:
    area = "evaluation"
    inputs = {
        "answers/one.json": JUDGE,
        "records.json": ("evaluate.py", "instruct", "{}/run", "--data", "{}/records.json", "--epochs", "1"),
        "items.jsonl": ("evaluate.py", "hellaswag", "{}/run", "--data", "{}/items.jsonl"),
    }
    for file, command in inputs.items():
        for name, damage in (NO_FILE | NO_JSON | LARGE | MISSING).items():
            yield Case(area, f"{file}: {name}", command, at(file, damage))
    for name, damage in NO_FILE.items():
        yield Case(area, f"verdicts.jsonl: {name}", ASKING, at("verdicts.jsonl", damage))
        loss = ("evaluate.py", "loss", "{}/run", "--count", "64")
        yield Case(area, f"evaluations.jsonl: {name}", loss, at("run/evaluations.jsonl", damage))
