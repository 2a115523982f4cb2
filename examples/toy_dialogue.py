"""The toy dialogue: stories for a base model, conversations for a fine-tune, and held-out questions with answers.

    python examples/toy_dialogue.py toy  # writes stories.jsonl, conversations.jsonl, questions.jsonl
    python examples/toy_dialogue.py toy --model runs/toy-talk  # prints the share of questions that the model answers

Each animal of a toy world has a color, a home, a food and a job. The stories mention all four facts about each animal.
The conversations ask for three of the four, and the held-out questions for the fourth. A right answer therefore states
something that the model learned only from the stories, in a form that it learned from conversations about other facts.
One answer in eleven would be right by chance.
"""

import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench  # makes the repository's packages importable
import torch
from scipy import special

from common.files import check_replaceable, replace_file
from model.generate import Sampling
from tokens.tokenizer.template import ASSISTANT, USER, Message

ANIMALS = [
    *("bat", "bear", "bee", "cow", "crab", "crow", "deer", "dog", "duck", "fox", "frog", "goat"),
    *("hare", "hen", "horse", "lion", "mole", "mouse", "otter", "owl", "pig", "seal", "toad", "wolf"),
]
# For each kind of fact: the sentence, the questions, and the values.
FACTS = [
    (
        "The {animal} is {value}.",
        ("What colour is the {animal}?", "Tell me the colour of the {animal}."),
        ("black", "blue", "brown", "green", "grey", "orange", "pink", "red", "white", "yellow"),
    ),
    (
        "The {animal} lives in the {value}.",
        ("Where does the {animal} live?", "Tell me the home of the {animal}."),
        ("barn", "bridge", "cave", "farm", "field", "garden", "hill", "lake", "mill", "school", "tower", "wood"),
    ),
    (
        "The {animal} eats {value}.",
        ("What does the {animal} eat?", "Tell me the food of the {animal}."),
        ("apples", "beans", "bread", "cake", "cheese", "corn", "honey", "nuts", "pears", "rice", "soup"),
    ),
    (
        "The {animal} is a {value}.",
        ("What is the work of the {animal}?", "Tell me what the {animal} does all day."),
        ("baker", "cook", "doctor", "farmer", "painter", "pilot", "sailor", "singer", "tailor", "teacher"),
    ),
]
# Texts between a question and its answer in stories.
GAPS = (" ", "\n", "\n", " Well. ", "\nI know it. ", " Oh, that is easy.\n")
MOST_SENTENCES, MOST_QUESTIONS = 8, 6  # most sentences in a story, and most questions in a conversation
STORIES, CONVERSATIONS = 12_000, 3_000
LONGEST_ANSWER = 40  # tokens


class Fact(NamedTuple):
    """A fact of the toy world."""

    sentence: str
    questions: list[str]


class ToyWorld:
    """A random world and its texts, which depend only on the seed."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        facts = [self._facts_of_a_kind(*kind) for kind in FACTS]
        self._held_out = [self._random.choice(facts_of_animal) for facts_of_animal in zip(*facts, strict=True)]
        self._facts = list(itertools.chain(*facts))
        self._taught = [fact for fact in self._facts if fact not in self._held_out]

    def story(self) -> str:
        """Return a document for the base model: facts, each on its own or after a question."""
        facts = self._random.sample(self._facts, self._random.randint(1, MOST_SENTENCES))
        questions = [self._random.choice(["", *fact.questions]) for fact in facts]
        questions = [question and f"{question}{self._random.choice(GAPS)}" for question in questions]
        return "\n".join(question + fact.sentence for question, fact in zip(questions, facts, strict=True))

    def conversation(self) -> list[Message]:
        """Return a conversation of one to MOST_QUESTIONS questions and answers."""
        facts = self._random.sample(self._taught, self._random.randint(1, MOST_QUESTIONS))
        pairs = [(self._random.choice(fact.questions), fact.sentence) for fact in facts]
        return [Message(role, text) for pair in pairs for role, text in zip((USER, ASSISTANT), pair, strict=True)]

    def questions(self) -> list[tuple[str, str]]:
        """Return all held-out questions, each with its answer."""
        return [(question, fact.sentence) for fact in self._held_out for question in fact.questions]

    def _facts_of_a_kind(self, sentence: str, questions: Sequence[str], values: Sequence[str]) -> list[Fact]:
        """Return one fact about each animal. All values occur about equally often."""
        shuffled = list(itertools.islice(itertools.cycle(values), len(ANIMALS)))
        self._random.shuffle(shuffled)
        return [
            Fact(
                sentence.format(animal=animal, value=value), [question.format(animal=animal) for question in questions]
            )
            for animal, value in zip(ANIMALS, shuffled, strict=True)
        ]


def write(directory: Path, seed: int) -> None:
    """Write the files of a toy world."""
    world = ToyWorld(seed)
    stories = [{"text": world.story()} for _ in range(STORIES)]
    conversations = [
        {"messages": [message._asdict() for message in world.conversation()]} for _ in range(CONVERSATIONS)
    ]
    questions = [{"question": question, "answer": answer} for question, answer in world.questions()]
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in (("stories", stories), ("conversations", conversations), ("questions", questions)):
        content = "".join(f"{json.dumps(row)}\n" for row in rows)
        check_replaceable(directory / f"{name}.jsonl", content.encode().__eq__, f"the toy world of --seed {seed}")
        replace_file(directory / f"{name}.jsonl", content)
        print(f"{directory / name}.jsonl: {len(rows):,} lines")


def ask(model: str, questions: Path) -> None:
    """Print the share of questions that a model answers correctly.

    Each question starts a new conversation, and decoding is greedy.
    """
    from evaluation.generation.chat import Conversation
    from evaluation.shared.load import load
    from evaluation.shared.model_location import locate

    torch.set_num_threads(1)
    trained = load(locate(model, None), None, torch.device("cpu"))
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    wrong = []
    for row in rows:
        answer = "".join(Conversation(trained, LONGEST_ANSWER).answer(row["question"], Sampling(temperature=0)))
        if answer != row["answer"]:
            wrong.append(f"{row['question']} {answer!r}, expected {row['answer']!r}")
    print(*wrong[:5], sep="\n")
    right = len(rows) - len(wrong)
    low = special.betaincinv(right, len(wrong) + 1, 0.025) if right else 0.0  # Clopper and Pearson
    high = special.betaincinv(right + 1, len(wrong), 0.975) if wrong else 1.0
    print(f"{model}: {right} of {len(rows)} right, {right / len(rows):.1%} [{low:.1%}, {high:.1%}]")


def main(directory: Path, *, seed: int = 0, model: str | None = None) -> None:
    """Write the files, or ask a model the held-out questions."""
    if model is None:
        write(directory, seed)
    else:
        ask(model, directory / "questions.jsonl")


if __name__ == "__main__":
    bench.run(main)
