"""What a run needs is estimated before it starts, and told when the machine has less."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import estimates
from adapters import count_kept_weights
from config import load_recipe
from device import Place
from estimates import check_free_disk, count_checkpoints, find_disk_shortage, find_shared_memory_shortage
from faults import UserError
from launching import train_here, write_recipe
from manifest import Row
from model import load_model, read_base_model, trainable_parameters
from sets import CheckedSet
from toy import build_whisper, write_speech

RUN = dict(do_train=True, per_device_train_batch_size=16, per_device_eval_batch_size=8, dataloader_num_workers=4, dataloader_prefetch_factor=None)


@pytest.fixture
def shortage(monkeypatch):
    """A function that gives the warning for so many bytes of free shared memory, four ranks, and changes of the arguments."""

    def find(free: int, *, mel_bins: int = 80, **changes) -> str:
        monkeypatch.setattr(estimates.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return find_shared_memory_shortage(SimpleNamespace(**RUN | changes), mel_bins=mel_bins, place=Place("cpu", local_world_size=4))

    return find


def test_four_ranks_with_four_workers_do_not_fit_a_containers_64_mb(shortage):
    line = shortage(64 * 10**6)
    assert "may need 492 MB of /dev/shm, 64 MB are free" in line
    assert "--training.dataloader_num_workers" in line and "--shm-size" in line and len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("needed", "changes"),
    [
        (16 * 960_000 * 4 * 2 * 4, {}),
        (16 * 1_536_000 * 4 * 2 * 4, {"mel_bins": 128}),
        (32 * 960_000 * 4 * 2 * 4, {"per_device_eval_batch_size": 32}),
        (8 * 960_000 * 4 * 2 * 4, {"do_train": False}),
        (16 * 960_000 * 4 * 5 * 4, {"dataloader_prefetch_factor": 5}),
        (0, {"dataloader_num_workers": 0}),
    ],
)
def test_nothing_is_said_while_everything_fits_to_the_byte(shortage, needed, changes):
    assert shortage(needed, **changes) == ""
    assert needed == 0 or shortage(needed - 1, **changes).startswith("warning: ")


def test_a_machine_without_that_mount_is_told_nothing(monkeypatch):
    monkeypatch.setattr(estimates, "SHARED_MEMORY", "/nowhere")
    assert find_shared_memory_shortage(SimpleNamespace(**RUN), mel_bins=80, place=Place("cpu")) == ""


# --- the disk ----------------------------------------------------------------------------------------------------

SAVING = dict(
    do_train=True,
    save_strategy="steps",
    save_steps=10,
    eval_strategy="steps",
    eval_steps=20,
    logging_steps=5,
    save_total_limit=2,
    load_best_model_at_end=True,
    max_steps=100,
    num_train_epochs=3,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=1,
)


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (3, {}),  # two kept and one being written
        (3, {"save_total_limit": 1}),  # the best stays beside the newest
        (2, {"save_total_limit": 1, "load_best_model_at_end": False}),
        (10, {"save_total_limit": None}),
        (5, {"save_total_limit": None, "save_strategy": "best"}),
        (10, {"save_total_limit": None, "save_steps": 0.1}),
        (4, {"save_total_limit": None, "save_strategy": "epoch"}),
        (1, {"save_steps": 100}),
        (0, {"save_strategy": "no"}),
    ],
)
def test_checkpoints_that_lie_on_the_disk_at_once_are_counted(count, changes):
    assert count_checkpoints(SimpleNamespace(**SAVING | changes), steps=100, epochs=3.5) == count


@pytest.fixture
def free(monkeypatch):
    """A function that sets the free bytes of every disk."""
    return lambda size: monkeypatch.setattr(estimates.shutil, "disk_usage", lambda path: SimpleNamespace(free=size))


def test_a_disk_without_room_for_one_checkpoint_is_refused_and_with_room_for_some_is_told(free, tmp_path):
    sizes = dict(checkpoint=400 * 10**6, checkpoints=3, others=100 * 10**6)
    free(1300 * 10**6)
    assert find_disk_shortage(tmp_path, **sizes) == ""
    free(1300 * 10**6 - 1)
    line = find_disk_shortage(tmp_path, **sizes)
    assert line.startswith("warning: 3 checkpoints and the results may take 1,300 MB of ") and len(line.splitlines()) == 1
    free(400 * 10**6)
    assert find_disk_shortage(tmp_path, **sizes).startswith("warning: ")
    free(400 * 10**6 - 1)
    with pytest.raises(UserError, match=rf"^training.output_dir: {tmp_path} has 400 MB free, and one checkpoint may take 400 MB"):
        find_disk_shortage(tmp_path, **sizes)


def test_the_room_of_earlier_checkpoints_counts_as_free(free, tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "optimizer.pt").write_bytes(bytes(1000))
    free(500)
    assert find_disk_shortage(tmp_path, checkpoint=1000, checkpoints=1, others=500) == ""


def test_scoring_alone_needs_room_for_its_results(free, tmp_path):
    free(99)
    with pytest.raises(UserError, match="the results may take"):
        find_disk_shortage(tmp_path, checkpoint=0, checkpoints=0, others=100)


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    build_whisper(folder / "model")
    write_speech(folder, [f"clip {i}" for i in range(4)])
    write_speech(folder, ["one"], name="dev")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--lora.modules_to_save=[layer_norm]", "--lora.lora_bias=true"],
        ["--model.freeze_encoder=true", "--lora.target_modules=[q_proj,fc1]"],
        ["--lora=null"],
        ["--lora=null", "--model.freeze_encoder=true"],
    ],
)
def test_weights_are_counted_without_loading_them_as_they_are_trained(speech, words):
    recipe = load_recipe(["--config", str(write_recipe(speech)), *words])
    base = read_base_model(recipe.model, max_new_tokens=4, num_beams=1)
    model = load_model(recipe, base, Place("cpu"), compute_type=torch.float32)
    trained = sum(parameter.numel() for _, parameter in trainable_parameters(model))
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert count_kept_weights(recipe, base.config) == (trained, trained if recipe.lora else whole)


def test_an_adapter_that_is_gone_on_from_is_counted_by_its_own_settings(speech, tmp_path):
    recipe = load_recipe(["--config", str(write_recipe(speech)), "--lora.r=2"])
    base = read_base_model(recipe.model, max_new_tokens=4, num_beams=1)
    model = load_model(recipe, base, Place("cpu"), compute_type=torch.float32)
    model.save_pretrained(tmp_path / "adapter")
    again = load_recipe(["--config", str(write_recipe(speech)), "--model.adapter", str(tmp_path / "adapter")])
    assert count_kept_weights(again, base.config) == count_kept_weights(recipe, base.config)


def test_the_estimate_holds_every_file_of_a_checkpoint_without_being_twice_as_much(speech, tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "TOKENIZER_BYTES", 0)
    asked = []
    monkeypatch.setattr(estimates, "find_disk_shortage", lambda folder, **sizes: asked.append(sizes) or "")
    lora = {"r": 32, "target_modules": ["q_proj", "v_proj", "fc1", "fc2"]}
    train_here(write_recipe(speech, lora=lora, training={"output_dir": str(tmp_path / "out")}))
    names = ("adapter_model.safetensors", "optimizer.pt")
    size = sum((tmp_path / "out" / "checkpoint-2" / name).stat().st_size for name in names)
    assert asked[0]["checkpoint"] / 1.2 < size < asked[0]["checkpoint"] * 1.5
    predictions = sum(path.stat().st_size for path in (tmp_path / "out" / "predictions").iterdir())
    final = (tmp_path / "out" / "adapter_model.safetensors").stat().st_size
    assert asked[0]["checkpoints"] == 1 and asked[0]["others"] > 0.8 * (predictions + final)


def test_scoring_alone_counts_every_scored_text_twice_and_no_checkpoint(speech, tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "find_disk_shortage", lambda folder, **sizes: sizes)
    recipe = load_recipe(["--config", str(write_recipe(speech))])
    checked = {"dev": CheckedSet([Row("a.wav", "नमस्ते", "dev.jsonl", 1)] * 1000, 1000, 1.0)}
    sizes = check_free_disk(tmp_path, recipe, SimpleNamespace(do_train=False), None, checked, world_size=1)
    assert sizes == {"checkpoint": 0, "checkpoints": 0, "others": 1000 * (2 * 18 + estimates.PREDICTION_BYTES)}
