"""Text generation: sample one token at a time, with a key-value cache."""

from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from model.gpt import GPT, Cache, CacheGroup, KeyValueCache, ScoringCache
from model.loss import check_finite

LOGITS = "the model's logits are"  # an error message begins with this
Finish = Literal["stop", "length"]  # a token ended the text, or the text reached its maximum length


@attrs.frozen(kw_only=True)
class Sampling:
    """Sampling options, which determine how the next token is drawn from the logits."""

    temperature: float = 1.0  # 0 always chooses the most likely token
    top_k: int | None = None  # number of candidates to keep; None keeps all
    top_p: float = 1.0  # keep the most likely candidates until their probabilities add up to top_p; 1 keeps all
    seed: int = 0


def lay_out_for_generation(model: GPT) -> None:
    """Store the wide matrices of a model on a CPU in column-major order, in place.

    Names, shapes and values do not change. Generating one token multiplies matrices by a vector, and memory reads
    limit the speed of this product. The layout makes generation 1.3 times as fast (GPT-2 124M, one core of an AMD
    EPYC). Use it only for inference, because it changes the order of additions.
    """
    if model.token_embedding.weight.device.type != "cpu":
        return
    wide = [part.weight for part in model.modules() if isinstance(part, nn.Linear)] + [model.token_embedding.weight]
    for weight in wide:
        if weight.shape[0] > weight.shape[1]:
            weight.data = weight.data.t().contiguous().t()


class Prefix:
    """The tokens of one text, with their keys and values. A prefix can be used for several calls of `draw`.

    The prefix stays valid if a call is interrupted.
    """

    def __init__(self, model: GPT):
        self.model = model
        self.cache = KeyValueCache(model.config, batch_size=1, device=model.token_embedding.weight.device)
        self.tokens: list[int] = []  # the cache has keys and values of the first `cache.length` tokens

    def shared(self, tokens: list[int]) -> int:
        """Return the number of tokens at the beginning of `tokens` whose keys and values are stored here."""
        pairs = zip(self.tokens[: self.cache.length], tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def reuse(self, tokens: list[int]) -> list[int]:
        """Keep the beginning that this text shares with `tokens`, and return the tokens that are still to be computed.

        The last token is always computed, because its logits are needed.
        """
        self.cache.length = self.shared(tokens[:-1])
        self.tokens = [*tokens]
        return tokens[self.cache.length :]


class DrawnToken(NamedTuple):
    """A new token, and the logits that it was drawn from."""

    token: int
    logits: Float[Tensor, "V"]  # fp32, before temperature, top-k and top-p; on the model's device
    # The reason why the text ends here; None if the text continues. With "stop", the token is not part of the text.
    finish: Finish | None


class Drawing:
    """A text that is drawn token by token, from logits that `advance` computes.

    The network sees the last `context_length` tokens, as in nanoGPT. As soon as the text is longer than that, all of
    these tokens must be computed again for every new token.
    """

    def __init__(
        self, prefix: Prefix, prompt: list[int], count: int, sampling: Sampling, stop: Collection[int] = ()
    ) -> None:
        """Start a text of at most `count` new tokens. Any token in `stop` ends the text.

        If the prefix already has tokens, the logits differ by rounding from those with an empty prefix, because sums
        are added in a different order. Raises ValueError if the prompt is empty.
        """
        if not prompt:
            raise ValueError("the prompt has no tokens")
        self.prefix, self.sampling, self.remaining, self.stop = prefix, sampling, count, stop
        self.context = prefix.model.config.context_length
        self.generator = torch.Generator(prefix.cache.memory.device).manual_seed(sampling.seed)
        self.new = prefix.reuse(prompt[-self.context :])  # tokens that are computed next

    def take(self, logits: Float[Tensor, "1 V"]) -> DrawnToken:
        """Draw the next token from these logits, add it to the text, and return it.

        `logits` are the network's output after the last token of `new`. Raises ValueError as `choose` does.
        """
        token, tokens = int(choose(logits.float(), self.sampling, self.generator)), self.prefix.tokens
        tokens.append(token)
        self.new = [token]
        if len(tokens) > self.context:
            self.prefix.cache.length = 0  # every token's position has changed
            self.new = self.prefix.reuse(tokens[-self.context :])
        self.remaining -= 1
        finish: Finish | None = "stop" if token in self.stop else "length" if self.remaining == 0 else None
        return DrawnToken(token, logits[0].float(), finish)


def advance(
    drawings: Sequence[Drawing], *, most: int | None = None, all_positions: bool = False
) -> Float[Tensor, "N V"]:
    """Run one forward pass over the new tokens of several texts, and return the logits after each text's last token.

    At most `most` tokens of each text are computed. With `all_positions`, only one text is allowed, and the logits
    after each of its tokens are returned, (T, V).
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
) -> Iterator[DrawnToken]:
    """Yield the new tokens of one text, including the token in `stop` that ends it. `Drawing` explains the arguments.

    Raises ValueError if the prompt is empty or a logit is not finite.
    """
    prefix.model.eval()
    drawing = Drawing(prefix, prompt, count, sampling, stop)
    while drawing.remaining:
        token = drawing.take(advance([drawing]))
        yield token
        if token.finish == "stop":
            return


def choose(logits: Float[Tensor, "B V"], sampling: Sampling, generator: torch.Generator) -> Int[Tensor, "B 1"]:
    """Return one token id for each row of logits. Raises ValueError if a logit is not finite."""
    check_finite(logits, LOGITS)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if sampling.top_k is not None:
        candidates = min(sampling.top_k, logits.shape[-1])
        threshold = logits.topk(candidates, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token is removed if the probabilities of more likely tokens already add up to top_p.
        removed = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        probabilities = probabilities.masked_fill(removed.scatter(1, order, removed), 0.0)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)
