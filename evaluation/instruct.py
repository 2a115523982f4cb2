"""How well a model learns to follow instructions: a copy is fine-tuned, then answers questions it has not seen."""

import statistics
from pathlib import Path
from typing import Any

import attrs

from errors import BadInput
from evaluation.fine_tuning import FineTuned, Settings, answer_losses, encode, fine_tune, make_example, prompt_text
from evaluation.intervals import plus_minus
from evaluation.load import Trained
from evaluation.overlap import FreeScores, describe, free_scores
from evaluation.records import Answer, Answers, Record, read_records, write_answers
from evaluation.shares import share
from evaluation.smoke import decode
from files import sha256
from model.generate import Sampling, generate, lay_out_for_generation
from training.metrics import ANSWERS
from training.ranks import Ranks, from_coordinator

TRAINED, TESTED = 0.85, 0.10  # of the records; the rest validates


@attrs.frozen(kw_only=True)
class Split:
    """Records by what they are for, in the order of their file: train, test, validation."""

    train: list[Record]
    test: list[Record]
    validation: list[Record]


@attrs.frozen(kw_only=True)
class Questions:
    """A file of records, cut into its parts."""

    file: str
    sha256: str
    split: Split

    def described(self) -> dict[str, Any]:
        """Return what results and answers say of it."""
        sizes = {name: len(records) for name, records in attrs.asdict(self.split, recurse=False).items()}
        return {"file": self.file, "sha256": self.sha256, **sizes}


@attrs.frozen(kw_only=True)
class Tuned:
    """What one fine-tuning came to."""

    seed: int
    fine_tuned: FineTuned
    free: FreeScores
    answers: Path
    cut: int  # records that the context did not hold

    def __str__(self) -> str:
        losses, best = self.fine_tuned.losses, self.fine_tuned.best_epoch
        parts = [
            f"best epoch {best}, validation loss {losses[0]:.4f} -> {losses[best]:.4f} nats a token",
            describe(self.free),
            *([f"{self.cut} records cut to the context"] if self.cut else []),
            f"answers in {self.answers}",
        ]
        return f"seed {self.seed}: {'; '.join(parts)}"


def read_questions(path: Path) -> Questions:
    """Return the records of a file, cut into its parts. Raises BadInput."""
    return Questions(file=path.name, split=split_records(read_records(path)), sha256=sha256(path))


def instruct(trained: Trained, questions: Questions, settings: Settings, folder: Path | None, ranks: Ranks) -> Tuned:
    """Fine-tune the network, answer the test part, and write the answers, into `folder` or the model's home.

    Call it on every rank. Raises BadInput.
    """
    split = questions.split
    fine_tuned = fine_tune(trained, split.train, split.validation, settings, ranks)
    texts = answer_all(trained, split.test, settings, ranks)
    place = trained.place
    name = f"{place.title.replace('/', '--').replace(' ', '-')}-seed-{settings.seed}.json"
    file = (folder or place.home / ANSWERS) / name
    known = attrs.asdict(settings) | attrs.asdict(fine_tuned) | {"data": questions.described()}
    answers = Answers(model=place.title, seed=settings.seed, home=place.home, settings=known, answers=texts)
    from_coordinator(ranks, lambda: write_answers(file, answers))
    everything = [*split.train, *split.validation, *split.test]
    return Tuned(
        seed=settings.seed,
        fine_tuned=fine_tuned,
        free=free_scores(answers),
        answers=file,
        cut=sum(make_example(trained, record).cut for record in everything),
    )


def summary(tuned: list[Tuned], questions: Questions, settings: Settings) -> dict[str, Any]:
    """Return what is kept of several fine-tunings: each, and means with their spread over seeds."""
    return {
        "data": questions.described(),
        "settings": {name: value for name, value in attrs.asdict(settings).items() if name != "seed"},
        "seeds": [
            {
                "seed": one.seed,
                "best_epoch": one.fine_tuned.best_epoch,
                "validation_loss": one.fine_tuned.losses[one.fine_tuned.best_epoch],
                **attrs.asdict(one.free),
                "answers": one.answers.name,
            }
            for one in tuned
        ],
        "reference_loss": _over_seeds([one.free.reference_loss for one in tuned]),
        "chrf": _over_seeds([one.free.chrf for one in tuned]),
    }


def describe_summary(summary: dict[str, Any]) -> str:
    """Return means and spreads for people."""
    parts = [
        f"{name.replace('_', ' ')} {plus_minus(summary[name]['value'], summary[name]['spread'], 4)}"
        for name in ("reference_loss", "chrf")
    ]
    return f"over {len(summary['seeds'])} seeds, mean ± standard deviation: {', '.join(parts)}"


def split_records(records: list[Record]) -> Split:
    """Cut the records 85/10/5 in their order. Raises BadInput where a part would be empty."""
    train, test = int(len(records) * TRAINED), int(len(records) * TESTED)
    if test == 0 or train + test == len(records):
        raise BadInput(f"got {len(records)} records, wanted 10 or more to train, test and validate on; add records")
    return Split(train=records[:train], test=records[train : train + test], validation=records[train + test :])


def answer_all(trained: Trained, records: list[Record], settings: Settings, ranks: Ranks) -> list[Answer]:
    """Return the model's greedy answers, and its loss on the reference answers; ranks share the records.

    It ends with the model laid out for generation.
    """
    losses = share(
        ranks,
        records,
        lambda record: float(answer_losses(trained.network, make_example(trained, record)).mean()),
        "record",
    )
    lay_out_for_generation(trained.network)
    context = trained.network.config.context_length
    longest = min(settings.longest_answer, max(1, context // 2))

    def answer(record: Record) -> str:
        prompt = encode(trained, prompt_text(record))[-max(1, context - longest) :]
        end = trained.tokenizer.end_of_text_id
        try:
            chosen = generate(trained.network, prompt, longest, Sampling(temperature=0), stop=end)
        except ValueError as error:
            raise BadInput(f"{trained.place.path}: {error}") from error
        return decode(trained, chosen).strip()

    texts = share(ranks, records, answer, "answer")
    return [
        Answer(record=record, text=text, reference_loss=loss)
        for record, text, loss in zip(records, texts, losses, strict=True)
    ]


def _over_seeds(values: list[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {"value": statistics.fmean(known), "spread": statistics.stdev(known) if len(known) > 1 else None}
