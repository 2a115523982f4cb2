"""HellaSwag (Zellers et al., 2019): accuracy of the likeliest ending, as build-nanogpt and llm.c measure it."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from common.checks import structured
from common.errors import BadInput, printable, quoted, refusing
from common.files import sha256
from common.hub_client import download_snapshot
from common.json_files import check_text, read_every_line
from evaluation.command_line import HellaSwagCommand
from evaluation.loss.choice_losses import Choice, choice_losses, measure_items, untouched
from evaluation.shared.load import ModelLocation, Trained
from evaluation.shared.measuring import measure_each
from evaluation.shared.results import EvaluationResult, Measure, Measurement, Published
from evaluation.shared.significance import Interval, mean_and_error, plus_minus, student_interval
from tokens.search.overlap import GRAM
from tokens.tokenizer.tokenizer import Tokenizer
from training.parallel.process_group import Ranks

PATTERNS = ["*validation*.parquet", "*validation*.jsonl"]  # validation split of a dataset on the hub
ENDINGS = 4


@attrs.frozen(kw_only=True)
class Item:
    """A context and four endings, under the names of rowanz/hellaswag."""

    ctx: str
    endings: list[str]
    label: str  # number of the true one; Parquet has it as text, JSON Lines as a number


def accuracy_difference(a: list[np.ndarray], b: list[np.ndarray], confidence: float) -> Interval:
    """Return the difference of accuracies, paired by item (McNemar, Psychometrika 12, 1947).

    Only items that exactly one of the two models answers correctly count. `a`, `b`: for each seed, 1 for an item
    answered correctly, else 0, float64 (items,). The variance is that of two items more, on which the two disagree by
    one half each way: otherwise models that agree on every item would get an interval without width (Agresti and Min,
    Statistics in Medicine 24, 2005).
    """
    by_item = np.mean(a, axis=0) - np.mean(b, axis=0)
    items = len(by_item)
    shrunk = float(by_item.sum()) / (items + 2)
    variance = (float(np.square(by_item).sum()) + 1) / (items + 2) - shrunk**2
    error = math.sqrt(variance / (items + 1)) if items > 1 else None
    return student_interval(float(by_item.mean()), error, items - 1, confidence)


COMPLETION = Measure(
    name="HellaSwag, completion",
    unit="of all items",
    difference=accuracy_difference,
    published=Published(
        values={"OpenAI GPT-2 small": "0.2955", "OpenAI GPT-2 XL": "0.4893"},
        source="karpathy/build-nanogpt, hellaswag.py: acc_norm on all 10,042 items of the validation split",
    ),
)


def run(command: HellaSwagCommand) -> None:
    measure_each(command, "hellaswag", partial(_read, command), partial(measure, against=command.against))


def read_items(source: str, count: int | None) -> tuple[list[Item], dict[str, str]]:
    """Return the first `count` items, or all, and their source: JSON Lines, Parquet, or OWNER/NAME. Raises BadInput."""
    path, name = Path(source), source
    if not path.is_file():
        path = _download(source)
        name = f"{source} {path.name}"
    rows = _parquet_rows(path) if path.suffix == ".parquet" else read_every_line(path, advice="download the file again")
    if not rows:
        raise BadInput(f"{path}: holds no items; wanted HellaSwag's, one a line")
    if count is not None and count > len(rows):
        raise BadInput(f"--count: got {count:,}, but {path} has {len(rows):,} items")
    items = [_item(row, f"{path}: item {number}") for number, row in enumerate(rows[:count], 1)]
    return items, {"file": name, "sha256": sha256(path)}


def measure(
    trained: Trained, read: tuple[list[Item], dict[str, str]], ranks: Ranks, against: Path | None = None
) -> tuple[dict[str, Any], str]:
    """Return a model's accuracy, to store and as text; call it on every rank. Raises BadInput for NaN.

    `against`: a token directory; without the items that share an n-gram with its train split, too.
    """
    items, data = read
    work = partial(answers, trained)
    hits, hits_norm, longer = np.array(measure_items(ranks, items, [len(item.ctx) for item in items], work)).T
    found, cut = accuracy(hits > 0, hits_norm > 0), int(longer.sum())
    told = f" {describe(found)}" + (f"; {cut:,} items were cut to the context" if cut else "")
    values = {"data": data, "items": len(items), "cut": cut, "completion": found}
    if against is not None:
        kept, short = untouched(
            ranks, trained, [f"{item.ctx} {item.endings[int(item.label)]}" for item in items], against
        )
        clean = accuracy(hits[kept] > 0, hits_norm[kept] > 0) if kept.any() else None
        count = int(kept.sum())
        values["untouched"] = {"against": str(against), "items": count, "too_short": short, "completion": clean}
        rest = "nothing to measure" if clean is None else describe(clean)
        told += f"; on the {count:,} items without {GRAM} tokens of {against}: {rest}"
    return values, told


def describe(found: dict[str, Any]) -> str:
    """Return both accuracies, with their errors, as text."""
    return ", ".join(f"{key} {plus_minus(found[key], found[f'{key}_error'], 4)}" for key in ("acc", "acc_norm"))


def completion(item: Item, tokenizer: Tokenizer) -> list[Choice]:
    """Return an item's choices as karpathy/build-nanogpt and llm.c make them (hellaswag.py): encoded separately."""
    context = tokenizer.encode(item.ctx)
    endings = [tokenizer.encode(f" {ending}") for ending in item.endings]
    return [Choice(np.concatenate([context, ending]), len(ending)) for ending in endings]


