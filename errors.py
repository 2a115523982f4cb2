"""What can go wrong for a user, and the exit status that says so to a script."""

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_ERROR = 1
# 2 is argparse's own status for a bad command line
EXIT_DIVERGED = 3  # a loss or gradient was not finite, or spiked; the update was not applied
EXIT_INTERRUPTED = 130  # by Ctrl-C, as a shell says it, where there is no checkpoint to make
EXIT_STOPPED = 75  # stopped early with a checkpoint: run the same command again (EX_TEMPFAIL of sysexits.h)


class BadInput(Exception):
    """A file, option or value the user can mend. The message is one line: what, where, got, wanted, what to do.

    All ranks of a job raise it together and rank 0 says it for them, unless `alone`: then this rank says it itself.
    """

    def __init__(self, message: str, *, alone: bool = False):
        super().__init__(message)
        self.alone = alone


class Diverged(Exception):
    """Training produced a loss or gradient that is not finite, or a spike. The message names the step."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known word most like `word`, or the list of known words."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(names)}"
