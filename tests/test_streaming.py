"""A stream gives every rank as many batches as it asks for, each row to one reader, and goes on where a resumed run was."""

import itertools
import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import pytest
import toy
import torch
from accelerate import PartialState
from accelerate.data_loader import skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import streaming
from config import DataConfig, DataSource, ModelConfig
from device import Place
from faults import UserError
from hub import HubSet
from labels import LabelBuilder
from launching import launch, train_here, write_recipe
from manifest import BadRow
from meeting import Meeting
from model import read_base_model
from sets import check_sets
from speech import collate
from streaming import Note, StreamedSpeech, StreamReport, build_loader

datasets.disable_progress_bars()


pytestmark = pytest.mark.usefixtures("own_cache")


def texts_only(name: str, texts: list[str], *, files: int = 1, **keys) -> HubSet:
    """A stream of rows without sound."""
    rows = datasets.Dataset.from_dict({"audio": [f"{i}" for i in range(len(texts))], "text": texts})
    return HubSet(DataSource(hub=name, split="train", **keys), rows.to_iterable_dataset(num_shards=files), "audio", "text")


class Texts(StreamedSpeech):
    """A stream judged by the text alone: bad ones are dropped."""

    def __init__(self, *sets: HubSet, seed: int = 0):
        super().__init__(sets, None, data=DataConfig(), place=Place("cpu"), seed=seed)

    def _find_problem(self, row):
        return BadRow(row.file, row.line, row.audio, "silent", "") if row.text.startswith("bad") else None


def read(stream: StreamedSpeech, reader: int, readers: int, count: int) -> list[str]:
    return [row.text for row, _ in itertools.islice(stream.read(reader, readers), count)]


# --- shares ------------------------------------------------------------------------------------------------------


def one_pass(stream: Texts, hub_set: HubSet, turn: int, readers: int) -> list[list[str]]:
    return [[row.text for row in stream._read_pass(hub_set, turn, reader, readers)] for reader in range(readers)]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(rows=st.integers(1, 40), files=st.integers(1, 6), world_size=st.integers(1, 4), workers=st.integers(1, 3), turn=st.integers(0, 3))
def test_within_a_pass_each_row_is_read_by_exactly_one_worker_of_one_rank(rows, files, world_size, workers, turn):
    hub_set = texts_only("a/b", [f"text {i}" for i in range(rows)], files=min(files, rows))
    shares = one_pass(Texts(hub_set), hub_set, turn, world_size * workers)
    assert sorted(text for share in shares for text in share) == sorted(f"text {i}" for i in range(rows))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.floats(0.1, 3)), min_size=1, max_size=3),
    world_size=st.integers(1, 3),
    workers=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_every_reader_goes_on_without_end_and_repeats_no_row_before_it_met_all_of_its_own(sizes, world_size, workers, seed):
    sets = [
        texts_only(f"own/{number}", [f"{number} {i}" for i in range(good)] + [f"bad {i}" for i in range(bad)], weight=weight)
        for number, (good, bad, weight) in enumerate(sizes)
    ]
    readers = world_size * workers
    for reader in range(readers):
        texts = read(Texts(*sets, seed=seed), reader, readers, 40)
        assert len(texts) == 40 and not any(text.startswith("bad") for text in texts)
        for number in range(len(sizes)):
            met = Counter(text for text in texts if text.split()[0] == str(number))
            own = one_pass(Texts(sets[number]), sets[number], 0, readers)[reader]
            own = {text for text in own if not text.startswith("bad")} or {f"{number} {i}" for i in range(sizes[number][0])}
            assert {*met} <= own
            assert not met or max(met.values()) - min(met[text] for text in own) <= 1


def test_passes_differ_in_order_and_a_seed_repeats_them():
    hub_set = texts_only("a/b", [str(i) for i in range(30)], files=3)
    texts = read(Texts(hub_set, seed=1), 0, 1, 60)
    assert sorted(texts[:30]) == sorted(texts[30:]) and texts[:30] != texts[30:]
    assert read(Texts(hub_set, seed=1), 0, 1, 60) == texts != read(Texts(hub_set, seed=2), 0, 1, 60)


def test_a_long_stream_is_shuffled_by_a_bounded_buffer_and_no_row_is_lost(monkeypatch):
    monkeypatch.setattr(streaming, "SHUFFLED_ROWS", 8)
    texts = [int(text) for text in read(Texts(texts_only("a/b", [str(i) for i in range(100)])), 0, 1, 100)]
    assert sorted(texts) == list(range(100)) != texts
    assert all(number <= place + 8 for place, number in enumerate(texts))  # what comes later has not been read yet


def test_clips_come_from_the_sources_in_proportion_to_their_weights():
    sets = [texts_only(name, [name] * 20 + ["bad"] * bad, weight=weight) for name, bad, weight in (("a/a", 0, 3), ("b/b", 20, 1))]
    counts = Counter(read(Texts(*sets), 0, 1, 2000))
    assert counts["a/a"] / 2000 == pytest.approx(0.75, abs=0.03)


