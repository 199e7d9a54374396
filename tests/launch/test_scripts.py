"""The launch scripts parse, and give the job nothing that it does not know."""

import os
import re
import shutil
import subprocess

import pytest
import yaml

from attrimem_jax import config as schema
from attrimem_jax import main, validation

SCRIPTS = ("gpus.sh", "slurm.sh", "tpu_pod.sh")


def _configured(arguments):
  """The configuration of a command line, on the machine that it is for."""
  main.check_arguments(arguments)
  recipe, _, preset = next(a for a in arguments if a.startswith("--config=")).removeprefix("--config=").partition(":")
  config = schema.recipe(recipe, preset)
  for argument in arguments:
    if argument.startswith("--config."):
      name, _, value = argument.removeprefix("--config.").partition("=")
      with config.unlocked():
        config.update_from_flattened_dict({name: int(value) if value.isdigit() else value})
  return config


def _check(config, tmp_path, devices, processes):
  config.data.path = str(tmp_path / "data.json")
  (tmp_path / "data.json").write_text("[]", encoding="utf-8")
  validation.validate(config, devices, processes)


@pytest.mark.parametrize("name", [*SCRIPTS, "serve.sh"])
def test_a_script_parses_and_may_be_run(repository, name):
  path = repository / "launch" / name
  subprocess.run(["bash", "-n", path], check=True)
  assert os.access(path, os.X_OK)


@pytest.mark.parametrize(
  ("name", "devices", "processes"), [("gpus.sh", 8, 1), ("slurm.sh", 16, 2), ("tpu_pod.sh", 16, 4)]
)
def test_the_command_in_its_head_is_a_valid_job(repository, tmp_path, monkeypatch, name, devices, processes):
  monkeypatch.chdir(repository)
  text = (repository / "launch" / name).read_text(encoding="utf-8")
  example = re.search(rf"#   [^\n]*launch/{name}((?:[^\n]*\\\n#)*[^\n]*)", text)[1]
  arguments = [word for word in example.replace("\\\n#", " ").split() if word.startswith("--")]
  _check(_configured(arguments), tmp_path, devices, processes)


@pytest.mark.parametrize("name", ["locomo", "longmemeval", "perltqa"])
def test_a_benchmark_runs_every_system_and_compares_them(repository, tmp_path, name):
  script = repository / "launch" / f"bench_{name}.sh"
  (tmp_path / "python").write_text('#!/usr/bin/env bash\necho "$*"\n', encoding="utf-8")
  (tmp_path / "python").chmod(0o755)
  variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUNS": "r"}
  said = subprocess.run([script, "--config.data.path=x"], env=variables, capture_output=True, text=True, check=True)
  *runs, page = said.stdout.splitlines()
  systems = [re.search(r"--config.eval.system=(\S+)", line)[1] for line in runs]
  assert sorted(systems) == sorted(validation.CHOICES["eval.system"])
  assert page.split()[3:] == [f"r/{system}" for system in systems]
  data = str(tmp_path / "data.json")
  (tmp_path / "data.json").write_text("[]", encoding="utf-8")
  for line in runs:
    arguments = line.replace("=x", f"={data}").split()[2:]
    validation.validate(_configured([a for a in arguments if a.startswith("--config")]))


def test_a_script_hands_its_arguments_on(repository, tmp_path):
  """With programs in place of the real ones that print what they were given."""
  for program in ("python", "srun", "gcloud"):
    (tmp_path / program).write_text('#!/usr/bin/env bash\necho "$ATTRIMEM_COORDINATOR|$*"\n', encoding="utf-8")
    (tmp_path / program).chmod(0o755)
  inherited = {name: value for name, value in os.environ.items() if not name.startswith("ATTRIMEM_")}
  variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TPU": "t", "ZONE": "z", "SLURM_SUBMIT_DIR": str(repository)}
  expected = {"gpus.sh": "|-m", "slurm.sh": "auto|--kill-on-bad-exit=1 python -m", "tpu_pod.sh": "|compute tpus"}
  for name in SCRIPTS:
    done = subprocess.run(
      [shutil.which("bash"), repository / "launch" / name, "--config=x", "--config.seed=1"],
      env=inherited | variables,
      capture_output=True,
      text=True,
      check=True,
    )
    assert done.stdout.startswith(expected[name])
    assert done.stdout.endswith("attrimem_jax.main --config=x --config.seed=1\n")


def test_the_kubernetes_job_is_whole(repository, tmp_path, monkeypatch):
  monkeypatch.chdir(repository)
  text = (repository / "launch" / "kubernetes.yaml").read_text(encoding="utf-8")
  service, job = yaml.safe_load_all(text)
  spec = job["spec"]
  pod = spec["template"]["spec"]
  (container,) = pod["containers"]
  values = {entry["name"]: entry.get("value") for entry in container["env"]}
  processes = spec["completions"]
  assert spec["completionMode"] == "Indexed"
  assert spec["parallelism"] == processes == int(values["ATTRIMEM_PROCESSES"])
  assert "job-completion-index" in str(container["env"])
  assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
  name, port = values["ATTRIMEM_COORDINATOR"].split(":")
  assert name == f"{job['metadata']['name']}-0.{pod['subdomain']}"
  assert pod["subdomain"] == service["metadata"]["name"]
  assert int(port) == service["spec"]["ports"][0]["port"]
  assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
  gpus = container["resources"]["limits"]["nvidia.com/gpu"]
  _check(_configured(container["args"]), tmp_path, processes * gpus, processes)
