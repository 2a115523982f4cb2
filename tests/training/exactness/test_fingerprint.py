"""The numerics fingerprint: its fields at each determinism level, and the differences between two fingerprints."""

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


def fingerprint_of(run: Path, numerics: Numerics = ELASTIC, data: int = 2, tensor: int = 1) -> dict[str, Any]:
    group, cpu = RankGroup(rank=0, size=data), torch.device("cpu")
    ranks = Ranks(rank=0, world_size=data * tensor, data_parallel=group, device=cpu, control=None, download=None)
    return fingerprint(load_run(run, []).train, numerics, ranks)


def test_fingerprints_have_versions_hardware_and_settings(make_run: MakeRun) -> None:
    recorded = fingerprint_of(make_run())
    assert recorded["torch"] == torch.__version__
    assert recorded["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert (recorded["microbatch_size"], recorded["attention"], recorded["cuda"]) == (2, "cpu", None)


def test_data_parallel_size_and_wrapper_matter_unless_elastic(make_run: MakeRun) -> None:
    run = make_run()
    assert fingerprint_of(run) == fingerprint_of(run, data=4)
    run_level = attrs.evolve(ELASTIC, determinism="run")
    assert drift(fingerprint_of(run, run_level), fingerprint_of(run, run_level, 4)) == ["data_parallel_size: 2 -> 4"]
    older = {name.replace("data_parallel", "world"): value for name, value in fingerprint_of(run, run_level).items()}
    assert drift(older, fingerprint_of(run, run_level)) == [] and drift(older, fingerprint_of(run, run_level, 1)) == [
        "data_parallel_size: 2 -> 1"
    ]
    assert fingerprint_of(run, run_level)["parallel"] == "ddp"
    # The number of tensor ranks does not matter, because the number of tensor shards is the same.
    assert fingerprint_of(run, run_level) == fingerprint_of(run, run_level, tensor=2)


@pytest.mark.parametrize(("compiled", "unit"), [(False, False), (True, "blocks, head and loss"), ("model", "model")])
def test_compiled_regions_are_named(make_run: MakeRun, compiled: bool | str, unit: bool | str) -> None:
    assert fingerprint_of(make_run(), attrs.evolve(ELASTIC, compiled=compiled))["compiled"] == unit


def test_environment_and_loss_chunks_change_the_fingerprint(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    before = fingerprint_of(make_run("before"))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    after, kernels = (
        fingerprint_of(make_run("after", loss_chunks=3, tensor_shards=2)),
        "ATEN_CPU_CAPABILITY: None -> default",
    )
    assert drift(before, after) == [kernels, "loss_chunks: 1 -> 3", "tensor_shards: 1 -> 2"]
    assert drift({name: before[name] for name in before.keys() - {"loss_chunks", "tensor_shards"}}, before) == []


@pytest.mark.parametrize(
    ("configured", "device", "level"),
    [
        (None, "cpu", "elastic"),
        (None, "cuda", "off"),
        ("run", "cpu", "run"),
        ("elastic", "cuda", "elastic"),
        ("off", "cpu", "off"),
    ],
)
def test_the_default_is_the_strongest_level_that_costs_nothing(
    make_run: MakeRun, configured: str | None, device: str, level: str
) -> None:
    train = load_run(make_run(determinism=configured, precision="bf16"), []).train
    assert resolve_numerics(train, torch.device(device)).determinism == level


def test_changed_numerics_are_refused_unless_allowed(make_run: MakeRun) -> None:
    run = make_run()
    complete(run, "--max-steps", "2")
    refused = one_line(train_run(run, "--set", "cpu_threads=2", "--set", "microbatch_size=4"))
    assert "made with different numerics (cpu_threads: 1 -> 2; microbatch_size: 2 -> 4)" in refused
    assert "pass --allow-numerics-drift, which is recorded in the metrics" in refused
    other_cpu = train_run(run, "--max-steps", "3", environment={"ATEN_CPU_CAPABILITY": "default"})
    assert "ATEN_CPU_CAPABILITY: None -> default; cpu_capability: " in other_cpu.stderr
    allowed = complete(run, "--set", "cpu_threads=2", "--allow-numerics-drift", "--max-steps", "3")
    assert "WARNING: numerics changed since step-00000002: cpu_threads: 1 -> 2" in allowed.stderr
    changes = [record["changes"] for record in read_metrics(run) if record.get("event") == "numerics-drift"]
    assert changes == [["cpu_threads: 1 -> 2"]]


WORK = ("torch.compile", "the gradient norm with determinism ", "the gradient norm with tensor shards")


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("determinism", [None, "off", "run", "elastic"])
@pytest.mark.parametrize("compiled", [None, True, "model", False])
def test_preflight_checks_what_a_run_compiles(
    monkeypatch: pytest.MonkeyPatch, compiled: bool | str | None, determinism: str | None, shards: int
) -> None:
    """Preflight requires a compiler if, and only if, a run with these options compiles something on a GPU."""
    keys = {"compile": compiled, "determinism": determinism, "tensor_shards": shards, "precision": "fp32"}
    train = load_run(ROOT / "runs" / "8xa100", []).train
    execution = attrs.evolve(train.execution, **keys)
    train = attrs.evolve(train, execution=execution)
    numerics, used_kernels = resolve_numerics(train, torch.device("cuda")), []

    def record_use(name: str) -> Callable[..., None]:
        return lambda *arguments, **options: used_kernels.append(name)

    network = SimpleNamespace(blocks=[SimpleNamespace(compile=record_use(WORK[0]))])
    model = SimpleNamespace(network=network, compile=record_use(WORK[0]), compile_head=record_use(WORK[0]))
    wrap.compile_model(model, numerics.compiled)  # type: ignore[arg-type]
    monkeypatch.setattr(grad_norm, "fast_grad_norm", lambda gradients: None)
    # The other two norms call row_sums_of_squares, which is a Triton kernel on a GPU.
    monkeypatch.setattr(grad_norm, "ordered_grad_norm", record_use(WORK[1]))
    monkeypatch.setattr(grad_norm, "norm_of_shards", record_use(WORK[2]))
    parallel = SimpleNamespace(shards=object() if shards > 1 else None, named_parameters=dict, gradients=list)
    grad_norm.global_grad_norm(parallel, numerics.determinism)  # type: ignore[arg-type]
    compiled_work = compiled_on_gpu(train)
    assert bool(compiled_work) == bool(used_kernels)
    assert all(any(name.startswith(work) for name in compiled_work) for work in used_kernels)
    for setting in " ".join(compiled_work.values()).removeprefix("--set ").split(" --set "):
        key, _, value = setting.partition("=")
        if key:  # if all advice is followed, nothing has to be compiled
            execution = attrs.evolve(execution, **{key: {"false": False, "1": 1}.get(value, value)})
    assert compiled_on_gpu(attrs.evolve(train, execution=execution)) == {}
