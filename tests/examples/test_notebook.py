"""`examples/notebooks/first_run.ipynb` runs from top to bottom in a real kernel, and its model learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/notebooks/first_run.ipynb"


@pytest.mark.slow
@pytest.mark.adapters
def test_the_first_notebook_runs_and_its_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    measured = dict(re.findall(r"(before|after) +([\d.]+) of", "".join(texts)))
    assert float(measured["after"]) > float(measured["before"]) + 0.15, texts
    assert any("image/png" in output.get("data", {}) for output in outputs), "the curves are drawn"
    assert any("observation" in text for text in texts), "an episode is shown turn by turn"


def test_the_notebook_is_kept_without_outputs() -> None:
    """Those of another machine would be read as promises."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 6
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
