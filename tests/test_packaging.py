"""What a stranger gets: the README's commands are those that .ci/run runs, and the manifests are complete."""

import tomllib


def _line(text, part):
  lines = [line.strip() for line in text.splitlines() if part in line]
  assert lines, f"no line with {part!r}"
  return lines[0]


def test_ci_runs_the_test_command_of_the_readme(repository):
  command = _line((repository / "README.md").read_text(), "python -m pytest")
  assert 'pip install -e ".[test]"' in command
  assert "python -m pytest" in (repository / ".ci" / "run").read_text()
  assert command.endswith("&& python -m pytest")


def test_one_version_everywhere(repository):
  import attrimem_jax

  project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
  assert project["version"] == attrimem_jax.__version__


def test_the_wheel_takes_the_manifests_and_they_are_complete(repository):
  build = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
  for file, target in build["force-include"].items():
    assert (repository / file).is_file()
    assert target == f"attrimem_jax/{file}"
  datasets = tomllib.loads((repository / "third_party" / "datasets.toml").read_text())
  for name, entry in datasets.items():
    assert set(entry) == {"source", "url", "files", "revision", "sha256", "bytes", "licence", "holds"}, name
    assert len(entry["sha256"]) in (0, 64)
