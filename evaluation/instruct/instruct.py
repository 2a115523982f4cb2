"""Measure instruction following: fine-tune a copy of a model, and generate answers to held-out questions."""

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

TRAIN_SHARE, TEST_SHARE = 0.85, 0.10  # shares of the records; the rest is used for validation
# A file of answers also stores these outcomes of the fine-tuning run under "settings".
OUTCOME_KEYS = {"losses", "best_epoch"}
IDENTITY = "instruct.json"  # file in a fine-tuning run's directory; states the model, data and settings of the run


@attrs.frozen(kw_only=True)
class HeldOutQuestions:
    """A file of records, split for training, testing and validation."""

    file: str
    sha256: str
    train: list[Record]
    test: list[Record]
    validation: list[Record]

    def as_record(self) -> dict[str, Any]:
        """Return the fields to store, with the number of records instead of the records."""
        values = attrs.asdict(self, recurse=False)
        return {name: len(value) if isinstance(value, list) else value for name, value in values.items()}


@attrs.frozen(kw_only=True)
class Tuned:
    """A fine-tuning run with one seed, and the scores of its answers."""

    seed: int
    fine_tuned: FineTuned
    scores: ReferenceScores
    answers: Path
    cut: int  # number of records longer than the context
    is_reused: bool  # True: the answers are from an earlier session

    def __str__(self) -> str:
        losses, best = self.fine_tuned.losses, self.fine_tuned.best_epoch
        parts = [
            f"best epoch {best}, validation loss {losses[0]:.4f} -> {losses[best]:.4f} nats per token",
            str(self.scores),
            *([f"{self.cut} records were cut to the context"] if self.cut else []),
            f"answers in {self.answers}" + (", kept from an earlier session" if self.is_reused else ""),
        ]
        return f"seed {self.seed}: {'; '.join(parts)}"


def run(command: InstructCommand) -> None:
    measure_each(command, "instruct", partial(_prepare, command), partial(measure, command))


def measure(
    command: InstructCommand, trained: Trained, questions: HeldOutQuestions, ranks: Ranks
) -> tuple[dict[str, Any], str]:
    """Return a model's scores after fine-tuning, as fields to store and as text. Raises BadInput.

    Call this on every rank.
    """
    set_determinism("elastic", 1, ranks)
    fine_tunings, first = [], command.settings.seed
    for seed in range(first, first + command.seeds):
        fine_tunings.append(instruct(trained, questions, attrs.evolve(command.settings, seed=seed), command, ranks))
        show(f"{trained.location.path}: {fine_tunings[-1]}", once=True)
    values = summary(fine_tunings, questions, command.settings)
    means = [
        f"{name.replace('_', ' ')} {plus_minus(values[name]['value'], values[name]['spread'], 4)}"
        for name in ("reference_loss", "chrf")
    ]
    spread = f", ± standard deviation over {len(fine_tunings)} seeds" if len(fine_tunings) > 1 else ""
    return values, f" {', '.join(means)}{spread}"


def read_questions(path: Path) -> HeldOutQuestions:
    """Read a file of records, and split them in file order: 85% for training, 10% for testing, 5% for validation.

    Raises BadInput for damaged records, or if there are so few records that a part would be empty.
    """
    records = read_records(path)
    train, test = int(len(records) * TRAIN_SHARE), int(len(records) * TEST_SHARE)
    if test == 0 or train + test == len(records):
        raise BadInput(
            f"{path}: got {len(records)} records, wanted 10 or more for training, testing and validation; add records"
        )
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
    """Fine-tune a copy of the model with one seed and write its answers, unless an earlier session has done so.

    Call this on every rank. Raises BadInput.
    """
    location = trained.location
    if trained.tokenizer.end_of_text_id >= trained.network.config.vocab_size:
        raise BadInput(
            f"{location.path}: answers have to end with the end-of-text id, but the model's vocabulary has none"
        )
    file = answers_file(command, location, settings.seed)
    name = file.stem
    run = file.with_name(f".{name}") if command.keep is None else command.keep / name
    record = attrs.asdict(settings) | {"data": questions.as_record()}
    weights = from_coordinator(ranks, lambda: identity_of(trained.network, location.path))
    record |= {WEIGHTS_VALUES: weights.values_sha256, "tokenizer": trained.tokenizer.name}
    tokenizer = trained.given_tokenizer
    record |= {
        TOKENIZER: fingerprint(trained.tokenizer),
        ADDED_TOKENS: ordinary_added_tokens(trained.tokenizer.structure),
        GIVEN_TOKENIZER: None if tokenizer is None else tokenizer.as_record(),
    }
    answers = earlier = from_coordinator(
        ranks, lambda: _earlier_answers(file, record, questions.test, command.keep and run)
    )
    if answers is None:
        outcome = from_coordinator(
            ranks, partial(_train, trained, questions, settings, run, record), group=ranks.download
        )
        # Even if no epoch improved the loss, the model is loaded again: answering changes a network's layout, but
        # `trained` must not change, because the other seeds need it, too.
        best = (location, command.tokenizer) if outcome.best_epoch == 0 else (locate(str(run), None), None)
        tuned = load_on_all(ranks, *best)
        texts = answer_all(tuned, questions.test, settings, ranks)
        record |= attrs.asdict(outcome)
        answers = Answers(
            model=location.title,
            seed=settings.seed,
            home=location.home,
            settings=record,
            answers=texts,
            weights=weights,
        )
        from_coordinator(ranks, partial(_write, file, answers))
        if command.keep is None and ranks.coordinates:
            shutil.rmtree(run, ignore_errors=True)
    all_records = [*questions.train, *questions.validation, *questions.test]
    return Tuned(
        seed=settings.seed,
        fine_tuned=structured(answers.settings, FineTuned, unknown_keys=True),
        scores=reference_scores(answers),
        answers=file,
        cut=sum(make_example(trained, question).cut for question in all_records),
        is_reused=earlier is not None,
    )


