"""Text generation: sampling one token at a time with a key-value cache."""

from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from model.gpt import GPT, Cache, CacheGroup, KeyValueCache, ScoringCache
from model.loss import check_finite

LOGITS = "the model's logits are"  # the subject of an error
Finish = Literal["stop", "length"]  # a token that ends texts; the most tokens


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
    finish: Finish | None  # why the text ends here; the token of a "stop" is no part of the text


class Drawing:
    """A text that is drawn token by token, from logits that `advance` computes.

    The network sees the last `context_length` tokens, as in nanoGPT: beyond that, each token computes all of them.
    """

    def __init__(
        self, prefix: Prefix, prompt: list[int], count: int, sampling: Sampling, stop: Collection[int] = ()
    ) -> None:
        """Begin a text of at most `count` new tokens, which a token of `stop` ends. Raises ValueError without a prompt.

        With a used prefix, logits equal those of a new one up to rounding, as sums are taken in another order.
        """
        if not prompt:
            raise ValueError("the prompt has no tokens")
        self.prefix, self.sampling, self.remaining, self.stop = prefix, sampling, count, stop
        self.context = prefix.model.config.context_length
        self.generator = torch.Generator(prefix.cache.memory.device).manual_seed(sampling.seed)
        self.new = prefix.reuse(prompt[-self.context :])  # tokens to compute next

    def take(self, logits: Float[Tensor, "1 V"]) -> Drawn:
        """Return the token after `new`, whose last one has these logits. Raises ValueError as `choose`."""
        token, tokens = int(choose(logits.float(), self.sampling, self.generator)), self.prefix.tokens
        tokens.append(token)
        self.new = [token]
        if len(tokens) > self.context:
            self.prefix.cache.length = 0  # each token has another position now
            self.new = self.prefix.reuse(tokens[-self.context :])
        self.remaining -= 1
        finish: Finish | None = "stop" if token in self.stop else "length" if self.remaining == 0 else None
        return Drawn(token, logits[0].float(), finish)


def advance(
    drawings: Sequence[Drawing], *, most: int | None = None, all_positions: bool = False
) -> Float[Tensor, "N V"]:
    """Compute new tokens of several texts in one forward pass, `most` of each; return logits after the last of each.

    `all_positions`: of one text, the logits after each of the tokens, (T, V).
    """
    parts = [drawing.new[:most] for drawing in drawings]
    caches = [drawing.prefix.cache for drawing in drawings]
    cache: Cache = ScoringCache(caches[0]) if all_positions else caches[0] if len(caches) == 1 else CacheGroup(caches)
    tokens = torch.tensor([[token for part in parts for token in part]], device=caches[0].memory.device)
    logits = drawings[0].prefix.model(tokens, cache)[0]
    for drawing, part in zip(drawings, parts, strict=True):
        drawing.new = drawing.new[len(part) :]
    return logits


@torch.inference_mode()
def draw(
    prefix: Prefix, prompt: list[int], count: int, sampling: Sampling, stop: Collection[int] = ()
) -> Iterator[Drawn]:
    """Yield the new tokens of one text, the one that ends it as well; the arguments are those of `Drawing`.

    Raises ValueError when the prompt is empty, or the logits are not finite.
    """
    prefix.model.eval()
    drawing = Drawing(prefix, prompt, count, sampling, stop)
    while drawing.remaining:
        drawn = drawing.take(advance([drawing]))
        yield drawn
        if drawn.finish == "stop":
            return


def choose(logits: Float[Tensor, "B V"], sampling: Sampling, generator: torch.Generator) -> Int[Tensor, "B 1"]:
    """Return one token id for each row of logits. Raises ValueError when a logit is not finite."""
    check_finite(logits, LOGITS)
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
