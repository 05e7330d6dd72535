"""Sets of the Hub give the rows that manifests give; their sound stays on disk; what cannot be loaded is told in one line."""

import io
import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import soundfile
import toy
from datasets import ClassLabel
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import GatedRepoError
from torch.utils.data import DataLoader

from audio import AudioError, load_audio, measure_audio
from config import DataConfig, DataSource
from device import Place
from faults import UserError
from hub import HubSet, open_hub_set
from launching import train_here, write_recipe
from manifest import Row, read_manifest
from meeting import Meeting
from sets import check_sets
from speakers import choose_speakers


pytestmark = pytest.mark.usefixtures("own_cache")
SPEAKERS = ["ann", "bob", "eva", "tom", "kim", "leo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A set of two files with the columns that Hub sets have, and a split test of one row."""
    folder = tmp_path_factory.mktemp("hub")
    columns = {
        "text": [f"text {i}" for i in range(12)],
        "path": ["/elsewhere/1.wav"] * 12,
        "language": ["Hindi"] * 11 + ["Klingon"],
        "lang_id": [7] * 12,
        "client": [SPEAKERS[i % 6] for i in range(12)],
        "village": ["north"] * 6 + [None] * 6,
        "duration": [0.5] * 12,
        "words": [["a", "b"]] * 12,
        "is_native": [True] * 12,
    }
    toy.write_hub_set(folder, columns, files=2)
    return toy.write_hub_set(folder, {name: values[:1] for name, values in columns.items()}, split="test")


def open_set(folder, *, streaming: bool = False, **keys) -> HubSet:
    source = DataSource(**{"hub": str(folder), "split": "train"} | keys)
    return open_hub_set(
        source, "data.train[0]", audio_column=source.audio_column, text_column=source.text_column, streaming=streaming
    )


def complain(folder, **keys) -> str:
    with pytest.raises(UserError) as caught:
        open_set(folder, **keys)
    (problem,) = caught.value.problems
    assert "\n" not in problem
    return problem


# --- rows --------------------------------------------------------------------------------------------------------


def test_rows_are_those_of_a_manifest_and_a_stream_gives_the_same(folder):
    rows, bad_rows = open_set(folder).read()
    assert (len(rows), bad_rows) == (12, [])
    row = rows[7]
    assert (row.audio, row.text, row.line, row.language, row.duration) == ("train-7.wav", "text 7", 8, "Hindi", 0.5)
    assert row.file == f"hub:{folder}/train"
    assert row.extra == {"path": "/elsewhere/1.wav", "lang_id": "7", "client": "bob", "is_native": "true"}
    stream = open_set(folder, streaming=True)
    streamed = [stream.build_row({name: value for name, (value,) in values.items()}, line) for line, values in enumerate(stream.rows.iter(1), 1)]
    assert [replace(row, store=None) for row in streamed] == [replace(row, store=None) for row in rows]
    assert [row.sound() for row in streamed] == [row.sound() for row in rows]


def test_the_embedded_sound_is_that_of_the_file(folder):
    rows, _ = open_set(folder).read()
    for row in (rows[0], rows[11]):
        assert np.array_equal(load_audio(row.sound()), load_audio(str(folder / "clips" / row.audio)))


def test_a_source_says_the_language_of_every_row_whatever_its_columns_say(folder, tmp_path):
    rows, _ = open_set(folder, language="hi", task="translate").read()
    assert {(row.language, row.task) for row in rows} == {("hi", "translate")}
    manifest = toy.write_manifest(tmp_path / "a.jsonl", [{"audio": "a.wav", "text": "a", "language": "x", "task": "asr"}, {"audio": "b", "text": "b"}])
    rows, bad_rows = read_manifest(str(manifest), fixed={"language": "hi", "task": "transcribe"})
    assert bad_rows == [] and {(row.language, row.task) for row in rows} == {("hi", "transcribe")}


def test_classes_are_named(folder):
    opened = open_set(folder)
    features = opened.rows.features.copy()
    features["lang_id"] = ClassLabel(names=[f"class {i}" for i in range(9)])
    row = HubSet(opened.source, opened.rows.cast(features), "audio", "text").read()[0][0]
    assert row.extra["lang_id"] == "class 7"


def test_a_column_of_decoded_sound_is_read_as_well(tmp_path):
    wave = np.linspace(-0.5, 0.5, 1600, dtype=np.float32)
    columns = {"speech": [{"array": wave.tolist(), "sampling_rate": 16_000}] * 2, "text": ["one", "two"]}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "train.parquet")
    rows, _ = open_set(tmp_path, audio_column="speech").read()
    assert [row.audio for row in rows] == ["row 1", "row 2"]
    assert np.array_equal(load_audio(rows[1].sound()), wave)


