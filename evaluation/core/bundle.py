"""Tasks of CORE: the evaluation bundle of karpathy/nanochat, downloaded or at hand, and its few-shot prompts."""

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
RECORDED = DOWNLOADED.with_name(f"{DOWNLOADED.name}.sha256")  # of the archive as it was downloaded here
IS_NANOCHATS = "is_nanochats"  # key of a stored source: whether its content is known to be that of nanochat's archive
LABELS = (  # of the tasks in that archive, to check a name before it is downloaded
    *("hellaswag_zeroshot", "jeopardy", "bigbench_qa_wikidata", "arc_easy", "arc_challenge", "copa", "commonsense_qa"),
    *("piqa", "openbook_qa", "lambada_openai", "hellaswag", "winograd", "winogrande", "bigbench_dyck_languages"),
    *("agi_eval_lsat_ar", "bigbench_cs_algorithms", "bigbench_operators", "bigbench_repeat_copy_logic", "squad"),
    *("coqa", "boolq", "bigbench_language_identification"),
)
LARGEST_BUNDLE = 1 << 30  # bytes; nanochat's archive has about 160 MB
ORDER_SEED, EXAMPLES_SEED = 1337, 1234  # nanochat's: of a task's items; of an item's examples, plus its number
KINDS = {  # of tasks: the keys of an item's contexts and continuations, one of which is a list, or each one text
    "multiple_choice": ("query", "choices"),
    "schema": ("context_options", "continuation"),
    "language_modeling": ("context", "continuation"),
}
DAMAGED: tuple[type[Exception], ...] = (OSError, LookupError, RuntimeError, TypeError, ValueError)
DAMAGED += (zipfile.BadZipFile, zlib.error, csv.Error, yaml.YAMLError)


@attrs.frozen(kw_only=True)
class TaskEntry:
    """A task as core.yaml lists it."""

    label: str
    icl_task_type: str  # of KINDS
    dataset_uri: str
    num_fewshot: list[int]  # examples in a prompt: the first counts
    continuation_delimiter: str = " "


