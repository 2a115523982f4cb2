"""Preflight: each check reports its finding and what to do, and problems end a run before it costs anything."""

import re
import resource
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import EXIT_DONE, EXIT_ERROR, BadInput
from tests import launch
from tests.conftest import ROOT, MakeRun, train
from training.checkpoints.retention import disk_need
from training.config.train_config import load_run
from training.hardware import preflight
from training.hardware.preflight import Check, DiskNeed, PreflightRequirements


def free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(size)))


def need(directory: Path) -> DiskNeed:
    return DiskNeed(directory=directory, contents="checkpoints", least_bytes=1e9, total_bytes=5e9, advice="free some")


COMPILES = PreflightRequirements().compiles


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a machine with eight usable GPUs, a compiler and plenty of shared memory."""
    monkeypatch.setattr(preflight, "choose_device", lambda requested: requested or "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(preflight, "driver_cuda", lambda: "12.8")
    monkeypatch.setattr(preflight, "check_compiler", lambda _: Check("compiler", "gcc and Python.h"))
    free(monkeypatch, 1e12)


def test_gpu_machine_makes_all_checks_in_order(gpu_machine: None, tmp_path: Path) -> None:
    checks = preflight.machine_checks(PreflightRequirements(disk=need(tmp_path)))
    assert [check.name for check in checks] == ["GPUs", "compiler", "disk", "shared memory", "open files"]
    assert {check.level for check in checks} == {"ok"}
    assert str(checks[0]) == "GPUs           ok       8 usable; driver for CUDA 12.8, torch built for 13.0"
    assert "for 8 GPUs" in checks[3].finding
    fewer = preflight.machine_checks(PreflightRequirements(compiles={}, ranks=2))
    assert [check.name for check in fewer] == ["GPUs", "shared memory", "open files"] and "for 2 GPUs" in fewer[
        1
    ].finding
    on_a_cpu = preflight.machine_checks(PreflightRequirements(device="cpu"))
    assert [check.name for check in on_a_cpu] == ["GPUs", "open files"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_requested_gpu_that_is_missing_is_a_problem() -> None:
    [gpus, *_] = preflight.machine_checks(PreflightRequirements(device="cuda"))
    assert gpus.level == "problem"
    advice = "pass --device cpu to use the CPU, or leave --device out"
    assert gpus.finding == f"--device cuda: got 0 GPUs for 1 rank on this machine; {advice}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("flops", "world_size", "device", "hours"),
    [
        (24 * 3600 * 1e12, 1, None, None),  # exactly the limit
        (25 * 3600 * 1e12, 1, None, 25),
        (25 * 3600 * 1e12, 2, None, None),
        (2e18, 8, None, 69),
        (2e18, 8, "cpu", None),
        (None, 1, None, None),
    ],
)
def test_only_a_long_run_needs_a_gpu_or_a_request_for_the_cpu(
    flops: float | None, world_size: int, device: str | None, hours: int | None
) -> None:
    needs = PreflightRequirements(count_flops=lambda: flops, world_size=world_size, device=device)
    [gpus, *_] = preflight.machine_checks(needs)
    assert gpus.level == ("ok" if hours is None else "problem")
    if hours is not None:
        assert f", which take {hours} hours or more on {world_size} CPU rank" in gpus.finding


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_long_run_without_a_gpu_ends_before_it_downloads_anything(tmp_path: Path) -> None:
    run = shutil.copytree(ROOT / "runs" / "8xa100", tmp_path / "run")
    problem = (
        "no GPU is visible, and the run needs 2.8e+18 FLOPs, which take 774 hours or more on 1 CPU rank; start it on a "
        "machine with GPUs, or pass --device cpu to train on the CPU anyway"
    )

    def start(*options: str) -> Any:
        return launch.run(ROOT / "train.py", str(run), *options, environment={"HF_HUB_OFFLINE": "1"})

    done = start()
    assert (done.returncode, done.stderr) == (1, f"train.py: {problem}\n")
    checked = start("--preflight")
    assert (checked.returncode, checked.stdout.splitlines()[0]) == (1, f"GPUs           problem  {problem}")
    assert start("--preflight", "--device", "cpu").stdout.startswith("GPUs           ok       not used")
    # A few steps are a test of a large run, and --device cpu trains it anyway. Both look for the tokens.
    for options in (("--max-steps", "1"), ("--device", "cpu")):
        assert "gpjt/fineweb-gpt2-tokens: cannot be downloaded" in start(*options).stderr
    assert not (run / "checkpoints").exists()


def test_gpu_problem_does_not_hide_other_checks(
    gpu_machine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unusable(_: object) -> str:
        raise BadInput("CUDA can use none")

    monkeypatch.setattr(preflight, "choose_device", unusable)
    monkeypatch.setattr(preflight, "driver_gpus", lambda: 4)
    monkeypatch.setattr(preflight, "check_each_gpu", lambda: pytest.fail("they cannot be used"))
    assert preflight.report(PreflightRequirements()) == EXIT_ERROR
    first, compiler, *_ = capsys.readouterr().out.splitlines()
    assert (first, compiler[:17]) == ("GPUs           problem  CUDA can use none", "compiler       ok")
    with pytest.raises(BadInput, match=r"^CUDA can use none$"):
        preflight.enforce(PreflightRequirements())


def test_gpu_without_working_kernels_is_a_problem(gpu_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=79 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(preflight, "use_gpu", lambda device: None)
    assert preflight.check_each_gpu() == Check("GPUs tried", "8 x NVIDIA H100, 79.0 GiB")

    def third_fails(device: torch.device) -> None:
        if device.index == 2:
            raise BadInput("GPU 2 cannot be used: busy")

    monkeypatch.setattr(preflight, "use_gpu", third_fails)
    assert preflight.check_each_gpu() == Check("GPUs tried", "GPU 2 cannot be used: busy", "problem")


def test_full_disk_is_a_problem_small_disk_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requirement = need(tmp_path / "not" / "there")
    for size, text, level in ((6e9, "6.00 GB", "ok"), (2e9, "2.00 GB", "warning"), (5e8, "500 MB", "problem")):
        free(monkeypatch, size)
        check = preflight.check_disk(requirement)
        assert check.level == level
        assert check.finding.startswith(f"{text} free at {tmp_path}, wanted 5.00 GB for checkpoints")
        assert check.finding.endswith("; free some") == (level != "ok")


@pytest.mark.parametrize(
    ("mount", "level"),
    [
        ("fuse.gcsfuse runs", "problem"),
        ("fuse mountpoint-s3", "problem"),
        ("fuse.s3fs s3fs", "problem"),
        ("fuse.juicefs JuiceFS:runs", "ok"),
        ("nfs4 s3fs:/export", "ok"),
        ("ext4 /dev/sda1", "ok"),
    ],
)
def test_checkpoints_on_object_store_mounts_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_run: MakeRun, mount: str, level: str
) -> None:
    monkeypatch.setattr(preflight, "mounted_as", lambda path: mount)
    check = preflight.check_disk(disk_need(load_run(make_run(), []), resumes=False))
    assert check.level == level
    assert ("a mount of an object store" in check.finding) == (level == "problem")
    assert preflight.check_disk(need(tmp_path)).level != "problem"  # such a mount suffices for token files


def test_existing_checkpoints_reduce_the_disk_need(make_run: MakeRun) -> None:
    run = make_run()
    config = load_run(run, [])
    fresh = disk_need(config, resumes=True)
    assert fresh.total_bytes == 5 * fresh.least_bytes  # the 3 newest checkpoints, the best, and the one being written
    assert train(run, "--max-steps", "4").returncode == EXIT_DONE
    later = disk_need(config, resumes=True)
    [checkpoint] = [path for path in (run / "checkpoints").iterdir() if not path.is_symlink()]
    on_disk = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert later.total_bytes == fresh.total_bytes - on_disk
    assert fresh.least_bytes == pytest.approx(on_disk, rel=0.1)  # the difference is headers and JSON
    assert disk_need(config, resumes=False).total_bytes == fresh.total_bytes


def test_full_disk_never_prevents_a_resume(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    config, fresh = load_run(run, []), disk_need(load_run(run, []), resumes=False)
    assert disk_need(config, resumes=True) == fresh
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    resumed = disk_need(config, resumes=True)
    free(monkeypatch, 0)
    assert preflight.check_disk(fresh).level == "problem"
    assert preflight.check_disk(resumed).level == "warning"


def test_killed_saves_reduce_the_disk_need(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    config, folder = load_run(run, []), run / "checkpoints"
    partial = folder / ".partial-step-00000006"
    partial.mkdir(parents=True)
    with (partial / "model.safetensors").open("wb") as file:
        file.write(b"x" * (1 << 16))
        file.truncate(1 << 30)  # a real save also starts with a sparse file
    fresh = disk_need(config, resumes=False)
    assert disk_need(config, resumes=True) == fresh  # without a checkpoint, a partial save is archived
    (folder / "step-00000004").mkdir()
    resumed = disk_need(config, resumes=True)
    assert 1 << 16 <= fresh.total_bytes - resumed.total_bytes < 1 << 20
    free(monkeypatch, 0)
    assert preflight.check_disk(fresh).level == "problem"
    assert preflight.check_disk(resumed).level == "warning"


def test_run_without_disk_for_checkpoints_is_refused(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = PreflightRequirements(device="cpu", disk=disk_need(load_run(make_run(), []), resumes=True))
    free(monkeypatch, 1e4)
    with pytest.raises(BadInput, match=r"10.0 KB free at .*, wanted .* keep_checkpoints=1"):
        preflight.enforce(needs)
    assert preflight.report(needs) == EXIT_ERROR
    assert "\ndisk           problem  10.0 KB free" in capsys.readouterr().out


def test_dockers_shared_memory_is_too_small_for_four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SHM_DISABLE", raising=False)
    free(monkeypatch, 64 << 20)
    assert 4 * 2 * preflight.NCCL_FILE_BYTES > 64 << 20
    assert [preflight.check_shared_memory(ranks).level for ranks in (1, 2, 4, 8)] == ["ok", "ok", "warning", "warning"]
    assert "64.0 MiB free in /dev/shm; NCCL may need 147 MiB for 8 GPUs; " in preflight.check_shared_memory(8).finding
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    assert preflight.check_shared_memory(8) == Check("shared memory", "not used")


RAISE = "raise the hard limit as root: ulimit -Hn 65536"


@pytest.mark.parametrize(
    ("limits", "raised", "check"),
    [
        ((1024, 4096), (4096, 4096), Check("open files", "at most 4,096, raised from 1,024")),
        ((1024, 1 << 20), (65536, 1 << 20), Check("open files", "at most 65,536, raised from 1,024")),
        ((1024, resource.RLIM_INFINITY), (65536, -1), Check("open files", "at most 65,536, raised from 1,024")),
        ((1 << 20, 1 << 20), None, Check("open files", "at most 1,048,576")),
        ((resource.RLIM_INFINITY,) * 2, None, Check("open files", "no limit")),
        ((256, 256), None, Check("open files", f"at most 256 open files; wanted 1,024; {RAISE}", "warning")),
    ],
)
def test_limit_of_open_files_is_raised_or_warned_about(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: tuple[int, int] | None, check: Check
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: calls.append(values))
    assert preflight.check_open_files() == check
    assert calls == ([] if raised is None else [raised])


def test_warnings_are_printed_once_and_training_starts(make_run: MakeRun, changed_train: Callable[[str], Path]) -> None:
    few = "preflight.check_open_files = lambda: preflight.Check('open files', 'few of them', 'warning')"
    script = changed_train(f"from training.hardware import preflight; {few}")
    done = train(make_run(), "--max-steps", "1", script=script, ranks=2)
    assert done.returncode == EXIT_DONE, done.stderr
    assert done.stderr.splitlines().count("WARNING: few of them") == 1


def test_report_of_a_run_checks_its_disk_and_trains_nothing(make_run: MakeRun) -> None:
    run = make_run()
    done = train(run, "--preflight")
    assert done.returncode == EXIT_DONE, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["GPUs", "disk", "open"]
    assert re.search(f"[GT]B free at {run}, wanted [0-9.]+ MB for 5 checkpoints of [0-9]+ KB", done.stdout)
    assert sorted(path.name for path in run.iterdir()) == ["model.json", "train.json"]


@pytest.mark.skipif(
    shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").is_file(), reason="needs gcc"
)
def test_real_compiler_finds_this_pythons_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert preflight.check_compiler(COMPILES).level == "ok"
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": "/absent"})
    assert re.search(r"need a C compiler .*Python\.h", preflight.check_compiler(COMPILES).finding)


def test_missing_compiler_advises_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    working, without_headers = tmp_path / "working", tmp_path / "without"
    working.write_text("#!/bin/sh\nexit 0\n")
    working.chmod(0o755)
    monkeypatch.setenv("CC", str(working))
    assert preflight.check_compiler(COMPILES) == Check("compiler", f"{working} and Python.h")
    monkeypatch.delenv("CC")
    without_headers.write_text('#!/bin/sh\necho "<stdin>:2:10: fatal error: Python.h: No such file" >&2\nexit 1\n')
    without_headers.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for compiler, problem in (
        (None, "gcc was not found"),
        (str(without_headers), "fatal error: Python.h: No such file"),
        ("/absent/cc", "/absent/cc: No such file or directory"),
    ):
        if compiler is not None:
            monkeypatch.setenv("CC", compiler)
        check = preflight.check_compiler(COMPILES)
        assert check.level == "problem"
        assert f"{problem}; run: sudo apt-get install build-essential python3." in check.finding
