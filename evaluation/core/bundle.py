"""Read the tasks of CORE from karpathy/nanochat's evaluation bundle, which is downloaded if necessary.

This module also builds the few-shot prompts.
"""

import csv
import hashlib
import io
import random
import zipfile
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from common.checks import structured
from common.errors import BadInput, refusing
from common.files import replace_file, sha256, writing
from common.json_files import LINES_BYTES, check_text, open_regular, parse_json, read_regular
from common.output import show
from common.remote_files import look_up_remote
from common.text import nearest, quoted

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
DOWNLOADED = Path("runs/eval_bundle.zip")
RECORDED = DOWNLOADED.with_name(f"{DOWNLOADED.name}.sha256")  # contains the archive's sha256; written by the download
IS_NANOCHATS = "is_nanochats"  # key in stored results; true if the bundle is known to equal nanochat's archive
LABELS = (  # the tasks in nanochat's archive, listed here to check a name before the download
    *("hellaswag_zeroshot", "jeopardy", "bigbench_qa_wikidata", "arc_easy", "arc_challenge", "copa", "commonsense_qa"),
    *("piqa", "openbook_qa", "lambada_openai", "hellaswag", "winograd", "winogrande", "bigbench_dyck_languages"),
    *("agi_eval_lsat_ar", "bigbench_cs_algorithms", "bigbench_operators", "bigbench_repeat_copy_logic", "squad"),
    *("coqa", "boolq", "bigbench_language_identification"),
)
LARGEST_BUNDLE = 1 << 30  # bytes; nanochat's archive has about 160 MB
# nanochat's seeds, for the order of a task's items and for the choice of an item's examples. The item's number is added
# to the second seed.
ORDER_SEED, EXAMPLES_SEED = 1337, 1234
# The kinds of tasks, each with the key of an item's contexts and the key of its continuations. An item has a single
# text under each of these keys, or a list of texts under one of them.
KINDS = {
    "multiple_choice": ("query", "choices"),
    "schema": ("context_options", "continuation"),
    "language_modeling": ("context", "continuation"),
}
DAMAGED: tuple[type[Exception], ...] = (OSError, LookupError, RuntimeError, TypeError, ValueError)
DAMAGED += (zipfile.BadZipFile, zlib.error, csv.Error, yaml.YAMLError)


@attrs.frozen(kw_only=True)
class TaskEntry:
    """A task's entry in core.yaml."""

    label: str
    icl_task_type: str  # a key of KINDS
    dataset_uri: str
    num_fewshot: list[int]  # number of examples in a prompt; only the first entry is used
    continuation_delimiter: str = " "


