"""Read instruction records with their reference answers. Also read and write files of model answers."""

import codecs
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import attrs

from common.checks import is_absent, structured
from common.errors import BadInput, refusing
from common.files import replace_file, writing
from common.json_files import check_text, read_every_line, read_json, read_regular
from common.output import note, show
from evaluation.shared.weights import WeightsIdentity
from tokens.documents.messages import excluded_by
from tokens.documents.parquet import REFUSED_FIELDS
from training.telemetry.metrics_log import ANSWERS, EVALUATIONS, GIVEN_TOKENIZER

MOST_BYTES = 1 << 30  # size limit of a file
NAMED_FIELDS = 20  # largest number of fields that a note on unread fields lists
WANTED = "wanted a JSON array of records, or JSON Lines"
WANTED_ANSWERS = "wanted a file of answers that evaluate.py instruct wrote"

# The keys of two settings in an answer file. The fingerprint is stored because a tokenizer's name does not determine
# its ids, and the added tokens are stored because the fingerprint does not include them.
TOKENIZER, ADDED_TOKENS = "tokenizer_fingerprint", "ordinary_added_tokens"
LATER_SETTINGS = {TOKENIZER, ADDED_TOKENS, GIVEN_TOKENIZER}  # settings that files of earlier versions do not have


@attrs.frozen(kw_only=True)
class Record:
    """One instruction in the form of Stanford's Alpaca (Taori et al. 2023)."""

    instruction: str
    input: str = ""
    output: str  # the reference answer


@attrs.frozen(kw_only=True)
class Answer:
    """A model's answer to one instruction."""

    record: Record
    text: str
    reference_loss: float | None  # the model's loss on the reference answer, nats per token


@attrs.frozen(kw_only=True)
class Answers:
    """A file of answers by one fine-tuned model."""

    model: str  # the model's title
    seed: int  # seed of the fine-tuning run
    home: Path | None  # the run or model directory, whose evaluations.jsonl gets the results
    settings: dict[str, Any]  # settings of the fine-tuning run
    answers: list[Answer]
    weights: WeightsIdentity | None = None  # weights before fine-tuning; None: unknown


def read_records(path: Path) -> list[Record]:
    """Read records from a JSON array or JSON Lines, and print a note on fields that are not read.

    Raises BadInput with the number of the first damaged record.
    """
    unread = Counter[str]()
    records = [_record(row, f"{path}: record {number}", unread) for number, row in enumerate(_rows(path), 1)]
    if not records:
        raise BadInput(f"{path}: no records; wanted a JSON array of objects with instruction, input and output")
    _note_unread(path, unread)
    return records


def check_folder(folder: Path, option: str = "--output") -> None:
    """Create the folder that was passed to an output option. Raises BadInput if it is not writable.

    Call this before anything is trained.
    """
    with refusing(f"{folder}: cannot be written", f"pass another {option}", (OSError,)):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def write_answers(path: Path, answers: Answers) -> None:
    """Write a file of answers in the format that `read_answers` reads. Raises BadInput."""
    rows = [
        attrs.asdict(answer.record) | {"answer": answer.text, "reference_loss": answer.reference_loss}
        for answer in answers.answers
    ]
    home = None if answers.home is None else str(answers.home)
    hashes = {} if answers.weights is None else answers.weights.as_record()
    value: dict[str, Any] = {"model": answers.model, "home": home, "seed": answers.seed, **hashes}
    value |= {"settings": answers.settings, "answers": rows}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", durable=True)


