"""Who is judged, on what: files of answers become models with seeds, all of them on the same questions."""

from collections import Counter
from pathlib import Path
from typing import TypeAlias

import attrs

from common.errors import BadInput
from evaluation.judging.prompt import LABELS
from evaluation.shared.records import Answer, Answers, Record, read_answers
from evaluation.shared.results import read_results
from training.telemetry.metrics_log import ANSWERS

Question: TypeAlias = tuple[Record, int]  # and how often the same file has asked it before
Read: TypeAlias = tuple[Path, Answers]
OF_A_SEED = {"seed", "losses", "best_epoch"}  # what differs between fine-tunings that are alike


@attrs.frozen(kw_only=True)
class Candidate:
    """A model, with the answers of each of its fine-tunings."""

    title: str  # unlike any other candidate's
    model: str  # as the answers name it
    home: Path | None  # whose evaluations.jsonl takes results
    seeds: list[Answers]  # by seed; all to the panel's questions, in their order


@attrs.frozen(kw_only=True)
class Panel:
    """Everything that is judged together. Candidates are sorted: the order of a command line changes no prompt."""

    questions: list[Record]
    candidates: list[Candidate]
    slots: int  # seeds of every candidate that are judged

    def text(self, question: int, slot: int, candidate: int) -> str:
        """Return an answer; behind the candidates' comes the reference."""
        if candidate == len(self.candidates):
            return self.questions[question].output
        return self.candidates[candidate].seeds[slot].answers[question].text


def find_files(names: list[str]) -> list[Path]:
    """Return the files of answers that a command line names: by themselves, or all those of a MODEL.

    Raises BadInput where there is none.
    """
    files = []
    for name in names:
        path = Path(name)
        if path.is_file():
            files.append(path)
            continue
        if path.suffix == ".json":
            raise BadInput(f"{path}: no such file; wanted answers, as evaluate.py instruct writes them")
        files += _of_model(name)
    return list(dict.fromkeys(file.resolve() for file in files))


def read_panel(files: list[Path], *, common: bool) -> Panel:
    """Read answers. `common`: where files differ in questions, judge those that all share. Raises BadInput."""
    groups: dict[tuple[str, Path], list[Read]] = {}
    for file in files:
        answers = read_answers(file)
        groups.setdefault((answers.model, answers.home or file.parent), []).append((file, answers))
    everything = [read for group in groups.values() for read in group]
    questions = _shared_questions(everything, common=common)
    if len(groups) >= len(LABELS):
        raise BadInput(f"{len(groups)} models: wanted at most {len(LABELS) - 1}, all of which one prompt can hold")
    titles = Counter(model for model, _ in groups)
    candidates = []
    for (model, place), group in sorted(groups.items()):
        seeds = {answers.seed: _in_order(answers, questions) for _, answers in group}
        if len(seeds) < len(group):
            raise BadInput(f"{place}: two files of '{model}' with the same seed; pass one of them")
        _check_settings(group)
        candidates.append(
            Candidate(
                title=model if titles[model] == 1 else f"{model} ({place})",
                model=model,
                home=group[0][1].home,
                seeds=[seeds[seed] for seed in sorted(seeds)],
            )
        )
    slots = min(len(candidate.seeds) for candidate in candidates)
    return Panel(questions=[record for record, _ in questions], candidates=candidates, slots=slots)


def _of_model(reference: str) -> list[Path]:
    """Return the files of a model's answers: of a run's, the checkpoint that answered last."""
    from evaluation.shared.load import home_of  # it takes seconds

    home, path = home_of(reference), Path(reference)
    found: dict[str, list[Path]] = {}  # by title
    for file in sorted((home / ANSWERS).glob("*.json")):
        found.setdefault(read_answers(file).model, []).append(file)
    what = "no answers"
    if path.is_dir() and path.resolve() != home.resolve():  # a checkpoint, in which a title ends
        what = f"no answers of {path.resolve().name}"
        found = {title: files for title, files in found.items() if title.rpartition(" ")[2] == path.resolve().name}
    if not found:
        raise BadInput(f"{home / ANSWERS}: {what}; write them with evaluate.py instruct, or pass files of answers")
    if len(found) == 1:
        return next(iter(found.values()))
    answered = [result["model"] for result in read_results(home) if result.get("evaluation") == "instruct"]
    newest = answered[-1] if answered else None
    if newest not in found:
        raise BadInput(
            f"{home / ANSWERS}: answers of {', '.join(found)}, of which none is known as the newest; "
            "pass a checkpoint, or files of answers"
        )
    print(
        f"{reference}: the answers of {newest}, not those of {', '.join(title for title in found if title != newest)}"
    )
    return found[newest]


def _check_settings(group: list[Read]) -> None:
    """Raise BadInput where seeds of a model were not fine-tuned alike."""
    (first_file, first), *others = group
    for file, answers in others:
        for name in sorted({*first.settings, *answers.settings} - OF_A_SEED):
            theirs, ours = answers.settings.get(name), first.settings.get(name)
            if theirs != ours:
                raise BadInput(
                    f"{file}: other settings than {first_file}: {name} {theirs} and {ours}; "
                    "fine-tune all seeds alike, or pass files of one kind"
                )


def _shared_questions(read: list[Read], *, common: bool) -> list[Question]:
    """Return the questions that all files answer, sorted: which file comes first changes no prompt."""
    first_file, first = read[0]
    shared = set(_questions(first))
    for file, answers in read[1:]:
        theirs = set(_questions(answers))
        if theirs != set(_questions(first)) and not common:
            counts = (
                f"{len(first.answers)} and {len(answers.answers)}, {len(theirs.intersection(_questions(first)))} shared"
            )
            raise BadInput(f"{file}: other questions than {first_file}: {counts}; --common judges those that all share")
        shared &= theirs
        if not shared:
            raise BadInput(f"{file}: no overlap: not one question is also in all files before it; pass others")
    return sorted(shared, key=lambda question: (attrs.astuple(question[0]), question[1]))


def _questions(answers: Answers) -> list[Question]:
    seen: Counter[Record] = Counter()
    found = []
    for answer in answers.answers:
        found.append((answer.record, seen[answer.record]))
        seen[answer.record] += 1
    return found


def _in_order(answers: Answers, questions: list[Question]) -> Answers:
    by_question: dict[Question, Answer] = dict(zip(_questions(answers), answers.answers, strict=True))
    return attrs.evolve(answers, answers=[by_question[question] for question in questions])
