"""Reference: means over tenths of a run, the coverage of the band, the output for a resumed log, and damaged files."""

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from evaluation.shared.significance import prediction_band
from tests.reporting.written_runs import step, write_resolved, write_run
from training.checkpoints.run_record import RunRecord, read_record
from training.reference import MARKS, TENTH, ComparedLog, Reference, compare, recipe_of, tenths, tokens_of
from training.telemetry.curves import Curve

STEPS = 400
LOGGED = np.append(1, np.arange(10, STEPS + 1, 10))


def loss(steps: np.ndarray, noise: float = 0.0, seed: int = 0) -> Curve:
    """Return a loss that falls as a power of the step, plus noise."""
    random = np.random.default_rng(seed)
    return Curve(steps.astype(float), 1 + 4 * (steps + 10.0) ** -0.3 + noise * random.standard_normal(len(steps)))


LOSSES = np.array([tenths(loss(LOGGED, 0.1, seed), STEPS) for seed in range(9)])
BAND = prediction_band(LOSSES, TENTH)


def run_with_reference(directory: Path, **changes: Any) -> tuple[Path, RunRecord]:
    """Return a run directory with a reference of nine runs, and the run's record."""
    tokens = {"tokens": 9, "sha256": ["a"]}
    run = write_resolved(write_run(directory, [step(1, 5.0)]), steps=STEPS, train_stream=tokens)
    (run / "metrics.jsonl").unlink()
    record = read_record(run)
    assert record is not None
    reference = Reference(
        recipe=recipe_of(record),
        prepared=None,
        devices=["CPU"],
        band=[bound.tolist() for bound in BAND],
        seeds=[*range(9)],
        tokens=[str(tokens_of(record)[0])] * 9,
        losses=LOSSES.tolist(),
    )
    (run / "reference.json").write_text(json.dumps(attrs.asdict(reference) | changes))
    return run, record


def test_tenths_are_independent_of_the_log_interval() -> None:
    curve = loss(np.arange(1, STEPS + 1))
    exact = tenths(curve, STEPS)
    plain = [curve.values[max(0, mark - TENTH) * 10 : mark * 10].mean() for mark in range(1, MARKS + 1)]
    assert exact == pytest.approx(plain, rel=0.01)
    assert tenths(loss(LOGGED), STEPS)[TENTH:] == pytest.approx(exact[TENTH:], rel=0.003)
    curve.values[[50, *range(95, STEPS)]] = np.nan
    assert len(tenths(curve, STEPS)) == 9 and np.isfinite(tenths(curve, STEPS)).all()


def test_at_most_5_percent_leave_the_band() -> None:
    normal = np.array([tenths(loss(LOGGED, 0.1, 100 + seed), STEPS) for seed in range(1000)])
    assert np.mean(((normal < BAND[0]) | (normal > BAND[1])).any(axis=1)) <= 0.05


def test_log_reports_when_the_loss_leaves_the_band(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run, record), curve = run_with_reference(tmp_path / "run"), loss(np.arange(1, STEPS + 1))
    curve.values[100:200] += 1.0
    curve.values[300:] -= 1.0
    lines = [step(int(number), step_loss) for number, step_loss in zip(curve.steps, curve.values, strict=True)]
    for first, last in ((0, 170), (150, STEPS)):  # the first job is killed 20 steps after its checkpoint
        log = ComparedLog(run, record)
        log.write({"event": "start", "step": first})
        for line in lines[first:last]:
            log.write(line)
        log.close()
    band = "the band of 9 runs of this recipe"
    assert capsys.readouterr().err.splitlines() == [
        f"band         of 9 runs on CPU: {run / 'reference.json'}",
        f"step 10: training loss inside {band}",
        f"step 110: training loss above {band} since step 110",
        f"step 150: training loss above {band} since step 110",
        f"step 240: training loss inside {band} since step 240",
        f"step 310: training loss below {band} since step 310",
        f"step 400: training loss below {band} since step 310",
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"band": [[1.0] * MARKS]}, "wanted two bounds in the band, and 40 numbers"),
        ({"losses": [[1.0]] * 9}, "wanted two bounds in the band, and 40 numbers"),
        ({"losses": []}, "losses: got 0 losses, 9 seeds and 9 tokens, wanted at least 3 runs"),
        ({"losses": [], "seeds": [], "tokens": []}, "losses: got 0 losses, 0 seeds and 0 tokens, wanted at least 3"),
        ({"losses": LOSSES[:8].tolist()}, "losses: got 8 losses, 9 seeds and 9 tokens"),
        ({"losses": [[-1.0] * MARKS] * 9}, "wanted losses from 0"),
        ({"losses": [["2"] * MARKS] * 9}, "wanted a number"),
        ({"losses": (LOSSES + 1).tolist()}, "band: at some mark, the mean of the losses is outside the band"),
        ({"seeds": [0] * 9}, "seeds: got two runs with the same seed and the same tokens"),
        ({"seeds": [*range(8)]}, "losses: got 9 losses, 8 seeds and 9 tokens"),
        ({"seeds": [-1, *range(8)]}, "wanted whole numbers from 0"),
        ({"band": [[2.0] * MARKS, [1.0] * MARKS]}, "wanted the lowest losses first"),
        ({"band": [[float("nan")] * MARKS] * 2}, "got nan"),
        ({"recipe": {}}, "emb_dim is 128, but null in the reference; and 16 more"),
        ({"tokens": ["other"] * 9}, "the reference is not for these tokens"),
    ],
)
def test_damaged_reference_gives_one_note(
    changes: dict[str, Any], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, record = run_with_reference(tmp_path / "run", **changes)
    log = ComparedLog(run, record)
    for number in (1, 200, STEPS):
        log.write(step(number, 2.0))
    log.close()
    [line] = capsys.readouterr().err.splitlines()
    assert line == str(compare(run, record, {}).line) and problem in line
    assert line.startswith(f"NOTE: {run / 'reference.json'}: the loss is not compared: ") and line.count(str(run)) == 1