def test_a_row_that_lacks_its_text_or_its_sound_is_a_bad_row(folder):
    opened = open_set(folder)
    columns = {"audio": [{"bytes": b"", "path": None}] * 2, "text": ["one", None]}
    rows = datasets.Dataset.from_dict(columns).cast_column("audio", datasets.Audio(decode=False))
    good, bad = HubSet(opened.source, rows, "audio", "text").read()
    assert [(row.reason, row.line, row.detail) for row in bad] == [("bad_field", 2, "text is null, not text")]
    with pytest.raises(AudioError, match="missing_file"):
        good[0].sound()


def test_a_pickled_set_names_files_and_reads_the_same_rows(folder):
    opened = open_set(folder)
    content = pickle.dumps(opened)
    assert len(content) < 10_000
    again = pickle.loads(content).read()[0]
    assert [row.sound() for row in again] == [row.sound() for row in opened.read()[0]]


def test_loader_workers_read_the_sound_of_rows_made_before_the_fork(folder):
    rows, _ = open_set(folder).read()
    loader = DataLoader(rows, batch_size=3, num_workers=2, collate_fn=lambda rows: [load_audio(row.sound()).sum() for row in rows])
    assert [value for batch in loader for value in batch] == [load_audio(row.sound()).sum() for row in rows]


# --- sound in any form -------------------------------------------------------------------------------------------


