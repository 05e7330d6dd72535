"""What a run needs is estimated before it starts, and told when the machine has less."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import estimates
from adapters import count_kept_weights
from config import load_recipe
from device import Place
from estimates import check_free_disk, count_checkpoints, describe_needs, find_disk_shortage, find_shared_memory_shortage, measure_labels, measure_packed_labels
from faults import UserError
from labels import LabelBuilder
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


# --- the card and the time ---------------------------------------------------------------------------------------


def rows_of(*texts: str) -> list[Row]:
    return [Row("a.wav", text, "train.jsonl", line) for line, text in enumerate(texts, 1)]


def test_the_longest_label_is_found_wherever_it_stands_and_the_mean_among_rows_spread_evenly():
    labels = SimpleNamespace(build=lambda row: [0] * len(row.text))
    rows = rows_of(*["ab", "abcd"] * 5000)
    rows[4321] = rows_of("x" * 99)[0]
    longest, mean = measure_labels(rows, labels)
    assert longest == 99 and 2 <= mean <= 4
    assert measure_labels(rows_of("abc"), labels) == (3, 3)


def test_the_labels_of_packed_clips_are_those_of_their_window():
    train = SimpleNamespace(rows=[None], clips=SimpleNamespace(tokens=np.array([5, 1, 20, 3], dtype=np.uint16)))
    labels = SimpleNamespace(prefix=lambda row: [1, 2, 3])
    assert measure_packed_labels(train, labels, [(0, 2), (1,), (3, 1)]) == (29, (29 + 5 + 8) / 3)


@pytest.fixture
def needs(speech, monkeypatch):
    """A function that gives the lines told for a place and changes of the toy recipe, on a card of 1 GiB doing 1 GFLOP/s."""
    timed = []
    monkeypatch.setattr(estimates, "card_bytes", lambda device: 2**30)
    monkeypatch.setattr(estimates, "measure_products", lambda device, *_, **__: timed.append(device) or 1e9)

    def tell(place: Place, *words: str) -> list[str]:
        recipe = load_recipe(["--config", str(write_recipe(speech)), *words])
        base = read_base_model(recipe.model, max_new_tokens=4, num_beams=1)
        sizes = {key: recipe.training[key] for key in ("max_steps", "num_train_epochs", "per_device_train_batch_size")}
        arguments = SimpleNamespace(**sizes, gradient_accumulation_steps=1, bf16=False, fp16=False)
        train, labels = CheckedSet(rows_of(*["one clip"] * 4), 4, 4.0), LabelBuilder(base, recipe.model)
        return describe_needs(recipe, arguments, labels=labels, train=train, place=place)

    tell.timed = timed
    return tell


def test_on_a_cpu_nothing_is_told_of_cards(needs):
    (line,) = needs(Place("cpu"))
    assert line.startswith("time: about 7 s for 2 steps, without evaluations") and needs.timed == ["cpu"]


def test_the_main_process_alone_times_its_card_and_tells(needs):
    assert needs(Place("cuda:1", rank=1, local_rank=1, world_size=2)) == [] and needs.timed == []
    memory, time = needs(Place("cuda:0", world_size=2))
    assert memory.startswith("memory of a card: about 0.0 GiB") and memory.endswith(" of 1.0")
    assert time.startswith("time: ") and needs.timed == ["cuda:0"]


def test_a_run_that_may_not_fit_is_warned_of_and_not_refused(needs):
    lines = needs(Place("cuda:0"), "--training.per_device_train_batch_size=4000")
    assert any(line.startswith("warning: a training step may take ") for line in lines)


def test_the_plan_is_told_before_weights_are_loaded(speech, tmp_path, capsys):
    train_here(write_recipe(speech), "--check", "--training.output_dir", str(tmp_path / "out"), "--training.warmup_steps", "1")
    out = capsys.readouterr().out
    assert "2 steps (0.5 epochs of 4 clips, 0.0 h), 1 of warm-up, each of 1 clips = 1 process x 1 at once x 1 accumulated" in out
    assert re.search(r"^time: about .* for 2 steps, without evaluations", out, re.MULTILINE) and "memory of a card" not in out
