"""Text generation: sampling one token at a time with a key-value cache."""

from collections.abc import Collection, Iterator
from itertools import takewhile
from typing import NamedTuple

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from model.gpt import GPT, KeyValueCache


@attrs.frozen(kw_only=True)
class Sampling:
    """Sampling options: how the next token is drawn from the logits."""

    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int | None = None  # candidates kept; None keeps all
    top_p: float = 1.0  # probability that the likeliest candidates have to reach; 1 keeps all
    seed: int = 0


def lay_out_for_generation(model: GPT) -> None:
    """Store the wide matrices of a model on a CPU in column-major order, in place; names, shapes and values stay.

    Generating one token is a matrix-vector product, bound by memory reads, which are 1.3 times as fast this way (GPT-2
    124M, one core of an AMD EPYC). For inference only: the order of additions changes.
    """
    if model.token_embedding.weight.device.type != "cpu":
        return
    wide = [part.weight for part in model.modules() if isinstance(part, nn.Linear)] + [model.token_embedding.weight]
    for weight in wide:
        if weight.shape[0] > weight.shape[1]:
            weight.data = weight.data.t().contiguous().t()


class Prefix:
    """Tokens of one text with their keys and values, kept between calls of `draw`, interrupted ones too."""

    def __init__(self, model: GPT):
        self.model = model
        self.cache = KeyValueCache(model.config, batch_size=1, device=model.token_embedding.weight.device)
        self.tokens: list[int] = []  # the first `cache.length` have keys and values

    def shared(self, tokens: list[int]) -> int:
        """Return how many of the first `tokens` have keys and values here."""
        known = zip(self.tokens[: self.cache.length], tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], known))

    def reuse(self, tokens: list[int]) -> list[int]:
        """Keep the longest common beginning with `tokens`, but their last one; return the rest, to be computed."""
        self.cache.length = self.shared(tokens[:-1])
        self.tokens = [*tokens]
        return tokens[self.cache.length :]


class Drawn(NamedTuple):
    """A new token, and the logits that it was drawn from."""

    token: int
    logits: Float[Tensor, "V"]  # fp32, before temperature, top-k and top-p; on the model's device


class Drawing:
    """A text that is drawn token by token from the logits that a caller computes; `draw` is such a caller."""

    def __init__(self, prefix: Prefix, prompt: list[int], sampling: Sampling):
        self.prefix, self.sampling = prefix, sampling
        self.context = prefix.model.config.context_length
        self.generator = torch.Generator(prefix.cache.memory.device).manual_seed(sampling.seed)
        self.new = prefix.reuse(prompt[-self.context :])  # tokens to compute next

    def take(self, logits: Float[Tensor, "1 V"]) -> Drawn:
        """Return the token after those in `new`, whose last one has these logits. Raises ValueError as `choose`."""
        token, tokens = int(choose(logits.float(), self.sampling, self.generator)), self.prefix.tokens
        tokens.append(token)
        self.new = [token]
        if len(tokens) > self.context:
            self.prefix.cache.length = 0  # each token has another position now
            self.new = self.prefix.reuse(tokens[-self.context :])
        return Drawn(token, logits[0].float())


@torch.inference_mode()
def draw(
    prefix: Prefix, prompt: list[int], count: int, sampling: Sampling, stop: Collection[int] = ()
) -> Iterator[Drawn]:
    """Yield `count` new tokens after `prompt`, or fewer up to a token of `stop`, which is left out.

    The network sees the last `context_length` tokens, as in nanoGPT: beyond that, each token computes all of them.
    With a used prefix, logits equal those of a new one up to rounding, as sums are taken in another order.
    Raises ValueError when the prompt is empty, or the logits are not finite.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens")
    model, drawing = prefix.model.eval(), Drawing(prefix, prompt, sampling)
    for _ in range(count):
        logits = model(torch.tensor([drawing.new], device=prefix.cache.memory.device), prefix.cache)  # (1, 1, V)
        drawn = drawing.take(logits[:, -1])
        if drawn.token in stop:
            return
        yield drawn


def generate(
    model: GPT, prompt: list[int], count: int, sampling: Sampling, stop: Collection[int] = ()
) -> Iterator[int]:
    """Yield the ids that `draw` draws with a new prefix. Raises ValueError as it does."""
    return (drawn.token for drawn in draw(Prefix(model), prompt, count, sampling, stop))


def check_finite(logits: Float[Tensor, "*B V"]) -> None:
    """Raise ValueError when a logit is not finite."""
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("the model's logits are not finite: its weights are damaged or training diverged")


def choose(logits: Float[Tensor, "B V"], sampling: Sampling, generator: torch.Generator) -> Int[Tensor, "B 1"]:
    """Return one token id for each row of logits. Raises ValueError when a logit is not finite."""
    check_finite(logits)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if sampling.top_k is not None:
        kept = min(sampling.top_k, logits.shape[-1])
        threshold = logits.topk(kept, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        spare = ordered.cumsum(dim=-1) - ordered >= sampling.top_p  # likelier ones reach it already
        probabilities = probabilities.masked_fill(spare.scatter(1, order, spare), 0.0)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)
