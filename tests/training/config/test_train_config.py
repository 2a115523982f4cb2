"""Run directories: this project's and gpjt's can be loaded, and an error names the file and the key."""

import json
import re
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import attrs
import pytest

from common.errors import BadInput
from common.text import either
from tests.conftest import ROOT, TINY_MODEL, TINY_TRAIN, MakeRun, write_run
from training.config.batch_plan import derive_layout, describe, make_plan
from training.config.key_groups import OPTIMIZERS, MemoryOptions
from training.config.train_config import GOOD_RECIPE, KEYS, TrainConfig, load_run, normalized_values, resolve_key

GPT2_124M = {
    "vocab_size": 50257,
    "context_length": 1024,
    "emb_dim": 768,
    "n_heads": 12,
    "n_layers": 12,
    "drop_rate": 0.1,
    "qkv_bias": False,
}
# Keys and values from the public run directories of gpjt/ddp-base-model-from-scratch
PUBLIC = {
    "dataset": "gpjt/fineweb-gpt2-tokens",
    "min_train_tokens": 3260190720,
    "start_train_token": 0,
    "start_val_token": 0,
    "microbatch_size": 12,
    "checkpoint_interval": 617,
}


def run_directory(folder: Path, model: dict[str, Any], train: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "train.json").write_text(json.dumps(train))
    return folder


@pytest.mark.parametrize(
    "extra",
    [
        *({}, {"random_seed": 67}),
        {"clipping_max_norm": 3.5, "weight_decay": 0.01, "learning_rate": 0.0014},
        {"schedule_learning_rate": True, "warmup_period_percent": 5, "gradient_accumulation_steps": 16},
    ],
)
def test_public_run_directories_load_unchanged(tmp_path: Path, extra: dict[str, Any]) -> None:
    run = load_run(run_directory(tmp_path / "r", GPT2_124M, PUBLIC | extra), [])
    [note] = run.notices  # the notice names only the recommended keys that are missing
    assert [key for key in GOOD_RECIPE if f'"{key}": ' in str(note)] == [key for key in GOOD_RECIPE if key not in extra]
    accumulation = extra.get("gradient_accumulation_steps", 1)
    plan = make_plan(run.train, run.model.context_length, 8)
    assert plan.layout.global_batch_size == 12 * accumulation * 8
    assert plan.train_tokens >= 3260190720
    assert "train.json has no global_batch_size" in "\n".join(describe(run.model, run.train, plan))


@pytest.mark.parametrize(
    ("extra", "override", "expected_values", "notice"),
    [
        ({"on_spike": "skip"}, "log_interval=1", {"log_interval": 1}, "train.json: on_spike is ignored: "),
        ({"use_amp": False}, "log_interval=1", {"precision": "fp32"}, "use_amp false is read as precision fp32"),
        ({"use_amp": True}, "log_interval=1", {"precision": "auto"}, "use_amp true is read as precision auto"),
        ({"validation_batches": 300}, "log_interval=1", {"validation_sequences": 1200}, "validation_sequences 1200"),
        ({"minibatch_size": 9, "microbatch_size": 9}, "log_interval=1", {"microbatch_size": 9}, "minibatch_size 9 is"),
        ({"minibatch_size": 2}, "microbatch_size=12", {"microbatch_size": 12}, ""),
        ({"microbatch_size": 2}, "minibatch_size=12", {"microbatch_size": 12}, "is read as microbatch_size"),
        ({"use_amp": True}, "precision=fp32", {"precision": "fp32"}, ""),
        ({"precision": "bf16"}, "use_amp=false", {"precision": "fp32"}, "is read as precision fp32"),
        (
            {"precision": "bf16", "use_amp": False},
            "log_interval=1",
            {"precision": "bf16"},
            "is ignored, because the file has precision bf16",
        ),
        ({"validation_batches": 3}, "validation_sequences=5", {"validation_sequences": 5}, ""),
    ],
)
def test_older_spellings_are_translated_with_a_notice(
    tmp_path: Path, extra: dict[str, Any], override: str, expected_values: dict[str, Any], notice: str
) -> None:
    public_values = {key: value for key, value in PUBLIC.items() if key != "microbatch_size"}
    train = GOOD_RECIPE | public_values | ({} if "minibatch_size" in extra else {"microbatch_size": 4}) | extra
    run = load_run(run_directory(tmp_path / "r", GPT2_124M, train), [override])
    assert run.train.flat() | expected_values == run.train.flat()
    assert [notice in str(line) for line in run.notices] == [True] * (notice != "")


