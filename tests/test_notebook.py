"""The notebook in launch/colab, run from top to bottom as a reader would, with two steps of training instead of ten."""

import os

import pytest

from attrimem_jax.io.models import ASSETS, EMBEDDED

nbclient = pytest.importorskip("nbclient", reason="running the notebook needs nbclient and ipykernel")
nbformat = pytest.importorskip("nbformat", reason="running the notebook needs nbformat")
pytest.importorskip("ipykernel", reason="running the notebook needs ipykernel")


@pytest.fixture
def notebook(repository):
  return nbformat.read(repository / "launch" / "colab" / "quickstart.ipynb", as_version=4)


def test_the_notebook_is_committed_clean(notebook):
  nbformat.validate(notebook)
  code = [cell for cell in notebook.cells if cell.cell_type == "code"]
  assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.slow
@pytest.mark.skipif(
  not all((ASSETS / name / "config.json").is_file() for name in EMBEDDED), reason="this checkout has no embedded models"
)
def test_the_notebook_runs_from_top_to_bottom(notebook, repository, tmp_path, monkeypatch):
  monkeypatch.setenv("QUICKSTART_STEPS", "2")
  path = [str(repository), *filter(None, [os.environ.get("PYTHONPATH")])]
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
  client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
  client.execute()
  outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
  shown = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
  memory, explanation, report = shown
  assert "Memory of" in memory
  assert 'title="attribution' in explanation
  assert "Rollouts of step 2" in report
  assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