@attrs.frozen(kw_only=True)
class Question:
    contexts: list[str]
    continuations: list[str]
    gold: int  # number of the right pair

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Contexts with their continuations: there is one of either."""
        return [(context, continuation) for context in self.contexts for continuation in self.continuations]


@attrs.frozen(kw_only=True)
class CoreTask:
    entry: TaskEntry
    baseline: float  # accuracy by chance, 0 to 1
    questions: list[Question]

    def prompts(self, number: int) -> list[tuple[str, str]]:
        """Return a question's prompts, each in two parts: all before the continuation, and the continuation.

        Examples are other questions of the task, drawn as nanochat draws them.
        """
        drawn = random.Random(EXAMPLES_SEED + number).sample(range(len(self.questions) - 1), self.entry.num_fewshot[0])
        examples = [self.questions[other + (other >= number)] for other in drawn]
        delimiter = self.entry.continuation_delimiter
        shown = "".join(f"{delimiter.join(example.pairs[example.gold])}\n\n" for example in examples)
        return [(shown + context + delimiter, continuation) for context, continuation in self.questions[number].pairs]


def read_bundle(path: Path | None, wanted: str | None, count: int | None) -> tuple[list[CoreTask], dict[str, Any]]:
    """Return the wanted tasks, at most `count` items of each, in nanochat's order, and their source, to store.

    `path`: archive or folder, None: downloaded; `wanted`: names with commas. Raises BadInput naming a file or an item.
    """
    path, digest, tasks = path or _downloaded(), hashlib.sha256(), []  # of all content that is read
    names: list[str] = []

    def read(name: str) -> bytes:
        content = _content(path, name)
        digest.update(content)
        names.append(name)
        return content

    known = _entries(path, read("core.yaml"))
    described = read("eval_meta_data.csv").decode(errors="replace")
    for label in known if wanted is None else dict.fromkeys(wanted.split(",")):
        _check_label(label, known)
        entry = known[label]
        with refusing(f"{path}: {label}: wanted a kind, of {', '.join(KINDS)}, and a baseline", kinds=DAMAGED):
            table = csv.DictReader(io.StringIO(described))
            baseline = [float(row["Random baseline"]) for row in table if row["Eval Task"] == label][-1] / 100
            keys, shots = KINDS[entry.icl_task_type], entry.num_fewshot[0]
        name = f"eval_data/{entry.dataset_uri}"
        lines = enumerate(filter(None, read(name).splitlines()), 1)
        questions = [_question(line, keys, f"{path}: {name}: item {number}") for number, line in lines]
        random.Random(ORDER_SEED).shuffle(questions)
        questions = questions[:count]
        if not (len(questions) > shots >= 0 and 0 <= baseline < 1):
            got = f"{len(questions)} items, {shots} examples before each, baseline {baseline:g}"
            raise BadInput(f"{path}: {label}: got {got}; wanted more items than examples: pass a larger --count")
        tasks.append(CoreTask(entry=entry, baseline=baseline, questions=questions))
    source = {"file": str(path), "sha256": digest.hexdigest(), "count": count}
    return tasks, source | {IS_NANOCHATS: _is_nanochats(path, names, digest.hexdigest())}


def check_tasks(path: Path | None, wanted: str | None) -> None:
    """Raise BadInput for a task that does not exist, before a model or the bundle is downloaded."""
    if wanted is None:
        return
    path = path or DOWNLOADED
    known = _entries(path, _content(path, "core.yaml")) if path.exists() or path != DOWNLOADED else LABELS
    for label in wanted.split(","):
        _check_label(label, known)


def _check_label(label: str, known: Collection[str]) -> None:
    if label not in known:
        raise BadInput(f"--tasks: got {quoted(label)}; {nearest(label, known)}")


def _content(path: Path, name: str) -> bytes:
    """Return the content of a file of the bundle."""
    with refusing(f"{path}: {name}: cannot be read", "wanted nanochat's eval_bundle.zip, or its folder", DAMAGED):
        if path.is_dir():
            return read_regular(path / name, LINES_BYTES)
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return archive.read(f"eval_bundle/{name}")


def _entries(path: Path, listed: bytes) -> dict[str, TaskEntry]:
    """Return the tasks of core.yaml by label."""
    with refusing(f"{path}: core.yaml", kinds=DAMAGED):
        rows = yaml.safe_load(listed)["icl_tasks"]
        return {entry.label: entry for entry in (structured(row, TaskEntry, unknown_keys=True) for row in rows)}


def _downloaded() -> Path:
    """Return nanochat's archive, downloaded once: its sha256 is recorded then, and checked after. Raises BadInput."""
    with writing(DOWNLOADED):
        if not DOWNLOADED.exists():
            show(f"downloading {URL} to {DOWNLOADED}")
            DOWNLOADED.parent.mkdir(parents=True, exist_ok=True)
            remote = look_up_remote(URL)
            if remote.size_bytes > LARGEST_BUNDLE:
                raise BadInput(f"{URL}: got {remote.size_bytes:,} bytes, wanted at most {LARGEST_BUNDLE:,}")
            with remote.open() as file:
                content = file.read()
            # The record comes first: an archive without one was not downloaded here.
            replace_file(RECORDED, _sha256_line(hashlib.sha256(content).hexdigest()), durable=True)
            replace_file(DOWNLOADED, content, durable=True)
        if RECORDED.exists() and not _is_recorded(DOWNLOADED):
            raise BadInput(f"{DOWNLOADED}: its sha256 is not that of {RECORDED.name}; delete it to download it again")
    return DOWNLOADED


def _is_nanochats(path: Path, names: Sequence[str], digest: str) -> bool:
    """Tell whether a bundle is nanochat's archive as it was downloaded here, or has the same content.

    `digest` is the sha256 of the content of the files `names` of the bundle, one after the other.
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
    return f"{digest}  {DOWNLOADED.name}\n".encode()  # as sha256sum -c takes it


def _question(line: bytes, keys: tuple[str, str], where: str) -> Question:
    """Return an item of a task. nanochat trims the context of language modeling, and no other."""
    with refusing(f"{where}: {', '.join(keys)}, gold"):
        row, trims = parse_json(line), "context" in keys
        contexts, continuations = ([value] if not isinstance(value := row.get(key), list) else value for key in keys)
        values = {"contexts": contexts, "continuations": continuations, "gold": 0 if trims else row.get("gold")}
        found = structured(values, Question)
        several = len(found.contexts) > 1 and len(found.continuations) > 1
        if several or not 0 <= found.gold < len(found.pairs) or not all(map("".join, found.pairs)):
            raise ValueError(f"got gold {found.gold}, wanted the number of one of {len(found.pairs)} texts, none empty")
    for text in (*contexts, *continuations):
        check_text(text, where)
    return attrs.evolve(found, contexts=[text.strip() for text in contexts]) if trims else found
