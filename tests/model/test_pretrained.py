"""Plain state dicts: padding cut off and put back, and parameters that do not fit refused by name."""

import attrs
import pytest
import torch

from model.axes import stored_rows
from model.pretrained import load_plain, unpadded
from tests.model.test_gpt import SMALL, network

UNTIED = attrs.evolve(SMALL, tie_weights=False)


def plain(seed: int) -> dict[str, torch.Tensor]:
    return {name: unpadded(name, value.detach(), UNTIED) for name, value in network(UNTIED, seed).named_parameters()}


def test_a_plain_state_dict_has_the_vocabularys_rows_and_loads_back_padded_with_zeros() -> None:
    loaded, state = network(UNTIED, seed=2), plain(1)
    assert state["head.weight"].shape[0] == state["token_embedding.weight"].shape[0] == UNTIED.vocab_size
    load_plain(loaded, state)
    for name, parameter in network(UNTIED, seed=1).named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
        assert stored_rows(name, len(parameter), UNTIED) == len(state[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.0.mlp.up.bias": None}, "parameter blocks.0.mlp.up.bias is missing"),
        ({"a.weight": torch.ones(1)}, "parameter a.weight is unknown"),
        ({"final_norm.bias": torch.ones(3)}, r"parameter final_norm.bias: got shape \(3,\), wanted \(64,\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, torch.Tensor | None], message: str) -> None:
    state = {name: value for name, value in (plain(1) | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        load_plain(network(UNTIED), state)