@attrs.frozen(kw_only=True)
class Question:
    """An item of a task: contexts that share a continuation, or continuations that share a context."""

    contexts: list[str]
    continuations: list[str]
    gold: int  # index of the correct pair

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All combinations of a context and a continuation."""
        return [(context, continuation) for context in self.contexts for continuation in self.continuations]


@attrs.frozen(kw_only=True)
class CoreTask:
    """A task of CORE with its questions."""

    entry: TaskEntry
    baseline: float  # accuracy of guessing, 0 to 1
    questions: list[Question]

    def prompts(self, number: int) -> list[tuple[str, str]]:
        """Return the prompts of a question, each in two parts: the text before the continuation, and the continuation.

        The few-shot examples are other questions of the task. They are the same questions that nanochat draws at
        random.
        """
        indices = random.Random(EXAMPLES_SEED + number).sample(
            range(len(self.questions) - 1), self.entry.num_fewshot[0]
        )
        examples = [self.questions[index + (index >= number)] for index in indices]
        delimiter = self.entry.continuation_delimiter
        shown = "".join(f"{delimiter.join(example.pairs[example.gold])}\n\n" for example in examples)
        return [(shown + context + delimiter, continuation) for context, continuation in self.questions[number].pairs]


def read_bundle(path: Path | None, labels: str | None, count: int | None) -> tuple[list[CoreTask], dict[str, Any]]:
    """Return the requested tasks in nanochat's order, and a description of their source for the stored result.

    `path`: the archive or its folder; None: the downloaded archive. `labels`: the names of tasks, separated by commas;
    None: all tasks. `count`: the largest number of items per task; None: all items. Raises BadInput with the name of
    the damaged file or item.
    """
    path, digest, tasks = path or _download_once(), hashlib.sha256(), []  # the digest covers all content that is read
    names: list[str] = []

    def read(name: str) -> bytes:
        content = _content(path, name)
        digest.update(content)
        names.append(name)
        return content

    entries = _entries(path, read("core.yaml"))
    metadata = read("eval_meta_data.csv").decode(errors="replace")
    for label in entries if labels is None else dict.fromkeys(labels.split(",")):
        _check_label(label, entries)
        entry = entries[label]
        problem = f"{path}: {label}: wanted a baseline, and one of the kinds {', '.join(KINDS)}"
        with refusing(problem, kinds=DAMAGED):
            table = csv.DictReader(io.StringIO(metadata))
            baseline = [float(row["Random baseline"]) for row in table if row["Eval Task"] == label][-1] / 100
            keys, shots = KINDS[entry.icl_task_type], entry.num_fewshot[0]
        name = f"eval_data/{entry.dataset_uri}"
        lines = enumerate(filter(None, read(name).splitlines()), 1)
        questions = [_question(line, keys, f"{path}: {name}: item {number}") for number, line in lines]
        random.Random(ORDER_SEED).shuffle(questions)
        questions = questions[:count]
        if not (len(questions) > shots >= 0 and 0 <= baseline < 1):
            got = f"{len(questions)} items, {shots} examples before each, baseline {baseline:g}"
            raise BadInput(
                f"{path}: {label}: got {got}, wanted more items than examples, and a baseline from 0 to below 1; if "
                "there are too few items, pass a larger --count"
            )
        tasks.append(CoreTask(entry=entry, baseline=baseline, questions=questions))
    source = {"file": str(path), "sha256": digest.hexdigest(), "count": count}
    return tasks, source | {IS_NANOCHATS: _is_nanochats(path, names, digest.hexdigest())}


def check_tasks(path: Path | None, labels: str | None) -> None:
    """Raise BadInput for a task that does not exist. Call this before a model or the bundle is downloaded."""
    if labels is None:
        return
    path = path or DOWNLOADED
    valid_labels = _entries(path, _content(path, "core.yaml")) if path.exists() or path != DOWNLOADED else LABELS
    for label in labels.split(","):
        _check_label(label, valid_labels)


def _check_label(label: str, valid_labels: Collection[str]) -> None:
    if label not in valid_labels:
        raise BadInput(f"--tasks: got {quoted(label)}; {nearest(label, valid_labels)}")


def _content(path: Path, name: str) -> bytes:
    """Return the content of a file in the bundle."""
    with refusing(f"{path}: {name}: cannot be read", "pass nanochat's eval_bundle.zip or its folder", DAMAGED):
        if path.is_dir():
            return read_regular(path / name, LINES_BYTES)
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return archive.read(f"eval_bundle/{name}")


def _entries(path: Path, content: bytes) -> dict[str, TaskEntry]:
    """Return the tasks in the content of core.yaml, by label."""
    with refusing(f"{path}: core.yaml", kinds=DAMAGED):
        rows = yaml.safe_load(content)["icl_tasks"]
        return {entry.label: entry for entry in (structured(row, TaskEntry, unknown_keys=True) for row in rows)}


def _download_once() -> Path:
    """Return the path of nanochat's archive, which is downloaded only once. Raises BadInput.

    The download records the archive's sha256, and every later call checks it.
    """
    with writing(DOWNLOADED):
        if not DOWNLOADED.exists():
            show(f"downloading {URL} to {DOWNLOADED}")
            DOWNLOADED.parent.mkdir(parents=True, exist_ok=True)
            remote = look_up_remote(URL)
            if remote.size_bytes > LARGEST_BUNDLE:
                raise BadInput(f"{URL}: got {remote.size_bytes:,} bytes, wanted at most {LARGEST_BUNDLE:,}")
            with remote.open() as file:
                content = file.read()
            # The hash is written before the archive, so an archive without a hash was not downloaded by this function.
            replace_file(RECORDED, _sha256_line(hashlib.sha256(content).hexdigest()), durable=True)
            replace_file(DOWNLOADED, content, durable=True)
        if RECORDED.exists() and not _is_recorded(DOWNLOADED):
            raise BadInput(
                f"{DOWNLOADED}: its sha256 differs from the one in {RECORDED.name}; delete it to download it again"
            )
    return DOWNLOADED


def _is_nanochats(path: Path, names: Sequence[str], digest: str) -> bool:
    """Return whether a bundle is the archive that was downloaded here from nanochat, or has the same content.

    `digest`: the sha256 of the contents of the bundle's files `names`, in this order.
    """
    with refusing(RECORDED, kinds=(OSError,)):
        if not RECORDED.exists():
            return False
        if path.is_file() and _is_recorded(path):
            return True
        if not DOWNLOADED.is_file() or not _is_recorded(DOWNLOADED):
            return False
    content = hashlib.sha256()
    for name in names:
        try:
            content.update(_content(DOWNLOADED, name))
        except BadInput:  # nanochat's archive has no such file
            return False
    return content.hexdigest() == digest


def _is_recorded(path: Path) -> bool:
    return read_regular(RECORDED) == _sha256_line(sha256(path))


def _sha256_line(digest: str) -> bytes:
    return f"{digest}  {DOWNLOADED.name}\n".encode()  # the format of `sha256sum -c`


def _question(line: bytes, keys: tuple[str, str], where: str) -> Question:
    """Return an item of a task. Like nanochat, trim the context only for language modeling."""
    with refusing(f"{where}: {', '.join(keys)}, gold"):
        row, trims = parse_json(line), "context" in keys
        contexts, continuations = ([value] if not isinstance(value := row.get(key), list) else value for key in keys)
        values = {"contexts": contexts, "continuations": continuations, "gold": 0 if trims else row.get("gold")}
        question = structured(values, Question)
        has_two_lists = len(question.contexts) > 1 and len(question.continuations) > 1
        pairs = question.pairs
        if has_two_lists or not 0 <= question.gold < len(pairs) or not all(map("".join, pairs)):
            raise ValueError(f"got gold {question.gold}, wanted the index of one of {len(pairs)} non-empty texts")
    for text in (*contexts, *continuations):
        check_text(text, where)
    return attrs.evolve(question, contexts=[text.strip() for text in contexts]) if trims else question
