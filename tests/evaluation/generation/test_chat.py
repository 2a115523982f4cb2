"""`evaluate.py chat`: answers, commands and interrupts in a terminal, and the answer to a single message."""

import json
import os
import pty
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file

from common.errors import BadInput
from common.text import printable
from evaluation.generation.chat import Conversation, run_chat_command, wrap_words
from evaluation.shared.load import Trained
from evaluation.shared.model_location import ModelLocation
from model.config import ModelConfig
from model.generate import DrawnToken, Sampling
from model.gpt import GPT, initialize
from tests.conftest import TINY_MODEL, only_line
from tests.evaluation.comparison.stored import evaluate
from tests.evaluation.generation.test_sample import start
from tests.model.architectures import MODERN
from tests.model.test_generate import generate
from tests.model.test_gpt import SMALL
from tests.model.test_naming import gpjt, network, plain_of
from tokens.tokenizer.loading import load_tokenizer
from tokens.tokenizer.template import ASSISTANT, SYSTEM, TEMPLATES, TURN_TOKENS, USER, Message, Template

GREEDY = Sampling(temperature=0)
TEMPLATE = "{% for message in messages %}{{ message.role[0] + ':' + message.content + '\n' }}{% endfor %}a:"


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a model with a chat template. The model's answers are long and plain ASCII."""
    folder, values = tmp_path_factory.mktemp("talker"), TINY_MODEL | {"context_length": 1 << 14}
    model = GPT(ModelConfig(**values))
    initialize(model, 1)
    with torch.no_grad():
        model.token_embedding.weight[: ord("!")] = 0
        model.token_embedding.weight[ord("~") :] = 0
    weights = gpjt(plain_of(model), model.config)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    (folder / "model.json").write_text(json.dumps(values))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@attrs.frozen
class Talker(Trained):
    """A model whose template and end-of-answer ids are not read from files."""

    template: Template | None = None
    stop_ids: frozenset[int] = frozenset()


class Terminal:
    """A program in a terminal of 80 columns."""

    def __init__(self, *words: str | Path):
        self.controller, terminal = pty.openpty()
        self.process = start([*words], *[terminal] * 3)
        os.close(terminal)

    def until(self, text: str, more: int = 0) -> str:
        """Read output until this text, and at least `more` characters after it, have arrived. Return the output."""
        shown = ""
        while text not in shown or len(shown.partition(text)[2]) < more:
            shown += os.read(self.controller, 4096).decode(errors="replace")
            shown = re.sub(r"\x1b\[\?2004[hl]\r?", "", shown)  # the terminal switches bracketed paste on and off
        return shown

    def type(self, text: str, end: str) -> str:
        os.write(self.controller, text.encode())
        return self.until(end)


@pytest.fixture
def terminal(talker: Path) -> Iterator[Terminal]:
    started = Terminal("chat", talker, "--tokenizer=bytes", "--system=Sys")
    assert "Ctrl-C ends an answer" in started.until("\n> ")
    yield started
    started.process.kill()
    started.process.wait()
    os.close(started.controller)


def trained(config: ModelConfig = SMALL, context: int = 512, template: str | None = "turns") -> Talker:
    """Return a model with random weights. It generates only ASCII."""
    model = network(attrs.evolve(config, vocab_size=261, context_length=context, tie_weights=False))
    assert model.head is not None
    with torch.no_grad():
        model.head.weight[128:] = 0
        model.head.weight[:128] *= 5
    tokenizer = load_tokenizer("bytes").with_special_tokens(TURN_TOKENS)
    location = ModelLocation(Path("model"), None, Path("model"))
    known_template = None if template is None else TEMPLATES[template]
    ends = [] if known_template is None else known_template.ends(tokenizer)
    return Talker(model, tokenizer, location, known_template, frozenset([tokenizer.end_of_text_id, *ends]))


