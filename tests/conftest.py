"""What all tests share: no network, and the place of the real data samples."""

import os
import pathlib

# Read by huggingface_hub when it is imported, so it has to stand before any test module.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests compile hundreds of programs and run each for a moment: unoptimised, that takes a seventh.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

import pytest

from tests.endpoint import running

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
  return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
  """The folder of real benchmark samples; a test that asks for it is skipped where there is none."""
  folder = pathlib.Path(os.environ.get("ATTRIMEM_SHARED", REPOSITORY.parent / "shared" / "data"))
  if not folder.is_dir():
    pytest.skip(f"no benchmark samples at {folder}; set ATTRIMEM_SHARED to their folder")
  return folder


@pytest.fixture
def endpoint():
  """A scripted endpoint of OpenAI's form: `script`, what it has `seen`, its `url`."""
  with running() as server:
    yield server
