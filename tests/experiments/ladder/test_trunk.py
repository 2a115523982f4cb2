"""Trunks and branches: a branch has the same bits as a separate complete run, even after a pause or a kill."""

import os
from pathlib import Path

import attrs
import pytest

from common.errors import BadInput
from experiments.ladder.ladder_file import read_ladder
from experiments.ladder.trunk import Trunk, trunks_of, write_branch
from experiments.shared.experiment_files import write_run_directory
from experiments.shared.run_progress import read_progress
from tests.conftest import complete, metrics
from tests.experiments.conftest import MakeLadder
from training.schedule import learning_rate

HORIZONS = {"tokens_per_parameter": [0.5, 1, 2]}


def trunk_of(file: Path, output: Path) -> Trunk:
    ladder = read_ladder(file, output)
    return trunks_of(ladder, ladder.sizes[1], 0.01)[0]


def run_to_end(directory: Path, *options: str) -> None:
    complete(directory, "--hash-every", "1", *options)


@pytest.mark.slow
def test_every_horizon_has_the_bits_of_a_run_trained_alone(make_ladder: MakeLadder, tmp_path: Path) -> None:
    trunk = trunk_of(make_ladder(**HORIZONS), tmp_path / "ladder")
    write_run_directory(trunk.directory, trunk.horizons[-1].sections)
    for horizon in trunk.horizons[:-1]:
        run_to_end(trunk.directory, "--max-steps", str(horizon.decay_begins))
        write_branch(trunk, horizon)
    run_to_end(trunk.directory)
    hashes = set()
    for number, horizon in enumerate(trunk.horizons):
        if horizon.directory != trunk.directory:
            run_to_end(horizon.directory)
        write_run_directory(alone := tmp_path / f"alone-{number}", horizon.sections)
        run_to_end(alone)
        for key in ("validation_loss", "state_sha256"):
            assert metrics(horizon.directory, key)[horizon.plan.steps] == metrics(alone, key)[horizon.plan.steps]
        hashes.add(metrics(alone, "state_sha256")[horizon.plan.steps])
    assert len(hashes) == len(trunk.horizons)


def test_horizons_share_rates_until_each_decays_to_zero(make_ladder: MakeLadder, tmp_path: Path) -> None:
    trunk = trunk_of(make_ladder(**HORIZONS), tmp_path)
    longest = trunk.horizons[-1].plan.schedule
    for horizon in trunk.horizons:
        schedule = horizon.plan.schedule
        assert schedule.warmup_steps == longest.warmup_steps > 0
        assert schedule.decay_steps == horizon.plan.steps // 5
        for step in range(horizon.decay_begins):
            assert learning_rate(schedule, step) == learning_rate(longest, step)
        assert learning_rate(schedule, horizon.plan.steps - 1) == 0


@pytest.mark.parametrize("killed_in", ["os.link", "rename"])
def test_a_half_written_branch_is_completed(
    make_ladder: MakeLadder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    trunk = trunk_of(make_ladder(), tmp_path / "ladder")
    write_run_directory(trunk.directory, trunk.horizons[-1].sections)
    horizon = trunk.horizons[0]
    run_to_end(trunk.directory, "--max-steps", str(horizon.decay_begins))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "link") if killed_in == "os.link" else (Path, "rename")), killed)
        with pytest.raises(KeyboardInterrupt):
            write_branch(trunk, horizon)
    assert read_progress(horizon.directory).steps == 0
    write_branch(trunk, horizon)
    assert read_progress(horizon.directory).steps == horizon.decay_begins
    name = f"checkpoints/step-{horizon.decay_begins:08d}/model.safetensors"
    assert (horizon.directory / name).samefile(trunk.directory / name)


def test_a_branch_needs_the_trunks_checkpoint(make_ladder: MakeLadder, tmp_path: Path) -> None:
    trunk = trunk_of(make_ladder(), tmp_path / "ladder")
    with pytest.raises(BadInput, match=r"no such checkpoint, but .* must start with it; move .* away"):
        write_branch(trunk, trunk.horizons[0])


def test_horizons_too_short_for_a_decay_are_refused(make_ladder: MakeLadder, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tokens_per_parameter: the horizons of 1x12 are too short or too close"):
        trunk_of(make_ladder(tokens_per_parameter=[0.5, 0.501]), tmp_path)


def test_continuing_a_ladder_with_other_ranks_is_refused(make_ladder: MakeLadder, tmp_path: Path) -> None:
    ladder = read_ladder(make_ladder(), tmp_path)
    [trunk] = trunks_of(ladder, ladder.sizes[0], 0.01)
    write_run_directory(trunk.directory, trunk.horizons[-1].sections)
    (trunk.directory / "metrics.jsonl").touch()
    problem = r"started with \w+batch_size \d, but the experiment now has \d+ \(which also depends on --ranks 8\)"
    with pytest.raises(BadInput, match=problem):
        trunks_of(attrs.evolve(ladder, ranks=8), ladder.sizes[0], 0.01)
    with pytest.raises(BadInput, match="tensor_parallel: got 2, wanted a divisor of world size 1"):
        trunks_of(attrs.evolve(ladder, train=ladder.train | {"tensor_parallel": 2}), ladder.sizes[0], 0.01)
