"""Panel: the models that are judged together, with their answers to the same questions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from common.errors import BadInput
from evaluation.judging.verdict import LABELS
from evaluation.shared.records import Answer, Answers, Record, read_answers
from evaluation.shared.results import read_results
from training.telemetry.metrics_log import ANSWERS

Question: TypeAlias = tuple[Record, int]  # and how many equal ones come before it in the same file
OF_A_SEED = {"seed", "losses", "best_epoch"}  # settings that may differ between the fine-tunings of a model


@attrs.frozen(kw_only=True)
class Candidate:
    """A model, with the answers of each of its fine-tunings."""

    title: str  # unique in the panel
    model: str  # as the answers name it
    home: Path | None  # whose evaluations.jsonl takes results
    seeds: list[Answers]  # by seed, each in the order of the panel's questions


@attrs.frozen(kw_only=True)
class Panel:
    """Candidates, sorted so that the order of a command line changes no prompt, and their questions."""

    questions: list[Record]
    candidates: list[Candidate]
    slots: int  # judged seeds of every candidate

    @property
    def titles(self) -> list[str]:
        return [candidate.title for candidate in self.candidates]

    def text(self, question: int, slot: int, candidate: int) -> str:
        """Return an answer. Candidate number `len(candidates)` is the reference."""
        if candidate == len(self.candidates):
            return self.questions[question].output
        return self.candidates[candidate].seeds[slot].answers[question].text


@attrs.frozen(kw_only=True)
class _AnswerFile:
    path: Path
    answers: Answers
    by_question: dict[Question, Answer]


def find_files(names: Sequence[str]) -> list[Path]:
    """Return the answer files that a command line names: FILE, or MODEL for all of its files.

    Raises BadInput if there is none.
    """
    files = []
    for name in names:
        path = Path(name)
        if path.suffix == ".json" and not path.is_file():
            raise BadInput(f"{path}: no such file; wanted answers, as evaluate.py instruct writes them")
        files += [path] if path.is_file() else _files_of_model(name)
    return list(dict.fromkeys(file.resolve() for file in files))


def read_panel(paths: list[Path], *, common: bool) -> Panel:
    """Read answer files. `common`: judge only the questions that all files share. Raises BadInput."""
    files = [_read_file(path) for path in paths]
    groups: dict[tuple[str, Path], list[_AnswerFile]] = {}
    for file in files:
        groups.setdefault((file.answers.model, file.answers.home or file.path.parent), []).append(file)
    if len(groups) >= len(LABELS):
        raise BadInput(f"{len(groups)} models: wanted at most {len(LABELS) - 1}, the most that fit into one prompt")
    questions = _shared_questions(files, common=common)
    models = Counter(model for model, _ in groups)
    candidates = []
    for (model, folder), group in sorted(groups.items()):
        _check_seeds(group, folder)
        candidates.append(
            Candidate(
                title=model if models[model] == 1 else f"{model} ({folder})",
                model=model,
                home=group[0].answers.home,
                seeds=[
                    attrs.evolve(file.answers, answers=[file.by_question[question] for question in questions])
                    for file in sorted(group, key=lambda file: file.answers.seed)
                ],
            )
        )
    slots = min(len(candidate.seeds) for candidate in candidates)
    return Panel(questions=[record for record, _ in questions], candidates=candidates, slots=slots)


def _read_file(path: Path) -> _AnswerFile:
    answers = read_answers(path)
    seen: Counter[Record] = Counter()
    by_question = {}
    for answer in answers.answers:
        by_question[answer.record, seen[answer.record]] = answer
        seen[answer.record] += 1
    return _AnswerFile(path=path, answers=answers, by_question=by_question)


def _files_of_model(reference: str) -> list[Path]:
    """Return the answer files of a model; of a run, those of the checkpoint that answered last."""
    from evaluation.shared.load import home_of  # imports torch

    home, path = home_of(reference), Path(reference)
    found: dict[str, list[Path]] = {}  # by title
    for file in sorted((home / ANSWERS).glob("*.json")):
        found.setdefault(read_answers(file).model, []).append(file)
    missing = "no answers"
    if path.is_dir() and path.resolve() != home.resolve():  # a checkpoint: titles end with its name
        checkpoint = path.resolve().name
        missing = f"no answers of {checkpoint}"
        found = {title: files for title, files in found.items() if title.rpartition(" ")[2] == checkpoint}
    if not found:
        raise BadInput(f"{home / ANSWERS}: {missing}; write them with evaluate.py instruct, or pass files of answers")
    if len(found) == 1:
        return next(iter(found.values()))
    newest = next((r["model"] for r in reversed(read_results(home)) if r.get("evaluation") == "instruct"), None)
    if newest not in found:
        raise BadInput(
            f"{home / ANSWERS}: answers of {', '.join(found)}, and no record of which is the newest; "
            "pass a checkpoint, or files of answers"
        )
    print(f"{reference}: using the answers of {newest}, not of {', '.join(found.keys() - {newest})}")
    return found[newest]


def _check_seeds(group: list[_AnswerFile], folder: Path) -> None:
    """Raise BadInput if a model's files share a seed, or differ in other fine-tuning settings."""
    first, *others = group
    if len({file.answers.seed for file in group}) < len(group):
        raise BadInput(f"{folder}: two files of '{first.answers.model}' with the same seed; pass one of them")
    ours = first.answers.settings
    for file in others:
        theirs = file.answers.settings
        for name in sorted({*ours, *theirs} - OF_A_SEED):
            if theirs.get(name) != ours.get(name):
                raise BadInput(
                    f"{file.path}: settings differ from {first.path}: {name} {theirs.get(name)} and {ours.get(name)}; "
                    "fine-tune all seeds alike, or pass files with equal settings"
                )


def _shared_questions(files: list[_AnswerFile], *, common: bool) -> list[Question]:
    """Return the questions that all files answer, sorted: the order of files changes no prompt."""
    first, *others = files
    shared = set(first.by_question)
    for file in others:
        theirs = set(file.by_question)
        if theirs != set(first.by_question) and not common:
            counts = f"{len(first.by_question)} and {len(theirs)}, {len(theirs & set(first.by_question))} shared"
            raise BadInput(
                f"{file.path}: questions differ from {first.path}: {counts}; --common judges the shared ones"
            )
        shared &= theirs
        if not shared:
            raise BadInput(f"{file.path}: no overlap: shares no question with the files before it; pass other files")
    return sorted(shared, key=lambda question: (attrs.astuple(question[0]), question[1]))
