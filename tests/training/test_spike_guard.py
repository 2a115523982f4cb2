"""Spikes: what counts as one, by hand; and in real runs, that its update is never applied, on any world size."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import metrics, seal_again, train
from training.checkpoints.disk import on_disk
from training.checkpoints.verification import verify
from training.config.key_groups import SpikeOptions
from training.parallel.process_group import Ranks
from training.spike_guard import Guard, SpikeHistory, SpikeWindow
from training.telemetry.metrics_log import read_metrics


def config(**keys: Any) -> SpikeOptions:
    return SpikeOptions(**{"on_spike": "skip", "spike_window": 4} | keys)


def window(*losses: float, **keys: Any) -> SpikeWindow:
    """Return a window that has seen these losses, each with a gradient norm ten times as large."""
    spikes = SpikeWindow(config(**keys), torch.device("cpu"))
    for step, loss in enumerate(losses):
        assert not see(spikes, step, loss, 10 * loss)
    return spikes


def see(spikes: SpikeWindow, step: int, loss: float, grad_norm: float, *, counts: bool = True) -> bool:
    measured = torch.tensor([loss, grad_norm], dtype=torch.float64)
    return bool(spikes.observe(step, measured, torch.tensor(counts)).item())


def guard(device: str = "cpu", **keys: Any) -> Guard:
    ranks = Ranks(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        device=torch.device(device),
        control=None,
        download=None,
    )
    return Guard(ranks, config(**keys))


def judge(judging: Guard, step: int, loss: float, grad_norm: float, *, excused: bool = False) -> float:
    """Return 1.0 where the guard holds the update back."""
    return judging.observe(step, torch.tensor([loss]), torch.tensor([loss, grad_norm]), excused).item()


# 1, 2, 3, 4 have the mean 2.5 and the standard deviation sqrt(1.25) = 1.118034: six of them reach 9.208204.
@pytest.mark.parametrize(("loss", "spike"), [(9.208, False), (9.2083, True), (-50.0, False)])
def test_a_spike_lies_so_many_standard_deviations_above_the_mean(loss: float, spike: bool) -> None:
    assert see(window(4, 3, 2, 1), 4, loss, 25) == spike


def test_either_number_can_spike_and_the_message_names_it() -> None:
    spikes = window(4, 3, 2, 1)
    assert spikes.last() is None
    assert see(spikes, 4, 2.5, 25 + 70 * 1.25**0.5)
    words = "step 5: gradient norm 103.3 lies 7.0 standard deviations above the mean 25 of the last 4 steps"
    assert str(spikes.last()) == words


def test_only_the_last_steps_count_and_a_level_that_lasts_is_learned() -> None:
    spikes = window(1000, 1, 2, 1, 2)  # the first has left
    assert [see(spikes, step, 20, 15) for step in range(5, 8)] == [True, False, False]
    assert spikes.spikes() == 1
    assert spikes.state().losses == [2.0, 20.0, 20.0, 20.0]


def test_of_spikes_of_one_size_the_default_window_finds_four() -> None:
    spikes = window(*(3 + step % 2 / 10 for step in range(128)), spike_window=128)
    assert [see(spikes, step, 1e6, 30) for step in range(128, 134)] == [True] * 4 + [False] * 2


def test_nothing_is_judged_before_half_the_window_is_filled() -> None:
    assert not see(window(1, spike_window=4), 1, 1000, 1)
    assert see(window(1, 2, spike_window=4), 2, 1000, 1)
    assert not see(window(1, 2, spike_window=5), 2, 1000, 1)


def test_in_a_flat_window_rounding_is_no_spike() -> None:
    assert not see(window(3, 3, 3, 3), 4, 3.0000005, 30.000004)
    assert see(window(3, 3, 3, 3), 4, 3.1, 30)
    assert not see(window(0, 0, 0, 0), 4, 0, 0)


def test_what_does_not_count_is_no_spike_and_enters_nothing() -> None:
    spikes = window(4, 3, 2, 1)
    assert not see(spikes, 4, 1000, torch.inf, counts=False)
    assert spikes.state().losses == [4.0, 3.0, 2.0, 1.0]


def test_the_window_goes_through_json_to_the_bit() -> None:
    spikes = window(*torch.tensor([0.1, 0.7, 0.3]).tolist())
    restored = window()
    restored.load(SpikeHistory(**json.loads(json.dumps(attrs.asdict(spikes.state())))))
    for step, loss in enumerate([0.6, 900.0, 0.2], start=3):
        assert see(spikes, step, loss, loss) == see(restored, step, loss, loss)
        assert spikes.last() == restored.last()
    assert restored.state() == spikes.state()
    assert spikes.spikes() == 1


def test_another_window_begins_with_the_newest_steps_that_fit() -> None:
    state = window(4, 3, 2, 1).state()
    for size, losses in ((2, [2.0, 1.0]), (9, [4.0, 3.0, 2.0, 1.0])):
        other = window(spike_window=size)
        other.load(state)
        assert other.state().losses == losses
    empty = window()
    empty.load(window().state())
    assert empty.state() == SpikeHistory(losses=[], grad_norms=[], skipped_steps=0)


@pytest.mark.parametrize(("on_spike", "held"), [(None, [0, 0]), ("skip", [1, 0]), ("stop", [1, 1])])
def test_a_spike_is_held_back_alone_or_with_all_that_follows(on_spike: str | None, held: list[float]) -> None:
    judging = guard(on_spike=on_spike)
    assert [judge(judging, step, 1.0 + step % 2, 1.0) for step in range(4)] == [0.0] * 4
    assert [judge(judging, 4, 50.0, 1.0), judge(judging, 5, 1.0, 1.0)] == held
    problem, skips = judging.problem(), judging.new_skips()
    assert (problem is not None) == (on_spike == "stop")
    assert (skips is not None) == (on_spike == "skip")
    assert judging.metrics() == ({"skipped_steps": 1} if on_spike == "skip" else {})
    assert (judging.state() is None) == (on_spike is None)
    assert judging.new_skips() is None  # told once


def test_a_resumed_guard_counts_on_and_tells_only_of_its_own_skips() -> None:
    first, second = guard(), guard()
    assert [judge(first, step, loss, 1.0) for step, loss in enumerate([1.0, 2.0, 1.0, 50.0])] == [0.0, 0.0, 0.0, 1.0]
    second.load(first.state())
    assert second.new_skips() is None
    assert judge(second, 4, 5000.0, 1.0) == 1.0
    skips = second.new_skips()
    assert skips is not None
    assert (skips.count, skips.total, skips.last.step) == (1, 2, 5)


def test_skipping_excuses_no_loss_that_is_not_finite_but_fp16_may_overflow() -> None:
    judging = guard()
    steps = [(1.0, 1.0, True), (2.0, torch.inf, True), (1.0, 1.0, True), (torch.nan, 1.0, True), (1.0, 1.0, True)]
    held = [judge(judging, step, loss, norm, excused=excused) for step, (loss, norm, excused) in enumerate(steps)]
    assert held == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert judging.new_skips() is None
    state = judging.state()
    assert state is not None
    assert state.losses == [1.0, 1.0]


@pytest.mark.parametrize("on_spike", ["skip", "stop"])
def test_a_step_reads_nothing_back_from_the_device(on_spike: str) -> None:
    judging = guard("meta", on_spike=on_spike)  # a device whose values nobody can read
    numbers = torch.zeros(2, device="meta")
    held = judging.observe(0, numbers, numbers, torch.tensor(False, device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        held.item()


SPIKED = """
import train
from training import loop, replay, step