def read_answers(path: Path) -> Answers:
    """Read a file of answers, and print a note on fields that are not read. Raises BadInput."""
    value = read_json(path, most_bytes=MOST_BYTES, advice=WANTED_ANSWERS)
    if not isinstance(value.get("answers"), list) or not value["answers"]:
        raise BadInput(f"{path}: {WANTED_ANSWERS}")
    answers, unread = [], Counter[str]()
    for number, row in enumerate(value["answers"], 1):
        where = f"{path}: answer {number}"
        record, loss = _record(row, where, unread, "answer", "reference_loss"), row.get("reference_loss")
        if not isinstance(row.get("answer"), str) or not (loss is None or type(loss) in (int, float)):
            raise BadInput(f"{where}: wanted a string as 'answer', and a number or null as 'reference_loss'")
        check_text(row["answer"], f"{where}: answer")
        answers.append(Answer(record=record, text=row["answer"], reference_loss=loss))
    _note_unread(path, unread)
    model, seed, settings = value.get("model"), value.get("seed", 0), value.get("settings", {})
    if not isinstance(model, str) or type(seed) is not int or not isinstance(settings, dict):
        raise BadInput(f"{path}: wanted a string as 'model', an integer as 'seed' and an object as 'settings'")
    return Answers(
        model=model,
        seed=seed,
        home=_home(path, value.get("home")),
        settings=settings,
        answers=answers,
        # Older files have only the hash of the weights' values, which they store among the settings.
        weights=WeightsIdentity.of(value) or WeightsIdentity.of(settings),
    )


def _home(path: Path, recorded: Any) -> Path | None:
    """Return the directory of a model's results.

    If the file is in the answers/ folder of a run or model directory, return that run or model directory. Otherwise,
    return the directory that is recorded in the file.
    """
    folder = path.resolve().parent
    enclosing = folder.parent if folder.name == ANSWERS else None
    if enclosing is not None and (enclosing / EVALUATIONS).is_file():
        return enclosing
    return Path(recorded).resolve() if isinstance(recorded, str) and Path(recorded).is_dir() else enclosing


def _record(row: Any, where: str, unread: Counter[str], *known_keys: str) -> Record:
    """Return the record in a row. Raises BadInput.

    `unread` counts the keys of the row that are neither fields of a record nor among `known_keys`.
    """
    if not isinstance(row, dict):
        raise BadInput(f"{where}: got {type(row).__name__}, wanted an object with instruction, input and output")
    filled = [key for key, value in row.items() if not is_absent(value)]
    if refused := [key for key in REFUSED_FIELDS if key in filled]:
        raise BadInput(f"{where}: got '{refused[0]}', which is not read; correct or remove the record")
    if (name := excluded_by(row)) is not None:
        raise BadInput(
            f"{where}: got '{name}': {json.dumps(row[name])}, which excludes the record from training, but every "
            "record is used for training or testing; remove the record"
        )
    fields = {field.name for field in attrs.fields(Record)}
    unread.update(key for key in filled if key not in fields and key not in known_keys)
    values = {key: value for key, value in row.items() if key in fields}
    if is_absent(values.get("input")) and not isinstance(values.get("input"), str):
        values.pop("input", None)
    with refusing(where, "correct or remove the record"):
        record = structured(values, Record)
    for key in ("instruction", "output"):
        if is_absent(row[key]):
            raise BadInput(f"{where}: {key}: empty; correct or remove the record")
    for key, text in attrs.asdict(record).items():
        check_text(text, f"{where}: {key}")
    return record


def _note_unread(path: Path, unread: Counter[str]) -> None:
    fields = ", ".join(f"'{name}' {count:,}" for name, count in unread.most_common(NAMED_FIELDS))
    if fields:
        more = f" and {len(unread) - NAMED_FIELDS:,} more fields" if len(unread) > NAMED_FIELDS else ""
        show(note(f"{path}: ignored fields, each with the number of records that have it: {fields}{more}"))


def _rows(path: Path) -> list[Any]:
    """Return the elements of a JSON array, or the lines of JSON Lines if the file begins with an object."""
    with refusing(f"{path}: cannot be read", kinds=(OSError,)):
        lines = read_regular(path, MOST_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
    return (
        read_every_line(path, advice=WANTED) if lines else read_json(path, list, most_bytes=MOST_BYTES, advice=WANTED)
    )
