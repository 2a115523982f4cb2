"""The cells of examples/quickstart.ipynb run in order, on the CPU, with a small quickstart."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import metrics
from tests.launch import ROOT

HANG_SECONDS = 900
NOTEBOOK = "examples/quickstart.ipynb"


def output_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.slow
@pytest.mark.timeout(HANG_SECONDS + 60)
def test_the_notebooks_cells_run_in_order(clone: Path) -> None:
    notebook = nbformat.read(clone / NOTEBOOK, as_version=4)
    # The notebook's own folder is the working directory, as in Jupyter. The first cell looks for the repository.
    client = NotebookClient(notebook, timeout=HANG_SECONDS, resources={"metadata": {"path": str(clone / "examples")}})
    client.execute()  # raises an error if a cell fails
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert output_of(cells[0]) == f"working in {clone}\n"
    for run in ("quickstart", "notebook"):
        assert list(metrics(clone / "runs" / run, "validation_loss")) == [0, 3, 6]
    assert cells[2].outputs[0].data["image/png"]
    assert (clone / "report.html").is_file()


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(ROOT / NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs, cell.execution_count) == ([], None)
