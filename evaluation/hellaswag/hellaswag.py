"""HellaSwag (Zellers et al., 2019): accuracy of the likeliest ending, as build-nanogpt and llm.c measure it."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from common.checks import structured
from common.errors import BadInput, printable, quoted, refusing
from common.files import sha256
from common.hub_client import download_snapshot
from common.json_files import check_text, read_every_line
from evaluation.command_line import HellaSwagCommand
from evaluation.loss.held_out_loss import BATCH_TOKENS, prediction_losses
from evaluation.shared.load import ModelLocation, Trained
from evaluation.shared.measuring import measure_each, share
from evaluation.shared.results import EvaluationResult, Measure, Measurement, Published
from evaluation.shared.significance import Interval, mean_and_error, plus_minus, student_interval
from tokens.search.overlap import GRAM, Overlap, find_overlap, forms, open_comparable
from tokens.tokenizer.tokenizer import Tokenizer
from training.parallel.process_group import Ranks, from_coordinator

PATTERNS = ["*validation*.parquet", "*validation*.jsonl"]  # validation split of a dataset on the hub
ENDINGS = 4


@attrs.frozen(kw_only=True)
class Item:
    """A context and four endings, under the names of rowanz/hellaswag."""

    ctx: str
    endings: list[str]
    label: str  # number of the true one; Parquet has it as text, JSON Lines as a number


@attrs.frozen(kw_only=True)
class Items:
    file: str
    sha256: str
    items: list[Item]


@attrs.frozen
class Choice:
    tokens: np.ndarray  # of context and ending, 1-D
    scored: int  # number of them, at the end, whose loss counts


@attrs.frozen(kw_only=True)
class Accuracy:
    """Share of items whose true ending is the likeliest: in total (acc), and by its length (acc_norm)."""

    acc: float
    acc_error: float | None  # standard error, binomial; None where there is one item
    acc_norm: float
    acc_norm_error: float | None
    hits: str  # a bit for each item, in order, in hexadecimal: for paired comparison
    hits_norm: str

    def __str__(self) -> str:
        acc, acc_norm = plus_minus(self.acc, self.acc_error, 4), plus_minus(self.acc_norm, self.acc_norm_error, 4)
        return f"acc {acc}, acc_norm {acc_norm}"


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


def read_items(source: str, count: int | None) -> Items:
    """Return the first `count` items, or all, of JSON Lines, Parquet, or OWNER/NAME on the hub. Raises BadInput."""
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
    return Items(file=name, sha256=sha256(path), items=items)


def measure(trained: Trained, data: Items, ranks: Ranks, against: Path | None = None) -> tuple[dict[str, Any], str]:
    """Return a model's accuracy, to store and as text; call it on every rank. Raises BadInput for NaN.

    `against`: a token directory; without the items that share an n-gram with its train split, too.
    """
    length = trained.network.config.context_length
    choices = [choice for item in data.items for choice in completion(item, trained.tokenizer)]
    cut = len({index // ENDINGS for index, choice in enumerate(choices) if len(choice.tokens) > length + 1})
    choices = [Choice(choice.tokens[-(length + 1) :], min(choice.scored, length)) for choice in choices]
    likelihoods = log_likelihoods(trained, choices, ranks)
    if not np.isfinite(likelihoods).all():
        raise BadInput(f"{trained.place.path}: its loss is not finite: the weights are damaged, or training diverged")
    labels = [int(item.label) for item in data.items]
    found = accuracy(likelihoods, choices, labels)
    source, counts = {"file": data.file, "sha256": data.sha256}, {"items": len(data.items), "cut": cut}
    told = f" {found}" + (f"; {cut:,} items were cut to the context" if cut else "")
    values = {"data": source, **counts, "completion": attrs.asdict(found)}
    if against is not None:
        overlap = from_coordinator(ranks, lambda: _overlap(trained, data.items, against))
        kept = np.flatnonzero(~overlap.touched)
        rows = (kept[:, None] * ENDINGS + np.arange(ENDINGS)).reshape(-1)
        some, short = [choices[row] for row in rows.tolist()], int(np.count_nonzero(overlap.lengths == 0))
        clean = accuracy(likelihoods[rows], some, [labels[item] for item in kept.tolist()]) if len(kept) else None
        there = {"against": str(against), "items": len(kept), "too_short": short}
        values["untouched"] = {**there, "completion": None if clean is None else attrs.asdict(clean)}
        told += f"; on the {len(kept):,} items without {GRAM} tokens of {against}: {clean or 'nothing to measure'}"
    return values, told


def completion(item: Item, tokenizer: Tokenizer) -> list[Choice]:
    """Return an item's choices as karpathy/build-nanogpt and llm.c make them (hellaswag.py): encoded separately."""
    context = tokenizer.encode(item.ctx)
    endings = [tokenizer.encode(f" {ending}") for ending in item.endings]
    return [Choice(np.concatenate([context, ending]), len(ending)) for ending in endings]


