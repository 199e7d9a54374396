"""What a command line can get wrong before any work starts."""

import pytest

from attrimem_jax import main

RECIPE = "configs/grpo_token.py"


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], "no recipe given"),
    (["--config="], "no recipe given"),
    ([f"--config={RECIPE}:nope"], "Unknown preset 'nope'. Use one of 'embedded', 'smollm2'"),
    (["--config=configs/nope.py"], "No recipe at 'configs/nope.py'"),
    (["--config=README.md"], "'README.md' is not a Python file"),
    (
      [f"--config={RECIPE}", "--config.kl=3", "--config.masks=2"],
      "config.kl: there is no such key; did you mean rl.kl, train.collapse.kl?",
    ),
    ([f"--config={RECIPE}", "--config.kl=3", "--config.masks=2"], "did you mean attribution.masks, explain.masks?"),
    (
      [f"--config={RECIPE}", "--config.attribution.masks[0]=5"],
      "config.attribution.masks[0]: a part of a value cannot be set; give the whole of config.attribution.masks",
    ),
    (["--config", RECIPE, "--config.rl.zzz"], "config.rl.zzz: there is no such key"),
  ],
)
def test_mistakes_are_sentences(arguments, message, repository, monkeypatch):
  monkeypatch.chdir(repository)
  with pytest.raises(ValueError) as error:
    main.check_arguments(arguments)
  assert message in str(error.value)


@pytest.mark.parametrize(
  "arguments",
  [
    ["--help"],
    ["--config", RECIPE, "--workdir=x"],
    [f"--config={RECIPE}:smollm2", "--config.rl.kl=0.1", "--config.attribution.masks=((0, 8),)"],
    [f"--config={RECIPE}", "--config.mesh.data", "2"],
  ],
)
def test_good_lines_pass(arguments, repository, monkeypatch):
  monkeypatch.chdir(repository)
  main.check_arguments(arguments)


def test_a_recipe_that_does_not_load_says_why(tmp_path):
  recipe = tmp_path / "mine.py"
  recipe.write_text("import no_such_module\n")
  with pytest.raises(ValueError, match="cannot be run as a recipe: No module named 'no_such_module'"):
    main.check_arguments([f"--config={recipe}"])
