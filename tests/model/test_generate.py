"""Generation with a cache says what the network says without one."""

import pytest
import torch

from model.generate import Sampling, generate
from model.gpt import GPT, initialize
from tests.model.test_gpt import SMALL, network


def uncached_greedy(model: GPT, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_cached_generation_equals_uncached() -> None:
    model = network(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # logits far apart, many different tokens
    chosen = generate(model, [3, 1, 4, 1, 5], 43, Sampling(temperature=0))
    assert chosen == uncached_greedy(model, [3, 1, 4, 1, 5], 43)
    assert len(set(chosen)) > 3


def test_sampling_is_a_function_of_the_seed() -> None:
    model = network(SMALL)
    first = generate(model, [7], 20, Sampling(top_k=25, seed=3))
    assert generate(model, [7], 20, Sampling(top_k=25, seed=3)) == first
    assert generate(model, [7], 20, Sampling(top_k=25, seed=4)) != first


def test_top_k_keeps_only_the_most_likely() -> None:
    model = network(SMALL)
    assert generate(model, [7], 20, Sampling(top_k=1)) == generate(model, [7], 20, Sampling(temperature=0))


@pytest.mark.parametrize(("prompt", "count", "message"), [([], 3, "no tokens"), ([1] * 40, 9, "do not fit")])
def test_impossible_requests_are_refused(prompt: list[int], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(network(SMALL), prompt, count, Sampling())


def test_damaged_weights_are_refused() -> None:
    model = GPT(SMALL)
    initialize(model, 0)
    model.final_norm.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        generate(model, [1], 3, Sampling())
