"""Smoke test: continuations of fixed prompts, and detection of degenerate output."""

from collections.abc import Sequence
from typing import Any

import attrs

from common.errors import BadInput, Problem, accepted
from common.json_files import check_text
from common.output import note, show
from evaluation.command_line import SmokeCommand
from evaluation.generation.generated_text import GeneratedText
from evaluation.shared.load import Trained
from evaluation.shared.measuring import measure_each, share
from model.generate import Sampling, lay_out_for_generation
from tokens.tokenizer.template import USER, Message
from training.parallel.process_group import Ranks

# The beginnings of a sentence, a fact, a story, a list, a question and a program.
GALLERY = [
    "Every effort moves you",
    "The capital of France is",
    "Once upon a time",
    "The three most important things in life are",
    "Question: How many legs does a spider have?\nAnswer:",
    "def fibonacci(n):\n",
]
REPEATED_TOKENS = 10  # at least, of a repetition that is degenerate
LONGEST_CYCLE = 3  # tokens
GREEDY = Sampling(temperature=0)


@attrs.frozen
class AskedPrompt:
    text: str  # as it is shown; of a model of conversations with the turn tokens around the message
    ids: list[int]

    @classmethod
    def of(cls, trained: Trained, text: str) -> "AskedPrompt":
        """Return the prompt by which a model is asked: a message in its template, or a text to continue."""
        ids = trained.ask([Message(USER, text)])
        return cls(text if trained.template is None else trained.decode(ids), ids)


@attrs.frozen(kw_only=True)
class Continuation:
    prompt: str  # as it is shown
    temperature: float  # 0: the most likely token each time
    text: str  # what follows the prompt
    problem: str | None  # why it is degenerate; None: it is not

    def __str__(self) -> str:
        way = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return f"[{way}] {self.prompt}{self.text}"


def run(command: SmokeCommand) -> None:
    """Print and store each model's continuations. Raises BadInput for degenerate ones."""
    for text in command.prompt:
        check_text(text, "--prompt")
    sampling = Sampling(temperature=command.temperature, top_k=command.top_k, seed=command.seed)
    problems: list[str] = []

    def measure(trained: Trained, _: None, ranks: Ranks) -> tuple[dict[str, Any], str]:
        prompts = [AskedPrompt.of(trained, text) for text in command.prompt]
        said = smoke(trained, prompts, command.tokens, sampling, ranks)
        problems.extend(f"{trained.place.path}: degenerate output: {one.problem}" for one in said if one.problem)
        values = {"top_k": command.top_k, "seed": command.seed, "said": [attrs.asdict(one) for one in said]}
        if (new := new_tokens(trained, command.tokens)) < REPEATED_TOKENS:
            show(
                note(
                    f"{trained.place.path}: continuations of {new} tokens are checked for empty output alone: a "
                    f"repetition is found in {REPEATED_TOKENS} tokens or more; pass --tokens {REPEATED_TOKENS} or more"
                ),
                once=True,
            )
        return values, "".join(f"\n{one}" for one in said)

    _, refused = accepted([command], lambda _: measure_each(command, "smoke", lambda _: None, measure))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        refused.append(Problem(text=problems[0] + more))
    if refused:
        raise BadInput(*refused)


def smoke(
    trained: Trained, prompts: Sequence[AskedPrompt], count: int | None, sampling: Sampling, ranks: Ranks
) -> list[Continuation]:
    """Return continuations of prompts, or the gallery, greedy and sampled; call it on every rank. Raises BadInput.

    A model of conversations ends an answer by itself.
    """
    lay_out_for_generation(trained.network)
    new = new_tokens(trained, count)
    ways = [GREEDY] if sampling.temperature == 0 else [GREEDY, sampling]

    stop = trained.stop_ids if trained.template is not None else frozenset[int]()

    def work(job: tuple[AskedPrompt, Sampling]) -> Continuation:
        prompt, way = job
        generated = GeneratedText(trained, prompt.ids, new, way, stop=stop)
        text = "".join(generated)
        # Greedy continuations of small models always repeat.
        problem = _problem(generated.tokens, text) if way is ways[-1] else None
        return Continuation(prompt=prompt.text, temperature=way.temperature, text=text, problem=problem)

    known = getattr(trained.tokenizer, "characters", None)
    gallery = [text for text in GALLERY if known is None or {*text} <= {*known}] or [""]
    chosen = prompts or [AskedPrompt.of(trained, text) for text in gallery]
    return share(ranks, [(prompt, way) for prompt in chosen for way in ways], work, "prompt")


def new_tokens(trained: Trained, count: int | None) -> int:
    """Return how many tokens a continuation has at most: --tokens, or by default 40, or half of a short context."""
    return min(40, max(1, trained.network.config.context_length // 2)) if count is None else count


def shortest_cycle(tokens: list[int]) -> int | None:
    """Return the period with which a sequence repeats to its end, or None where it does not."""
    if len(tokens) < REPEATED_TOKENS:
        return None
    return next((n for n in range(1, LONGEST_CYCLE + 1) if tokens[n:] == tokens[:-n]), None)


def _problem(chosen: list[int], text: str) -> str | None:
    if not text.strip():
        return f"{len(chosen)} tokens that decode to {text[:20]!r}"
    cycle = shortest_cycle(chosen)
    return None if cycle is None else f"{len(chosen)} tokens that repeat every {cycle}, {text[:20]!r}"