def log_likelihoods(trained: Trained, choices: list[Choice], ranks: Ranks) -> np.ndarray:
    """Return the log-probability of each ending behind its context, nats, fp64 (choices,), on every rank."""
    order = sorted(range(len(choices)), key=lambda index: -len(choices[index].tokens))
    batches = []
    while order:
        size = max(1, BATCH_TOKENS // len(choices[order[0]].tokens))
        batches.append(order[:size])
        order = order[size:]
    found = share(ranks, batches, lambda batch: _batch(trained, [choices[index] for index in batch]))
    likelihoods = np.empty(len(choices))
    likelihoods[[index for batch in batches for index in batch]] = np.concatenate(found)
    return likelihoods


def accuracy(likelihoods: np.ndarray, choices: list[Choice], labels: list[int]) -> Accuracy:
    """Return how often the true one of four choices is the likeliest; of equal ones the first counts."""
    means = likelihoods / np.array([choice.scored for choice in choices])
    hits, hits_norm = (values.reshape(-1, ENDINGS).argmax(1) == labels for values in (likelihoods, means))
    return Accuracy(
        acc=float(hits.mean()),
        acc_error=mean_and_error(hits)[1],
        acc_norm=float(hits_norm.mean()),
        acc_norm_error=mean_and_error(hits_norm)[1],
        hits=np.packbits(hits).tobytes().hex(),
        hits_norm=np.packbits(hits_norm).tobytes().hex(),
    )


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


def _overlap(trained: Trained, items: list[Item], against: Path) -> Overlap:
    """Search a train split for the contexts of items with their true endings. Raises BadInput."""
    texts = [f"{item.ctx} {item.endings[int(item.label)]}" for item in items]
    return find_overlap(
        [open_comparable(against, "train", trained.tokenizer)], [forms(trained.tokenizer, text) for text in texts]
    )


def _read(command: HellaSwagCommand, _: list[ModelLocation]) -> Items:
    data = read_items(command.data, command.count)
    print(printable(f"{data.file}: {len(data.items):,} items"))
    print("GPT-2 124M: acc 0.2859, acc_norm 0.2955 on all 10,042, by build-nanogpt's hellaswag.py")
    return data


def _batch(trained: Trained, choices: list[Choice]) -> np.ndarray:
    """Return the log-probabilities of the endings, fp64 (B,). Padding after the end of a row has no effect."""
    tokens = [torch.from_numpy(choice.tokens.astype(np.int64)) for choice in choices]
    losses = prediction_losses(trained.network, pad_sequence(tokens, batch_first=True)).double().cpu()
    ended = [row[: len(choice.tokens) - 1] for row, choice in zip(losses, choices, strict=True)]
    return np.array([-float(row[-choice.scored :].sum()) for row, choice in zip(ended, choices, strict=True)])


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
    folder = download_snapshot(source, "dataset", PATTERNS, problem, advice)
    found = sorted(path for pattern in PATTERNS for path in folder.rglob(pattern))
    if len(found) != 1:
        raise BadInput(f"{source}: got {len(found)} files of a validation split, wanted 1; pass a file with --data")
    return found[0]