original, healthy = step.train_step, step.microbatch_loss


def spiked(state, settings, number, next_batch):
    step.microbatch_loss = (lambda *arguments: healthy(*arguments) * 1000) if number == 5 else healthy
    return original(state, settings, number, next_batch)


loop.train_step = replay.train_step = spiked
train.leave(train.main())
"""
SETTINGS = {"spike_window": 8, "validation_interval": None, "keep_checkpoints": 9}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "spiked.py"
    path.write_text(SPIKED)
    return path


def read(run: Path, step: int, file: str) -> dict[str, Any]:
    path = run / "checkpoints" / f"step-{step:08d}" / file
    return load_file(path) if file.endswith(".safetensors") else json.loads(path.read_text())


def events(run: Path, event: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run) if record.get("event") == event]


@pytest.mark.parametrize(
    ("optimizer", "parallel"), [("adamw", "fsdp"), pytest.param("muon", "ddp", marks=pytest.mark.slow)]
)
def test_a_skip_is_part_of_the_state_on_any_world_size(
    make_run: Callable[..., Path], script: Path, optimizer: str, parallel: str
) -> None:
    settings = SETTINGS | {"on_spike": "skip", "optimizer": optimizer}
    straight, walked = (make_run(name, **settings) for name in ("straight", "walked"))
    done = train(straight, "--hash-every", "1", ranks=2, script=script)
    assert done.returncode == 0, done.stderr
    assert "standard deviations above the mean" in done.stderr
    assert done.stderr.count("the update was skipped, 1 so far") == 1
    for ranks, last in ((1, "5"), (2, "6"), (1, "8")):
        options = ("--set", f"parallel={parallel}", "--max-steps", last, "--hash-every", "1")
        done = train(walked, *options, ranks=ranks, script=script)
        assert done.returncode == 0, done.stderr
    for key in ("state_sha256", "train_loss", "grad_norm", "skipped_steps"):
        assert metrics(walked, key) == metrics(straight, key), key
    assert metrics(walked, "skipped_steps") == {step: int(step >= 6) for step in range(1, 9)}
    for file in ("model.safetensors", "optimizer.safetensors"):
        before, after = read(walked, 5, file), read(walked, 6, file)
        assert all(torch.equal(before[name], after[name]) for name in before | after)
    assert [read(walked, step, "state.json")["optimizer_steps"] for step in (5, 6, 8)] == [5, 5, 7]
    for run in (straight, walked):
        [skipped] = events(run, "spike-skipped")
        assert (skipped["step"], skipped["skipped"], skipped["last_skipped_step"]) == (6, 1, 6)
    shown = train(walked, "--replay", "6", "7", script=script)
    assert shown.returncode == 0, shown.stdout
    assert shown.stdout.count(" same\n") == 6
    assert "step 6: loss" in shown.stdout


def test_a_stop_applies_and_saves_nothing_and_skip_goes_past_it(make_run: Callable[..., Path], script: Path) -> None:
    run = make_run(on_spike="stop", **SETTINGS)
    done = train(run, script=script)
    assert done.returncode == 3, done.stderr
    assert "of the last 5 steps; the update was not applied; --replay 6 6 shows it" in done.stderr
    assert "\nin all " in done.stdout  # where its time went
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert "step 6: loss" in events(run, "diverged")[0]["problem"]
    assert list(metrics(run, "train_loss")) == [1, 2, 3, 4, 5]
    resumed = train(run, "--set", "on_spike=skip", script=script)
    assert resumed.returncode == 0, resumed.stderr
    assert metrics(run, "skipped_steps") == {5: 0, 6: 1, 7: 1, 8: 1}
    assert read(run, 8, "state.json")["optimizer_steps"] == 7


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_is_never_applied(make_run: Callable[..., Path], ranks: int) -> None:
    run = make_run(checkpoint_interval=2)
    assert train(run, "--max-steps", "2").returncode == 0
    checkpoint = run / "checkpoints" / "step-00000002"
    weights = load_file(checkpoint / "model.safetensors")
    weights["final_norm.weight"][3] = torch.inf
    save_file(weights, checkpoint / "model.safetensors")
    shutil.copy(checkpoint / "model.safetensors", run / "kept")
    seal_again(checkpoint)
    done = train(run, ranks=ranks)
    assert done.returncode == (3 if ranks == 1 else 1)  # torchrun exits with 1 for any failure
    everyone = ", ".join(str(rank) for rank in range(ranks))
    assert f"step 3: loss is not finite on rank {everyone}; the update was not applied" in done.stderr
    assert done.stderr.count("is not finite") == 1
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert (checkpoint / "model.safetensors").read_bytes() == (run / "kept").read_bytes()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    assert last["event"] == "diverged"
    if ranks == 2:
        assert "exitcode  : 3" in done.stderr


POISONED = """
import torch

