"""Views of a heat map: colours and values of a text's tokens, of one checkpoint or of the difference of two."""

import math

import attrs

MOST_VIEWED = 3  # runs that have views without a script
# Lower bounds of the colours, in nats: of a negative log-probability, and of a difference either way.
NATS = (0.05, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
DIFFERENCE_NATS = (0.05, 0.2, 0.5, 1.0, 2.0)


@attrs.frozen(kw_only=True)
class Measured:
    """A checkpoint, with the log-probability of each cell of the text, in nats; None: not predicted, or not finite."""

    label: str
    values: list[float | None]
    mean_nats: float | None  # per token


@attrs.frozen(kw_only=True)
class HeatView:
    """A colouring of the text: of one checkpoint, or of its difference from a second one."""

    label: str
    first: Measured
    second: Measured | None = None

    def value(self, cell: int) -> float | None:
        """Return what colours a cell: a log-probability, or by how much the first one's is greater."""
        one = self.first.values[cell]
        if self.second is None or one is None:
            return one
        other = self.second.values[cell]
        return None if other is None else one - other

    def colour(self, cell: int) -> str:
        """Return a cell's colour: p0 (expected) to p8; a1 to a5 where the first one is better, b1 to b5, or z; u."""
        value = self.value(cell)
        if value is None:
            return "u"
        if self.second is None:
            return f"p{sum(-value >= bound for bound in NATS)}"
        level = sum(abs(value) >= bound for bound in DIFFERENCE_NATS)
        return f"{'a' if value > 0 else 'b'}{level}" if level else "z"

    def text(self, cell: int) -> str:
        """Return the value of a cell for people."""
        value = self.value(cell)
        if value is None:
            return "not finite"
        return f"{value:.2f} nats, {_percent(math.exp(value))}" if self.second is None else f"{value:+.2f} nats"


def heat_views(measured: list[list[Measured]]) -> list[HeatView]:
    """Return the views: of one run its last, middle and first checkpoint, of several the last of each."""
    if len(measured) == 1:
        [run] = measured
        singles = [run[number] for number in sorted({0, len(run) // 2, len(run) - 1}, reverse=True)]
        pairs = [(run[-1], run[number]) for number in sorted({0, max(0, len(run) - 2)}) if run[number] is not run[-1]]
    else:
        singles = [run[-1] for run in measured[:MOST_VIEWED]]
        pairs = [(run[-1], measured[0][-1]) for run in measured[1:MOST_VIEWED]]
    differences = [
        HeatView(label=f"{one.label} against {other.label}", first=one, second=other) for one, other in pairs
    ]
    return [*(HeatView(label=each.label, first=each) for each in singles), *differences]


def _percent(probability: float) -> str:
    return f"{probability:.1%}" if probability >= 0.001 else f"{probability:.1e}"
