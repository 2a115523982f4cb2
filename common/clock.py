"""Clock: timestamps for records."""

import time


def utc_now() -> str:
    """Return date and time in UTC, ISO 8601, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
