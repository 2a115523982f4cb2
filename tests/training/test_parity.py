"""Networks compiled, or in lower precision, train nearly like the plain one in fp32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.conftest import metrics, train

ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # a pool of them imports torch for each


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
