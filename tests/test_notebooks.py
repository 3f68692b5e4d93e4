"""Every stage's notebook: runs from top to bottom, and is committed with what it showed."""

import os
import re
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from common.device import DTYPE_VARIABLE, resolve_dtype

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("stage*/notebook.ipynb"))
PNG_LIMIT = 60_000  # bytes
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def pictures(notebook) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.parent.name)
def test_it_is_committed_with_its_outputs(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert text.count("<details>") == text.count("</details>") >= 2, "two exercises with answers"
    assert re.search(r"[\u4e00-\u9fff]", text)
    assert pictures(notebook)
    assert max(len(picture) * 3 / 4 for picture in pictures(notebook)) < PNG_LIMIT


def run(path: Path, **env: str):
    """The notebook after a run from top to bottom; raises the first cell's error."""
    notebook = nbformat.read(path, 4)
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", **env})  # as the other tests: cores may be shared
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.parent.name)
def test_it_runs(path, default_model):
    assert len(pictures(run(path))) == len(pictures(nbformat.read(path, 4)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["stage1_naive", "stage3_kvcache"])
def test_those_that_draw_tensors_run_in_either_dtype(name, dtype, default_model):
    """Matplotlib takes no bfloat16. One of the two is what `test_it_runs` had."""
    if dtype == DTYPES[resolve_dtype("auto", torch.device("cpu"))]:
        pytest.skip("the default of this CPU: run above")
    run(ROOT / name / "notebook.ipynb", **{DTYPE_VARIABLE: dtype})
