"""lm-evaluation-harness finds the same in our model on any number of ranks, and in the exported one."""

import json
from pathlib import Path

import pytest
import torch

from evaluation.comparison.compare import compare
from evaluation.harness.harness import REQUIREMENT, harness_model
from evaluation.shared.load import load, locate
from tests import launch
from tests.conftest import ROOT, complete, only_line, write_run
from tests.evaluation.comparison.stored import refused, results, rows_of, said, write
from tests.evaluation.harness.written_items import write_items

pytestmark = pytest.mark.timeout(900)  # importing the harness takes every rank ten seconds
CONTEXT = 64  # bytes, of which some items have more
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
{rest}
"""
CHOICES = """output_type: multiple_choice
process_docs: !function texts.process_docs
doc_to_text: "{{query}}"
doc_to_target: "{{label}}"
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]"""
ROLLING = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{ctx}}"
metric_list: [{metric: byte_perplexity}]"""
SPOKEN = """output_type: generate_until
doc_to_text: "{{ctx_a}}"
doc_to_target: "{{ctx}}"
generation_kwargs: {until: ["."], max_gen_toks: 16, do_sample: true, temperature: 0.9}
metric_list: [{metric: chrf}]"""


@pytest.fixture(scope="module")
def trained(token_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, keys = tmp_path_factory.mktemp("harness") / "run", {"context_length": CONTEXT}
    complete(write_run(run, token_files, keys, validation_sequences=2), "--max-steps", "2")
    return run


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Return a folder of tasks over one file of items."""
    pytest.importorskip("lm_eval")
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_items(folder / "items.jsonl")
    (folder / "texts.py").write_text("from lm_eval.tasks.hellaswag.utils import process_docs\n")
    for name, rest in (("our_choices", CHOICES), ("our_rolling", ROLLING), ("our_spoken", SPOKEN)):
        text = TASK.format(name=name, data=folder / "items.jsonl", rest=rest)
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.slow
def test_it_finds_the_same_on_any_number_of_ranks(trained: Path, tasks: Path) -> None:
    command = ("harness", "our_choices,our_rolling,our_spoken", trained, "--include-path", tasks, "--batch-size", "2")
    for ranks in (1, 3):
        done = said(*command, "--device", "cpu", ranks=ranks, environment=OFFLINE)
    first, other = ({**result, "time": ""} for result in results(trained))
    assert first == other  # every bit
    assert first["tasks"]["our_choices"]["sample_len"] == 37
    assert first["tasks"]["our_rolling"]["byte_perplexity"] > 1
    assert first["tasks"]["our_spoken"]["chrf"] > 0
    line = next(line.split() for line in done.splitlines() if line.startswith("our_choices"))
    assert line[:4] == ["our_choices", "37", "acc", f"{first['tasks']['our_choices']['acc']:.4f}"]


@pytest.mark.slow
def test_the_model_in_memory_scores_as_the_exported_one(
    trained: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    exported = tasks.parent / "exported"
    said("export", trained, exported)
    model = load(locate(str(trained), None), None, torch.device("cpu"))
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    loaded = HFLM(pretrained=str(exported), batch_size=4, device="cpu")  # as its users load it, without code of ours
    samples = [
        simple_evaluate(asked, tasks=["our_choices"], task_manager=manager)["samples"]["our_choices"]
        for asked in (loaded, harness_model(model, 4, torch.device("cpu")))
    ]
    theirs, ours = ([[resps[0][0] for resps in sample["resps"]] for sample in one] for one in samples)
    assert len(ours) == 37
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.slow
def test_what_the_harness_cannot_run_is_one_line(trained: Path, tasks: Path) -> None:
    def why(task: str, ranks: int) -> str:
        return refused("harness", task, trained, "--include-path", tasks, ranks=ranks, environment=OFFLINE)

    assert "task helaswag: unknown to lm-evaluation-harness; did you mean hellaswag" in why("helaswag", 1)
    assert "tasks hellaswag: " in why("hellaswag", 2)  # its data are on the hub
    long = tasks / "items.jsonl"
    rows = [json.loads(line) for line in long.read_text().splitlines()]
    rows[20]["endings"][1] = "word " * CONTEXT
    long.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"an answer is longer than the context, {CONTEXT} tokens" in why("our_choices", 2)


def test_without_the_harness_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    script = tmp_path / "without.py"
    script.write_text("import sys\nsys.modules['lm_eval'] = None\nimport evaluate\nsys.exit(evaluate.main())\n")
    said = only_line(launch.run(script, "harness", "hellaswag", "runs/quickstart"))
    assert said.startswith("evaluate.py: lm-evaluation-harness is not installed (")
    assert said.endswith(f'): pip install "{REQUIREMENT}"')


def test_what_make_installs_is_what_the_line_says() -> None:
    assert f"\nHARNESS = {REQUIREMENT}\n" in (ROOT / "Makefile").read_text()


def test_tasks_of_the_harness_are_columns_and_never_ranked(tmp_path: Path) -> None:
    def asked(name: str, **tasks: dict[str, float]) -> Path:
        how = {"lm_eval": "0.4.13", "fewshot": None, "limit": None, "batch_size": 16}
        return write(tmp_path / name, "harness", **how, tasks=tasks)

    arc = {"sample_len": 2376, "acc": 0.4383, "acc_stderr": 0.0102, "acc_norm": 0.3948, "acc_norm_stderr": 0.01}
    a = asked("a", arc_easy=arc, lambada={"sample_len": 5153, "perplexity": 40.05})
    b = asked("b", arc_easy=arc | {"acc": 0.5}, broken={"sample_len": 1, "acc": None})
    found = compare(rows_of(a, b))
    assert found.columns == ["model", "arc_easy, acc", "arc_easy, acc_norm", "lambada, perplexity"]
    assert [cell.text for cell in found.rows[1]] == ["b", "0.5000 ± 0.0102", "0.3948 ± 0.0100", ""]
    assert found.statements == []
    measured = "harness arc_easy: lm-evaluation-harness 0.4.13 on 2,376 documents"
    assert any(note.startswith(measured) for note in found.notes)
