"""Instruction following: fine-tune a copy of a model, then generate answers to held-out questions."""

import json
import shutil
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from common.checks import structured
from common.errors import EXIT_DONE, BadInput
from common.files import replace_file, sha256, writing
from common.json_files import read_json
from common.output import note, show
from evaluation.command_line import FineTuneSettings, InstructCommand
from evaluation.generation.generated_text import GeneratedText
from evaluation.instruct.fine_tuning import (
    FineTuned,
    answer_losses,
    make_example,
    prompt_ids,
    train_run,
    write_run,
)
from evaluation.instruct.reference_scores import ReferenceScores, reference_scores
from evaluation.shared.load import Trained, load_on_all
from evaluation.shared.measuring import measure_each, share
from evaluation.shared.model_location import ModelLocation, locate
from evaluation.shared.records import (
    ADDED_TOKENS,
    LATER_SETTINGS,
    TOKENIZER,
    Answer,
    Answers,
    Record,
    check_folder,
    read_answers,
    read_records,
    write_answers,
)
from evaluation.shared.significance import plus_minus
from evaluation.shared.weights import WeightsIdentity
from evaluation.shared.weights_on_disk import files_sha256, identity_of
from model.generate import Sampling, lay_out_for_generation
from tokens.format.manifest import ordinary_added_tokens
from tokens.tokenizer.tokenizer import fingerprint
from training.checkpoints.directory import new_archive
from training.exactness.fingerprint import set_determinism
from training.parallel.process_group import Ranks, from_coordinator
from training.supervision.run_lock import read_exit
from training.telemetry.metrics_log import ANSWERS, GIVEN_TOKENIZER, WEIGHTS_VALUES

TRAINED, TESTED = 0.85, 0.10  # of the records; the rest validates
MEASURED = {"losses", "best_epoch"}  # settings in a file of answers that the fine-tuning found
IDENTITY = "instruct.json"  # in a run directory of a fine-tuning: its model, data and settings


@attrs.frozen(kw_only=True)
class HeldOutQuestions:
    file: str
    sha256: str
    train: list[Record]
    test: list[Record]
    validation: list[Record]

    def described(self) -> dict[str, Any]:
        values = attrs.asdict(self, recurse=False)
        return {name: len(value) if isinstance(value, list) else value for name, value in values.items()}


@attrs.frozen(kw_only=True)
class Tuned:
    seed: int
    fine_tuned: FineTuned
    scores: ReferenceScores
    answers: Path
    cut: int  # records longer than the context
    kept: bool  # from an earlier session

    def __str__(self) -> str:
        losses, best = self.fine_tuned.losses, self.fine_tuned.best_epoch
        parts = [
            f"best epoch {best}, validation loss {losses[0]:.4f} -> {losses[best]:.4f} nats per token",
            str(self.scores),
            *([f"{self.cut} records cut to the context"] if self.cut else []),
            f"answers in {self.answers}" + (", kept from an earlier session" if self.kept else ""),
        ]
        return f"seed {self.seed}: {'; '.join(parts)}"


def run(command: InstructCommand) -> None:
    measure_each(command, "instruct", partial(_prepare, command), partial(measure, command))


def measure(
    command: InstructCommand, trained: Trained, questions: HeldOutQuestions, ranks: Ranks
) -> tuple[dict[str, Any], str]:
    """Return a model's scores after fine-tuning, to store and as text; call it on every rank. Raises BadInput."""
    set_determinism("elastic", 1, ranks)
    tuned, first = [], command.settings.seed
    for seed in range(first, first + command.seeds):
        tuned.append(instruct(trained, questions, attrs.evolve(command.settings, seed=seed), command, ranks))
        show(f"{trained.place.path}: {tuned[-1]}", once=True)
    values = summary(tuned, questions, command.settings)
    means = [
        f"{name.replace('_', ' ')} {plus_minus(values[name]['value'], values[name]['spread'], 4)}"
        for name in ("reference_loss", "chrf")
    ]
    spread = f", ± standard deviation over {len(tuned)} seeds" if len(tuned) > 1 else ""
    return values, f" {', '.join(means)}{spread}"


def read_questions(path: Path) -> HeldOutQuestions:
    """Read a file of records, and split them 85/10/5, in order. Raises BadInput, also where a part would be empty."""
    records = read_records(path)
    train, test = int(len(records) * TRAINED), int(len(records) * TESTED)
    if test == 0 or train + test == len(records):
        raise BadInput(f"got {len(records)} records, wanted 10 or more to train, test and validate on; add records")
    return HeldOutQuestions(
        file=path.name,
        sha256=sha256(path),
        train=records[:train],
        test=records[train : train + test],
        validation=records[train + test :],
    )


