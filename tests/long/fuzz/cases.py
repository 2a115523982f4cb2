"""Bad inputs for the four scripts: the damage, and the command that reads the damaged file."""

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from common.other_programs import foreign_keys
from tests.conftest import seal_again
from tests.long.fuzz.damage import (
    BYTES,
    DEEP,
    ESCAPE,
    HUGE,
    JSON_DAMAGES,
    LARGE,
    MISSING,
    NO_FILE,
    NO_JSON,
    NO_OBJECT,
    Case,
    Damage,
    at,
    cut,
    flip_bit,
    no_damage,
    with_keys,
)
from training.config.train_config import KEY_ROWS, KEYS

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
# The command that prepared the tokens.
SAME = ("prepare_data.py", "{}/texts/b.jsonl", "--output", "{}/tokens", "--tokenizer", "bytes")
SAME = (*SAME, "--validation-fraction", "0.1", "--executor", "inline")
STATUS, VERIFY, STATS = (("prepare_data.py", command, "{}/tokens") for command in ("status", "verify", "stats"))
PLAN = ("train.py", "{}/run", "--plan", "--machines", "{}/machines.json")
WHOLE = NO_FILE | NO_JSON | LARGE | MISSING
NEWEST = "run/checkpoints/step-00000004"

WRONG = {  # wrong values, by the type of the key
    "int": (1.5, "8", True, [], {}, -2, HUGE, ESCAPE),  # min_train_tokens accepts -1
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
ADDRESSES = ("/absent", "/dev/zero", "/dev/null", "{}/no/*.txt", "http://127.0.0.1:9/x/", "hf:a/b", "ftp://x/y")
PRICE_LISTS: tuple[dict[str, Any], ...] = (
    *({"date": 7}, {"date": ESCAPE}, {"machines": []}, {"machines": {}}, {"machines": {"x": 1}}, {"x": 1}),
    {"machines": {"x": {"gpu": ESCAPE, "gpus": 1, "usd_per_hour": 1}}},
    {"machines": {"x": {"gpu": "l4", "gpus": HUGE, "usd_per_hour": 1}}},
    {"machines": {"x": {"gpu": "l4", "gpus": 1, "usd_per_hour": -1}}},
)


# For each area and file: the kinds of damage, the command, and whether the command may succeed despite the damage.
FILES: dict[tuple[str, str], list[tuple[dict[str, Damage], tuple[str, ...], bool]]] = {
    ("token files", "tokens/train.safetensors"): [(BYTES, command, False) for command in (TRAIN, VERIFY)],
    ("token files", "tokens/manifest.json"): [
        (NO_FILE | NO_JSON | LARGE, command, False) for command in (TRAIN, VERIFY, STATS)
    ],
    **{
        ("output folders", f"tokens/{file}"): [(NO_FILE, SAME, True), (NO_FILE, STATUS, True)]
        for file in (".lock", ".scratch", "plan.json", "ledger.jsonl", "manifest.json")
    },
    ("output folders", "run/.lock"): [(NO_FILE, TRAIN, False)],
    ("price lists", "machines.json"): [(JSON_DAMAGES, PLAN, False)],
    ("price lists", "prices.json"): [(JSON_DAMAGES, ASKING, False)],
    ("models", "export/config.json"): [(JSON_DAMAGES, SMOKE, False)],
    # Without tokenizer.json, the tokenizer is read from vocab.json.
    ("models", "export/tokenizer.json"): [(NO_JSON, SMOKE, False), (NO_FILE, SMOKE, True)],
    ("models", "export/model.safetensors"): [({"cut short": cut} | NO_FILE | MISSING, SMOKE, False)],
    ("evaluation", "answers/one.json"): [(WHOLE, JUDGE, False)],
    ("evaluation", "records.json"): [
        (WHOLE, ("evaluate.py", "instruct", "{}/run", "--data", "{}/records.json", "--epochs", "1"), False)
    ],
    ("evaluation", "verdicts.jsonl"): [(NO_FILE, ASKING, False)],
    ("evaluation", "run/evaluations.jsonl"): [(NO_FILE, ("evaluate.py", "loss", "{}/run", "--count", "64"), False)],
}


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for generate in (_run_directories, _command_lines, _checkpoints, _records, _files, _models):
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
    for section, fields in KEYS.items():
        file = f"{section}.json"
        for key, field in fields.items():
            for value in _wrong_values(key, str(field.type)):
                command, damage = TRAIN if key == "dataset" else DRY_RUN, with_keys(**{key: value})
                yield Case(area, f"{file}: {key} = {str(value)[:20]!r}", command, at(f"run/{file}", damage))
    for override in OVERRIDES:
        yield Case(area, f"--set {override[:20]!r}", (*TRAIN, "--set", override), no_damage)
    for key in foreign_keys(KEY_ROWS):
        yield Case(area, f"train.json: {key} of another program", DRY_RUN, at("run/train.json", with_keys(**{key: 1})))
        yield Case(area, f"--set {key} of another program", (*DRY_RUN, "--set", f"{key}=1"), no_damage)


def _wrong_values(key: str, type_name: str) -> list[Any]:
    if key == "dataset":
        return list(DATASETS)
    values = next(values for name, values in WRONG.items() if name in type_name)
    fits = {"compile": (True,)}.get(key, ())
    return [value for value in values if not any(value is fit for fit in fits)]


def _command_lines() -> Iterator[Case]:
    area = "command line"
    for command, options in OPTIONS.items():
        for option, texts in options.items():
            for text in texts:
                name = f"{' '.join(command[:2])} {option} {text[:20]!r}"
                yield Case(area, name, (*command, f"{option}={text}"), no_damage)
    for place in PLACES:
        for command in WITH_A_PLACE:
            yield Case(area, f"{' '.join(command)} {place[:20]!r}", (*command, place), no_damage)
        yield Case(area, f"export {place[:20]!r}", ("evaluate.py", "export", place, "{}/new"), no_damage)
        yield Case(
            area, f"instruct {place[:20]!r}", ("evaluate.py", "instruct", place, "--data", "{}/records.json"), no_damage
        )


def _checkpoints() -> Iterator[Case]:
    """Yield cases with damaged checkpoints.

    The run must continue from an intact checkpoint with the same bits, or end with an error. It must not lose anything.
    """
    area = "checkpoints"
    for file in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        for name, damage in (
            BYTES | NO_FILE | MISSING | (NO_JSON | NO_OBJECT if file.endswith("json") else {})
        ).items():
            yield Case(area, f"{file}: {name}", TRAIN, at(f"{NEWEST}/{file}", damage), True)
    for key in STATE_KEYS:
        for value in ("8", -1, HUGE, [], {}, True, 1.5, ESCAPE):
            yield Case(area, f"forged {key} = {str(value)[:12]!r}", TRAIN, _forged(**{key: value}), True)
    for step in (1, 3, 5, 8):
        yield Case(area, f"forged step = {step}", TRAIN, _forged(step=step), True)


def _forged(**keys: Any) -> Damage:
    """Return a function that changes the state of a checkpoint and updates all its hashes."""

    def damage(workspace: Path, draw: random.Random) -> None:
        with_keys(**keys)(workspace / NEWEST / "state.json", draw)
        seal_again(workspace / NEWEST)

    return damage


def _records() -> Iterator[Case]:
    """Yield cases with damage to the other files of a run. The run must resume, or end with a clear error."""
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


def _files() -> Iterator[Case]:
    for (area, file), rows in FILES.items():
        for damages, command, survives in rows:
            for name, damage in damages.items():
                yield Case(area, f"{command[1]}: {file}: {name}", command, at(file, damage), survives)


def _models() -> Iterator[Case]:
    """Yield cases with wrong values in price lists and Hugging Face models, and with sources that are not files."""
    for keys in PRICE_LISTS:
        yield Case("price lists", f"machines.json: {str(keys)[:60]!r}", PLAN, at("machines.json", with_keys(**keys)))
    for export, keys in MODEL_KEYS.items():
        for key, value in product(keys, ("x", -1, 0, HUGE, [], ESCAPE)):
            damage, smoke = with_keys(**{key: value}), ("evaluate.py", "smoke", f"{{}}/{export}", "--tokens", "2")
            yield Case("models", f"{export}: {key} = {str(value)[:12]!r}", smoke, at(f"{export}/config.json", damage))
    for source in ADDRESSES:
        yield Case("sources", source, ("prepare_data.py", source, *PREPARE[2:]), no_damage)