import train
from training import loop, step

what, bad_ranks = {what!r}, {bad_ranks}
original = step.train_step


def poisoned(state, settings, number, next_batch):
    if number == 2 and state.parallel.data_parallel.rank in bad_ranks:
        if what == "loss":
            healthy = step.microbatch_loss
            step.microbatch_loss = lambda *arguments: healthy(*arguments) * torch.nan
        else:
            next(iter(state.parallel.named_parameters().values())).register_hook(lambda grad: grad * torch.inf)
    return original(state, settings, number, next_batch)


loop.train_step = poisoned
train.leave(train.main())
"""


@pytest.mark.parametrize(
    ("what", "bad_ranks", "message"),
    [
        ("loss", (1,), "step 3: loss is not finite on rank 1; the update was not applied"),
        ("gradient", (0, 1), "step 3: gradient norm is not finite, every loss is; the update was not applied"),
    ],
)
def test_what_is_not_finite_is_named_and_the_state_before_it_kept(
    make_run: Callable[..., Path], tmp_path: Path, what: str, bad_ranks: tuple[int, ...], message: str
) -> None:
    run = make_run(checkpoint_interval=2)
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED.format(what=what, bad_ranks=bad_ranks))
    done = train(run, ranks=2, script=script)
    assert done.returncode == 1
    assert message in done.stderr
    assert list(metrics(run, "train_loss")) == [1, 2]
    assert verify(on_disk(run / "checkpoints" / "step-00000002")) is None
    assert train(run).returncode == 0  # goes on from there


def test_an_overflow_that_lasts_ends_an_fp16_run_too(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(min_train_tokens=40 * 256, validation_interval=None)
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED.format(what="gradient", bad_ranks=(0,)))
    done = train(run, "--set", "precision=fp16", script=script)
    assert done.returncode == 3, done.stderr
    assert "gradient norm is not finite, every loss is" in done.stderr
    norms = metrics(run, "grad_norm")
    assert norms[2] is not None
    assert {norms[step] for step in norms if step > 2} == {None}
    assert len(norms) >= 2 + 16  # the scale fell from 2 ** 16 to below 1 first
