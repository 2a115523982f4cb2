"""The first GPU hour: time limits, continuing after an interruption, page and tarball, and comparisons on a CPU."""

import importlib
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import bench
import first_gpu_hour as hour
import pytest
from bench import is_running
from bus_bandwidth import TRANSFERS, bus_bandwidth
from correctness import MachineComparison, SmallResult, compare_step_hashes, compare_step_losses
from cyclopts import CycloptsError
from first_gpu_hour import limit_seconds, make_page, pack, run_steps
from gpu_hour_steps import STEPS, HourStep, Outcome, hour_steps, read_outcome, run_limited

from common.arguments import ScriptTexts, parse
from common.errors import BadInput
from tests.launch import ROOT, execute, wait_until
from training.command import FIND_EPILOG, FindCommand
from training.hardware import preflight

PYTHON = sys.executable
# Prints shortened output of nvidia-smi. Samples of a busy GPU are printed in a loop until the program is killed.
NVIDIA_SMI = """
case "$*" in
  *--loop*) while :; do echo "1755, 698.31, 71, 0x0000000000000004"; sleep 0.05; done;;
  "topo -m") printf '\\t\\033[4mGPU0\\tGPU1\\033[0m\\nGPU0\\tX\\tNV18\\n';;
  *compute-apps*) printf 'gpu_bus_id, pid, used_gpu_memory [MiB]\\n00000000:18:00.0, 4711, 1234 MiB\\n';;
  *) printf 'index, name, memory.used [MiB]\\n0, NVIDIA H100 80GB HBM3, 1240 MiB\\n';;
esac
"""


def step(name: str, command: str, minutes: float = 1) -> HourStep:
    return HourStep(name=name, command=command, dry_run=command, minutes=minutes, fills="docs/status.md: nothing")


@pytest.fixture
def scripts(tmp_path: Path) -> dict[str, str]:
    """Write scripts that end in different ways, and return their paths."""
    contents = {
        "works": "print('result 42')",
        "fails": "print('measured half'); raise SystemExit('no luck')",
        "hangs": "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(600)",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.py").write_text(content)
    return {name: str(tmp_path / f"{name}.py") for name in contents}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "hour").mkdir()
    return tmp_path / "hour"


def outcomes_of(steps: list[HourStep], output: Path, minutes: float = 60) -> list[tuple[HourStep, Outcome]]:
    return list(run_steps(steps, output, 1, minutes, dry_run=False))


def states(steps: list[HourStep], output: Path, minutes: float = 60) -> list[str]:
    return [outcome.state for _, outcome in outcomes_of(steps, output, minutes)]


def test_failed_steps_are_repeated_finished_steps_skipped(output: Path, scripts: dict[str, str]) -> None:
    steps = [step(name, scripts[name]) for name in ("fails", "works")]
    assert states(steps, output) == ["failed", "done"]
    assert (output / "fails.txt").read_text() == "measured half\nno luck\n"
    done = read_outcome(output, "works", [scripts["works"]])
    Path(scripts["works"]).write_text("raise SystemExit(1)")
    Path(scripts["fails"]).write_text("print('now it works')")
    assert states(steps, output) == ["done", "done"]
    assert (output / "works.txt").read_text() == "result 42\n"
    assert read_outcome(output, "works", [scripts["works"]]) == done and done.state == "done"
    assert read_outcome(output, "works", [scripts["works"], "--steps", "2"]).state == "not started"
    (output / "works.json").write_text("{")
    assert read_outcome(output, "works", [scripts["works"]]).state == "not started"


def test_a_step_is_killed_with_its_children(tmp_path: Path, scripts: dict[str, str]) -> None:
    for seconds in (2.0, 20.0, 200.0):  # on a busy machine, an interpreter starts slowly
        outcome = run_limited(tmp_path, "hangs", [PYTHON, scripts["hangs"]], seconds)
        assert outcome.state == "timed out" and outcome.exit_status is None
        if child := (tmp_path / "hangs.txt").read_text():
            break
    assert not is_running(int(child))


