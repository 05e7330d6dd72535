"""A row becomes a block of exactly 3000 frames when it is needed; only what the model takes goes into the batch."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import toy
import torch
from config import DataConfig, DataSource, ModelConfig, Recipe, RunConfig
from device import Place
from labels import LabelBuilder
from manifest import read_manifest
from model import read_base_model
from sets import CheckedSet
from speech import SpeechDataset, collate
from torch.utils.data import DataLoader
from trainer import build_examples, thin_out
from transformers.models.whisper.modeling_whisper import WhisperModel

FRAMES = 3000
AUGMENT = dict(apply_spec_augment=True, mask_time_prob=0.3, mask_time_length=10, mask_feature_prob=0.0)


def build_labels(folder: Path, *, model: ModelConfig | None = None, **changes) -> LabelBuilder:
    toy.build_whisper(folder, **changes)
    model = replace(model or ModelConfig(), name=str(folder), language="en")
    return LabelBuilder(read_base_model(model, max_new_tokens=225, num_beams=1), model, allow_empty_text=True)


@pytest.fixture(scope="module")
def labels(tmp_path_factory) -> LabelBuilder:
    return build_labels(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    texts = ["one", "two or three", "", "four"]
    return read_manifest(str(toy.write_speech(folder, texts, speaker="Ann", accent="north", duration=99)))[0]


def write_noise(path: Path, samples: int) -> Path:
    soundfile.write(path, np.random.default_rng(0).uniform(-0.3, 0.3, samples), 16_000)
    return path


def rows_of(folder: Path, *samples: int):
    clips = [write_noise(folder / f"{count}.wav", count).name for count in samples]
    return read_manifest(str(toy.write_manifest(folder / "train.jsonl", [{"audio": clip, "text": "a"} for clip in clips])))[0]


def join(examples: SpeechDataset, *indices: int) -> dict:
    base = examples.labels.base
    items = [examples[i] for i in indices or range(len(examples))]
    return collate(items, start=base.config.decoder_start_token_id, pad=base.config.pad_token_id)


# --- shapes ------------------------------------------------------------------------------------------------------


def test_a_batch_has_the_models_shapes_and_types(labels, rows):
    batch = join(SpeechDataset(rows, labels, first_id=7))
    assert batch["input_features"].shape == (4, 80, FRAMES) and batch["input_features"].dtype == torch.float32
    longest = max(len(labels.build(row)) for row in rows)
    for name in ("labels", "decoder_input_ids"):
        assert batch[name].shape == (4, longest) and batch[name].dtype == torch.int64
    assert batch["row_id"] == [7, 8, 9, 10]
    assert (batch["language"], batch["task"]) == (["en"] * 4, ["transcribe"] * 4)


@pytest.mark.parametrize("bins", [80, 128])
def test_the_mel_bins_are_those_of_the_models_config(tmp_path, rows, bins):
    examples = SpeechDataset(rows, build_labels(tmp_path, num_mel_bins=bins))
    assert join(examples, 0)["input_features"].shape == (1, bins, FRAMES)


@pytest.mark.parametrize("with_mask", [False, True])
def test_every_clip_fills_3000_frames_whatever_its_length(tmp_path, labels, with_mask):
    examples = SpeechDataset(rows_of(tmp_path, 1600, 799, 800, 801, 16_001, 480_000), labels, with_mask=with_mask)
    batch = join(examples)
    assert batch["input_features"].shape == (6, 80, FRAMES)
    assert ("attention_mask" in batch) == with_mask
    if with_mask:
        assert batch["attention_mask"].shape == (6, FRAMES)


@pytest.mark.parametrize("samples", [799, 800, 801, 32_000, 32_001, 479_999, 480_000])
def test_the_mask_is_one_within_the_clip_and_zero_behind_it(tmp_path, labels, samples):
    (mask,) = join(SpeechDataset(rows_of(tmp_path, samples), labels, with_mask=True))["attention_mask"]
    length = int(mask.sum())
    assert abs(length - samples / 160) <= 1
    assert mask[:length].all() and not mask[length:].any()


def test_only_what_the_model_takes_and_scoring_needs_reaches_the_batch(labels, rows):
    assert rows[0].extra == {"accent": "north"} and rows[0].speaker == "Ann"
    assert set(join(SpeechDataset(rows, labels))) == {"input_features", "labels", "decoder_input_ids", "row_id", "seconds", "language", "task"}


def test_examples_do_not_depend_on_their_batch_nor_on_workers(labels, rows):
    examples = SpeechDataset(rows, labels)
    join_items = partial(collate, start=labels.base.config.decoder_start_token_id, pad=labels.base.config.pad_token_id)
    loader = DataLoader(examples, batch_size=3, num_workers=2, collate_fn=join_items)
    features = torch.cat([batch["input_features"] for batch in loader])
    for index, block in enumerate(features):
        assert torch.equal(block, join(examples, index)["input_features"][0])


def test_a_row_with_start_and_end_is_that_part_of_its_file(tmp_path, labels):
    clip = write_noise(tmp_path / "long.wav", 48_000)
    soundfile.write(tmp_path / "part.wav", soundfile.read(clip)[0][16_000:24_000], 16_000)
    manifest = toy.write_manifest(
        tmp_path / "train.jsonl",
        [{"audio": "long.wav", "text": "a", "start": 1.0, "end": 1.5}, {"audio": "part.wav", "text": "a"}],
    )
    part, alone = join(SpeechDataset(read_manifest(str(manifest))[0], labels))["input_features"]
    assert torch.allclose(part, alone, atol=1e-4)


# --- augmentation ------------------------------------------------------------------------------------------------


def test_masked_frames_lie_within_the_real_length(tmp_path):
    labels = build_labels(tmp_path / "base", model=ModelConfig(**AUGMENT))
    batch = join(SpeechDataset(rows_of(tmp_path, 32_000, 80_000), labels, with_mask=True))
    model = WhisperModel(labels.base.config).train()
    np.random.seed(0)
    masked = model._mask_input_features(batch["input_features"].clone(), attention_mask=batch["attention_mask"])
    changed = (masked != batch["input_features"]).any(dim=1)
    for frames, length in zip(changed, (200, 500), strict=True):
        assert frames[:length].sum() >= 10, "the clip itself is masked"
        assert not frames[length:].any()


def test_nothing_is_masked_in_evaluation_nor_by_default(tmp_path):
    for name, model_config in (("on", ModelConfig(**AUGMENT)), ("off", ModelConfig())):
        labels = build_labels(tmp_path / name, model=model_config)
        batch = join(SpeechDataset(rows_of(tmp_path, 32_000), labels, with_mask=True))
        model = WhisperModel(labels.base.config).train(mode=name == "off")
        masked = model._mask_input_features(batch["input_features"].clone(), attention_mask=batch["attention_mask"])
        assert torch.equal(masked, batch["input_features"])


def recipe_for(model: ModelConfig, **training) -> Recipe:
    data = DataConfig([DataSource("train.jsonl")], {"dev": DataSource("dev.jsonl"), "other": DataSource("other.jsonl")})
    return Recipe("recipe.yaml", model, {}, data, RunConfig(), {"do_train": True} | training)


@pytest.mark.parametrize("augmented", [False, True])
def test_only_training_with_augmentation_has_a_mask(labels, rows, augmented):
    checked = {name: CheckedSet(rows, len(rows), 1.0) for name in ("train", "dev", "other")}
    train, sets = build_examples(recipe_for(ModelConfig(apply_spec_augment=augmented)), checked, labels, place=Place("cpu"))
    assert ("attention_mask" in train[0]) == augmented
    assert not any("attention_mask" in examples[0] for examples in sets.values())


def test_row_ids_of_two_scored_sets_differ(labels, rows):
    checked = {name: CheckedSet(rows, len(rows), 1.0) for name in ("train", "dev", "other")}
    _, sets = build_examples(recipe_for(ModelConfig()), checked, labels, place=Place("cpu"))
    assert [examples[i]["row_id"] for examples in sets.values() for i in range(4)] == [[i] for i in range(8)]


def test_a_recipe_that_only_scores_has_no_training_examples(labels, rows):
    checked = {name: CheckedSet(rows, len(rows), 1.0) for name in ("dev", "other")}
    train, sets = build_examples(recipe_for(ModelConfig(), do_train=False), checked, labels, place=Place("cpu"))
    assert train is None and list(sets) == ["dev", "other"]


def test_a_thinned_set_is_the_same_rows_every_time(labels, rows):
    examples = SpeechDataset(rows * 10, labels)
    chosen = [thin_out(examples, 6).indices for _ in range(2)]
    assert chosen[0] == chosen[1] == sorted(set(chosen[0])) and len(chosen[0]) == 6
    assert thin_out(examples, None) is thin_out(examples, 40) is thin_out(examples, 50) is examples


# --- clips that go bad -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text("not sound")])
def test_a_clip_that_went_bad_after_the_check_is_named_by_file_and_line(tmp_path, labels, spoil):
    rows = rows_of(tmp_path, 1600, 3200)
    spoil(tmp_path / "3200.wav")
    place = re.escape(f"{tmp_path}/train.jsonl:2: ")
    with pytest.raises(RuntimeError, match=rf"^{place}.*3200\.wav: .*readable when it was checked"):
        SpeechDataset(rows, labels)[1]


def test_features_that_are_not_finite_are_named_by_file_and_line(tmp_path, labels):
    wave = np.zeros(1600, dtype=np.float32)
    wave[800] = np.nan
    soundfile.write(tmp_path / "1600.wav", wave, 16_000, subtype="FLOAT")
    rows = read_manifest(str(toy.write_manifest(tmp_path / "train.jsonl", [{"audio": "1600.wav", "text": "a"}])))[0]
    with pytest.raises(RuntimeError, match=r"train\.jsonl:1: .*1600\.wav: its features are not finite"):
        SpeechDataset(rows, labels)[0]


# --- clips that share a window -----------------------------------------------------------------------------------


def test_clips_of_one_window_are_heard_and_read_one_after_another(tmp_path, labels):
    rows = rows_of(tmp_path, 32_000, 16_000, 48_000)
    rows = [replace(row, text=text) for row, text in zip(rows, ["one", " two ", "three."], strict=True)]
    example = SpeechDataset(rows, labels, first_id=5, with_mask=True)[(2, 0, 1)]
    waves = [soundfile.read(rows[number].audio, dtype="float32")[0] for number in (2, 0, 1)]
    pause = np.zeros(3200, dtype=np.float32)  # 0.2 s
    joined = np.concatenate([waves[0], pause, waves[1], pause, waves[2]])
    features = labels.base.processor.feature_extractor(joined, sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
    np.testing.assert_allclose(example["input_features"], features["input_features"][0], atol=1e-5)
    assert example["labels"] == labels.build(replace(rows[0], text="three. one two"))
    assert example["row_id"] == [7, 5, 6] and example["seconds"] == 6.0
    assert example["attention_mask"].sum() == 640, "6 s of sound and 0.4 s of pauses"


def test_a_batch_of_windows_names_all_of_their_clips(tmp_path, labels):
    examples = SpeechDataset(rows_of(tmp_path, 1600, 3200, 4800), labels)
    batch = join(examples, (2, 0), (1,))
    assert batch["input_features"].shape[0] == 2 and batch["row_id"] == [2, 0, 1]
    assert batch["seconds"] == pytest.approx([0.4, 0.2])


def test_a_window_with_features_that_are_not_finite_names_all_of_its_clips(tmp_path, labels):
    rows = rows_of(tmp_path, 1600, 3200)
    soundfile.write(tmp_path / "3200.wav", np.full(3200, np.nan, dtype=np.float32), 16_000, subtype="FLOAT")
    with pytest.raises(RuntimeError, match=r"train\.jsonl:1: .*1600\.wav, .*train\.jsonl:2: .*3200\.wav: its features are not finite"):
        SpeechDataset(rows, labels)[(0, 1)]
