"""The price table."""

import json
from pathlib import Path

import pytest

from common.errors import BadInput
from evaluation.judging.prices import PRICES, read_price
from evaluation.judging.store import Usage


def test_every_price_has_its_numbers_and_dated_versions_are_known(tmp_path: Path) -> None:
    for model in json.loads(PRICES.read_text())["usd_per_million_tokens"]:
        price = read_price(PRICES, model)
        assert 0 < price.cached_input <= price.input < price.output
    assert read_price(PRICES, "gpt-5-mini-2025-08-07") == read_price(PRICES, "gpt-5-mini")
    assert read_price(PRICES, "gpt-4o-2024-05-13").input == 5
    with pytest.raises(BadInput, match=r"no price of 'gpt-5-mimi'; add .*; did you mean 'gpt-5-mini'\?"):
        read_price(PRICES, "gpt-5-mimi")
    used = Usage(input=3_000_000, cached_input=1_000_000, output=2_000_000)
    assert read_price(PRICES, "gpt-5-mini").of(used, batch=False) == pytest.approx(2 * 0.25 + 0.025 + 2 * 2)
    assert read_price(PRICES, "gpt-5-mini").of(used, batch=True) == pytest.approx((2 * 0.25 + 0.025 + 2 * 2) / 2)
