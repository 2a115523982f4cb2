"""Smoke test: generate continuations of fixed prompts, and detect degenerate output."""

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
REPEATED_TOKENS = 10  # shortest repetition, in tokens, that is considered degenerate
LONGEST_CYCLE = 3  # tokens
GREEDY = Sampling(temperature=0)


@attrs.frozen
class AskedPrompt:
    """A prompt in the form that a model reads."""

    text: str  # the prompt as the output shows it; for a chat model, with the turn tokens around the message
    ids: list[int]

    @classmethod
    def of(cls, trained: Trained, text: str) -> "AskedPrompt":
        """Return the prompt for a text: a message in the model's template, or the text itself if there is none."""
        ids = trained.ask([Message(USER, text)])
        return cls(text if trained.template is None else trained.decode(ids), ids)


@attrs.frozen(kw_only=True)
class Continuation:
    """A text that a model has generated after a prompt."""

    prompt: str  # the prompt as the output shows it
    temperature: float  # 0: always the most likely token
    text: str  # the generated text
    problem: str | None  # why the text is degenerate; None: it is not

    def __str__(self) -> str:
        way = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return f"[{way}] {self.prompt}{self.text}"


def run(command: SmokeCommand) -> None:
    """Print and store each model's continuations. Raises BadInput if any is degenerate."""
    for text in command.prompt:
        check_text(text, "--prompt")
    sampling = Sampling(temperature=command.temperature, top_k=command.top_k, seed=command.seed)
    problems: list[str] = []

    def measure(trained: Trained, _: None, ranks: Ranks) -> tuple[dict[str, Any], str]:
        prompts = [AskedPrompt.of(trained, text) for text in command.prompt]
        continuations = smoke(trained, prompts, command.tokens, sampling, ranks)
        problems.extend(
            f"{trained.location.path}: degenerate output: {continuation.problem}"
            for continuation in continuations
            if continuation.problem
        )
        records = [attrs.asdict(continuation) for continuation in continuations]
        values = {"top_k": command.top_k, "seed": command.seed, "said": records}
        if (count := new_tokens(trained, command.tokens)) < REPEATED_TOKENS:
            show(
                note(
                    f"{trained.location.path}: continuations of {count} tokens are checked only for empty output, not "
                    f"for repetitions; pass --tokens {REPEATED_TOKENS} or more to check for both"
                ),
                once=True,
            )
        return values, "".join(f"\n{continuation}" for continuation in continuations)

    _, all_problems = accepted([command], lambda _: measure_each(command, "smoke", lambda _: None, measure))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        all_problems.append(Problem(text=problems[0] + more))
    if all_problems:
        raise BadInput(*all_problems)


def smoke(
    trained: Trained, prompts: Sequence[AskedPrompt], count: int | None, sampling: Sampling, ranks: Ranks
) -> list[Continuation]:
    """Return greedy and sampled continuations of prompts. Call this on every rank. Raises BadInput.

    `prompts`: if there are none, the texts of GALLERY are used. `count`: the value of --tokens. A chat model's
    continuation ends earlier if the model ends its answer.
    """
    lay_out_for_generation(trained.network)
    count = new_tokens(trained, count)
    samplings = [GREEDY] if sampling.temperature == 0 else [GREEDY, sampling]

    stop = trained.stop_ids if trained.template is not None else frozenset[int]()

    def work(job: tuple[AskedPrompt, Sampling]) -> Continuation:
        prompt, job_sampling = job
        generated = GeneratedText(trained, prompt.ids, count, job_sampling, stop=stop)
        text = "".join(generated)
        # Greedy continuations of small models always repeat, so they are checked only if there are no sampled ones.
        problem = _problem(generated.tokens, text) if job_sampling is samplings[-1] else None
        return Continuation(prompt=prompt.text, temperature=job_sampling.temperature, text=text, problem=problem)

    characters = getattr(trained.tokenizer, "characters", None)
    gallery = [text for text in GALLERY if characters is None or {*text} <= {*characters}] or [""]
    prompts = prompts or [AskedPrompt.of(trained, text) for text in gallery]
    return share(ranks, [(prompt, sampling) for prompt in prompts for sampling in samplings], work, "prompt")


def new_tokens(trained: Trained, count: int | None) -> int:
    """Return the largest number of tokens of a continuation.

    This is `count`, the value of --tokens, if it is given; otherwise 40, or half the context if that is less.
    """
    return min(40, max(1, trained.network.config.context_length // 2)) if count is None else count


def shortest_cycle(tokens: list[int]) -> int | None:
    """Return the period with which a sequence repeats until its end, or None if it does not repeat."""
    if len(tokens) < REPEATED_TOKENS:
        return None
    return next((n for n in range(1, LONGEST_CYCLE + 1) if tokens[n:] == tokens[:-n]), None)


def _problem(tokens: list[int], text: str) -> str | None:
    """Return why a continuation is degenerate, or None if it is not."""
    if not text.strip():
        return f"{len(tokens)} tokens that decode to {text[:20]!r}"
    cycle = shortest_cycle(tokens)
    return None if cycle is None else f"{len(tokens)} tokens that repeat with period {cycle}: {text[:20]!r}"