def instruct(
    trained: Trained, questions: HeldOutQuestions, settings: FineTuneSettings, command: InstructCommand, ranks: Ranks
) -> Tuned:
    """Fine-tune and write answers, unless an earlier session did; call it on every rank. Raises BadInput."""
    place = trained.place
    if trained.tokenizer.end_of_text_id >= trained.network.config.vocab_size:
        raise BadInput(f"{place.path}: the model has no id for the end of text, which ends an answer")
    file = answers_file(command, place, settings.seed)
    name = file.stem
    run = file.with_name(f".{name}") if command.keep is None else command.keep / name
    known = attrs.asdict(settings) | {"data": questions.described()}
    weights = from_coordinator(ranks, lambda: identity_of(trained.network, place.path))
    known |= {WEIGHTS_VALUES: weights.values_sha256, "tokenizer": trained.tokenizer.name}
    given = trained.given_tokenizer
    known |= {
        TOKENIZER: fingerprint(trained.tokenizer),
        ADDED_TOKENS: ordinary_added_tokens(trained.tokenizer.structure),
        GIVEN_TOKENIZER: None if given is None else given.as_record(),
    }
    answers = kept = from_coordinator(ranks, lambda: _kept(file, known, questions.test, command.keep and run))
    if answers is None:
        made = from_coordinator(ranks, partial(_train, trained, questions, settings, run, known), group=ranks.download)
        # Loaded anew also where no epoch was better: answers need another layout.
        best = (place, command.tokenizer) if made.best_epoch == 0 else (locate(str(run), None), None)
        tuned = load_on_all(ranks, *best)
        texts = answer_all(tuned, questions.test, settings, ranks)
        known |= attrs.asdict(made)
        answers = Answers(
            model=place.title, seed=settings.seed, home=place.home, settings=known, answers=texts, weights=weights
        )
        from_coordinator(ranks, partial(_write, file, answers))
        if command.keep is None and ranks.coordinates:
            shutil.rmtree(run, ignore_errors=True)
    everything = [*questions.train, *questions.validation, *questions.test]
    return Tuned(
        seed=settings.seed,
        fine_tuned=structured(answers.settings, FineTuned, unknown_keys=True),
        scores=reference_scores(answers),
        answers=file,
        cut=sum(make_example(trained, record).cut for record in everything),
        kept=kept is not None,
    )


def summary(tuned: list[Tuned], questions: HeldOutQuestions, settings: FineTuneSettings) -> dict[str, Any]:
    """Return the stored result of several fine-tunings: each, and means with their spread over seeds."""
    return {
        "data": questions.described(),
        "settings": {name: value for name, value in attrs.asdict(settings).items() if name != "seed"},
        "seeds": [
            {
                "seed": one.seed,
                "best_epoch": one.fine_tuned.best_epoch,
                "validation_loss": one.fine_tuned.losses[one.fine_tuned.best_epoch],
                **attrs.asdict(one.scores),
                "answers": one.answers.name,
            }
            for one in tuned
        ],
        "reference_loss": _over_seeds([one.scores.reference_loss for one in tuned]),
        "chrf": _over_seeds([one.scores.chrf for one in tuned]),
    }


