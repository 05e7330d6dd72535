"""A run with data.pack: every clip is met, scores come from single clips, and what is told of windows names their clips."""

import json
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

import trainer
from audio import WINDOW_SECONDS
from config import DataConfig, DataSource, ModelConfig
from device import Place
from labels import LabelBuilder
from launching import launch, train_here, write_recipe
from meeting import Meeting
from model import read_base_model
from sets import check_sets
from speech import SpeechDataset
from toy import build_whisper, write_clip, write_manifest, write_speech

SECONDS = [2.0 + i % 7 for i in range(24)]


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    build_whisper(folder / "model")
    rows = [
        {"audio": write_clip(folder / "clips" / f"{i}.wav", seconds=seconds, pitch=200 + 20 * i).name, "text": f"clip {i}", "language": "fr" if i % 3 else "hi"}
        for i, seconds in enumerate(SECONDS)
    ]
    write_manifest(folder / "clips" / "train.jsonl", rows)
    write_speech(folder, ["one", "two", "three"], name="dev")
    return folder


@pytest.fixture
def heard(monkeypatch) -> list[list[int]]:
    """The row ids of every training batch."""
    batches, compute = [], trainer.WhisperTrainer.compute_loss

    def spy(self, model, inputs, *args, **words):
        batches.append(inputs["row_id"])
        return compute(self, model, inputs, *args, **words)

    monkeypatch.setattr(trainer.WhisperTrainer, "compute_loss", spy)
    return batches


def packed(speech, out, **training):
    steps = {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "eval_steps": None, "save_strategy": "epoch"}
    data = {"train": [str(speech / "clips" / "train.jsonl")], "pack": True}
    return write_recipe(speech, data=data, run={"baseline": False}, training=steps | {"output_dir": str(out)} | training)


def test_each_epoch_meets_every_clip_once_and_scores_are_of_single_clips(speech, tmp_path, heard, capsys):
    results = train_here(packed(speech, tmp_path / "out"))
    windows = results["train"]["windows"]
    assert results["train"]["steps"] == windows == len(heard) < 20
    first, second = heard[: windows // 2], heard[windows // 2 :]
    for epoch in (first, second):
        assert sorted(row for batch in epoch for row in batch) == list(range(24))
        assert all(len({row % 3 == 0 for row in batch}) == 1 for batch in epoch), "one language a window"
    assert Counter(map(frozenset, first)) != Counter(map(frozenset, second))
    speed = results["train"]["audio_seconds_per_second"] / results["train"]["windows_per_second"]
    assert speed == pytest.approx(2 * sum(SECONDS) / windows)
    assert results["final"]["dev"]["rows_scored"] == 3
    out = capsys.readouterr().out
    each = sum(SECONDS) / (windows / 2)
    assert f"{windows} steps (2.0 epochs of 24 clips, 0.0 h), 0 of warm-up, each of 1 windows = 1 process x 1 at once x 1 accumulated\n" in out
    assert f"packed: 24 clips in {windows // 2} windows, {each:.1f} s each of {WINDOW_SECONDS}\n" in out


def test_a_resumed_packed_run_goes_on_with_the_windows_that_follow(speech, tmp_path):
    steps = {"max_steps": 8, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 6, "save_total_limit": None, "load_best_model_at_end": False}
    recipe = packed(speech, tmp_path / "straight", **steps)
    train_here(recipe)
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-8")
    (tmp_path / "resumed" / "results.json").unlink()
    train_here(recipe, "--training.output_dir", str(tmp_path / "resumed"), "--run.resume", "auto")
    weights = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("straight", "resumed")]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


def test_a_loss_that_is_not_finite_names_every_clip_of_its_windows(speech, tmp_path, heard, monkeypatch):
    monkeypatch.setattr(trainer, "mean_token_loss", lambda outputs, labels, **words: outputs.logits.sum() * torch.nan)
    recipe = packed(speech, tmp_path / "out")
    with pytest.raises(FloatingPointError) as error:
        train_here(recipe, "--run.max_skipped_steps", "0")
    assert len(heard[0]) > 1
    assert all(f"train.jsonl:{row + 1} " in str(error.value) for row in heard[0])


def test_silence_that_is_taught_as_empty_shares_no_window_with_speech(speech, tmp_path):
    rows = [json.loads(line) for line in (speech / "clips" / "train.jsonl").read_text().splitlines()]
    rows[4]["text"] = rows[5]["text"] = ""
    manifest = write_manifest(speech / "clips" / "some_silent.jsonl", rows)
    model = ModelConfig(name=str(speech / "model"))
    labels = LabelBuilder(read_base_model(model, max_new_tokens=4, num_beams=1), model, allow_empty_text=True)
    data = DataConfig([DataSource(str(manifest))], {"dev": DataSource(str(manifest))}, allow_empty_text=True, pack=True)
    checked = check_sets(data, labels, meeting=Meeting(Place("cpu"), None), folder=tmp_path, with_training=True)
    assert checked["dev"].clips is None
    clips = checked["train"].clips
    assert clips.samples.tolist() == [round(16_000 * seconds) for seconds in SECONDS]
    assert clips.tokens.tolist() == [len(f" {row['text']}") if row["text"] else 0 for row in rows]
    kinds = {group: {(row["language"], row["text"] == "") for row, own in zip(rows, clips.groups, strict=True) if own == group} for group in clips.groups}
    assert sorted(kind for found in kinds.values() for kind in found) == [("fr", False), ("fr", True), ("hi", False)]
    examples = SpeechDataset(checked["train"].rows, labels, clips=clips)
    assert clips.token_room == labels.max_length - len(examples[4]["labels"])


def test_two_processes_train_on_windows(speech, tmp_path):
    run = launch(packed(speech, tmp_path / "out", dataloader_num_workers=1, per_device_train_batch_size=2), processes=2)
    assert run.status == 0, run.tail
    windows = run.results["train"]["windows"]
    assert windows == run.results["train"]["steps"] * 4
    assert f"packed: 24 clips in {windows // 2} windows" in run.stdout
