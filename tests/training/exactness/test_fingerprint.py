"""Numerics fingerprint: what is in it at which level, and its differences by name."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from tests.conftest import ROOT, MakeRun, complete, one_line
from tests.conftest import train as train_run
from training import grad_norm
from training.config.train_config import load_run
from training.exactness.fingerprint import compiled_on_gpu, drift, fingerprint, resolve_numerics
from training.parallel import wrap
from training.parallel.process_group import RankGroup, Ranks
from training.precision import Numerics
from training.telemetry.metrics_log import read_metrics

ELASTIC = Numerics(determinism="elastic", precision="fp32", compiled=False)


def of(run: Path, numerics: Numerics = ELASTIC, data: int = 2, tensor: int = 1) -> dict[str, Any]:
    group, cpu = RankGroup(rank=0, size=data), torch.device("cpu")
    ranks = Ranks(rank=0, world_size=data * tensor, data_parallel=group, device=cpu, control=None, download=None)
    return fingerprint(load_run(run, []).train, numerics, ranks)


def test_fingerprints_have_versions_hardware_and_settings(make_run: MakeRun) -> None:
    found = of(make_run())
    assert found["torch"] == torch.__version__
    assert found["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert (found["microbatch_size"], found["attention"], found["cuda"]) == (2, "cpu", None)


def test_data_parallel_size_and_wrapper_matter_unless_elastic(make_run: MakeRun) -> None:
    run = make_run()
    assert of(run) == of(run, data=4)
    once = attrs.evolve(ELASTIC, determinism="run")
    assert drift(of(run, once), of(run, once, 4)) == ["data_parallel_size: 2 -> 4"]
    older = {name.replace("data_parallel", "world"): value for name, value in of(run, once).items()}
    assert drift(older, of(run, once)) == [] and drift(older, of(run, once, 1)) == ["data_parallel_size: 2 -> 1"]
    assert of(run, once)["parallel"] == "ddp"
    assert of(run, once) == of(run, once, tensor=2)  # which compute as many tensor shards


@pytest.mark.parametrize(("compiled", "unit"), [(False, False), (True, "blocks, head and loss"), ("model", "model")])
def test_compiled_regions_are_named(make_run: MakeRun, compiled: bool | str, unit: bool | str) -> None:
    assert of(make_run(), attrs.evolve(ELASTIC, compiled=compiled))["compiled"] == unit


def test_environment_and_loss_chunks_change_the_fingerprint(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    before = of(make_run("before"))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    after, kernels = of(make_run("after", loss_chunks=3, tensor_shards=2)), "ATEN_CPU_CAPABILITY: None -> default"
    assert drift(before, after) == [kernels, "loss_chunks: 1 -> 3", "tensor_shards: 1 -> 2"]
    assert drift({name: before[name] for name in before.keys() - {"loss_chunks", "tensor_shards"}}, before) == []


@pytest.mark.parametrize(
    ("wanted", "device", "level"),
    [
        (None, "cpu", "elastic"),
        (None, "cuda", "off"),
        ("run", "cpu", "run"),
        ("elastic", "cuda", "elastic"),
        ("off", "cpu", "off"),
    ],
)
def test_the_default_is_the_strongest_level_that_costs_nothing(
    make_run: MakeRun, wanted: str | None, device: str, level: str
) -> None:
    train = load_run(make_run(determinism=wanted, precision="bf16"), []).train
    assert resolve_numerics(train, torch.device(device)).determinism == level


def test_changed_numerics_are_refused_unless_allowed(make_run: MakeRun) -> None:
    run = make_run()
    complete(run, "--max-steps", "2")
    refused = one_line(train_run(run, "--set", "cpu_threads=2", "--set", "microbatch_size=4"))
    assert "made with different numerics (cpu_threads: 1 -> 2; microbatch_size: 2 -> 4)" in refused
    assert "pass --allow-numerics-drift, which is recorded in the metrics" in refused
    elsewhere = train_run(run, "--max-steps", "3", environment={"ATEN_CPU_CAPABILITY": "default"})
    assert "ATEN_CPU_CAPABILITY: None -> default; cpu_capability: " in elsewhere.stderr
    allowed = complete(run, "--set", "cpu_threads=2", "--allow-numerics-drift", "--max-steps", "3")
    assert "WARNING: numerics changed since step-00000002: cpu_threads: 1 -> 2" in allowed.stderr
    changes = [record["changes"] for record in read_metrics(run) if record.get("event") == "numerics-drift"]
    assert changes == [["cpu_threads: 1 -> 2"]]


WORK = ("torch.compile", "the gradient norm of determinism ", "the gradient norm of tensor shards")


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("determinism", [None, "off", "run", "elastic"])
@pytest.mark.parametrize("compiled", [None, True, "model", False])
def test_preflight_checks_what_a_run_compiles(
    monkeypatch: pytest.MonkeyPatch, compiled: bool | str | None, determinism: str | None, shards: int
) -> None:
    """Whatever the options are: the code of a run on a GPU is chosen, and compared with what preflight demands."""
    keys = {"compile": compiled, "determinism": determinism, "tensor_shards": shards, "precision": "fp32"}
    train = load_run(ROOT / "runs" / "8xa100", []).train
    execution = attrs.evolve(train.execution, **keys)
    train = attrs.evolve(train, execution=execution)
    numerics, used = resolve_numerics(train, torch.device("cuda")), []

    def chosen(name: str) -> Callable[..., None]:
        return lambda *arguments, **options: used.append(name)

    network = SimpleNamespace(blocks=[SimpleNamespace(compile=chosen(WORK[0]))])
    model = SimpleNamespace(network=network, compile=chosen(WORK[0]), compile_head=chosen(WORK[0]))
    wrap.compile_model(model, numerics.compiled)  # type: ignore[arg-type]
    monkeypatch.setattr(grad_norm, "fast_grad_norm", lambda gradients: None)
    # Both of the others end in row_sums_of_squares, a Triton kernel on a GPU
    monkeypatch.setattr(grad_norm, "ordered_grad_norm", chosen(WORK[1]))
    monkeypatch.setattr(grad_norm, "norm_of_shards", chosen(WORK[2]))
    parallel = SimpleNamespace(shards=object() if shards > 1 else None, named_parameters=dict, gradients=list)
    grad_norm.global_grad_norm(parallel, numerics.determinism)  # type: ignore[arg-type]
    demanded = compiled_on_gpu(train)
    assert bool(demanded) == bool(used)
    assert all(any(name.startswith(work) for name in demanded) for work in used)
    for setting in " ".join(demanded.values()).removeprefix("--set ").split(" --set "):
        key, _, value = setting.partition("=")
        if key:  # the advice of all of them together leaves nothing to compile
            execution = attrs.evolve(execution, **{key: {"false": False, "1": 1}.get(value, value)})
    assert compiled_on_gpu(attrs.evolve(train, execution=execution)) == {}
