"""Generation with a cache says what the network says without one."""

import pytest
import torch

from model.config import ModelConfig
from model.generate import Sampling, choose, generate, lay_out_for_generation
from model.gpt import GPT, initialize
from tests.model.architectures import MODERN
from tests.model.test_gpt import SMALL, network
from tests.model.test_naming import network as noisy


def uncached(model: GPT, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    tokens = list(prompt)
    generator = torch.Generator().manual_seed(sampling.seed)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(choose(model(torch.tensor([tokens]))[:, -1], sampling, generator)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("laid_out", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), *(Sampling(top_k=25, seed=seed) for seed in range(5))])
def test_cached_generation_equals_uncached(sampling: Sampling, *, laid_out: bool) -> None:
    model = network(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # logits far apart, many different tokens
    wanted = uncached(model, [3, 1, 4, 1, 5], 43, sampling)
    if laid_out:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        lay_out_for_generation(model)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not model.token_embedding.weight.is_contiguous()
    chosen = generate(model, [3, 1, 4, 1, 5], 43, sampling)
    assert chosen == wanted
    assert len(set(chosen)) > 3
    assert generate(model, [3, 1, 4, 1, 5], 43, sampling, stop=chosen[7]) == chosen[: chosen.index(chosen[7])]


@pytest.mark.parametrize("config", MODERN.values(), ids=MODERN)
def test_cached_generation_equals_uncached_with_rotated_and_grouped_heads(config: ModelConfig) -> None:
    model = noisy(config)
    chosen = generate(model, [3, 1, 4, 1, 5], 43, Sampling(top_k=25))
    assert chosen == uncached(model, [3, 1, 4, 1, 5], 43, Sampling(top_k=25))
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