def test_files_are_shared_out_whole_where_they_divide_evenly():
    hub_set = texts_only("a/b", [f"{i // 5} {i}" for i in range(20)], files=4)
    for share in one_pass(Texts(hub_set), hub_set, 0, 2):
        assert len({text.split()[0] for text in share}) == 2 and len(share) == 10


def test_a_source_without_one_usable_row_ends_the_run_with_the_reasons():
    with pytest.raises(RuntimeError, match=r"^hub:a/b/train: no row can be used: 3 silent$"):
        read(Texts(texts_only("a/b", ["bad"] * 3)), 0, 1, 1)


def test_many_bad_rows_one_after_another_end_the_run_before_the_pass_does(monkeypatch):
    monkeypatch.setattr(streaming, "JUDGED_ROWS", 50)
    with pytest.raises(RuntimeError, match=r"50 rows one after another cannot be used: 50 silent"):
        read(Texts(texts_only("a/b", ["bad"] * 1000)), 0, 1, 1)


# --- counts ------------------------------------------------------------------------------------------------------


def test_rows_read_are_rows_used_plus_rows_dropped():
    stream = Texts(texts_only("a/b", [f"bad {i}" if i % 4 == 0 else f"good {i}" for i in range(40)]))
    notes = [note for _, note in itertools.islice(stream.read(0, 1), 30)]
    assert sum(note.read for note in notes) == 30 + sum(len(note.dropped) for note in notes)


def report(*, dropped: int, read: int, world_size: int = 1, **keys) -> StreamReport:
    counts = StreamReport(DataConfig(**keys), world_size)
    bad = [BadRow("hub:a/b/train", 7, "x.wav", "too_long", "31.0 s")] * dropped
    counts.add([0], [Note("a", read, bad)])
    return counts


def test_too_many_dropped_rows_stop_the_run_once_enough_were_read():
    with pytest.raises(RuntimeError, match=r"1,000 rows read, dropped: 101 too_long; data\.max_dropped_share is 0\.1; the first: hub:a/b/train: x\.wav: too_long"):
        report(dropped=101, read=1000)
    with pytest.raises(RuntimeError, match="101 too_long"):
        report(dropped=101, read=500, world_size=2)
    assert report(dropped=100, read=1000).dropped == {"too_long": 100}
    early = report(dropped=500, read=999)
    with pytest.raises(RuntimeError, match="500 too_long"):
        early.judge()  # at the end


def test_with_fail_the_first_bad_row_stops_the_run():
    with pytest.raises(RuntimeError, match="data.on_bad_row is fail; the first: hub:a/b/train: x.wav"):
        report(dropped=1, read=10, on_bad_row="fail")


# --- with sound --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A toy model, a set of 20 clips in two files with one bad row, and a split dev of three."""
    folder = tmp_path_factory.mktemp("world")
    toy.build_whisper(folder / "model")
    texts = [f"text {i}" for i in range(20)]
    texts[3] = ""
    toy.write_hub_set(folder / "hub", {"text": texts}, files=2)
    toy.write_hub_set(folder / "hub", {"text": texts[:3]}, split="dev")
    return folder


@pytest.fixture(scope="module")
def labels(world) -> LabelBuilder:
    model = ModelConfig(name=str(world / "model"), language="hi")
    return LabelBuilder(read_base_model(model, max_new_tokens=4, num_beams=1), model)


def data_of(world: Path, **keys) -> DataConfig:
    source = DataSource(hub=str(world / "hub"), split="train", **keys)
    return DataConfig(train=[source], validation={"dev": DataSource(hub=str(world / "hub"), split="dev")}, streaming=True)


def check(data: DataConfig, labels: LabelBuilder, folder: Path):
    return check_sets(data, labels, meeting=Meeting(Place("cpu"), None), folder=folder, with_training=True)


def loader(world: Path, labels: LabelBuilder, folder: Path, *, rank: int = 0, world_size: int = 1, workers: int = 0):
    data = data_of(world)
    streams = check(data, labels, folder)["train"].streams
    place = Place("cpu", rank=rank, world_size=world_size)
    examples = StreamedSpeech(streams, labels, data=data, place=place, seed=1)
    join = partial(collate, start=labels.base.config.decoder_start_token_id, pad=labels.base.config.pad_token_id)
    return build_loader(examples, device="cpu", batch_size=2, collate_fn=join, num_workers=workers)


def names(batches) -> list[str]:
    return [note.name for batch in batches for note in batch["note"]]


def test_the_first_rows_are_checked_before_the_weights_and_go_into_the_report(world, labels, tmp_path):
    checked = check(data_of(world), labels, tmp_path)["train"]
    assert (len(checked.rows), checked.rows_total, len(checked.streams)) == (19, 20, 1)
    part = json.loads((tmp_path / "data_report.json").read_text())["sets"]["train"]
    assert (part["rows_read"], part["dropped"]) == (20, {"empty_text": 1})
    assert part["bad_rows"][0]["line"] == 4
    page = (tmp_path / "data_report.html").read_text()
    assert "<p>train is streamed: the first 100 rows of each source were checked" in page and "Every clip counted here was decoded" in page


