"""Loss band: tenths whatever the log interval, sides and since when; lines of a log once on change, also resumed."""

import json
from pathlib import Path

import attrs
import numpy as np
import pytest

from evaluation.shared.significance import prediction_band
from training.telemetry.curves import Curve
from training.telemetry.loss_band import TENTH, TENTH_ENDS, TENTH_STARTS, ComparedLog, Reference, tenths

STEPS = 400


def loss(steps: np.ndarray, noise: float = 0.0, seed: int = 0) -> Curve:
    """Return a loss that falls as a power of the step, with noise."""
    random = np.random.default_rng(seed)
    return Curve(steps.astype(float), 1 + 4 * (steps + 10.0) ** -0.3 + noise * random.standard_normal(len(steps)))


def reference_of(runs: int = 9, noise: float = 0.1, interval: int = 10) -> Reference:
    steps = np.append(1, np.arange(interval, STEPS + 1, interval))
    losses = [tenths(loss(steps, noise, seed), STEPS) for seed in range(runs)]
    return Reference(
        recipe={},
        prepared=None,
        devices=["CPU"],
        log_interval=interval,
        band=[bound.tolist() for bound in prediction_band(np.array(losses), TENTH)],
        seeds=list(range(runs)),
        tokens=["a"] * runs,
        losses=[each.tolist() for each in losses],
    )


def test_a_tenth_is_the_mean_of_the_loss_whatever_the_log_interval() -> None:
    every = np.arange(1, STEPS + 1)
    exact = tenths(loss(every), STEPS)
    plain = [
        loss(every).values[round(a * STEPS) : round(b * STEPS)].mean()
        for a, b in zip(TENTH_STARTS, TENTH_ENDS, strict=True)
    ]
    assert exact == pytest.approx(plain, rel=0.01)
    thinned = tenths(loss(np.append(1, np.arange(10, STEPS + 1, 10))), STEPS)
    assert thinned[TENTH:] == pytest.approx(exact[TENTH:], rel=0.003)


def test_tenths_end_where_the_run_is_and_leave_out_losses_that_are_not_finite() -> None:
    curve = loss(np.arange(1, 96))
    curve.values[50] = np.nan
    assert len(tenths(curve, STEPS)) == 9 and np.isfinite(tenths(curve, STEPS)).all()
    assert len(tenths(Curve(np.zeros(0), np.zeros(0)), STEPS)) == 0
    assert reference_of().verdict(loss(np.arange(1, 5)), STEPS) is None


def test_of_1000_normal_runs_at_most_5_of_100_leave_the_band() -> None:
    reference = reference_of(noise=0.1, interval=10)
    for interval in (10, 3):
        steps = np.append(1, np.arange(interval, STEPS + 1, interval))
        left = [reference.sides(loss(steps, 0.1, 100 + seed), STEPS).any() for seed in range(1000)]
        assert np.mean(left) <= 0.05


def test_the_verdict_says_since_which_step() -> None:
    reference, curve = reference_of(), loss(np.arange(1, STEPS + 1))
    assert reference.verdict(curve, STEPS) == "inside the band of 9 runs of this recipe"
    curve.values[100:] += 1.0
    assert reference.verdict(curve, STEPS) == "above the band of 9 runs of this recipe since step 110"
    curve.values[100:] -= 2.0
    assert reference.verdict(curve, STEPS) == "below the band of 9 runs of this recipe since step 110"
    curve.values[200:] += 1.0
    assert str(reference.verdict(curve, STEPS)).startswith("inside the band of 9 runs of this recipe since step 2")


def test_a_log_tells_a_change_once_and_the_end_and_counts_what_was_logged_before_a_resume(tmp_path: Path) -> None:
    curve, said = loss(np.arange(1, STEPS + 1)), list[str]()
    curve.values[100:200] += 1.0
    records = [{"step": int(at), "train_loss": value} for at, value in zip(curve.steps, curve.values, strict=True)]
    for first, last in ((0, 150), (150, STEPS)):
        log = ComparedLog(tmp_path, said.append, reference_of(), first, STEPS)
        log.write({"event": "start", "step": first})
        for record in records[first:last]:
            log.write(record)
        log.close()
    assert [line.partition(" the band")[0] for line in said] == [
        "step 110: training loss above",
        "step 160: training loss above",  # of the job that resumed
        "step 240: training loss inside",
        "step 400: training loss inside",
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == STEPS + 2


def test_a_reference_whose_numbers_do_not_fit_is_refused() -> None:
    values = json.loads(json.dumps(attrs.asdict(reference_of())))
    assert Reference(**values) == reference_of()
    for key in ("band", "losses"):
        with pytest.raises(ValueError, match="wanted 40 numbers"):
            Reference(**values | {key: [*values[key], [1.0]]})
