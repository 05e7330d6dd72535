"""Every recipe in configs/ is read by the real parser, is short, and says how to start it."""

from pathlib import Path

import pytest
from config import DEMO_RECIPE, accumulation_steps, load_recipe

RECIPES = sorted(DEMO_RECIPE.parent.glob("*"))


@pytest.fixture(params=RECIPES, ids=lambda path: path.name)
def path(request) -> Path:
    return request.param


def test_the_demo_recipe_is_among_them():
    assert DEMO_RECIPE in RECIPES


def test_it_is_read_by_the_real_parser(path):
    assert path.suffix == ".yaml"
    assert load_recipe(["--config", str(path)]).model.name


def test_it_is_at_most_45_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 45


def test_it_begins_with_the_command_that_starts_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    starts = [line for line in header if "accelerate launch" in line and "src/train.py" in line]
    assert starts, "no command in the header"
    assert path == DEMO_RECIPE or any(f"--config configs/{path.name}" in line for line in starts)


@pytest.mark.parametrize("processes", [1, 2])
def test_it_runs_on_one_card_and_on_two(path, processes):
    assert accumulation_steps(load_recipe(["--config", str(path)]), processes) >= 1


def test_no_two_recipes_share_an_output_dir():
    folders = [load_recipe(["--config", str(path)]).training["output_dir"] for path in RECIPES]
    assert len(set(folders)) == len(folders)