def summary(fine_tunings: list[Tuned], questions: HeldOutQuestions, settings: FineTuneSettings) -> dict[str, Any]:
    """Return the fields to store for a model's fine-tuning runs: fields for each seed, and means over the seeds."""
    return {
        "data": questions.as_record(),
        "settings": {name: value for name, value in attrs.asdict(settings).items() if name != "seed"},
        "seeds": [
            {
                "seed": tuned.seed,
                "best_epoch": tuned.fine_tuned.best_epoch,
                "validation_loss": tuned.fine_tuned.losses[tuned.fine_tuned.best_epoch],
                **attrs.asdict(tuned.scores),
                "answers": tuned.answers.name,
            }
            for tuned in fine_tunings
        ],
        "reference_loss": _over_seeds([tuned.scores.reference_loss for tuned in fine_tunings]),
        "chrf": _over_seeds([tuned.scores.chrf for tuned in fine_tunings]),
    }


def answer_all(trained: Trained, records: list[Record], settings: FineTuneSettings, ranks: Ranks) -> list[Answer]:
    """Return the model's greedy answers and its losses on the reference answers. All ranks share the work.

    For generation, this changes the layout of the network.
    """

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


def answers_file(command: InstructCommand, location: ModelLocation, seed: int) -> Path:
    """Return the path of the file with the answers of a model that was fine-tuned with this seed."""
    return (command.output or location.home / ANSWERS) / f"{_file_name(location.title, seed)}.json"


def _file_name(title: str, seed: int) -> str:
    return f"{title.replace('/', '--').replace(' ', '-')}-seed-{seed}"


def _check_owner(file: Path, location: ModelLocation) -> None:
    """Before anything is trained, raise BadInput if a file contains the answers of a model in another directory."""
    try:
        answers = read_answers(file)
    except BadInput:
        return  # there is no file, or it does not contain answers and will be archived
    theirs = None if answers.home is None else answers.home.resolve()
    ours = WeightsIdentity(files_sha256=files_sha256(location.path))
    if theirs == location.home.resolve() or ours.is_same(answers.weights):
        return
    owner = f"the one in {theirs}" if theirs else f"{answers.model}, which is not on this machine"
    weights = f" (weights {answers.weights})" if answers.weights else ""
    raise BadInput(
        f"{file}: contains the answers of another model with the same name as {location.path}: {owner}{weights}; pass "
        "another --output, or move the file away"
    )


def _write(file: Path, answers: Answers) -> None:
    """Write answers. An existing file is archived, unless it has earlier answers with the same fine-tuning settings."""
    if file.exists() and not _is_of_fine_tuning(file, answers.settings):
        archived = new_archive(file.parent) / file.name
        with writing(archived):
            file.rename(archived)
        show(note(f"{file}: the file had answers for other weights, settings or data; it was moved to {archived}"))
    write_answers(file, answers)


def _is_of_fine_tuning(file: Path, settings: dict[str, Any]) -> bool:
    """Return whether a file contains answers of a model that was fine-tuned with these settings."""
    try:
        return _settings_agree(
            read_answers(file).settings, {key: settings[key] for key in settings if key not in OUTCOME_KEYS}
        )
    except BadInput:
        return False