def test_the_share_of_speakers_is_told_of_the_first_rows(world, labels, tmp_path, caplog):
    hub = toy.write_hub_set(tmp_path / "hub", {"text": ["text"] * 20, "client": [f"speaker {i}" for i in range(20)]})
    source = DataSource(hub=str(hub), split="train", speaker_column="client", speaker_share=[0, 0.5])
    data = replace(data_of(world), train=[source])
    with caplog.at_level("INFO", logger="manifest"):
        used = len(check(data, labels, tmp_path)["train"].rows)
    assert 0 < used < 20
    assert f"data.train[0]: {20 - used} of the first 20 rows of hub:{hub}/train are left out by speaker_share" in caplog.text


def test_a_recipe_of_a_stream_can_only_score(world, labels, tmp_path):
    checked = check_sets(data_of(world), labels, meeting=Meeting(Place("cpu"), None), folder=tmp_path, with_training=False)
    assert {name: len(part.rows) for name, part in checked.items()} == {"dev": 3}


def test_a_loss_can_be_told_by_its_clips_in_a_step_of_thousands():
    report = StreamReport(DataConfig(), 1)
    report.add(range(2000), [Note(f"clip {i}", 1, []) for i in range(2000)])
    assert report.names[0] == "clip 0"


@pytest.mark.parametrize(("keys", "message"), [({"language": "tlh"}, "no rows are left"), ({"text_column": "words"}, "column 'words' is not there")])
def test_a_wrong_language_or_column_stops_before_the_weights(world, labels, tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        check(data_of(world, **keys), labels, tmp_path)


def test_two_ranks_with_two_workers_meet_each_good_row_of_a_pass_once(world, labels, tmp_path):
    # 20 rows for 4 workers: 5 each, the bad one among those of one worker, which begins its second pass a clip earlier.
    met = []
    for rank in range(2):
        batches = list(itertools.islice(loader(world, labels, tmp_path, rank=rank, world_size=2, workers=2), 4))
        assert [len(batch["labels"]) for batch in batches] == [2] * 4
        met += names(batches)
    assert len(met) == len({*met}) == 16
    assert not any("train-3.wav" in name for name in met)


def test_the_library_neither_splits_a_ranks_stream_again_nor_sends_it_from_the_main_process(world, labels, tmp_path, monkeypatch):
    alone = names(itertools.islice(loader(world, labels, tmp_path, rank=1, world_size=2), 4))
    PartialState()
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    assert names(itertools.islice(loader(world, labels, tmp_path, rank=1, world_size=2), 4)) == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_batches_goes_on_with_the_rows_that_follow(world, labels, tmp_path, workers):
    straight = names(itertools.islice(loader(world, labels, tmp_path, rank=1, world_size=2, workers=workers), 12))
    rest = skip_first_batches(loader(world, labels, tmp_path, rank=1, world_size=2, workers=workers), 5)
    assert names(itertools.islice(rest, 7)) == straight[10:]


STEPS = {"max_steps": 4, "save_total_limit": None, "per_device_train_batch_size": 2, "load_best_model_at_end": False}


def stream_recipe(world: Path, out: Path, **training) -> Path:
    source = {"hub": str(world / "hub"), "split": "train"}
    data = {"train": [source, source | {"weight": 0.5}], "validation": {"dev": source | {"split": "dev"}}, "streaming": True, "max_dropped_share": 0.5}
    return write_recipe(world, data=data, run={"baseline": False}, training=STEPS | {"output_dir": str(out)} | training)


def test_a_resumed_stream_equals_the_straight_run(world, tmp_path, capsys):
    recipe = stream_recipe(world, tmp_path / "straight")
    first = train_here(recipe)
    assert (first["train"]["steps"], first["train"]["windows"]) == (4, 8)
    assert f"clips: 67% hub:{world}/hub/train, 33% hub:{world}/hub/train" in capsys.readouterr().out
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-4")
    (tmp_path / "resumed" / "results.json").unlink()
    again = train_here(recipe, "--training.output_dir", str(tmp_path / "resumed"), "--run.resume", "auto")
    assert again["train"]["windows"] == 4
    weights = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("straight", "resumed")]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


def test_two_processes_train_on_a_stream_and_score_a_hub_set(world, tmp_path):
    recipe = stream_recipe(world, tmp_path / "out", dataloader_num_workers=2, gradient_accumulation_steps=2, logging_steps=1)
    run = launch(recipe, processes=2, HF_DATASETS_CACHE=str(tmp_path / "cache"), XDG_CACHE_HOME=str(tmp_path / "measures"))
    assert run.status == 0, run.tail
    assert run.results["train"]["steps"] == 4 and run.results["train"]["windows"] == 4 * 2 * 2 * 2
    assert run.results["final"]["dev"]["rows_scored"] == 3
    assert run.stdout.count("train is streamed") == 1