@pytest.mark.slow
def test_terminal_session_from_question_to_exit(terminal: Terminal, tmp_path: Path) -> None:
    for question in ("Hex\x7fllo", "And é?"):  # edited with a backspace
        os.write(terminal.controller, f"{question}\r".encode())
        shown = terminal.until("\r\n", more=100)
        for _ in range(9):
            terminal.process.send_signal(signal.SIGINT)
        shown += terminal.until("\n> ")
    saved = tmp_path / "of two.jsonl"
    for count in (1, 2):
        assert "Saved 5 messages" in terminal.type(f"/save {saved}\r", "\n> ")
        lines = saved.read_text().splitlines()
        assert len(lines) == count
    messages = json.loads(lines[-1])["messages"]
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2]
    assert [message["content"] for message in messages[:4:3]] == ["Sys", "And é?"]
    assert len(messages[2]["content"]) > 90
    answer = shown.partition("\r\n")[2].removesuffix("> ")  # the output after the typed line
    assert "".join(answer.split()) == "".join(map(printable, messages[4]["content"].split()))
    assert "A new conversation begins" in terminal.type("/reset\r", "\n> ")
    assert "nothing to save yet" in terminal.type(f"/save {saved}\r", "\n> ")
    assert "did you mean '/save'" in terminal.type("/safe\r", "\n> ")
    assert "/reset" in terminal.type("/help\r", "\n> ")
    os.write(terminal.controller, b"half a line")
    terminal.until("half a line")
    time.sleep(0.2)  # readline loses a signal that arrives between its echo and its wait
    terminal.process.send_signal(signal.SIGINT)
    assert "Ctrl-D ends the program" in terminal.until("\n> ")
    os.write(terminal.controller, b"\x04")
    assert terminal.process.wait(60) == 0


def test_one_message_is_answered(talker: Path, copied: Path) -> None:
    options = ("--tokenizer=bytes", "--tokens=30", "--temperature=0", "--prompt")
    answered = evaluate("chat", talker, *options, "Hello", "--system", "Sys")
    assert (answered.returncode, answered.stderr, len(answered.stdout)) == (0, "", 31)
    assert "wanted at most" in only_line(evaluate("chat", talker, *options, "x" * 16384))
    plain = evaluate("chat", copied, *options[1:], "import os")
    assert "NOTE: the model has no conversation template" in plain.stderr and plain.stdout.strip()
    assert "a system message needs a conversation template" in only_line(
        evaluate("chat", copied, "--prompt", "x", "--system", "Sys")
    )


def test_conversations_are_saved_only_to_jsonl_files(tmp_path: Path) -> None:
    talk = Conversation(trained(), 9, "Sys")
    assert [*talk.answer("Hi", GREEDY)]
    (tmp_path / "folder.jsonl").mkdir()
    for name, problem in (("", "no name"), ("model.pt", "wanted a .jsonl file"), ("x/y.jsonl", "create it")):
        with pytest.raises(BadInput, match=problem):
            run_chat_command(talk, "/save", name and str(tmp_path / name))
    for name, problem in ((str(tmp_path / "folder.jsonl"), "folder has this name"), ("~no.such.user/x.jsonl", "home")):
        with pytest.raises(BadInput, match=problem):
            run_chat_command(talk, "/save", name)


def test_saving_notes_cut_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk, path = Conversation(trained(), 2), str(tmp_path / "talks.jsonl")
    words = iter(["y", "ye", "yes"])  # the last two reach or exceed the maximum length of an answer

    def draw(prefix: Any, ids: list[int], count: int, *_: Any) -> Iterator[DrawnToken]:
        for number, letter in enumerate(next(words)[:count], start=1):
            yield DrawnToken(ord(letter), torch.zeros(1), "length" if number == count else None)
        if number < count:
            yield DrawnToken(256, torch.zeros(1), "stop")

    monkeypatch.setattr("evaluation.generation.generated_text.draw", draw)
    assert [*talk.answer("1", GREEDY)] and "NOTE" not in run_chat_command(talk, "/save", path)
    assert [*talk.answer("2", GREEDY)] and "\nNOTE: 1 answer in it was cut; a model trained" in run_chat_command(
        talk, "/save", path
    )
    assert [*talk.answer("3", GREEDY)] and "\nNOTE: 2 answers in it were cut; a model" in run_chat_command(
        talk, "/save", path
    )
    run_chat_command(talk, "/reset")
    assert talk.cut == 0


