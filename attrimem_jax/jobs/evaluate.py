"""Evaluates a policy, or the newest checkpoint of a run, on held-out histories."""

from ml_collections import ConfigDict

from attrimem_jax.jobs import setup
from attrimem_jax.jobs.grpo import Trainer
from attrimem_jax.jobs.run import Run


def run_evaluate(config: ConfigDict, run: Run) -> None:
  """Job `evaluate`: one row of `eval/…` metrics, at the step of the checkpoint that was evaluated (0 for none)."""
  trainer = Trainer(config, run)
  trainer.evaluate(run.resumed or 0, setup.newest_params(config, run, trainer.policy))