@pytest.mark.parametrize("name", ["1xrtx3090", "1xh100", "8xa100", "8xa100m80", "8xh100", "8xb200"])
def test_shipped_runs_share_model_and_batches(name: str) -> None:
    run = load_run(ROOT / "runs" / name, [])
    reference = load_run(ROOT / "runs" / "8xa100", [])
    assert (run.model, run.train) == (reference.model, reference.train)
    for world_size in (1, 2, 4, 8):
        plan = make_plan(run.train, run.model.context_length, world_size)
        assert plan.layout.global_batch_size == 128
        assert plan.layout.microbatch_size == 16
        assert plan.steps == 24_874
        assert 3_260_190_720 <= plan.train_tokens < 3_260_190_720 + plan.tokens_per_step
    assert run.train.data.dataset == "gpjt/fineweb-gpt2-tokens"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"warmup_step": 3},
            "train.json: unknown key 'warmup_step'; the corresponding key is train.warmup_period_percent, in percent",
        ),
        ({"learning_rates": 1}, "train.json: unknown key 'learning_rates'; did you mean 'learning_rate'?"),
        ({"zzz": 1}, "train.json: unknown key 'zzz'; known: adam_beta1"),
        ({"learning_rate": "fast"}, "learning_rate: got 'fast', wanted a number above 0"),
        ({"microbatch_size": 2.0}, "microbatch_size: got 2.0, wanted an integer of at least 1"),
        ({"min_train_tokens": -2}, "min_train_tokens: got -2, wanted an integer of at least 1"),
        ({"parallel": "zero"}, """parallel: got 'zero', wanted "ddp", "fsdp" or "hsdp\""""),
        ({"optimizer": "sgd"}, f"optimizer: got 'sgd', wanted {either(map(json.dumps, OPTIMIZERS))}"),
        ({"muon_split_qkv": True}, 'muon_split_qkv: got true, wanted false, because optimizer is "adamw"; leave'),
        ({"schedule_learning_rate": "step"}, "schedule_learning_rate: got 'step', wanted true, false, "),
        ({"schedule_learning_rate": 1}, "schedule_learning_rate: got 1, wanted true, false, "),
        ({"decay_period_percent": 40}, "decay_period_percent: got 40, wanted null, or schedule_learning_rate"),
        ({"decay_period_percent": 0}, "decay_period_percent: got 0, wanted a number above 0 up to 100"),
        (
            {"schedule_learning_rate": "warmup_stable_decay", "decay_period_percent": 80},
            "decay_period_percent: got 80, wanted at most 75: warmup_period_percent already takes 25%",
        ),
        (
            {"schedule_learning_rate": False, "final_learning_rate_percent": 5},
            "final_learning_rate_percent: got 5, wanted null, or a schedule_learning_rate that decays",
        ),
        ({"head_learning_rate": 0.01}, "head_learning_rate: got 0.01, wanted null, because tie_weights is true: th"),
        ({"vector_learning_rate": 0}, "vector_learning_rate: got 0, wanted a number above 0"),
        (
            {"lr_scheduler_type": "linear"},
            "unknown key 'lr_scheduler_type'; the corresponding key is train.schedule_learning_rate, with the values",
        ),
        ({"muon_momentum_warmup_steps": 300}, "muon_momentum_warmup_steps: got 300, wanted 0, because optimizer is"),
        ({"optimizer": "muon", "muon_first_momentum": 0.8}, "muon_first_momentum: got 0.8, wanted null, or muon_mom"),
        ({"optimizer": "muon", "muon_momentum": 1}, "muon_momentum: got 1, wanted a number from 0 up to 0.99999"),
        ({"dataset": ["a"]}, "train.json: dataset: entry 1: got 'a', wanted an object of keys and values"),
        ({"dataset": [{"dataset": "a", "weight": 1}], "min_train_tokens": None}, "min_train_tokens: got null (all tok"),
        ({"dataset": "a" * 5000, "max_epochs": "b" * 5000}, "max_epochs: got 'bbb"),
        ({"minibatch_size": "a" * 5000}, "minibatch_size: got 'aaa"),
        (
            {"minibatch_size": 3},
            "minibatch_size: got 3, wanted the value of microbatch_size, because minibatch_size is the old",
        ),
        (
            {"validation_batches": 3, "validation_sequences": 6},
            "validation_batches: got 3, but validation_sequences sets the same value; remove validation_batches",
        ),
        ({"use_amp": "no"}, "train.json: use_amp: got 'no', wanted true or false"),
        ({f"key{n}": n for n in range(20_000)}, "unknown key 'key0'; known: adam_beta1"),
        ({"x" * 5000 + "\x1b[2J": 1}, "unknown key 'xxx"),
        ({"random_seed": 10**30}, "random_seed: got 1000"),
        ({"max_epochs": 0}, "max_epochs: got 0, wanted an integer of at least 1"),
        ({"shuffle": 1}, "shuffle: got 1, wanted true or false"),
        (
            {"shuffle": True, "era_tokens": 1},
            "era_tokens: got 1, wanted at least context_length, 32, and preferably thousands of times more: windows",
        ),
        ({"era_tokens": 1000}, "era_tokens: got 1000, wanted null, or shuffle true"),
        ({"global_batch_size": 9}, "global_batch_size: got 9, wanted a multiple of microbatch_size, 2"),
        ({"hidden_size": 2}, "train.json: unknown key 'hidden_size'; did you mean 'emb_dim' of model.json?"),
        ({"model.n_layers": 10**7}, "n_layers: got 10000000, wanted an integer of at least 1, at most 10,000"),
        ({"model.learning_rate": 2}, "unknown key 'learning_rate'; did you mean 'learning_rate' of train.json?"),
        ({"model.n_head": 2}, "model.json: unknown key 'n_head'; did you mean 'n_heads'?"),
        ({"model.emb_dim": 33}, "model.json: emb_dim: got 33, wanted a multiple of n_heads, 2"),
        ({"tensor_parallel": 2, "tensor_shards": 3}, "tensor_shards: got 3, wanted a multiple of tensor_parallel, 2"),
        (
            {"tensor_shards": 2, "compile": "model"},
            'compile: got "model" with 2 tensor shards, wanted true: shards exchange activations between compiled',
        ),
        ({"tensor_shards": 4}, "train.json: tensor_shards: got 4, wanted 1 or 2, for equal parts of n_heads 2"),
        ({"tensor_parallel": 4}, "train.json: tensor_parallel: got 4, wanted 1 or 2, for equal parts of n_heads 2"),
        ({"model.moe": {"num_experts": 6}}, "model.json: key 'moe': mixtures of experts are not supported; Lockstep"),
    ],
)
def test_wrong_values_name_file_and_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = {"model": dict(TINY_MODEL), "train": {"dataset": "x"} | TINY_TRAIN}
    for key, value in change.items():
        values["model" if key.startswith("model.") else "train"][key.removeprefix("model.")] = value
    with pytest.raises(BadInput) as caught:
        load_run(run_directory(tmp_path / "r", values["model"], values["train"]), [])
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    lines = str(caught.value).split("\n")
    assert len(lines) <= 6 and max(map(len, lines)) < 1200