def test_bytes_path_decoder_and_array_give_the_same_samples(tmp_path):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (4410, 2)).astype(np.float32)
    path = tmp_path / "clip.wav"
    soundfile.write(path, noise, 22_050, subtype="FLOAT")
    samples = SimpleNamespace(data=noise.T, sample_rate=22_050)
    forms = [
        path.read_bytes(),
        {"bytes": path.read_bytes(), "path": "clip.wav"},
        {"bytes": None, "path": str(path)},
        {"array": noise.T, "sampling_rate": 22_050},
        SimpleNamespace(get_all_samples=lambda: samples),
    ]
    expected = load_audio(str(path))
    for form in forms:
        assert np.abs(load_audio(form) - expected).max() < 1e-4
        assert measure_audio(form) == measure_audio(str(path))
    mono = {"array": noise[:, 0].tolist(), "sampling_rate": 22_050}
    assert load_audio(mono).ndim == 1 and measure_audio(mono).channels == 1


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3"])
def test_embedded_sound_that_was_cut_off_is_unreadable(kind):
    content = io.BytesIO()
    soundfile.write(content, np.random.default_rng(0).uniform(-0.5, 0.5, 32_000), 16_000, format=kind)
    whole = content.getvalue()
    assert measure_audio(whole).seconds == pytest.approx(2, abs=0.1)
    with pytest.raises(AudioError, match="unreadable"):
        measure_audio(whole[: len(whole) // 2])


@pytest.mark.parametrize("sound", [None, {"bytes": None, "path": None}, {}])
def test_no_sound_at_all_is_missing(sound):
    with pytest.raises(AudioError, match="missing_file"):
        load_audio(sound)


# --- what cannot be loaded ---------------------------------------------------------------------------------------


def gated() -> GatedRepoError:
    return GatedRepoError("403 Forbidden", response=SimpleNamespace(status_code=403, headers={}, request=None))


@pytest.mark.parametrize(
    ("error", "start", "words"),
    [
        (DatasetNotFoundError("Dataset 'own/set' is a gated dataset on the Hub."), "hub: own/set is gated", "hf auth login"),
        (gated(), "hub: own/set is gated", "https://huggingface.co/datasets/own/set"),
        (DatasetNotFoundError("Dataset 'own/set' doesn't exist on the Hub or cannot be accessed."), "hub: there is no folder own/set here, and on the Hub no set own/set that", "private"),
        (DatasetNotFoundError("Revision 'old' doesn't exist for dataset 'own/set' on the Hub."), "revision: own/set has no revision old", "tree/main"),
        (ConnectionError("Couldn't reach 'own/set' on the Hub (ConnectError)"), "hub: there is no folder own/set here, and", "own/set is not in the cache"),
        (ValueError("Couldn't find cache for own/set for config 'x'"), "hub: there is no folder own/set here, and", "own/set is not in the cache"),
        (RuntimeError("Dataset scripts are no longer supported, but found set.py"), "hub: own/set is a loading script", "convert the set to Parquet"),
        (ValueError("BuilderConfig 'hi' not found. Available: ['hi_in', 'ta_in']"), "config: own/set has no configuration hi", "there are hi_in, ta_in"),
        (ValueError("Config name is missing.\nPlease pick one among the available configs: ['hi_in', 'ta_in']"), "config: is missing", "hi_in, ta_in"),
        (ValueError('Unknown split "train". Should be one of [\'test\'].'), "split: own/set has no split train", "there are test"),
        (OSError(28, "No space left on device"), "hub: own/set cannot be loaded", "No space left on device"),
    ],
)
def test_each_way_of_failing_is_one_line_with_what_to_do(monkeypatch, error, start, words):
    calls = []

    def fail(*args, **keys):
        assert "trust_remote_code" not in keys
        calls.append(args)
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    problem = complain("own/set", config="hi", revision="old")
    assert problem.startswith(f"data.train[0].{start}") and words in problem
    assert len(calls) == 1


def test_a_set_that_is_only_a_loading_script_is_refused_and_never_run(tmp_path):
    (tmp_path / "speech").mkdir()
    (tmp_path / "speech" / "speech.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "is a loading script, and those are never run: the Hub may have a copy" in complain(tmp_path / "speech")
    assert not (tmp_path / "ran").exists()


def test_splits_configurations_and_columns_that_are_there_are_listed(folder, tmp_path):
    assert complain(folder, split="dev").endswith("has no split dev; there are train, test")
    assert complain(folder, split="dev", streaming=True).endswith("has no split dev; there are train, test")
    assert complain(folder, split="train[:50%]", streaming=True).startswith("data.train[0].split: train[:50%] is a part of a split, and a stream")
    assert complain(folder, config="hi").endswith("has no configuration hi; there are default")
    assert "column 'clip' is not there; columns are audio, text, path" in complain(folder, audio_column="clip")
    assert complain(folder, audio_column="duration") == f"hub:{folder}/train: column 'duration' holds no sound (sound is in audio); set data.train[0].audio_column"
    assert complain(folder, audio_column="client") == f"hub:{folder}/train: column 'client' holds no sound (sound is in audio); set data.train[0].audio_column"


def test_a_part_of_a_split_and_two_splits_together_can_be_named(folder):
    assert [len(open_set(folder, split=split).read()[0]) for split in ("train[:25%]", "train+test")] == [3, 13]


# --- speakers ----------------------------------------------------------------------------------------------------


def rows_by(speakers: list[str]) -> list[Row]:
    return [Row(f"{i}.wav", "text", "a.jsonl", i + 1, extra={"name": name, "village": str(i % 2)}) for i, name in enumerate(speakers)]


def chosen(rows: list[Row], low: float, high: float, columns="name") -> set[str]:
    source = DataSource(path="a.jsonl", speaker_column=columns, speaker_share=[low, high])
    return {row.audio for row in choose_speakers(rows, source, "data.train[0]")}


def test_shares_that_meet_hold_every_speaker_once_in_proportion():
    rows = rows_by([f"speaker {i % 500}" for i in range(1000)])
    parts = [chosen(rows, low, high) for low, high in ((0, 0.2), (0.2, 0.8), (0.8, 1))]
    assert sum(map(len, parts)) == 1000 and set.union(*parts) == {row.audio for row in rows}
    speakers = [{row.extra["name"] for row in rows if row.audio in part} for part in parts]
    assert not speakers[0] & speakers[1] and not speakers[1] & speakers[2] and not speakers[0] & speakers[2]
    assert [len(part) / 500 for part in speakers] == pytest.approx([0.2, 0.6, 0.2], abs=0.06)


def test_a_speakers_part_depends_on_nothing_but_the_name():
    rows = rows_by([f"speaker {i}" for i in range(50)])
    assert chosen(rows[::-1], 0, 0.5) == chosen(rows, 0, 0.5)
    assert chosen(rows[10:20], 0, 0.5) == chosen(rows, 0, 0.5) & {row.audio for row in rows[10:20]}
    assert chosen(rows_by(["speaker 1", "speaker 2", "speaker 3"]), 0, 0.5) == {"1.wav", "2.wav"}  # on every machine


def test_several_columns_name_a_speaker_together():
    rows = rows_by(["kim"] * 100)
    parts = [chosen(rows, part / 50, (part + 1) / 50, ["name", "village"]) for part in range(50)]
    assert sorted(map(len, filter(None, parts))) == [50, 50]  # two speakers, not one
    assert choose_speakers(rows, DataSource(path="a", speaker_column=["name", "village"]), "data.train[0]")[1].speaker == "kim / 1"


def test_a_speaker_column_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(UserError, match=r"^data\.train\[0\]\.speaker_column: no row of a\.jsonl has a value in 'who'; other columns are name, village$"):
        chosen(rows_by(["ann"]), 0, 0.5, "who")

    with pytest.raises(UserError, match="has a value in 'speaker'; there are no other columns$"):
        choose_speakers([Row("a.wav", "a", "a.jsonl", 1)], DataSource(path="a.jsonl", speaker_share=[0, 0.5]), "data.train[0]")


# --- in a run ----------------------------------------------------------------------------------------------------


def check(data: DataConfig, out: Path) -> dict:
    fine = SimpleNamespace(find_problem=lambda row: ("unknown_language", "x") if row.language == "Klingon" else None)
    return check_sets(data, fine, meeting=Meeting(Place("cpu"), None), folder=out, with_training=True)


def test_two_parts_of_one_split_share_no_speaker_and_count_only_their_own_rows(folder, tmp_path, caplog):
    sources = [DataSource(hub=str(folder), split="train", speaker_column="client", speaker_share=share) for share in ([0, 0.5], [0.5, 1])]
    with caplog.at_level("INFO", logger="manifest"):
        checked = check(DataConfig(train=sources[:1], validation={"dev": sources[1]}, max_dropped_share=0.5), tmp_path)
    speakers = [{row.speaker for row in checked[name].rows} for name in ("train", "dev")]
    assert not speakers[0] & speakers[1] and all(speakers)
    report = json.loads((tmp_path / "data_report.json").read_text())["sets"]
    assert report["train"]["rows_read"] + report["dev"]["rows_read"] == 12
    bad = report["train"]["bad_rows"] + report["dev"]["bad_rows"]
    assert [(row["file"], row["line"], row["audio"]) for row in bad] == [(f"hub:{folder}/train", 12, "train-11.wav")]
    assert f"data.validation.dev: 6 of 12 rows of hub:{folder}/train are left out by speaker_share" in caplog.text.replace("data.train[0]", "")


def test_the_other_ranks_open_what_the_main_process_loaded_and_look_nothing_up(folder, tmp_path, monkeypatch):
    data = DataConfig(train=[DataSource(hub=str(folder), split="train")], validation={"dev": DataSource(hub=str(folder), split="test")})
    kept, alone = [], {"together": lambda work: work(), "spans_machines": False}
    meeting = SimpleNamespace(once=lambda work: kept.append(work()) or kept[0], **alone)
    fine = SimpleNamespace(find_problem=lambda row: None)
    main = check_sets(data, fine, meeting=meeting, folder=tmp_path, with_training=True)
    monkeypatch.setattr(datasets, "load_dataset", None)
    other = check_sets(data, fine, meeting=SimpleNamespace(once=lambda work: kept[0], **alone), folder=tmp_path, with_training=True)
    for name in ("train", "dev"):
        assert [row.sound() for row in other[name].rows] == [row.sound() for row in main[name].rows]


def test_a_configuration_of_the_hubs_own_copy_is_a_folder(tmp_path):
    parts = {"hi_in": "one", "ta_in": "two"}
    for name, text in parts.items():
        toy.write_hub_set(tmp_path / name, {"text": [text]})
        (tmp_path / "copy" / name / "train").mkdir(parents=True)
        (tmp_path / name / "data" / "train-00000-of-00001.parquet").rename(tmp_path / "copy" / name / "train" / "0000.parquet")
    for name, text in parts.items():
        source = DataSource(hub=str(tmp_path / "copy"), config=name, split="train", revision="refs/convert/parquet")
        rows, _ = open_hub_set(source, "data.train[0]", audio_column=None, text_column=None).read()
        assert [row.text for row in rows] == [text]


def test_two_sounds_of_one_record_are_two_clips(tmp_path):
    lengths = {"near": (0.5, 0.6), "far": (31, 0.7)}
    sounds = {name: [toy.write_clip(tmp_path / f"{name}{number}.wav", seconds=seconds) for number, seconds in enumerate(both)] for name, both in lengths.items()}
    columns = {name: [{"bytes": clip.read_bytes(), "path": clip.name} for clip in clips] for name, clips in sounds.items()}
    (tmp_path / "set" / "data").mkdir(parents=True)
    datasets.Dataset.from_dict(columns | {"text": ["a", "b"]}).to_parquet(tmp_path / "set" / "data" / "train-0.parquet")
    sources = [DataSource(hub=str(tmp_path / "set"), split="train", audio_column=name) for name in ("near", "far")]
    checked = check(DataConfig(train=sources, max_dropped_share=0.5), tmp_path)["train"]
    assert [row.audio for row in checked.rows] == ["near0.wav", "near1.wav", "far1.wav"]
    assert json.loads((tmp_path / "data_report.json").read_text())["sets"]["train"]["dropped"] == {"too_long": 1}


def test_a_line_that_is_bad_for_one_source_stays_in_another(tmp_path):
    toy.write_clip(tmp_path / "a.wav")
    manifest = tmp_path / "both.csv"
    manifest.write_text("audio,one,two\na.wav,x,\na.wav,y,z\n")
    sources = [DataSource(path=str(manifest), text_column=name) for name in ("one", "two")]
    meeting = Meeting(Place("cpu"), None)
    labels = SimpleNamespace(find_problem=lambda row: None if row.text else ("empty_text", ""))
    data = DataConfig(train=sources, max_dropped_share=0.5)
    checked = check_sets(data, labels, meeting=meeting, folder=tmp_path, with_training=True)["train"]
    assert [row.text for row in checked.rows] == ["x", "y", "z"]
    assert checked.mix.sizes == [2, 1]


def test_a_training_source_of_which_nothing_is_left_is_refused(tmp_path):
    toy.write_speech(tmp_path, ["one", "two"])
    toy.write_manifest(tmp_path / "bad.jsonl", [{"audio": "nothing.wav", "text": "a"}])
    sources = [DataSource(path=str(tmp_path / "train.jsonl")), DataSource(path=str(tmp_path / "bad.jsonl"))]
    with pytest.raises(UserError, match=r"^data\.train\[1\]: no row of .*bad\.jsonl can be used; .*/data_report\.json tells why$"):
        check(DataConfig(train=sources, max_dropped_share=0.5), tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (DataSource(hub="./nothere", split="train"), r"^data\.train\[0\]\.hub: there is no folder \./nothere; a manifest is named by path$"),
        (DataSource(hub="data/parts/one", split="train"), r"^data\.train\[0\]\.hub: there is no folder data/parts/one; "),
        (DataSource(hub="data\\one", split="train"), r"^data\.train\[0\]\.hub: there is no folder data\\one; "),
        (DataSource(hub=str(Path(__file__).parent), split="train", revision="main"), r"^data\.train\[0\]\.revision: belongs to sets on the Hub; "),
        (DataSource(hub="train.jsonl", split="train"), "there is no folder train.jsonl; a manifest is named by path$"),
        (DataSource(hub="google/fleurs", split="train", revision="refs/convert/parquet"), r"^data\.train\[0\]\.config: is missing; at refs"),
    ],
)
def test_a_source_that_cannot_be_meant_is_told_before_anything_is_looked_up(source, message):
    with pytest.raises(UserError, match=message):
        open_hub_set(source, "data.train[0]", audio_column=None, text_column=None)


def test_a_mistake_in_every_source_is_told_at_once(folder, tmp_path):
    data = DataConfig(train=[DataSource(hub=str(folder), split="dev"), DataSource(path="none.jsonl")], validation={"dev": DataSource(hub="a/b", split="x")})
    with pytest.raises(UserError) as caught:
        check(data, tmp_path)
    assert [problem.split(": ")[0] for problem in caught.value.problems] == ["data.train[0].split", "data.train[1].path", "data.validation.dev.hub"]


def test_a_hub_set_and_a_manifest_train_together_by_weight(folder, tmp_path, capsys):
    toy.build_whisper(tmp_path / "model")
    manifest = toy.write_speech(tmp_path, ["one", "two", "three", "four"])
    source = {"hub": str(folder), "split": "train", "weight": 0.5, "language": "hi"}
    validation = {"dev": {"hub": str(folder), "split": "test", "language": "hi"}}
    recipe = write_recipe(tmp_path, data={"train": [str(manifest), source], "validation": validation}, training={"num_train_epochs": 1, "max_steps": -1})
    results = train_here(recipe)
    assert results["train"]["steps"] == results["train"]["windows"] == 10
    assert results["final"]["dev"]["rows_scored"] == 1
    assert f"an epoch: 4 clips of the 4 in {manifest}, 6 clips of the 12 in hub:{folder}/train" in capsys.readouterr().out
    predictions = (tmp_path / "out" / "predictions" / "final-dev.jsonl").read_text()
    assert json.loads(predictions)["audio"] == "test-0.wav"
