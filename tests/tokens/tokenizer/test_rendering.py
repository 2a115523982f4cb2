"""Other people's templates run within limits, and each prompt equals the text before its answer in training."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from common.errors import BadInput
from tokens.tokenizer import rendering
from tokens.tokenizer.rendering import RenderedText, TemplateInput, conversation_text, render
from tokens.tokenizer.template import OURS

TURNS = [["user", "Q"], ["assistant", "A"], ["user", "R"], ["assistant", "B"]]
SAY = "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FOREVER = {
    "nested loops": LOOP,
    "a recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a huge power": "{{ 9 ** (9 ** 9) }}",
    "doubling": "{% set n = namespace(a='a' * 99999) %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "many slices": "{% for part in [1] | slice(10 ** 10) %}{% endfor %}",
}
TOO_LARGE = {
    "a product": "{{ 'a' * 10 ** 10 }}",
    "padding": "{{ '%10000000000d' % 1 }}",
    "a filter's padding": "{{ 'a' | center(10 ** 10) }}",
    "a method's padding": "{{ 'a'.ljust(10 ** 10) }}",
    "a list": "{% set a = [0] * 10 ** 10 %}",
    "a join": "{{ range(99999) | join('a' * 99999) }}",
}
UNDECIDED = {
    "deep recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "no file": "{% include '/etc/passwd' %}",
}


@pytest.fixture(scope="module", autouse=True)
def _short_limit() -> Iterator[None]:
    with limited(0.2):
        yield


@pytest.fixture
def _long_limit() -> Iterator[None]:
    with limited(60):  # a busy machine needs a long time to allocate a gigabyte
        yield


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        rendering._process_of(os.getpid())._end()
        patch.setattr(rendering, "SECONDS", seconds)
        yield
        rendering._process_of(os.getpid())._end()


def text(template: str, messages: list[list[str]] = TURNS, *, asks: bool = False, prompt: bool = False) -> RenderedText:
    answers = [number for number, (role, _) in enumerate(messages) if role == "assistant" and asks]
    values = {"eos_token": "<end>"}
    return render(TemplateInput(template, values, messages, begins_answer=prompt, answers=answers), trusted=False)


@pytest.mark.parametrize("template", FOREVER.values(), ids=FOREVER)
def test_a_template_is_stopped_at_its_time_limit(template: str) -> None:
    with pytest.raises(BadInput, match=r"takes more than 0\.2 seconds of processor time|of memory"):
        text(template + SAY)
    assert text(SAY).text.count("<end>") == 4  # the next text is rendered in a new process


@pytest.mark.parametrize("template", TOO_LARGE.values(), ids=TOO_LARGE)
@pytest.mark.usefixtures("_long_limit")
def test_a_template_is_stopped_at_its_size_limit(template: str) -> None:
    with pytest.raises(BadInput, match=r"more than 1,073,741,824 bytes of memory|writes [0-9,]+ characters, wanted"):
        text(template + SAY)


def test_an_oversized_template_or_text_is_refused() -> None:
    with pytest.raises(BadInput, match=r"writes 1,500,\d+ characters, wanted at most 1,048,588 for these messages"):
        text("{{ 'a' * 1500000 }}" + SAY)
    with pytest.raises(BadInput, match="got 1,048,577 characters, wanted at most 1,048,576"):
        text(" " * 1_048_577)
    long = [["user", "Q" * 3_000_000]]
    assert text(SAY, long).contents == ["Q" * 3_000_000]  # contents are not limited


@pytest.mark.parametrize("template", UNDECIDED.values(), ids=UNDECIDED)
def test_a_failing_template_is_one_error_line(template: str) -> None:
    with pytest.raises(BadInput, match=r"^the conversation template: \S.*$"):
        text(template + SAY)


def test_threads_and_forks_get_their_own_answers() -> None:
    contents = [f"{number} é \ud800" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda content: text(SAY, [["user", content]]).contents[0], contents)] == contents
    child = os.fork()
    if child == 0:
        os._exit(text(SAY).contents != ["Q", "A", "R", "B"])
    assert os.waitpid(child, 0)[1] == 0 and text(SAY, TURNS[:1]).contents == ["Q"]


@pytest.mark.usefixtures("_long_limit")
def test_an_interrupted_answer_is_not_returned_later() -> None:
    text(SAY)
    threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        text(LOOP)
    assert text(SAY, TURNS[:1]).contents == ["Q"]


def test_a_killed_process_is_replaced() -> None:
    text(SAY)
    process = rendering._process_of(os.getpid())._process
    assert process is not None
    process.kill()
    process.wait()
    assert text(SAY, TURNS[:1]).contents == ["Q"]


@pytest.mark.parametrize("random", ["{{ lipsum() }}", "{{ range(9) | random }}"])
def test_random_text_in_a_template_is_refused(random: str) -> None:
    with pytest.raises(BadInput):
        text(random + SAY)


LAST = "{% if add_generation_prompt %}a:{% endif %}"
DIFFERENT = {
    "a block before answers": SAY.replace("':'", "(':' if m.role == 'user' else ':<think></think>')") + LAST,
    "no generation prompt": SAY,
    "a space before answers": SAY.replace("':'", "(':' if m.role == 'user' else ': ')") + LAST,
    "a block before the last answer": SAY.replace("':'", "('::' if loop.last else ':')") + LAST.replace(":{", "::{"),
    "a block before earlier answers": SAY.replace("':'", "(':' if loop.last or m.role == 'user' else '::')") + LAST,
    "a number of turns": "{{ messages | length }}" + SAY + LAST,
    "a text before the last question": SAY.replace("{{", "{% if loop.revindex == 2 %}Now {% endif %}{{") + LAST,
    "a text of the question": SAY + LAST.replace("a:", "{{ 'no ' if '2' in messages[-1].content }}a:"),
    "trimmed only in prompts": SAY.replace("m.content", "(m.content | trim if add_generation_prompt else m.content)")
    + LAST,
    "a refusal": SAY + "{% if add_generation_prompt %}{{ raise_exception('no') }}{% endif %}",
}


@pytest.mark.parametrize("template", DIFFERENT.values(), ids=DIFFERENT)
def test_a_prompt_must_equal_the_training_text(template: str) -> None:
    messages = [["user", " Q2"], ["assistant", "A"], ["user", " R2"], ["assistant", "B"]]
    assert text(template, messages).text  # rendering succeeds if the text is not compared with prompts
    with pytest.raises(BadInput, match=r"differs from the prompt|differently than in the prompt|no prompt asks for it"):
        text(template, messages, asks=True)


def test_an_error_shows_both_endings_of_a_prompt() -> None:
    with pytest.raises(BadInput) as raised:
        text(DIFFERENT["a block before answers"], asks=True)
    assert "the prompt ends 'u:(message 1)<end>a:', and the conversation ends 'u:(message 1)<end>a:<think>" in str(
        raised.value
    )


def test_our_templates_prompt_as_they_train() -> None:
    turns = [["system", " S\n"], ["user", " Q "], ["assistant", "</think>A"], ["user", "\n"], ["assistant", ""]]
    for template in OURS:
        for messages in (turns, turns[1:], turns[:3], turns[1:3]):
            answers = [number for number, (role, _) in enumerate(messages) if role == "assistant"]
            values = {"eos_token": "<end>"}
            conversation = TemplateInput(template, values, messages, begins_answer=False, answers=answers)
            assert conversation_text(conversation).contents == [content for _, content in messages]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for x in %}", "the conversation template: line 1: is not valid Jinja; correct it (Expected an expression"),
        (
            "a\n{{ messages.x.y }}",
            "the conversation template: line 2: fails for these messages; correct the template, or the messages (",
        ),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
    ],
)
def test_errors_of_jinja_are_readable(template: str, message: str) -> None:
    conversation = TemplateInput(
        template=template, values={}, messages=[["user", "a"]], begins_answer=False, answers=[]
    )
    with pytest.raises(BadInput) as refused:
        conversation_text(conversation)
    assert message in str(refused.value)
