"""In any prefix of a mixture, every source is within one sample of its share. No sample depends on earlier ones."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokens.batches.mixture import MOST_ENTRIES, Mixture, Stage, assign, to_shares

SHARES = st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any)


def off_by(sources: list[int], shares: tuple[int, ...]) -> float:
    """Return the largest difference, in samples, between a source's count in a prefix and its share of that prefix."""
    chosen = np.array(sources)[:, None] == np.arange(len(shares))
    samples = np.arange(1, len(sources) + 1)[:, None]
    # The differences are multiplied by the sum of the shares, so that all numbers are integers.
    return float(np.abs(np.cumsum(chosen, axis=0) * sum(shares) - samples * np.array(shares)).max() / sum(shares))


@given(SHARES)
def test_every_prefix_satisfies_tijdemans_bound(shares: list[int]) -> None:
    used = sum(share > 0 for share in shares)
    assert off_by(assign(shares), tuple(shares)) <= (1 - 1 / (2 * used - 2) + 1e-12 if used > 1 else 0)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((0.7, 0.2, 0.0995, 0.0005), (1400, 400, 199, 1)),
        ((1, 1), (1, 1)),
        ((0.5, 1.5), (1, 3)),
        ((1e-3, 0, 0.999), (1, 0, 999)),
        ((3,), (1,)),
    ],
)
def test_decimal_weights_are_exact(weights: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert to_shares(weights) == shares
    sources = assign(shares)
    assert np.bincount(sources, minlength=len(shares)).tolist() == list(shares)  # every source gets its share
    assert off_by(sources, shares) < 1


def test_assignment_follows_the_published_rule() -> None:
    """Check that our rule for whole numbers chooses the same sources as the published rule, which uses fractions."""
    shares = (5, 11, 0, 1, 30)
    size, bound = sum(shares), Fraction(1, 2 * 4 - 2)
    counts, expected_sources = [0] * len(shares), []
    for sample in range(1, size + 1):
        ahead = [Fraction(sample * share, size) - count for share, count in zip(shares, counts, strict=True)]
        able = [source for source, share in enumerate(shares) if share and ahead[source] >= bound]
        expected_sources.append(
            min(able, key=lambda source: (1 - bound - ahead[source]) / Fraction(shares[source], size))
        )
        counts[expected_sources[-1]] += 1
    assert assign(shares) == expected_sources


def test_too_precise_weights_are_refused() -> None:
    assert sum(to_shares((1, MOST_ENTRIES - 1))) == MOST_ENTRIES
    with pytest.raises(ValueError, match=r"whole numbers with a sum of at most 1,048,576; round the weights"):
        to_shares((1, MOST_ENTRIES))
    with pytest.raises(ValueError, match="round the weights to fewer digits"):
        to_shares((0.3333333333, 0.6666666667))


@st.composite
def mixtures(draw: st.DrawFn) -> list[Stage]:
    sources = draw(st.integers(1, 5))
    shares = st.lists(st.integers(0, 12), min_size=sources, max_size=sources).filter(any)
    firsts = sorted(draw(st.sets(st.integers(1, 120), max_size=3)) | {0})
    return [Stage(first, tuple(draw(shares))) for first in firsts]


@given(mixtures())
def test_sample_numbers_have_no_gaps_across_stages(stages: list[Stage]) -> None:
    mixture = Mixture(stages)
    sources, places = mixture.find(np.arange(200))
    for source in range(len(stages[0].shares)):
        assert places[sources == source].tolist() == list(range(int((sources == source).sum())))
    for end in (0, 1, 57, 120, 200):
        assert mixture.counts(end) == [int((sources[:end] == source).sum()) for source in range(len(stages[0].shares))]
    for stage, following in zip(stages, [*stages[1:], Stage(200, ())], strict=True):
        if stage.first < following.first:
            assert off_by(sources[stage.first : following.first].tolist(), stage.shares) < 1


@given(mixtures(), st.integers(0, 10**12))
def test_a_sample_is_located_without_earlier_ones(stages: list[Stage], far: int) -> None:
    mixture = Mixture(stages)
    samples = np.array([*range(130), *range(far, far + 50)])
    together = np.stack(mixture.find(samples), axis=1)
    alone = [[int(part[0]) for part in mixture.find(samples[at : at + 1])] for at in range(len(samples))]
    assert together.tolist() == alone
    assert mixture.counts(far)[together[130][0]] == together[130][1]
