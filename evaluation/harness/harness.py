"""Tasks of EleutherAI/lm-evaluation-harness, run on a model in memory by all ranks.

Rank 0 runs the harness, which loads the tasks, makes the requests and scores the answers. The requests are split into
pieces that do not depend on the number of ranks, and all ranks answer them: the metrics have the same bits.
"""

import copy
import difflib
import json
import logging
import tempfile
from collections.abc import Iterator
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from common.errors import BadInput
from common.files import replace_file
from evaluation.command_line import HarnessCommand
from evaluation.export.export import hugging_face_weights
from evaluation.shared.chat_template import CONFIG
from evaluation.shared.load import Trained
from evaluation.shared.measuring import measure_each, share
from evaluation.shared.results import EvaluationResult, Measure, Measurement
from model.stock import stock_class
from tokens.tokenizer.hugging_face_files import write_tokenizer_files
from training.hardware.usable_gpus import is_memory_error
from training.parallel.process_group import Ranks, from_coordinator

REQUIREMENT = "lm_eval[hf]==0.4.13"
KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")  # of requests: methods of the harness's models
DOCUMENTS, ERROR = "sample_len", "_stderr"  # in the names of its values
PIECE_BATCHES = 8  # the harness groups equal contexts, so that a piece of one batch would not fill it


Pieces = list[list[tuple[Any, ...]]]  # arguments of each request


def run(command: HarnessCommand) -> None:
    try:
        import lm_eval
    except ImportError as error:
        raise BadInput(f'lm-evaluation-harness is not installed ({error}): pip install "{REQUIREMENT}"') from error
    if command.include_path is not None and not command.include_path.is_dir():
        raise BadInput(f"--include-path {command.include_path}: no such directory; wanted one with tasks as YAML files")
    measure_each(command, "harness", lambda _: lm_eval.__version__, partial(measure, command))


def measure(command: HarnessCommand, trained: Trained, version: str, ranks: Ranks) -> tuple[dict[str, Any], str]:
    """Return the values of each task and group, to store and as text; call it on every rank. Raises BadInput."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = harness_model(trained, command.batch_size, ranks.device)
    asked = copy.copy(model)
    model._rank = 1  # the harness draws bars on its rank 0: here one for every piece
    if ranks.coordinates:
        for kind in KINDS:
            setattr(asked, kind, partial(_ask, model, ranks, kind))
    found = partial(_run, asked, command)
    while isinstance(told := from_coordinator(ranks, found, group=ranks.download), tuple):
        _answers(model, *told, ranks)
    how = {name: getattr(command, name) for name in ("fewshot", "limit", "batch_size")}
    return {"lm_eval": version, **how, "tasks": told}, f"\n{describe(told)}"


def harness_model(trained: Trained, batch_size: int, device: torch.device) -> Any:
    """Return the harness's own model, HFLM, of the weights in their stock class. Raises BadInput without one."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = trained.network.config
    end = trained.tokenizer.end_of_text_id
    values = stock_class(config, str(trained.place.path)).config | {"bos_token_id": end, "eos_token_id": end}
    network: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    missing, unexpected = network.load_state_dict(hugging_face_weights(trained.network), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if values["tie_word_embeddings"] else set())
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer_files(trained.tokenizer, Path(folder), config.context_length)
        replace_file(Path(folder) / CONFIG, '{"model_type": "gpt2"}')
        tokenizer = AutoTokenizer.from_pretrained(folder)
    return HFLM(pretrained=network.to(device).eval(), tokenizer=tokenizer, batch_size=batch_size)


def describe(found: dict[str, dict[str, Any]]) -> str:
    """Return results as a table: a line for each metric of each task."""
    rows = [[task, values.get(DOCUMENTS), *metric] for task, values in found.items() for metric in metrics_of(values)]
    return tabulate(rows, ["task", "documents", "metric", "value", "error"], floatfmt=".4f", intfmt=",")


