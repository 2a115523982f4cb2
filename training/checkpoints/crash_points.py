"""Crash points: the moments of a save at which tests end the process."""

CRASH_POINTS = (
    "prepared",
    "share written",
    "hashed",
    "state written",
    "manifest written",
    "old one aside",
    "renamed",
    "durable",
    "latest made",
    "latest moved",
    "best made",
    "best moved",
    "deletion hidden",
    "deleted",
)  # in order


def reached(point: str) -> None:
    """Do nothing; tests replace this function."""
    assert point in CRASH_POINTS, point
