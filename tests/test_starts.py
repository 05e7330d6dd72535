"""Many two-process starts with random delays, set sizes, batch sizes and worker counts: none stalls, every row is scored once."""

import json
import random

import pytest

from forking import Launcher
from launching import ROOT, launch, write_recipe
from toy import build_whisper, write_speech

FORKED, LAUNCHED = 180, 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    build_whisper(folder / "model")
    return folder


def draw(seed: int, folder, model) -> tuple:
    """A recipe with sizes drawn from the seed, the rows of each scored set, and the delays of the two ranks in seconds."""
    draws = random.Random(seed)
    write_speech(folder, [f"clip {i}" for i in range(draws.randint(2, 9))])
    sizes = {name: draws.randint(1, 7) for name in ("dev", "other")[: draws.randint(1, 2)]}
    for name, size in sizes.items():
        write_speech(folder, [f"{name} {i}" for i in range(size)], name=name)
    recipe = write_recipe(
        folder,
        model={"name": str(model)},
        data={"validation": {name: str(folder / f"{name}.jsonl") for name in sizes}},
        run={"baseline": draws.random() < 0.3, "stall_timeout_seconds": 60.0},
        training={
            "max_steps": draws.randint(1, 3),
            "eval_steps": draws.randint(1, 3),
            "save_strategy": "no",
            "load_best_model_at_end": False,
            "metric_for_best_model": "dev_wer",
            "per_device_train_batch_size": draws.randint(1, 3),
            "per_device_eval_batch_size": draws.randint(1, 3),
            "gradient_accumulation_steps": draws.randint(1, 2),
            "dataloader_num_workers": draws.choice([0, 0, 1, 2]),
            "generation_max_length": 3,
        },
    )
    return recipe, sizes, [draws.choice([0.0, draws.random(), 3 * draws.random()]) for _ in range(2)]


def check_scores(folder, sizes: dict[str, int]) -> None:
    results = json.loads((folder / "out" / "results.json").read_text())
    assert results["status"] == "finished"
    for name, size in sizes.items():
        assert results["final"][name]["rows_scored"] == results["final"][name]["rows_total"] == size
        lines = (folder / "out" / "predictions" / f"final-{name}.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["line"] for line in lines) == list(range(1, size + 1))


@pytest.mark.long
def test_forked_starts_end_well(models, tmp_path):
    launcher = Launcher()
    seconds = []
    for seed in range(FORKED):
        folder = tmp_path / str(seed)
        recipe, sizes, delays = draw(seed, folder, models / "model")
        end = launcher.run(recipe, delays=delays)
        assert end["statuses"] == [0, 0], f"seed {seed}: {end['output'][-3000:]}"
        check_scores(folder, sizes)
        seconds.append(end["seconds"])
    launcher.close()
    print(f"{FORKED} starts, the longest run took {max(seconds):.1f} s, the mean {sum(seconds) / FORKED:.1f} s")


@pytest.mark.long
def test_launched_starts_end_well(models, tmp_path):
    for seed in range(1000, 1000 + LAUNCHED):
        folder = tmp_path / str(seed)
        recipe, sizes, delays = draw(seed, folder, models / "model")
        script = ROOT / "tests" / "planted.py"
        run = launch(recipe, processes=2, script=script, DELAYS=json.dumps(delays))
        assert run.status == 0, f"seed {seed}: {run.tail}"
        check_scores(folder, sizes)
