"""Generation with a cache says what the network says without one."""

from collections.abc import Collection

import pytest
import torch

from model.config import ModelConfig
from model.generate import Prefix, Sampling, choose, draw, lay_out_for_generation
from model.gpt import GPT, CacheGroup, initialize
from tests.conftest import slow
from tests.model.architectures import MODERN
from tests.model.test_gpt import SMALL, network
from tests.model.test_naming import network as noisy


def generate(model: GPT, prompt: list[int], count: int, sampling: Sampling, stop: Collection[int] = ()) -> list[int]:
    """Return the new ids of a text, without the one that ends it."""
    drawn = draw(Prefix(model), prompt, count, sampling, stop)
    return [one.token for one in drawn if one.finish != "stop"]


def uncached(model: GPT, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    tokens = list(prompt)
    generator = torch.Generator().manual_seed(sampling.seed)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(choose(model(torch.tensor([tokens]))[:, -1], sampling, generator)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("laid_out", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), *(Sampling(top_k=25, seed=seed) for seed in range(2))])
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
    assert generate(model, [3, 1, 4, 1, 5], 43, sampling, {chosen[7], 999}) == chosen[: chosen.index(chosen[7])]


@pytest.mark.parametrize("config", MODERN.values(), ids=MODERN)
def test_cached_generation_equals_uncached_with_rotated_and_grouped_heads(config: ModelConfig) -> None:
    model = noisy(config)
    chosen = generate(model, [3, 1, 4, 1, 5], 43, Sampling(top_k=25))
    assert chosen == uncached(model, [3, 1, 4, 1, 5], 43, Sampling(top_k=25))
    assert len(set(chosen)) > 3


def test_sampling_is_a_function_of_the_seed() -> None:
    model = network(SMALL)
    first, again, other = (generate(model, [7], 20, Sampling(top_k=25, seed=seed)) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("only", [Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(temperature=1e-3)])
def test_the_narrowest_sampling_is_greedy(only: Sampling) -> None:
    model = network(SMALL)
    assert generate(model, [7], 20, only) == generate(model, [7], 20, Sampling(temperature=0))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=9, top_p=1.0), [0.1, 0.4, 0.2, 0.3]),  # more than there are
        (Sampling(top_k=2), [0, 0.4, 0, 0.3]),
        (Sampling(top_p=0.71), [0, 0.4, 0.2, 0.3]),
        (Sampling(top_p=0.41), [0, 0.4, 0, 0.3]),
        (Sampling(top_p=0.39), [0, 0.4, 0, 0]),
        (Sampling(top_k=3, top_p=0.75), [0, 0.4, 0.0, 0.3]),  # 0.4 and 0.3 are 0.78 of what the first leaves
    ],
)
def test_tokens_are_drawn_as_often_as_candidates_and_temperature_say(sampling: Sampling, kept: list[float]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(4000, -1)
    drawn = choose(logits, sampling, torch.Generator().manual_seed(0)).flatten().bincount(minlength=4)
    wanted = torch.tensor(kept) / sum(kept)
    assert torch.allclose(drawn / 4000, wanted, atol=0.03)  # 3.8 standard errors at the most
    assert all((drawn == 0) == (wanted == 0))


@pytest.mark.parametrize("config", [SMALL, MODERN["NanoChat"]], ids=["learned", "rope"])
@pytest.mark.parametrize("length", [47, 130])
def test_beyond_the_context_the_last_tokens_are_seen(config: ModelConfig, length: int) -> None:
    model = noisy(config)
    context, tokens = config.context_length, [n * n % 50 for n in range(length)]
    chosen = generate(model, tokens, context + 9, Sampling(top_k=25))
    generator = torch.Generator().manual_seed(0)
    for token in chosen:
        logits = model(torch.tensor([tokens[-context:]]))[:, -1]
        assert token == int(choose(logits, Sampling(top_k=25), generator))
        tokens.append(token)
    assert len(chosen) == context + 9 and len(set(chosen)) > 3


def test_damaged_weights_and_prompts_without_tokens_are_refused() -> None:
    model = GPT(SMALL)
    initialize(model, 0)
    model.final_norm.weight.data[0] = torch.nan
    for prompt, problem in (([1], "not finite"), ([], "no tokens")):
        with pytest.raises(ValueError, match=problem):
            generate(model, prompt, 3, Sampling())


@pytest.mark.parametrize("config", [*slow(SMALL), MODERN["NanoChat"]], ids=["learned", "rope"])
def test_a_reused_prefix_gives_the_logits_of_a_new_one(config: ModelConfig) -> None:
    model = noisy(config)
    prefix, text = Prefix(model), [n * n % 50 for n in range(31)]
    for tokens in (text[:20], text, text[:9], [*text[:9], *text[3:30]], text[::-1], [7] * 130, [7] * 40, text[:1]):
        for count in (1, 20):  # beyond the context after 29
            drawn = [*draw(prefix, tokens, count, Sampling(top_k=25))]
            wanted = [*draw(Prefix(model), tokens, count, Sampling(top_k=25))]
            assert [one.token for one in drawn] == [one.token for one in wanted]
            for one, other in zip(drawn, wanted, strict=True):
                torch.testing.assert_close(one.logits, other.logits)


def test_a_prefix_computes_what_differs_and_survives_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = network(SMALL), list[int]()
    hook = model.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    prefix = Prefix(model)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for prompt, computed in (([1, 2, 3, 4], 4), ([1, 2, 3, 4], 1), ([1, 2, 9, 9, 9], 3), ([1, 2, 9], 1), ([5], 1)):
        broken = model.blocks[1].register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(draw(prefix, [*prompt, 8], 1, Sampling()))
        broken.remove()
        lengths.clear()
        next(draw(prefix, prompt, 1, Sampling()))
        assert lengths == [computed]
    hook.remove()


@pytest.mark.parametrize("config", [SMALL, *MODERN.values()], ids=["GPT-2", *MODERN])
def test_texts_of_different_lengths_get_a_token_each_in_one_forward_pass(config: ModelConfig) -> None:
    model, texts = noisy(config), [[3, 1, 4, 1, 5, 9], [2, 7], [1, 8, 2, 8]]
    alone, together = [[Prefix(model) for _ in texts] for _ in range(2)]
    with torch.inference_mode():
        for prefix, text in zip([*alone, *together], [*texts, *texts], strict=True):
            model(torch.tensor([text]), prefix.cache)
        for token in (5, 30):
            logits = model(torch.full((1, 3), token), CacheGroup([prefix.cache for prefix in together]))
            wanted = [model(torch.tensor([[token]]), prefix.cache) for prefix in alone]
            torch.testing.assert_close(logits, torch.cat(wanted, dim=1))
