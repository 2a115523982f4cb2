"""A time ledger with known parts, on a clock that the test turns."""

from training.telemetry.time_ledger import TimeLedger


def ledger_of(clock: list[float], *, price: float | None = None) -> TimeLedger:
    """Return a ledger after 4 s of start-up, steps of 9, 2 and 2 s, a validation of 5 s and an idle second."""
    ledger = TimeLedger(clock[0], price)
    with ledger.start_up():
        clock[0] += 4.0
    with ledger.measure("training"):
        for seconds in (9.0, 2.0, 2.0):
            clock[0] += seconds
            ledger.after_step(0.0)
        with ledger.measure("validation"):
            clock[0] += 5.0
    clock[0] += 1.0
    return ledger