def test_missing_files_and_broken_json_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such run directory"):
        load_run(tmp_path / "absent", [])
    run = run_directory(tmp_path / "mistyped", TINY_MODEL, TINY_TRAIN)
    with pytest.raises(
        BadInput, match=f"no such run directory, .*; did you mean {run}\\? train.py --like RUN writes a new one"
    ):
        load_run(tmp_path / "misstyped", [])
    with pytest.raises(BadInput, match=r"train\.json: key 'dataset' is missing"):
        load_run(run, [])
    (run / "train.json").write_text('{"dataset": "x", "dataset": "y"}')
    with pytest.raises(BadInput, match="key 'dataset' is given twice"):
        load_run(run, [])
    (run / "train.json").write_text('{"dataset": ')
    with pytest.raises(BadInput, match=r"train\.json: not JSON"):
        load_run(run, [])
    (run / "model.json").unlink()
    with pytest.raises(BadInput, match=r"model\.json: cannot be read: No such file"):
        load_run(run, [])


def test_set_option_replaces_values_of_both_files(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "r", Path("x"))
    run = load_run(directory, ["train.learning_rate=6e-4", "parallel=fsdp", "n_layers=3", "dataset=a/b"])
    assert (run.train.optimization.learning_rate, run.train.execution.parallel, run.model.n_layers) == (6e-4, "fsdp", 3)
    assert run.train.data.dataset == "a/b"
    for wrong in ("learning_rate", "optimizer.lr=1", "=3"):
        with pytest.raises(BadInput, match=r"wanted KEY=VALUE, train\.KEY=VALUE or model\.KEY=VALUE"):
            load_run(directory, [wrong])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("n_layers=3", "model.n_layers=4"), "n_layers"),
        (("microbatch_size=2", "dataset=x", "minibatch_size=2"), "minibatch_size"),
    ],
)
def test_set_option_accepts_each_key_once(tmp_path: Path, overrides: tuple[str, ...], key: str) -> None:
    directory = write_run(tmp_path / "r", Path("x"))
    line = f"--set: got '{overrides[0]}' and '{overrides[-1]}', wanted one value for {key}; give it once"
    with pytest.raises(BadInput, match=re.escape(line)):
        load_run(directory, overrides)


