"""Toy dialogue: stories for a base model, conversations for a fine-tune, held-out questions with the right answers.

    python benchmarks/toy_dialogue.py toy                  # writes stories.jsonl, conversations.jsonl, questions.jsonl
    python benchmarks/toy_dialogue.py toy --model runs/talk  # share of the held-out questions that it answers right

People of a toy world own things, each of one colour, of one material and at one place. Stories tell all of it.
Conversations ask for two of the three of each thing, held-out questions for the third: what a right answer says was
learned from stories alone, and how to answer such a question from conversations about other things.
"""

import json
import random
from pathlib import Path
from typing import NamedTuple

import bench
import torch
from scipy import special

from common.files import replace_file
from model.generate import Sampling
from tokens.tokenizer.template import ASSISTANT, USER, Message

PEOPLE = [
    *("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ida", "Jon"),
    *("Kim", "Leo", "Mira", "Nils", "Olga", "Pia", "Quin", "Rosa", "Sam", "Tess"),
]
THINGS = ["boat", "kite", "cart", "drum", "lamp", "bell", "coat", "hat", "ball", "book", "chair", "clock"]
COLOURS = ["red", "blue", "green", "white", "black", "yellow", "brown", "grey", "pink", "orange"]
MATERIALS = ["wood", "iron", "glass", "paper", "stone", "silk"]
PLACES = ["lake", "mill", "farm", "school", "bridge", "tower", "market", "harbour"]
OWNED = 5  # things of a person
MOST_QUESTIONS = 5  # of a conversation
STORIES, CONVERSATIONS = 12_000, 2_000
LONGEST_ANSWER = 40  # tokens


class Thing(NamedTuple):
    """A thing of the toy world."""

    owner: str
    kind: str
    colour: str
    material: str
    place: str

    @property
    def sentences(self) -> list[str]:
        """The sentences of stories about it."""
        name = f"{self.owner}'s {self.kind}"
        return [
            f"{self.owner} has a {self.colour} {self.kind} of {self.material}.",
            f"You find {name} at the {self.place}.",
            *(answer for _, answer in self.asked),
        ]

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Questions about it, each with its answer."""
        name = f"{self.owner}'s {self.kind}"
        return [
            (f"What colour is {name}?", f"{name} is {self.colour}."),
            (f"What is {name} made of?", f"{name} is made of {self.material}."),
            (f"Where is {name}?", f"{name} is at the {self.place}."),
        ]


class Question(NamedTuple):
    """A held-out question."""

    messages: list[Message]  # the last one asks
    answer: str


class ToyWorld:
    """A world and its texts, drawn by a seed."""

    def __init__(self, seed: int):
        self._random = choose = random.Random(seed)
        self._things = [
            Thing(owner, kind, choose.choice(COLOURS), choose.choice(MATERIALS), choose.choice(PLACES))
            for owner in PEOPLE
            for kind in choose.sample(THINGS, OWNED)
        ]
        kinds = range(len(self._things[0].asked))
        self._held_out = {thing: choose.choice(kinds) for thing in self._things}  # the question never asked about it

    def story(self) -> str:
        """Return a document for the base model, about one to three things."""
        things = self._random.sample(self._things, self._random.randint(1, 3))
        return " ".join(sentence for thing in things for sentence in self._random.sample(thing.sentences, 3))

    def conversation(self) -> list[Message]:
        """Return a conversation of one to MOST_QUESTIONS questions and answers."""
        things = self._random.sample(self._things, self._random.randint(1, MOST_QUESTIONS))
        asked = [self._random.choice([pair for pair in each.asked if pair != self._unasked(each)]) for each in things]
        return [Message(role, text) for pair in asked for role, text in zip((USER, ASSISTANT), pair, strict=True)]

    def questions(self) -> list[Question]:
        """Return all held-out questions: each alone."""
        return [Question([Message(USER, asked)], answer) for asked, answer in map(self._unasked, self._things)]

    def _unasked(self, thing: Thing) -> tuple[str, str]:
        return thing.asked[self._held_out[thing]]


def write(directory: Path, seed: int) -> None:
    """Write the files of a toy world."""
    world = ToyWorld(seed)
    stories = [{"text": world.story()} for _ in range(STORIES)]
    conversations = [{"messages": [each._asdict() for each in world.conversation()]} for _ in range(CONVERSATIONS)]
    asked = [{"messages": [each._asdict() for each in one.messages], "answer": one.answer} for one in world.questions()]
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in (("stories", stories), ("conversations", conversations), ("questions", asked)):
        replace_file(directory / f"{name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"{directory / name}.jsonl: {len(rows):,} lines")


def ask(model: str, questions: Path) -> None:
    """Print the share of questions that a model answers right, greedily, each in a conversation of its own."""
    from evaluation.chat.chat import Conversation
    from evaluation.shared.load import load, locate

    torch.set_num_threads(1)
    trained = load(locate(model, None), None, torch.device("cpu"))
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    wrong = []
    for row in rows:
        [question] = [message["content"] for message in row["messages"]]
        answer = "".join(Conversation(trained, LONGEST_ANSWER).answer(question, Sampling(temperature=0)))
        if answer != row["answer"]:
            wrong.append(f"{question} {answer!r}, wanted {row['answer']!r}")
    print(*wrong[:5], sep="\n")
    right = len(rows) - len(wrong)
    low = special.betaincinv(right, len(wrong) + 1, 0.025) if right else 0.0  # Clopper and Pearson
    high = special.betaincinv(right + 1, len(wrong), 0.975) if wrong else 1.0
    print(f"{model}: {right} of {len(rows)} right, {right / len(rows):.1%} [{low:.1%}, {high:.1%}]")


def main(directory: Path, *, seed: int = 0, model: str | None = None) -> None:
    """Write the files, or ask a model."""
    if model is None:
        write(directory, seed)
    else:
        ask(model, directory / "questions.jsonl")


if __name__ == "__main__":
    bench.run(main)