def metrics_of(values: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """Return the metrics of a task: name, value, and the standard error where the harness has one."""
    metrics = []
    for name, value in values.items():
        metric, _, answers = name.partition(",")
        if name != DOCUMENTS and not metric.endswith(ERROR):
            metrics.append((name, value, values.get(f"{metric}{ERROR}" + (f",{answers}" if answers else ""))))
    return metrics


def read_results(record: dict[str, Any]) -> Iterator[EvaluationResult]:
    """Yield a stored result of each task; none ranks models: answers to single documents are not stored."""
    version, fewshot = record.get("lm_eval"), record.get("fewshot")  # another version may ask otherwise
    shots = "" if fewshot is None else f", {fewshot} examples in the context"
    for task, values in record["tasks"].items():
        if isinstance(values, dict):
            evaluation, documents = f"harness {task}", values.get(DOCUMENTS)
            count = "" if documents is None else f" on {documents:,} documents"
            yield EvaluationResult.of(
                record,
                evaluation=evaluation,
                subject=json.dumps([evaluation, version, fewshot, record.get("limit"), documents]),
                description=f"lm-evaluation-harness {version}{count}{shots}; ± is its standard error; no pairs, no "
                "winner",
                measurements=[
                    Measurement(measure=Measure(name=f"{task}, {metric}"), value=value, error=error)
                    for metric, value, error in metrics_of(values)
                ],
            )


def _run(model: Any, wanted: HarnessCommand) -> dict[str, dict[str, Any]]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    try:
        manager = TaskManager(include_path=None if wanted.include_path is None else str(wanted.include_path))
        found = simple_evaluate(
            model,
            tasks=[name for task in wanted.tasks.split(",") for name in _named(task, manager)],
            num_fewshot=wanted.fewshot,
            limit=wanted.limit,
            task_manager=manager,
            log_samples=False,
        )
    except BadInput:
        raise
    except Exception as error:  # tasks are third-party code: they raise anything
        detail = " ".join(str(error).split())
        raise BadInput(f"tasks {wanted.tasks}: {type(error).__name__}: {detail}") from error
    return {task: _values(metrics) for task, metrics in found["results"].items()}


def _named(task: str, manager: Any) -> list[str]:
    """Return the tasks that match a name or pattern. Raises BadInput where there is none."""
    names: list[str] = manager.match_tasks([task])
    if not names:
        close = difflib.get_close_matches(task, manager.all_tasks)
        hint = f"did you mean {' or '.join(close)}?" if close else "`lm-eval ls tasks` lists them"
        raise BadInput(f"task {task}: unknown to lm-evaluation-harness; {hint}")
    return names


def _values(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a task's numbers, by metric, with the name of the answers' filter where there is one."""
    return {
        name.removesuffix(",none"): value if isinstance(value, int) else float(value)
        for name, value in metrics.items()
        if isinstance(value, Real)
    }


def _ask(model: Any, ranks: Ranks, kind: str, requests: list[Any], **_: Any) -> list[Any]:
    """Have all ranks answer requests; return the answers in order, on rank 0."""
    arguments = [request.args for request in requests]
    lengths = [sum(len(part) for part in parts if isinstance(part, str)) for parts in arguments]
    order = sorted(range(len(requests)), key=lambda index: -lengths[index])  # texts of similar length share a batch
    size = PIECE_BATCHES * model.batch_size
    pieces = [[arguments[index] for index in order[at : at + size]] for at in range(0, len(order), size)]
    answers: list[Any] = [None] * len(requests)
    found = _answers(model, *from_coordinator(ranks, lambda: (kind, pieces), group=ranks.download), ranks)
    for at, piece in enumerate(found):
        if isinstance(piece, str):
            raise BadInput(piece)
        for index, answer in zip(order[at * size :], piece, strict=False):
            answers[index] = answer
    return answers


def _answers(model: Any, kind: str, pieces: Pieces, ranks: Ranks) -> list[list[Any] | str]:
    """Return the answers to each piece, or the reason why there are none, on every rank."""
    from lm_eval.api.instance import Instance

    def answer(number: int) -> list[Any] | str:
        torch.manual_seed(number)  # for sampled answers
        requests = [Instance(kind, doc={}, arguments=parts, idx=0) for parts in pieces[number]]
        try:
            return getattr(model, kind)(requests, disable_tqdm=True)
        except (MemoryError, RuntimeError) as error:
            if not is_memory_error(error):
                raise
            return (
                f"--batch-size: got {model.batch_size}, too large for the memory of {ranks.device}; pass a smaller one"
            )
        except (AssertionError, ValueError) as error:
            detail = " ".join(str(error).split()) or f"an answer is longer than the context, {model.max_length} tokens"
            return f"lm-evaluation-harness refuses its own requests to this model: {detail}"

    return share(ranks, range(len(pieces)), answer)