def answers(trained: Trained, items: list[Item]) -> list[tuple[bool, bool, bool]]:
    """Return of items: whether the true ending is the likeliest, in total and by its length; whether one is cut."""
    most, asked = trained.network.config.context_length + 1, [completion(item, trained.tokenizer) for item in items]
    losses, found = choice_losses(trained, [[choice.within(most) for choice in four] for four in asked]), []
    for item, four, endings in zip(items, asked, losses, strict=True):
        best, best_norm = likeliest([nats for nats, _ in endings])
        cut = any(len(choice.tokens) > most for choice in four)
        found.append((best == int(item.label), best_norm == int(item.label), cut))
    return found


def likeliest(endings: list[np.ndarray]) -> tuple[int, int]:
    """Return the number of the likeliest ending, in total and by its length, of equal ones the first."""
    return int(np.argmin([nats.sum() for nats in endings])), int(np.argmin([nats.mean() for nats in endings]))


def accuracy(hits: np.ndarray, hits_norm: np.ndarray) -> dict[str, Any]:
    """Return the share of items, both bool (items,), whose true ending is the likeliest, in total and by its length.

    Errors are standard errors, binomial, None of one item; hits a bit for each item, in hexadecimal, for pairs.
    """
    found: dict[str, Any] = {}
    for suffix, values in (("", hits), ("_norm", hits_norm)):
        found[f"acc{suffix}"], found[f"acc{suffix}_error"] = mean_and_error(values)
        found[f"hits{suffix}"] = np.packbits(values).tobytes().hex()
    return found


def read_results(record: dict[str, Any]) -> list[EvaluationResult]:
    data, items, found = record["data"], record["items"], record["completion"]
    hits = np.unpackbits(np.frombuffer(bytes.fromhex(found["hits_norm"]), np.uint8))[:items].astype(np.float64)
    if not 0 < items == len(hits):
        raise ValueError(f"{items} items, but answers to {len(hits)}")
    value, error = found["acc_norm"], found.get("acc_norm_error")
    result = EvaluationResult.of(
        record,
        subject=f"{data['sha256']} {items} {len(found['hits_norm'])}",
        description=f"acc_norm on {items:,} items of {data['file']}; ± is a standard error over items",
        measurements=[Measurement(measure=COMPLETION, value=value, error=error, freedom=items - 1, sample=hits)],
    )
    return [result]


def _read(command: HellaSwagCommand, _: list[ModelLocation]) -> tuple[list[Item], dict[str, str]]:
    items, data = read_items(command.data, command.count)
    print(printable(f"{data['file']}: {len(items):,} items"))
    print("GPT-2 124M: acc 0.2859, acc_norm 0.2955 on all 10,042, by build-nanogpt's hellaswag.py")
    return items, data


def _item(row: dict[str, Any], where: str) -> Item:
    with refusing(where):
        item = structured(row | {"label": str(row.get("label", ""))}, Item, unknown_keys=True)
    for text in (item.ctx, *item.endings):
        check_text(text, where)
    if not item.ctx.strip():
        raise BadInput(f"{where}: ctx: got {quoted(item.ctx)}, wanted a text")
    if len(item.endings) != ENDINGS:
        raise BadInput(f"{where}: endings: got {len(item.endings)}, wanted {ENDINGS} texts")
    if item.label not in map(str, range(ENDINGS)):
        wanted = f"wanted 0 to {ENDINGS - 1}; the test split has no labels"
        raise BadInput(f"{where}: label: got {quoted(item.label)}, {wanted}")
    return item


def _parquet_rows(path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    kinds = (pyarrow.ArrowException, OSError, UnicodeDecodeError)
    with refusing(f"{path}: damaged", "download the file again", kinds):
        return pyarrow.parquet.read_table(path).to_pylist()


def _download(source: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source, re.ASCII) or source.endswith(".jsonl"):
        raise BadInput(f"{source}: no such file; wanted HellaSwag's items as JSON Lines, or OWNER/NAME on the hub")
    problem = "no such file, and no dataset available on the hub"
    advice = "; pass hellaswag_val.jsonl of github.com/rowanz/hellaswag with --data"
    folder = Path(download_snapshot(source, "dataset", PATTERNS, problem, advice))
    found = sorted(path for pattern in PATTERNS for path in folder.rglob(pattern))
    if len(found) != 1:
        raise BadInput(f"{source}: got {len(found)} files of a validation split, wanted 1; pass a file with --data")
    return found[0]
