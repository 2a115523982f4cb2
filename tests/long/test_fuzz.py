"""Every bad input gets one clear line: generated ones, over the four scripts. `make test-long`."""

import os
import queue
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.long.fuzz.cases import cases
from tests.long.fuzz.workspace import CLASSES, Case, Outcome, Workspace

SEED = os.environ.get("FUZZ_SEED", "0")
ONLY = os.environ.get("FUZZ_ONLY", "")  # a part of "AREA: NAME": to see one again
WORKERS = 2

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def test_no_bad_input_is_a_traceback_a_hang_silence_or_a_loss(tmp_path: Path) -> None:
    wanted = [case for case in cases() if ONLY in f"{case.area}: {case.name}"]
    assert ONLY or len(wanted) >= 500
    workspaces: queue.Queue[Workspace] = queue.Queue()
    for number in range(WORKERS):
        workspaces.put(Workspace(tmp_path / f"workspace-{number}"))

    def attempt(case: Case) -> Outcome:
        workspace = workspaces.get()
        try:
            return workspace.attempt(case, f"{SEED}: {case.area}: {case.name}")
        finally:
            workspaces.put(workspace)

    with ThreadPoolExecutor(WORKERS) as pool:
        outcomes = list(pool.map(attempt, wanted))
    tried = list(zip(wanted, outcomes, strict=True))
    counts = Counter((case.area, outcome.verdict) for case, outcome in tried)
    print(f"\nseed {SEED}: {len(tried)} bad inputs; FUZZ_SEED=N draws others, FUZZ_ONLY=NAME repeats one")
    print(f"{'':<14}", *(f"{name:>10}" for name in CLASSES))
    for area in dict.fromkeys(case.area for case in wanted):
        print(f"{area:<14}", *(f"{counts[area, name]:>10}" for name in CLASSES))
    print(f"{'in all':<14}", *(f"{sum(outcome.verdict == name for outcome in outcomes):>10}" for name in CLASSES))
    wrong = [
        f"{outcome.verdict}: {case.area}: {case.name}: status {outcome.status}: {outcome.said[-600:]!r}"
        for case, outcome in tried
        if outcome.verdict != "clear"
    ]
    assert not wrong, "\n".join(wrong)