def test_all_problems_of_both_files_are_reported(tmp_path: Path) -> None:
    train = {"dataset": "", "lr": 1, "max_epochs": 0} | {key: TINY_TRAIN[key] for key in ("learning_rate",)}
    with pytest.raises(BadInput) as raised:
        load_run(run_directory(tmp_path / "r", TINY_MODEL | {"n_heads": 0}, train), ["warmup_period_percent=200"])
    lines = [line.removeprefix(f"{tmp_path}/r/") for line in raised.value.lines]
    for start in (
        "train.json: unknown key 'lr'; did you mean 'learning_rate'",
        "model.json: n_heads: got 0",
        "train.json: key 'microbatch_size' is missing",
        "train.json: dataset: got ''",
        "train.json: max_epochs: got 0",
        "--set: warmup_period_percent: got 200",
    ):
        assert lines.pop(0).startswith(start)
    assert lines == []
    with pytest.raises(BadInput, match=r"--set: era_tokens: .*\n.*emb_dim: got 32, wanted a multiple of n_heads, 5"):
        load_run(write_run(tmp_path / "s", Path("x"), model=TINY_MODEL | {"n_heads": 5}), ["era_tokens=1000"])


def test_no_key_belongs_to_both_files() -> None:
    for section, keys in KEYS.items():
        assert all(resolve_key(key) == resolve_key(f"{section}.{key}") == (section, key) for key in keys)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("min_train_tokens=1e6", 1_000_000),
        ("min_train_tokens=1_000_000", 1_000_000),
        ("min_train_tokens=10M", 10_000_000),
        ("min_train_tokens=1B", 1_000_000_000),
        ("min_train_tokens=3.26B", 3_260_000_000),
        ("era_tokens=1e6", 1_000_000),
    ],
)
def test_set_option_accepts_numbers_as_people_write_them(tmp_path: Path, override: str, value: int) -> None:
    data = load_run(write_run(tmp_path / "r", Path("x")), ["shuffle=true", override]).train.data
    assert getattr(data, override.partition("=")[0]) == value
    assert type(value) is int


def test_only_number_keys_read_text_as_a_number(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "r", Path("x"))
    assert load_run(directory, ["dataset=10M"]).train.data.dataset == "10M"  # the name of a folder
    for text, rate in (("1e-3", 0.001), ("1e30", 1e30), ("2K", 2000.0)):
        learning_rate = load_run(directory, [f"learning_rate={text}"]).train.optimization.learning_rate
        assert learning_rate == rate and type(learning_rate) is float
    with pytest.raises(BadInput, match=r"^--set: learning_rate: got "):
        load_run(directory, ["learning_rate=1e999T"])
    with pytest.raises(BadInput, match=r"^--set: min_train_tokens: got '10m', wanted an integer"):
        load_run(directory, ["min_train_tokens=10m"])


def test_all_tokens_can_be_written_as_in_gpjt(tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "r", TINY_MODEL, TINY_TRAIN | {"dataset": "x", "min_train_tokens": -1})
    run = load_run(directory, [])
    assert run.train.data.min_train_tokens is None
    [line] = [str(notice) for notice in run.notices if "min_train_tokens" in str(notice)]
    assert line == f"NOTE: {directory}/train.json: min_train_tokens -1 is read as null, which means all tokens"
    [line] = [
        str(notice) for notice in load_run(directory, ["min_train_tokens=-1"]).notices if "is read" in str(notice)
    ]
    assert line == "NOTE: --set: min_train_tokens -1 is read as null, which means all tokens"


def test_wrong_overrides_name_the_set_option(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "r", Path("x"))
    with pytest.raises(BadInput, match=r"^--set: learning_rate: got 'fast', wanted a number above 0 up to 1e\+30$"):
        load_run(directory, ["learning_rate=fast"])
    with pytest.raises(BadInput, match=r"^--set: era_tokens: got 1000, wanted null, or shuffle true"):
        load_run(directory, ["era_tokens=1000"])
    for override, message in (
        ("train.lr=1", "'lr'; did you mean --set train.learning_rate=1?"),
        ("train.context_length=64", "'context_length'; did you mean --set model.context_length=64?"),
        ("model.microbatch_size=4", "'microbatch_size'; did you mean --set train.microbatch_size=4?"),
        ("batch_size=8", "'batch_size'; the corresponding key is train.microbatch_size, the sequences per forward"),
        ("optim=adamw", "'optim'; did you mean --set train.optimizer=adamw?"),
    ):
        with pytest.raises(BadInput) as raised:
            load_run(directory, [override])
        assert str(raised.value).startswith(f"--set: unknown key {message}"), str(raised.value)


