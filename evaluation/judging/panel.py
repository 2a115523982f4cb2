"""Panel: the models that are judged together, with their answers to the same questions."""

import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from common.errors import BadInput, printable
from evaluation.shared.records import Answer, Answers, Record, read_answers
from evaluation.shared.results import read_results
from training.telemetry.metrics_log import ANSWERS

Question: TypeAlias = tuple[Record, int]  # and how many equal ones come before it in the same file
LABELS = string.ascii_uppercase  # of the answers in a prompt
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


def find_files(names: Sequence[str]) -> list[Path]:
    """Return the answer files of a command line: FILE, or MODEL for all of its files. Raises BadInput without one."""
    files = []
    for name in names:
        path = Path(name)
        if path.suffix == ".json" and not path.is_file():
            raise BadInput(f"{path}: no such file; wanted answers, as evaluate.py instruct writes them")
        files += [path] if path.is_file() else _files_of_model(name)
    return list(dict.fromkeys(file.resolve() for file in files))


def read_panel(paths: list[Path], *, common: bool) -> Panel:
    """Read answer files. `common`: judge only the questions that all files share. Raises BadInput."""
    files = {path: read_answers(path) for path in paths}
    by_question = {path: _by_question(file) for path, file in files.items()}
    questions = _shared_questions(by_question, common=common)
    groups: dict[tuple[str, Path], list[Path]] = {}
    for path, file in sorted(files.items(), key=lambda item: item[1].seed):
        groups.setdefault((file.model, file.home or path.parent), []).append(path)
    if len(groups) >= len(LABELS):
        raise BadInput(f"{len(groups)} models: wanted at most {len(LABELS) - 1}, the most that fit into one prompt")
    models = Counter(model for model, _ in groups)
    candidates = []
    for (model, folder), group in sorted(groups.items()):
        _check_seeds({path: files[path] for path in group}, folder)
        title = model if models[model] == 1 else f"{model} ({folder})"
        seeds = [attrs.evolve(files[path], answers=[by_question[path][one] for one in questions]) for path in group]
        candidates.append(Candidate(title=title, model=model, home=seeds[0].home, seeds=seeds))
    slots = min(len(candidate.seeds) for candidate in candidates)
    return Panel(questions=[record for record, _ in questions], candidates=candidates, slots=slots)


def _files_of_model(reference: str) -> list[Path]:
    """Return the answer files of a model; of a run, those of the checkpoint that answered last."""
    from evaluation.shared.load import home_of  # imports torch

    home, path, missing = home_of(reference), Path(reference), "no answers"
    found: dict[str, list[Path]] = {}  # by title
    for file in sorted((home / ANSWERS).glob("*.json")):
        found.setdefault(read_answers(file).model, []).append(file)
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
    print(printable(f"{reference}: using the answers of {newest}, not of {', '.join(found.keys() - {newest})}"))
    return found[newest]


def _by_question(answers: Answers) -> dict[Question, Answer]:
    seen: Counter[Record] = Counter()
    found = {}
    for answer in answers.answers:
        found[answer.record, seen[answer.record]] = answer
        seen[answer.record] += 1
    return found


def _check_seeds(files: dict[Path, Answers], folder: Path) -> None:
    """Raise BadInput if a model's files share a seed, or differ in other fine-tuning settings."""
    (first, ours), *others = files.items()
    if len({file.seed for file in files.values()}) < len(files):
        raise BadInput(f"{folder}: two files of '{ours.model}' with the same seed; pass one of them")
    for path, theirs in others:
        for name in sorted({*ours.settings, *theirs.settings} - OF_A_SEED):
            if theirs.settings.get(name) != ours.settings.get(name):
                raise BadInput(
                    f"{path}: settings differ from {first}: {name} {theirs.settings.get(name)} and "
                    f"{ours.settings.get(name)}; fine-tune all seeds alike, or pass files with equal settings"
                )


def _shared_questions(by_question: dict[Path, dict[Question, Answer]], *, common: bool) -> list[Question]:
    """Return the questions that all files answer, sorted: the order of files changes no prompt."""
    (first, ours), *others = ((path, set(questions)) for path, questions in by_question.items())
    shared = ours
    for path, theirs in others:
        if theirs != ours and not common:
            counts = f"{len(ours)} and {len(theirs)}, {len(theirs & ours)} shared"
            raise BadInput(f"{path}: questions differ from {first}: {counts}; --common judges the shared ones")
        shared = shared & theirs
        if not shared:
            raise BadInput(f"{path}: no overlap: shares no question with the files before it; pass other files")
    return sorted(shared, key=lambda question: (attrs.astuple(question[0]), question[1]))