def test_steps_need_time_and_a_good_preflight(
    tmp_path: Path, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    works = step("works", scripts["works"])
    assert states([works], tmp_path, 0.1) == ["not started"]
    assert states([step("preflight", scripts["fails"]), works], tmp_path) == ["failed"]
    assert capsys.readouterr().out.endswith("\nmeasured half\nno luck\n\n")


def test_eight_gpus_finish_in_an_hour() -> None:
    assert sum(hour_step.minutes for hour_step in hour_steps(8)) <= 60
    first, later = step("first", "", 6), [step("second", "", 10), step("third", "", 20)]
    seconds = [limit_seconds(first, later, 60 * minutes_left) for minutes_left in (36, 40, 90, 20, 3)]
    assert seconds == [60 * minutes for minutes in (6, 10, 12, 6, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_page_and_tarball_are_written_after_each_step(
    tmp_path: Path, scripts: dict[str, str], number: signal.Signals
) -> None:
    steps = [(name, scripts[name]) for name in ("works", "hangs")]
    program = (
        "import signal, sys, torch\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # because `nohup make test` ignores SIGHUP
        f"sys.path[:0] = [{str(ROOT / 'benchmarks')!r}, {str(ROOT)!r}]\n"
        "import bench, first_gpu_hour as hour; from gpu_hour_steps import HourStep\n"
        "torch.cuda.device_count = lambda: 1\n"
        f"steps = [HourStep(name=n, command=c, dry_run=c, minutes=60, fills='') for n, c in {steps!r}]\n"
        "hour.hour_steps = lambda ranks: steps\n"
        f"sys.argv[1:] = ['--output', {str(tmp_path / 'hour')!r}]\n"
        "bench.run(hour.main)\n"
    )
    process = subprocess.Popen([PYTHON, "-c", program], stdout=subprocess.PIPE, text=True)
    log, page = tmp_path / "hour" / "hangs.txt", tmp_path / "hour" / "page.md"
    wait_until(lambda: log.exists() and log.read_text(), process)
    assert "## works: done" in page.read_text() and "## hangs: not started" in page.read_text()
    with tarfile.open(tmp_path / "hour.tar.gz") as tar:
        assert "hour/works.txt" in tar.getnames()
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 128 + number
    assert "## hangs: interrupted" in page.read_text()
    assert not is_running(int(log.read_text()))


def test_the_tarball_has_results_and_no_credentials(
    output: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "aws_secret_access_key"):
        monkeypatch.setenv(name, "do-not-tell")
    Path(scripts["works"]).write_text(
        "import os, tempfile; print(sorted(os.environ.items()))\n"
        "open(tempfile.mkdtemp() + '/model.safetensors', 'w').write('weights')"
    )
    steps = [step("works", scripts["works"]), step("fails", scripts["fails"])]
    outcomes = [*outcomes_of(steps, output), *outcomes_of([step("late", "none.py")], output, 0)]
    page = make_page(["2 of 2 GPUs"], outcomes, output, price_per_hour=36.0)
    (output / "page.md").write_text(page)
    sections = ("## works: done", "## fails: failed", "## late: not started")
    assert all(shown in page for shown in (*sections, "    no luck", "docs/status.md: nothing"))
    seconds = sum(outcome.seconds for _, outcome in outcomes)
    assert f"{seconds / 100:.2f}" in page.split("| all ")[1]
    with tarfile.open(pack(output)) as tar:
        names = tar.getnames()
        contents = b"".join(tar.extractfile(name).read() for name in names)
    assert names == [f"hour/{name}" for name in ("fails.json", "fails.txt", "page.md", "works.json", "works.txt")]
    assert b"PATH" in contents and b"do-not-tell" not in contents


@pytest.mark.slow
def test_steps_share_the_compile_cache(output: Path, scripts: dict[str, str]) -> None:
    Path(scripts["works"]).write_text(
        "import os, torch._inductor.runtime.cache_dir_utils as cache\n"
        "for folder in (cache.cache_dir(), os.environ['TRITON_CACHE_DIR']):\n"
        "    os.makedirs(folder, exist_ok=True); print(len(os.listdir(folder)), folder)\n"
        "    open(folder + '/kernel.json', 'w').close()\n"
    )
    for name, cached_kernels in (("first", 0), ("second", 1)):
        assert run_limited(output, name, [PYTHON, scripts["works"]], 120).state == "done"
        lines = [f"{cached_kernels} {output}/compiled/{compiler}" for compiler in ("inductor", "triton")]
        assert (output / f"{name}.txt").read_text().splitlines() == lines
    with tarfile.open(pack(output)) as tar:
        assert not any("kernel" in name for name in tar.getnames())


def test_every_step_names_an_existing_page_and_script() -> None:
    assert len({hour_step.name for hour_step in STEPS}) == len(STEPS)
    for hour_step in STEPS:
        pages = re.findall(r"docs/\S+?\.md", hour_step.fills)
        assert all((ROOT / page).is_file() for page in pages) and (pages or hour_step.name == "preflight")
        for words in (hour_step.command, hour_step.dry_run):
            files = re.findall(r"\S+\.py", words)
            assert all((ROOT / file).is_file() for file in files)
    assert {hour_step.least_gpus for hour_step in hour_steps(1)} == {1}
    assert hour_steps(8) == list(STEPS)


@pytest.mark.parametrize("hour_step", STEPS, ids=lambda hour_step: hour_step.name)
def test_every_script_accepts_its_command(hour_step: HourStep) -> None:
    for text in (hour_step.command, hour_step.dry_run):
        script, *words = re.search(r"\S+\.py.*", text.format(ranks=8))[0].split()
        if script == "find_batch_size.py":
            parse(script, FindCommand, words, texts=ScriptTexts(epilog=FIND_EPILOG))
            continue
        main = importlib.import_module(Path(script).stem).main
        bench.parser(main).parse_args(words, exit_on_error=False, print_error=False)
        with pytest.raises(CycloptsError):
            bench.parser(main).parse_args([*words, "--nonsense"], exit_on_error=False, print_error=False)


def test_page_and_tarball_describe_the_gpus(
    tmp_path: Path, output: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{NVIDIA_SMI}")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    samples = output / "works.gpus.csv"
    Path(scripts["works"]).write_text(f"while not open({str(samples)!r}).read(): pass")
    page = make_page(hour.describe_gpus(), outcomes_of([step("works", scripts["works"])], output), output, None)
    assert "| NVIDIA H100 80GB HBM3 |" in page and "| 1240 MiB " in page
    assert "    00000000:18:00.0, 4711, 1234 MiB" in page and "       GPU0    GPU1\n    GPU0    X       NV18\n" in page
    assert "| 1755 MHz, 698 W, 71 °C, sw_power_cap 100% |" in page
    samples_at_end = samples.read_text()
    time.sleep(0.2)
    assert samples.read_text() == samples_at_end, "nvidia-smi is still running after its step"
    with tarfile.open(pack(output)) as tar:
        assert "hour/works.gpus.csv" in tar.getnames()


def test_idle_and_unreadable_samples_are_left_out() -> None:
    samples = ["345, 70.0, 30, 0x1", "1980, [N/A], 40, 0x4", "1500, 500.0, 60, 0x44", "1700, 600.0, 61, 0x0", "17"]
    assert hour.summarize(samples) == "1600 MHz, 600 W, 61 °C, sw_power_cap 50%, hw_thermal_slowdown 50%"
    assert hour.summarize(["1980, 600.0, 61, 0x0"]) == "1980 MHz, 600 W, 61 °C, not throttled"
    assert hour.summarize(samples[:1]) == ""


def test_the_preflight_needs_room_for_checkpoints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for free, status in ((20e9, 1), (21e9, 0)):
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=int(free)))
        with pytest.raises(SystemExit) as ended:
            hour.main(preflight="1.5B")
        assert ended.value.code == status
    problem = r"disk +problem +20.0 GB free at .*, wanted 20.7 GB for .* 1.5B .*--output"
    assert re.search(problem, capsys.readouterr().out)


def test_bus_bandwidth_is_defined_as_in_nccl_tests() -> None:
    # doc/PERFORMANCE.md of nccl-tests defines the bus bandwidth. Here, 8 GB take 1 s on 8 ranks.
    bandwidths = {name: bus_bandwidth(name, 8 * 10**9, 1.0, 8) / 1e9 for name in TRANSFERS}
    assert bandwidths == {"all-reduce": 14.0, "all-gather": 7.0, "reduce-scatter": 7.0}


def trained(**keys: dict[int, object]) -> SmallResult:
    return SmallResult(**({"losses": {1: 5.0, 2: 4.0}, "hashes": {1: "a", 2: "b"}, "self_test": None} | keys))


def test_one_bad_step_fails_a_comparison() -> None:
    same = trained()
    assert compare_step_losses("x", same, trained(losses={1: 5.0, 2: 4.001}), 0.01).holds
    for losses in ({1: 5.0, 2: 4.1}, {1: 5.0}, {1: 5.0, 2: math.nan}, {}):
        assert not compare_step_losses("x", trained(losses=losses), same, 0.01).holds
    assert not compare_step_losses("x", same, trained(losses={}), 0.01).holds
    assert compare_step_hashes("x", trained(), same) == MachineComparison("hashes: x", "2 steps equal", "equal", True)
    for hashes in ({1: "a", 2: "c"}, {1: "a"}, {}):
        assert not compare_step_hashes("x", trained(hashes=hashes), same).holds
    assert not compare_step_hashes("x", same, trained(hashes={})).holds


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["losses", "elastic", "resume"])
def test_every_comparison_holds_on_a_cpu(part: str) -> None:
    steps = {"losses": "20", "elastic": "4", "resume": "16"}[part]
    options = ("--device", "cpu", "--tiny", "--ranks", "1", "2", "--steps", steps)
    done = execute(PYTHON, "benchmarks/correctness.py", part, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [line.split(" | ")[3] for line in done.stdout.splitlines() if line.count(" | ") == 3]
    assert outcomes == ["holds"] * {"losses": 5, "elastic": 6, "resume": 2}[part]


def test_a_folder_with_foreign_files_is_refused(tmp_path: Path) -> None:
    hour.check_output(tmp_path / "new")
    hour.check_output(tmp_path)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(BadInput, match=r"has files such as scratch, but no results of this script; pass"):
        hour.check_output(tmp_path)
    (tmp_path / "preflight.json").touch()  # a result of an earlier call
    hour.check_output(tmp_path)
