"""Sets are checked once, and what is found of a whole set is told: its plan, what it shares with the training set, what is missing."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import toy

from config import DataConfig, DataSource
from device import Place
from faults import UserError
from meeting import Meeting
from sets import CheckedSet, check_sets, describe_plan

pytestmark = pytest.mark.usefixtures("own_cache")


def check(train: list[DataSource], folder: Path, **validation: DataSource) -> dict[str, CheckedSet]:
    labels = SimpleNamespace(find_problem=lambda row: None)
    data = DataConfig(train=train, validation=validation)
    return check_sets(data, labels, meeting=Meeting(Place("cpu"), None), folder=folder, with_training=True)


def complain(train: list[DataSource], folder: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        check(train, folder)
    return caught.value.problems


@pytest.mark.parametrize(
    ("rows", "world_size", "steps", "epochs", "plan"),
    [
        (10, 1, -1, 2, "6 steps (2.0 epochs of 10 clips, 0.5 h), 1 of warm-up, each of 4 clips = 1 process x 2 at once x 2 accumulated"),
        (10, 1, 6, 3, "6 steps (2.0 epochs of 10 clips, 0.5 h), 1 of warm-up, each of 4 clips = 1 process x 2 at once x 2 accumulated"),
        (9, 2, 4, 3, "4 steps (2.0 epochs of 9 clips, 0.5 h), 0 of warm-up, each of 8 clips = 2 processes x 2 at once x 2 accumulated"),
        (16, 2, 3, 3, "3 steps (1.5 epochs of 16 clips, 0.5 h), 0 of warm-up, each of 8 clips = 2 processes x 2 at once x 2 accumulated"),
    ],
)
def test_epochs_are_steps_over_the_steps_of_an_epoch_whose_last_one_may_be_short(rows, world_size, steps, epochs, plan):
    sizes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps, num_train_epochs=epochs)
    arguments = SimpleNamespace(**sizes, get_warmup_steps=lambda steps: steps // 6)
    train = CheckedSet([None] * rows, rows, 1800.0)
    assert describe_plan(train, DataConfig(), arguments, place=Place("cpu", world_size=world_size)) == plan


# --- what a scored set shares ------------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path) -> Path:
    return toy.write_speech(tmp_path, ["one", "two", "three"], speaker="ann")


def warnings_of(out: Path, capsys) -> list[str]:
    """The lines of the log; each is on the page, too."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    page = (out / "data_report.html").read_text(encoding="utf-8")
    assert all(line in page for line in lines)
    return lines


def test_a_scored_set_that_holds_copies_of_trained_clips_is_told(train, tmp_path, capsys):
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    (tmp_path / "copy.wav").write_bytes((tmp_path / rows[1]["audio"]).read_bytes())
    toy.write_clip(tmp_path / "new.wav", pitch=999)
    dev = toy.write_manifest(tmp_path / "dev.jsonl", [{"audio": name, "text": "x"} for name in ("new.wav", "copy.wav")])
    check([DataSource(path=str(train))], tmp_path, dev=DataSource(path=str(dev)))
    (line,) = warnings_of(tmp_path, capsys)
    assert line.startswith(f"warning: dev: 1 of 2 clips are in train, too, the first one {dev}:2 ({tmp_path / 'copy.wav'}): ")


def test_another_part_of_a_trained_file_is_no_copy_and_the_same_part_is(tmp_path, capsys):
    toy.write_clip(tmp_path / "long.wav", seconds=3)
    parts = [{"audio": "long.wav", "text": "x", "start": start, "end": start + 1} for start in range(3)]
    train, dev = toy.write_manifest(tmp_path / "a.jsonl", parts[:2]), toy.write_manifest(tmp_path / "b.jsonl", parts[2:])
    check([DataSource(path=str(train))], tmp_path, dev=DataSource(path=str(dev)))
    assert warnings_of(tmp_path, capsys) == []
    check([DataSource(path=str(train))], tmp_path, dev=DataSource(path=str(toy.write_manifest(tmp_path / "c.jsonl", parts[1:]))))
    assert warnings_of(tmp_path, capsys)[0].startswith("warning: dev: 1 of 2 clips are in train, too")


def test_speakers_of_a_scored_set_that_are_trained_on_are_told(train, tmp_path, capsys):
    for number, name in enumerate(("eva", "ann")):
        toy.write_clip(tmp_path / f"{name}.wav", pitch=900 + number)
    dev = toy.write_manifest(tmp_path / "dev.jsonl", [{"audio": f"{name}.wav", "text": "x", "speaker": name} for name in ("eva", "ann")])
    check([DataSource(path=str(train))], tmp_path, dev=DataSource(path=str(dev)))
    (line,) = warnings_of(tmp_path, capsys)
    assert line.startswith("warning: dev: 1 of 2 speakers are in train, too (ann): ")


# --- what is missing ---------------------------------------------------------------------------------------------


def test_a_manifest_that_is_not_there_is_told_by_its_key_and_the_folder_that_paths_count_from(tmp_path):
    (problem,) = complain([DataSource(path="nowhere/train.jsonl")], tmp_path)
    assert problem == f"data.train[0].path: there is no file or folder nowhere/train.jsonl; paths count from the working directory, {os.getcwd()}"


def test_a_column_is_told_by_the_key_that_was_typed(train, tmp_path):
    sources = [DataSource(path=str(train), text_column="words")]
    assert complain(sources, tmp_path)[0].endswith("columns are audio, text, speaker; set data.train[0].text_column")


def test_a_set_whose_every_file_is_missing_is_told_of_the_audio_folder(tmp_path):
    manifest = toy.write_manifest(tmp_path / "a.jsonl", [{"audio": f"{i}.wav", "text": "x"} for i in range(7)])
    (problem,) = complain([DataSource(path=str(manifest))], tmp_path / "out")
    assert f"and 2 more: see {tmp_path / 'out' / 'data_report.json'}\n" in problem
    assert "the source's audio_folder names another one" in problem.splitlines()[-1]


def test_parts_outside_their_sound_are_told_of_clips_that_are_cut_already(tmp_path):
    toy.write_clip(tmp_path / "cut.wav")
    manifest = toy.write_manifest(tmp_path / "a.jsonl", [{"audio": "cut.wav", "text": "x", "start": 12.5, "end": 13}])
    (problem,) = complain([DataSource(path=str(manifest))], tmp_path / "out")
    assert problem.splitlines()[-1] == (
        "  start and end are seconds inside the sound of the row; where clips are cut already, leave these two columns out"
    )


def test_the_share_of_speakers_is_told_with_the_set_it_belongs_to(train, tmp_path, caplog):
    toy.write_speech(tmp_path, ["four"], name="other", speaker="bob")
    with caplog.at_level(logging.INFO, logger="manifest"):
        sources = [DataSource(path=str(tmp_path / "other.jsonl")), DataSource(path=str(train), speaker_share=[0, 1e-9])]
        complain(sources, tmp_path)
    assert f"data.train[1]: 3 of 3 rows of {train} are left out by speaker_share" in caplog.text
