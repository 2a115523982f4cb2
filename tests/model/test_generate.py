"""Generation with a cache gives the same tokens as generation without one."""

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
    """Return the new token ids of a text, without the id that ends the text."""
    drawn_tokens = draw(Prefix(model), prompt, count, sampling, stop)
    return [drawn.token for drawn in drawn_tokens if drawn.finish != "stop"]


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
            parameter.mul_(5)  # so that logits are far apart, and texts have many different tokens
    expected = uncached(model, [3, 1, 4, 1, 5], 43, sampling)
    if laid_out:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        lay_out_for_generation(model)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not model.token_embedding.weight.is_contiguous()
    text = generate(model, [3, 1, 4, 1, 5], 43, sampling)
    assert text == expected
    assert len(set(text)) > 3
    assert generate(model, [3, 1, 4, 1, 5], 43, sampling, {text[7], 999}) == text[: text.index(text[7])]


@pytest.mark.parametrize("config", MODERN.values(), ids=MODERN)
def test_cached_generation_equals_uncached_for_modern_networks(config: ModelConfig) -> None:
    model = noisy(config)
    text = generate(model, [3, 1, 4, 1, 5], 43, Sampling(top_k=25))
    assert text == uncached(model, [3, 1, 4, 1, 5], 43, Sampling(top_k=25))
    assert len(set(text)) > 3


def test_seed_determines_the_text() -> None:
    model = network(SMALL)
    first, repeated, different = (generate(model, [7], 20, Sampling(top_k=25, seed=seed)) for seed in (3, 3, 4))
    assert first == repeated != different


@pytest.mark.parametrize("narrow", [Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(temperature=1e-3)])
def test_narrowest_sampling_is_greedy(narrow: Sampling) -> None:
    model = network(SMALL)
    assert generate(model, [7], 20, narrow) == generate(model, [7], 20, Sampling(temperature=0))


@pytest.mark.parametrize(
    ("sampling", "probabilities"),
    [
        (Sampling(top_k=9, top_p=1.0), [0.1, 0.4, 0.2, 0.3]),  # there are fewer than 9 candidates
        (Sampling(top_k=2), [0, 0.4, 0, 0.3]),
        (Sampling(top_p=0.71), [0, 0.4, 0.2, 0.3]),
        (Sampling(top_p=0.41), [0, 0.4, 0, 0.3]),
        (Sampling(top_p=0.39), [0, 0.4, 0, 0]),
        (Sampling(top_k=3, top_p=0.75), [0, 0.4, 0.0, 0.3]),  # 0.4 + 0.3 is 78% of the sum of the three candidates
    ],
)
def test_tokens_are_drawn_with_their_probabilities(sampling: Sampling, probabilities: list[float]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(4000, -1)
    counts = choose(logits, sampling, torch.Generator().manual_seed(0)).flatten().bincount(minlength=4)
    expected = torch.tensor(probabilities) / sum(probabilities)
    assert torch.allclose(counts / 4000, expected, atol=0.03)  # at most 3.8 standard errors
    assert all((counts == 0) == (expected == 0))


@pytest.mark.parametrize("config", [SMALL, MODERN["NanoChat"]], ids=["learned", "rope"])
@pytest.mark.parametrize("length", [47, 130])
def test_long_texts_see_only_the_last_tokens(config: ModelConfig, length: int) -> None:
    model = noisy(config)
    context, tokens = config.context_length, [n * n % 50 for n in range(length)]
    text = generate(model, tokens, context + 9, Sampling(top_k=25))
    generator = torch.Generator().manual_seed(0)
    for token in text:
        logits = model(torch.tensor([tokens[-context:]]))[:, -1]
        assert token == int(choose(logits, Sampling(top_k=25), generator))
        tokens.append(token)
    assert len(text) == context + 9 and len(set(text)) > 3


def test_damaged_weights_and_empty_prompts_are_refused() -> None:
    model = GPT(SMALL)
    initialize(model, 0)
    model.final_norm.weight.data[0] = torch.nan
    for prompt, problem in (([1], "not finite"), ([], "no tokens")):
        with pytest.raises(ValueError, match=problem):
            generate(model, prompt, 3, Sampling())


@pytest.mark.parametrize("config", [*slow(SMALL), MODERN["NanoChat"]], ids=["learned", "rope"])
def test_reused_prefix_gives_the_logits_of_a_new_prefix(config: ModelConfig) -> None:
    model = noisy(config)
    prefix, text = Prefix(model), [n * n % 50 for n in range(31)]
    for tokens in (text[:20], text, text[:9], [*text[:9], *text[3:30]], text[::-1], [7] * 130, [7] * 40, text[:1]):
        for count in (1, 20):  # some texts become longer than the context
            reused = [*draw(prefix, tokens, count, Sampling(top_k=25))]
            fresh = [*draw(Prefix(model), tokens, count, Sampling(top_k=25))]
            assert [drawn.token for drawn in reused] == [drawn.token for drawn in fresh]
            for reused_token, fresh_token in zip(reused, fresh, strict=True):
                torch.testing.assert_close(reused_token.logits, fresh_token.logits)


def test_prefix_computes_only_new_tokens_even_after_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = network(SMALL), list[int]()
    hook = model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    prefix = Prefix(model)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for prompt, computed in (([1, 2, 3, 4], 4), ([1, 2, 3, 4], 1), ([1, 2, 9, 9, 9], 3), ([1, 2, 9], 1), ([5], 1)):
        interrupt = model.blocks[1].register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(draw(prefix, [*prompt, 8], 1, Sampling()))
        interrupt.remove()
        lengths.clear()
        next(draw(prefix, prompt, 1, Sampling()))
        assert lengths == [computed]
    hook.remove()


@pytest.mark.parametrize("config", [SMALL, *MODERN.values()], ids=["GPT-2", *MODERN])
def test_one_forward_pass_extends_several_texts(config: ModelConfig) -> None:
    model, texts = noisy(config), [[3, 1, 4, 1, 5, 9], [2, 7], [1, 8, 2, 8]]
    separate, together = [[Prefix(model) for _ in texts] for _ in range(2)]
    with torch.inference_mode():
        for prefix, text in zip([*separate, *together], [*texts, *texts], strict=True):
            model(torch.tensor([text]), prefix.cache)
        for token in (5, 30):
            logits = model(torch.full((1, 3), token), CacheGroup([prefix.cache for prefix in together]))
            separate_logits = [model(torch.tensor([[token]]), prefix.cache) for prefix in separate]
            torch.testing.assert_close(logits, torch.cat(separate_logits, dim=1))
