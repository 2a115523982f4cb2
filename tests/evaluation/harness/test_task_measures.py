"""Tasks of lm-evaluation-harness are columns and never ranked."""

from pathlib import Path

from evaluation.comparison.compare import compare
from tests.evaluation.comparison.stored import rows_of, write


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
    assert any(
        note.startswith("harness arc_easy: lm-evaluation-harness 0.4.13 on 2,376 documents") for note in found.notes
    )