def _settings_agree(recorded: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether the recorded settings of a fine-tuning run are the expected ones.

    Earlier versions did not record some settings of the tokenizer. Such settings are compared only if they were
    recorded.
    """
    required = {key: value for key, value in expected.items() if key in recorded or key not in LATER_SETTINGS}
    return all(key in recorded and recorded[key] == value for key, value in required.items())


def _prepare(command: InstructCommand, locations: list[ModelLocation]) -> HeldOutQuestions:
    """Read the questions, and check everything that can be checked before any training. Raises BadInput."""
    titles = [location.title for location in locations]
    if len({_file_name(title, 0) for title in titles}) < len(titles):
        raise BadInput(f"MODEL: got {', '.join(titles)}, wanted every model once, and under different names")
    questions = read_questions(command.data)
    for location in locations:
        check_folder(command.output or location.home / ANSWERS)
        for seed in range(command.settings.seed, command.settings.seed + command.seeds):
            _check_owner(answers_file(command, location, seed), location)
    if command.keep is not None:
        check_folder(command.keep, "--keep")
    return questions


def _train(
    trained: Trained, questions: HeldOutQuestions, settings: FineTuneSettings, run: Path, record: dict[str, Any]
) -> FineTuned:
    """Train or resume the fine-tuning run in directory `run`. `record`: its model, data and settings.

    Raises BadInput if the directory contains something else that must not be removed.
    """
    if not _is_run_of(run, record):
        if not run.name.startswith(".") and run.exists():
            raise BadInput(
                f"{run}: exists, but belongs to another fine-tuning run or to none; move it away, or pass another "
                "--keep"
            )
        recorded = read_json(run / IDENTITY) if (run / IDENTITY).is_file() else {}
        if recorded.get(WEIGHTS_VALUES, record[WEIGHTS_VALUES]) != record[WEIGHTS_VALUES]:
            raise BadInput(
                f"{run}: an unfinished fine-tuning run of another model with the same name; delete it, repeat the "
                "command that started it, or pass another --output"
            )
        _refuse_other_folder(run)
        shutil.rmtree(run, ignore_errors=True)
    with writing(run):
        if not (run / "train.json").exists():  # this file is written last
            run.mkdir(parents=True, exist_ok=True)
            replace_file(run / IDENTITY, json.dumps(record, indent=2) + "\n")
            write_run(trained, questions.train, questions.validation, settings, run)
    return train_run(run, trained.location.path, next(trained.network.parameters()).device)


def _refuse_other_folder(run: Path) -> None:
    """Raise BadInput if a folder does not belong to a fine-tuning run: the caller is about to delete the folder."""
    unknown = [] if (run / IDENTITY).is_file() or not run.is_dir() else [*run.iterdir()]
    # A session that was killed may have left a partial identity file.
    if unknown := [path for path in unknown if path.name != f".partial-{IDENTITY}"]:
        raise BadInput(
            f"{run}: contains {unknown[0].name}, but no fine-tuning run was started here; move it away, or pass "
            "another --output"
        )


def _is_run_of(run: Path, record: dict[str, Any]) -> bool:
    """Return whether a directory belongs to the fine-tuning run with this model, data and settings."""
    return (run / IDENTITY).is_file() and _settings_agree(read_json(run / IDENTITY), record)


def _earlier_answers(file: Path, record: dict[str, Any], questions: list[Record], run: Path | None) -> Answers | None:
    """Return the answers of an earlier session with the same model, data and settings, or None if there are none.

    `run`: the run directory that --keep asks for, or None. If it is given, the answers are returned only if this
    directory contains a complete run with the same model, data and settings.
    """
    run_exit = None if run is None or not _is_run_of(run, record) else read_exit(run)
    if run is not None and (run_exit is None or run_exit.status != EXIT_DONE):
        return None
    try:
        answers = read_answers(file)
        structured(answers.settings, FineTuned, unknown_keys=True)
    except (BadInput, ValueError):
        return None  # the file is missing, damaged, or from another program
    return (
        answers
        if _settings_agree(answers.settings, record) and [answer.record for answer in answers.answers] == questions
        else None
    )


def _over_seeds(values: list[float | None]) -> dict[str, float | None]:
    """Return the mean over seeds, and the standard deviation if there are several seeds."""
    numbers = [value for value in values if value is not None]
    return {"value": statistics.fmean(numbers), "spread": statistics.stdev(numbers) if len(numbers) > 1 else None}