def test_train_config_converts_to_flat_keys_and_back() -> None:
    train = load_run(ROOT / "runs" / "8xa100", []).train
    flat = train.flat()
    assert list(flat) == list(KEYS["train"])
    assert TrainConfig.from_keys(flat) == train
    assert train.replace(loss_chunks=4).memory == MemoryOptions(loss_chunks=4)
    with pytest.raises(ValueError, match="unknown key 'loss_chunk'"):
        train.replace(loss_chunk=4)


UNUSUAL_VALUES = (
    *(0, 1, -1, 2, 0.0, -0.0, 1.0, 0.5, True, None, "x", [], {}),
    *(1e308, 5e-324, 10**400, 2**53, float("nan")),
)


@pytest.mark.parametrize(("section", "key"), [(section, key) for section, keys in KEYS.items() for key in keys])
def test_unusual_values_are_refused_or_normalized(tmp_path: Path, section: str, key: str) -> None:
    directory = write_run(tmp_path / "r", Path("x"))
    kind = KEYS[section][key].type
    for value in UNUSUAL_VALUES:
        try:
            run = load_run(directory, [f"{section}.{key}={json.dumps(value)}"])
            make_plan(run.train, run.model.context_length, 1)
        except BadInput as error:
            assert key in str(error), value
            continue
        sections = {"model": attrs.asdict(run.model), "train": run.train.flat()}
        parsed = sections[section][key]
        assert key == "dataset" or type(parsed) in (get_args(kind) if isinstance(kind, UnionType) else (kind,)), value
        assert json.dumps(normalized_values(section, sections[section])) == json.dumps(sections[section]), value


@pytest.mark.parametrize(
    ("section", "spelling", "equivalent"),
    [
        ("model", {"logit_softcap": 15}, {"logit_softcap": 15.0}),
        ("model", {"mlp_width": 128, "n_kv_heads": 2}, {}),
        ("train", {"weight_decay": 1, "adam_beta1": 0}, {"weight_decay": 1.0, "adam_beta1": -0.0}),
        ("train", {"schedule_learning_rate": "cosine", "final_learning_rate_percent": 10}, {}),
        ("train", {"schedule_learning_rate": "constant"}, {"schedule_learning_rate": False}),
        (
            "train",
            {"dataset": [{"dataset": "x", "weight": 1}, {"dataset": "y", "weight": 2.0}]},
            {"dataset": [{"weight": [[0, 1.0]], "dataset": "x"}, {"dataset": "y", "weight": [[0, 2]]}]},
        ),
    ],
)
def test_equivalent_values_have_one_form(section: str, spelling: dict[str, Any], equivalent: dict[str, Any]) -> None:
    base = TINY_MODEL if section == "model" else {"dataset": "x"} | TINY_TRAIN
    assert json.dumps(normalized_values(section, base | spelling)) == json.dumps(
        normalized_values(section, base | equivalent)
    )


CONTRADICTIONS = [
    (["microbatch_size=3"], "--set microbatch_size: {file}: global_batch_size: got 8, wanted a multiple of"),
    (["global_batch_size=3"], "--set: global_batch_size: got 3, wanted a multiple of microbatch_size, 2"),
    (["global_batch_size=8", "microbatch_size=3"], "--set: global_batch_size: got 8, wanted a multiple"),
    ([], None),
    (
        ["warmup_period_percent=90", "schedule_learning_rate=warmup_stable_decay"],
        "--set warmup_period_percent: default of decay_period_percent: got 20, wanted at most 10",
    ),
    (["validation_interval=null"], "--set validation_interval: {file}: patience: got 5, wanted null"),
    (["compile=model", "tensor_shards=2"], "--set: compile: got"),
    (["model.n_heads=3"], "--set n_heads: "),
]


@pytest.mark.parametrize(("overrides", "message"), CONTRADICTIONS)
def test_contradictions_name_the_last_change(make_run: MakeRun, overrides: list[str], message: str | None) -> None:
    run = make_run(patience=5)
    if message is None:
        load_run(run, overrides)
        return
    with pytest.raises(BadInput) as error:
        load_run(run, overrides)
    assert message.format(file=run / "train.json") in str(error.value)


def test_world_size_errors_name_the_option(make_run: MakeRun) -> None:
    train = load_run(make_run(), ["microbatch_size=4"]).train
    with pytest.raises(
        BadInput, match=r"^--set microbatch_size: .*/train.json: global_batch_size 8 is 2 micro-batches"
    ):
        derive_layout(train, 32, 4)