def test_prose_is_wrapped_and_code_keeps_its_indentation() -> None:
    assert "".join(wrap_words(["The quick br", "own fox jumps"], 10)) == "The quick\nbrown fox\njumps"
    assert "".join(wrap_words(["if x:\n    return", " 1\n"], 12)) == "if x:\n    return 1\n"
    assert "".join(wrap_words(["日本", "語", "  x"], 4)) == "日本\n語 \nx"


@pytest.mark.parametrize(
    ("config", "template"), [(SMALL, "turns"), (MODERN["NanoChat"], "turns"), (SMALL, "alpaca"), (SMALL, None)]
)
def test_answers_equal_those_without_a_cache(config: ModelConfig, template: str | None) -> None:
    model = trained(config, 700, template)
    talk = Conversation(model, 20, None if template is None else "Be brief.")
    for question in ("Hello", "What is <|end|>?", "é €"):
        answer = "".join(talk.answer(question, GREEDY))
        messages = [*talk.system, *talk.turns[:-1]]
        if model.template is None:
            ids = model.encode("".join(text + ("\n" if role == ASSISTANT else "") for role, text in messages))
        else:
            ids = model.template.prompt(model.tokenizer, messages)
        assert answer == model.decode(generate(model.network, ids, 20, GREEDY, model.stop_ids))
        assert talk.turns[-2:] == [Message(USER, question), Message(ASSISTANT, answer)]


def test_stopped_and_interrupted_answers_are_kept() -> None:
    model = trained()
    talk = Conversation(model, 30)
    full_answer = "".join(talk.answer("Hi", GREEDY))
    assert len(full_answer) == 30 and talk.latest is not None and talk.latest.finish == "length"
    ending = attrs.evolve(model, stop_ids=model.stop_ids | {ord(full_answer[-1])})
    talk = Conversation(ending, 30)
    assert "".join(talk.answer("Hi", GREEDY)) == full_answer[: full_answer.index(full_answer[-1])]
    assert talk.latest is not None and talk.latest.finish == "stop"
    talk = Conversation(model, 30)
    parts = talk.answer("Hi", GREEDY)
    beginning = next(parts) + next(parts)
    talk.interrupt()
    assert [*parts] == []
    assert talk.turns == [Message(USER, "Hi"), Message(ASSISTANT, beginning)] and beginning == full_answer[:2]
    assert run_chat_command(talk, "/reset") == "A new conversation begins."
    assert "".join(talk.answer("Hi", GREEDY)) == full_answer


def test_turn_without_an_answer_is_dropped() -> None:
    talk = Conversation(attrs.evolve(trained(), stop_ids=frozenset(range(261))), 30)
    assert ("".join(talk.answer("Hi", GREEDY)), talk.turns, talk.cut) == ("", [], 0)


def test_oldest_turns_leave_but_system_message_stays() -> None:
    model = trained(context=64)
    talk = Conversation(model, 500, "Sys")
    for turn in range(6):
        assert 0 < len("".join(talk.answer(f"question {turn}", GREEDY))) <= 64
        assert model.network.config.context_length - len(talk._prompt(Message(USER, "x"))) >= 16
    assert talk.unseen > 0 and len(talk.turns) == 12 and talk.system == [Message(SYSTEM, "Sys")]
    assert talk._prompt(Message(USER, "x"))[:5] == [257, *b"Sys", 260]
    with pytest.raises(BadInput, match="system message: got 88 tokens, wanted at most 48, so that"):
        next(talk.answer("x" * 80, GREEDY))
    assert (len(talk.turns), talk.answers) == (12, 6)


def test_system_message_needs_a_template_and_room() -> None:
    with pytest.raises(BadInput, match="needs a conversation template"):
        Conversation(trained(template=None), 9, "Be brief.")
    with pytest.raises(BadInput, match="system message: got 96 tokens"):
        Conversation(trained(context=64), 9, "Be brief. " * 9)
    refusing = attrs.evolve(trained(), template=attrs.evolve(TEMPLATES["turns"], text="{{ raise_exception('no!') }}"))
    with pytest.raises(BadInput, match="template: refuses these messages: no!"):
        Conversation(refusing, 9)
