"""One process, DDP and FSDP on two ranks train the same model, with their own reductions too (determinism "off")."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.conftest import metrics, train

ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # a pool of them imports torch for each
LAYOUTS = [(1, "ddp"), (1, "fsdp"), (2, "ddp"), (2, "fsdp")]


@pytest.mark.slow
def test_ddp_fsdp_and_one_process_have_one_loss_curve(make_run: Callable[..., Path]) -> None:
    curves = {}
    for ranks, parallel in LAYOUTS:
        run = make_run(f"{ranks}-{parallel}", {"drop_rate": 0.1}, parallel=parallel, determinism="off")
        done = train(run, ranks=ranks)
        assert done.returncode == 0, done.stderr
        curves[ranks, parallel] = {
            key: metrics(run, key) for key in ("train_loss", "validation_loss", "grad_norm", "learning_rate")
        }
    reference = curves[1, "ddp"]
    assert list(reference["train_loss"]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(reference["validation_loss"]) == [0, 4, 8]
    assert reference["train_loss"][8] < reference["train_loss"][1] - 0.5
    for layout, curve in curves.items():
        for key, values in reference.items():
            assert curve[key] == pytest.approx(values, rel=1e-5), (layout, key)


def test_weights_have_plain_names_and_the_vocabularys_rows(make_run: Callable[..., Path]) -> None:
    run = make_run(parallel="fsdp")
    assert train(run, "--set", "compile=false", "--max-steps", "1", ranks=2).returncode == 0
    weights = load_file(run / "checkpoints" / "latest" / "model.safetensors")
    assert weights["token_embedding.weight"].shape == (257, 32)
    assert "blocks.1.attention.qkv.weight" in weights
    assert not any("module" in name or "_orig_mod" in name for name in weights)


def compiled_curves(make_run: Callable[..., Path], layouts: list[tuple[bool | str, str, int]]) -> list[Any]:
    """Return the loss curve of each (compile, wrapper, ranks), beginning with that of the plain network."""
    curves = []
    for compiled, parallel, ranks in [(False, "ddp", 2), *layouts]:
        # a graph takes seconds, and validation has its own: once
        keys = {"compile": compiled, "parallel": parallel, "validation_interval": 4 if len(curves) < 2 else None}
        run = make_run(f"{compiled}-{parallel}-{ranks}", {"n_layers": 1}, **keys)
        done = train(run, "--max-steps", "2", ranks=ranks, environment=ONE_COMPILER)
        assert done.returncode == 0, done.stderr
        curves.append(metrics(run, "train_loss"))
    return curves


@pytest.mark.slow
def test_a_compiled_network_trains_like_the_plain_one_and_alike_on_two_ranks(make_run: Callable[..., Path]) -> None:
    layouts: list[tuple[bool | str, str, int]] = [(True, "ddp", 1), (True, "ddp", 2), (True, "fsdp", 2)]
    plain, *curves = compiled_curves(make_run, [*layouts, ("model", "ddp", 1), ("model", "ddp", 2)])
    assert curves[0] == curves[1] == curves[2] == pytest.approx(plain, rel=1e-5)
    assert curves[3] == curves[4] == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_lower_precision_trains_nearly_like_fp32(make_run: Callable[..., Path], precision: str) -> None:
    curves = []
    for name in ("fp32", precision):
        run = make_run(name)
        done = train(run, "--set", f"precision={name}", "--set", "validation_interval=null")
        assert done.returncode == 0, done.stderr
        curves.append(metrics(run, "train_loss"))
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    assert curves[1] != curves[0]


RECORD_WINDOWS = """
import json, os
from pathlib import Path

import train
from tokens.batches import micro_batches as reading

plain = reading.read_windows


def recorded(parts, context_length):
    with Path(os.environ["WINDOWS"], os.environ.get("RANK", "0")).open("a") as file:
        print(json.dumps([first for _, first in parts]), file=file)
    return plain(parts, context_length)


reading.read_windows = recorded
train.leave(train.main())
"""


@pytest.mark.slow
def test_real_ranks_read_every_window_of_the_run_exactly_once(make_run: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "record.py"
    script.write_text(RECORD_WINDOWS)
    settings = {"shuffle": True, "start_train_token": 100, "validation_interval": None, "microbatch_size": 1}
    steps_read = {}
    for ranks in (1, 2, 4):
        folder = tmp_path / f"windows-{ranks}"
        folder.mkdir()
        run = make_run(f"run-{ranks}", **settings)
        done = train(run, ranks=ranks, script=script, environment={"WINDOWS": str(folder)})
        assert done.returncode == 0, done.stderr
        per_rank = [[json.loads(line) for line in (folder / str(rank)).open()] for rank in range(ranks)]
        accumulation = 8 // ranks
        steps_read[ranks] = [
            [first for rows in per_rank for [first] in rows[step * accumulation : (step + 1) * accumulation]]
            for step in range(8)
        ]
        assert {first % 32 for rows in per_rank for [first] in rows} == {100 % 32}
    assert steps_read[1] == steps_read[2] == steps_read[4]
    read = [first for step in steps_read[1] for first in step]
    assert len(set(read)) == len(read) == 8 * 8
    assert read != sorted(read)