def answer_all(trained: Trained, records: list[Record], settings: FineTuneSettings, ranks: Ranks) -> list[Answer]:
    """Return greedy answers and the loss on reference answers, by all ranks; lays the model out for generation."""

    def reference_loss(record: Record) -> float:
        return float(answer_losses(trained.network, make_example(trained, record)).mean())

    losses = share(ranks, records, reference_loss, "record")
    lay_out_for_generation(trained.network)
    context = trained.network.config.context_length
    longest = min(settings.longest_answer, max(1, context // 2))

    def answer(record: Record) -> str:
        prompt = prompt_ids(trained, record)[-max(1, context - longest) :]
        ends = [trained.tokenizer.end_of_text_id]
        return "".join(GeneratedText(trained, prompt, longest, Sampling(temperature=0), stop=ends)).strip()

    texts = share(ranks, records, answer, "answer")
    return [
        Answer(record=record, text=text, reference_loss=loss)
        for record, text, loss in zip(records, texts, losses, strict=True)
    ]


def answers_file(command: InstructCommand, place: ModelLocation, seed: int) -> Path:
    """Return the file of the answers of a model that was fine-tuned with a seed."""
    return (command.output or place.home / ANSWERS) / f"{_file_name(place.title, seed)}.json"


def _file_name(title: str, seed: int) -> str:
    return f"{title.replace('/', '--').replace(' ', '-')}-seed-{seed}"


def _check_is_of(file: Path, place: ModelLocation) -> None:
    """Raise BadInput where a file holds the answers of a model in another directory, before anything is trained."""
    try:
        answers = read_answers(file)
    except BadInput:
        return  # missing, or no answers: it is kept under another name
    theirs = None if answers.home is None else answers.home.resolve()
    ours = WeightsIdentity(files_sha256=files_sha256(place.path))
    if theirs == place.home.resolve() or ours.is_same(answers.weights):
        return
    whose = f"of {theirs}" if theirs else f"of a model {answers.model} that is not here"
    weights = f", weights {answers.weights}" if answers.weights else ""
    raise BadInput(
        f"{file}: holds the answers of another model of this name, {whose}{weights}, but {place.path} is to be "
        f"fine-tuned; pass another --output, or move the file away"
    )


def _write(file: Path, answers: Answers) -> None:
    """Write answers. A file of that name with anything but earlier answers of this fine-tuning is kept, archived."""
    if file.exists() and not _is_of_fine_tuning(file, answers.settings):
        kept = new_archive(file.parent) / file.name
        with writing(kept):
            file.rename(kept)
        show(note(f"{file}: held the answers of other weights, settings or data; they are now {kept}"))
    write_answers(file, answers)


def _is_of_fine_tuning(file: Path, settings: dict[str, Any]) -> bool:
    try:
        return _agrees(read_answers(file).settings, {key: settings[key] for key in settings if key not in MEASURED})
    except BadInput:
        return False


def _agrees(recorded: dict[str, Any], known: dict[str, Any]) -> bool:
    """Tell whether records of a fine-tuning say what is known. Older ones do not have all settings of the tokenizer."""
    needed = {key: value for key, value in known.items() if key in recorded or key not in LATER_SETTINGS}
    return all(key in recorded and recorded[key] == value for key, value in needed.items())


def _prepare(command: InstructCommand, places: list[ModelLocation]) -> HeldOutQuestions:
    titles = [place.title for place in places]
    if len({_file_name(title, 0) for title in titles}) < len(titles):
        raise BadInput(f"MODEL: got {', '.join(titles)}, wanted each once, under different names")
    questions = read_questions(command.data)
    for place in places:
        check_folder(command.output or place.home / ANSWERS)
        for seed in range(command.settings.seed, command.settings.seed + command.seeds):
            _check_is_of(answers_file(command, place, seed), place)
    if command.keep is not None:
        check_folder(command.keep, "--keep")
    return questions


def _train(
    trained: Trained, questions: HeldOutQuestions, settings: FineTuneSettings, run: Path, known: dict[str, Any]
) -> FineTuned:
    """Train a run directory, or go on with it. Raises BadInput for one of another fine-tuning that is to be kept."""
    if not _is_run_of(run, known):
        if not run.name.startswith(".") and run.exists():
            raise BadInput(f"{run}: exists, and is no such fine-tuning; move it away, or pass another --keep")
        recorded = read_json(run / IDENTITY) if (run / IDENTITY).is_file() else {}
        if recorded.get(WEIGHTS_VALUES, known[WEIGHTS_VALUES]) != known[WEIGHTS_VALUES]:
            raise BadInput(
                f"{run}: an unfinished fine-tuning of another model of this name; delete it, or repeat the command "
                "that began it, or pass another --output"
            )
        _refuse_other_folder(run)
        shutil.rmtree(run, ignore_errors=True)
    with writing(run):
        if not (run / "train.json").exists():  # which is written last
            run.mkdir(parents=True, exist_ok=True)
            replace_file(run / IDENTITY, json.dumps(known, indent=2) + "\n")
            write_run(trained, questions.train, questions.validation, settings, run)
    return train_run(run, trained.place.path, next(trained.network.parameters()).device)


def _refuse_other_folder(run: Path) -> None:
    """Raise BadInput for a folder that no fine-tuning has begun: an unfinished one is removed, with all its files."""
    strange = [] if (run / IDENTITY).is_file() or not run.is_dir() else [*run.iterdir()]
    if strange := [path for path in strange if path.name != f".partial-{IDENTITY}"]:  # which a kill may leave
        raise BadInput(
            f"{run}: holds {strange[0].name}, and no fine-tuning has begun here; move it away, or pass another --output"
        )


def _is_run_of(run: Path, known: dict[str, Any]) -> bool:
    return (run / IDENTITY).is_file() and _agrees(read_json(run / IDENTITY), known)


def _kept(file: Path, known: dict[str, Any], questions: list[Record], run: Path | None) -> Answers | None:
    """Return the answers of an earlier session with the same model, data and settings, if it finished, as its `run`."""
    ended = None if run is None or not _is_run_of(run, known) else read_exit(run)
    if run is not None and (ended is None or ended.status != EXIT_DONE):
        return None
    try:
        answers = read_answers(file)
        structured(answers.settings, FineTuned, unknown_keys=True)
    except (BadInput, ValueError):
        return None  # missing, another program's, or damaged: fine-tune
    return (
        answers
        if _agrees(answers.settings, known) and [answer.record for answer in answers.answers] == questions
        else None
    )


def _over_seeds(values: list[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {"value": statistics.fmean(known), "spread": statistics.stdev(known) if len(known) > 1 else None}
