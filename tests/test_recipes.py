"""Every recipe in configs/ is read by the real parser, is short, says how to start it, and trains a toy of its model's layout."""

from pathlib import Path

import pytest
import yaml
from config import DEMO_RECIPE, accumulation_steps, load_recipe
from launching import train_here
from toy import build_whisper, write_clip, write_manifest

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


# --- a toy of each -----------------------------------------------------------------------------------------------

# What sets the layouts apart: mel bins, and the layers of encoder and decoder where their numbers differ.
LAYOUTS = {
    "demo/whisper-base": {},
    "openai/whisper-small": {},
    "openai/whisper-large-v3": {"num_mel_bins": 128},
    "openai/whisper-large-v3-turbo": {"num_mel_bins": 128, "encoder_layers": 4, "decoder_layers": 1},
}
SVARAH = ("gender", "age-group", "primary_language", "native_place_state", "native_place_district", "job_category")
# The columns that a set of the Hub has beside those of the recipe.
HUB_COLUMNS = {
    "google/fleurs": lambda i: {"id": i, "num_samples": 8000, "path": "x.wav", "transcription": f"row {i}", "gender": i % 2, "lang_group_id": 4},
    "ai4bharat/Svarah": lambda i: {"duration": 0.5} | {column: f"{column} {i % (n + 2)}" for n, column in enumerate(SVARAH)},
}


def write_set(path: Path, source: dict, data: dict) -> Path:
    """A manifest of tones with the columns of the set that a recipe names."""
    columns = HUB_COLUMNS.get(source.get("hub"), lambda i: {})
    rows = []
    for i in range(24 if "speaker_share" in source else 6):
        clip = write_clip(path.with_suffix("") / f"{i}.wav", pitch=200 + 40 * i)
        rows.append(columns(i) | {data.get("audio_column") or "audio": str(clip), data.get("text_column") or "text": f"Row {i}."})
    return write_manifest(path, rows)


def shrink(path: Path, world: Path) -> Path:
    """The recipe with a toy for its model, tones for its sets and two steps; the rest of it stays."""
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    recipe["model"]["name"] = str(build_whisper(world / "model", **LAYOUTS[recipe["model"]["name"]]))
    data = recipe["data"]
    for name, source in [*((f"train{i}", source) for i, source in enumerate(data["train"])), *data["validation"].items()]:
        manifest = write_set(world / f"{name}.jsonl", source, data)
        for word in ("hub", "config", "split", "revision"):
            source.pop(word, None)
        source["path"] = str(manifest)
    steps = {"max_steps": 2, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2, "warmup_steps": 0}
    quick = {"generation_max_length": 4, "dataloader_num_workers": 0, "report_to": "none", "disable_tqdm": True}
    recipe["training"] |= steps | quick | {"output_dir": str(world / "out")}
    (world / path.name).write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return world / path.name


def test_it_trains_a_toy_of_its_models_layout_for_two_steps(path, tmp_path):
    recipe = load_recipe(["--config", str(path)])
    results = train_here(shrink(path, tmp_path))
    assert results["train"]["steps"] == 2
    assert set(results["final"]) == set(results["baseline"]) == set(recipe.data.validation)
    assert results["quantization"] == recipe.model.quantization
    assert results["global_batch_size"] == (recipe.run.global_batch_size or recipe.training["per_device_train_batch_size"])
    assert all(scores["rows_scored"] for scores in results["final"].values())
    assert (tmp_path / "out" / ("model.safetensors" if recipe.lora is None else "adapter_model.safetensors")).is_file()
