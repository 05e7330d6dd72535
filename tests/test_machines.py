"""Several machines see the same manifests, sound files and, where it is needed, the same output folder, or the run does not start."""

import shutil
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

import machines
from config import DataConfig, DataSource, ModelConfig
from device import Place
from faults import UserError
from labels import LabelBuilder
from launching import ROOT, execute, write_recipe
from machines import check_same_disk, check_same_files, measure_files, needs_shared_folder
from manifest import read_manifest
from meeting import Meeting, Member
from model import read_base_model
from sets import check_sets
from toy import build_whisper, write_hub_set, write_speech

MEMBERS = {rank: Member(host, 0, 2, "cpu", "CPU", "float32", {}, {}) for rank, host in enumerate(("alpha", "beta"))}


@pytest.fixture
def rows(tmp_path):
    write_speech(tmp_path, ["one", "two", "three"])
    return read_manifest(str(tmp_path / "train.jsonl"))[0]


def on_machines(work) -> list:
    """Calls `work` with the meeting and the number of each of two machines; gives results and UserErrors."""
    store, found = dist.HashStore(), [None, None]

    def run(rank: int) -> None:
        try:
            found[rank] = work(Meeting(Place("cpu", rank=rank, world_size=2, local_world_size=1), store, MEMBERS), rank)
        except UserError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


# --- data --------------------------------------------------------------------------------------------------------


def test_the_same_files_pass_missing_ones_included(rows, tmp_path):
    Path(rows[1].audio).unlink()
    measured = measure_files(rows)
    assert measured.shape == (3, 2) and measured[1, 1] == -1 and measured[0, 1] == Path(rows[0].audio).stat().st_size
    check_same_files(rows, measured)
    check_same_files([], measure_files([]))


def test_the_first_sound_file_that_differs_or_is_missing_is_named_with_its_line(rows, tmp_path):
    expected = measure_files(rows)
    size = Path(rows[2].audio).stat().st_size
    Path(rows[2].audio).write_bytes(b"short")
    with pytest.raises(UserError, match=rf"train.jsonl:3: {rows[2].audio} has 5 bytes here and has {size:,} bytes where the main"):
        check_same_files(rows, expected)
    Path(rows[1].audio).unlink()
    with pytest.raises(UserError, match=rf"train.jsonl:2: {rows[1].audio} is missing here and has"):
        check_same_files(rows, expected)
    with pytest.raises(UserError, match=rf"train.jsonl:2: {rows[1].audio} has .* here and is missing where"):
        there = np.where([[False, False], [False, True], [False, False]], -1, expected)
        Path(rows[1].audio).write_bytes(b"x" * int(expected[1, 1]))
        check_same_files(rows, there)


@pytest.mark.parametrize("change", [{"text": "other"}, {"start": 0.1}, {"language": "fr"}, {"audio": "clips/9.wav"}, {"speaker": "s1"}])
def test_a_manifest_line_that_differs_is_named(rows, change):
    expected = measure_files(rows)
    with pytest.raises(UserError, match=r"train.jsonl:2: this line is another one than the main process reads"):
        check_same_files([rows[0], replace(rows[1], **change), rows[2]], expected)


def test_a_manifest_with_fewer_rows_is_told(rows):
    with pytest.raises(UserError, match="have 2 rows here and 3 where the main process reads"):
        check_same_files(rows[:2], measure_files(rows))


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    model = ModelConfig(name=str(build_whisper(tmp_path_factory.mktemp("model") / "toy")), language="hi")
    return LabelBuilder(read_base_model(model, max_new_tokens=4, num_beams=1), model, allow_empty_text=False)


def check_on_machines(tmp_path, labels, monkeypatch, source: DataSource, spoil) -> list:
    """check_sets on both machines; `spoil` changes the files once the main process has read them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    once = Meeting.once

    def once_and_spoil(self, work):
        def spoiling() -> bytes:
            result = work()
            spoil()
            return result

        return once(self, spoiling)

    monkeypatch.setattr(Meeting, "once", once_and_spoil)
    data = DataConfig(train=[source], validation={})
    return on_machines(lambda here, rank: check_sets(data, labels, meeting=here, folder=tmp_path / f"out{rank}", with_training=True))


def test_two_machines_with_the_same_files_use_the_same_rows_and_one_writes_the_report(tmp_path, labels, monkeypatch):
    manifest = write_speech(tmp_path, ["one", "two", "three"])
    first, second = check_on_machines(tmp_path, labels, monkeypatch, DataSource(path=str(manifest)), lambda: None)
    assert first["train"].rows == second["train"].rows and len(first["train"].rows) == 3
    assert (tmp_path / "out0" / "data_report.json").is_file() and not (tmp_path / "out1").exists()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "train" / "1.wav").write_bytes(b"cut"), "rank 1 (beta): {0}/train.jsonl:2: {0}/train/1.wav has 3 bytes"),
        (lambda folder: (folder / "train.jsonl").unlink(), "rank 1 (beta): data.train[0].path: there is no file or folder {0}/train.jsonl; "),
    ],
)
def test_a_machine_with_another_file_is_named_by_the_main_process(tmp_path, labels, monkeypatch, spoil, said):
    manifest = write_speech(tmp_path, ["one", "two", "three"])
    first, second = check_on_machines(tmp_path, labels, monkeypatch, DataSource(path=str(manifest)), lambda: spoil(tmp_path))
    assert first.problems[0].startswith(said.format(tmp_path))
    assert second.problems == ["stopped by the main process: its output, on alpha, tells why"]


def test_a_machine_that_does_not_see_the_cache_of_a_hub_set_says_which_disk_to_share(tmp_path, labels, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    source = DataSource(hub=str(write_hub_set(tmp_path / "set", {"text": ["one", "two"]})), split="train")
    first, _ = check_on_machines(tmp_path, labels, monkeypatch, source, lambda: shutil.rmtree(tmp_path / "hub"))
    assert any("set HF_HOME to a folder on a disk that all machines share" in problem for problem in first.problems)


# --- the output folder -------------------------------------------------------------------------------------------


def recipe_of(folder: Path, *, resume: str = "never", **training) -> SimpleNamespace:
    settings = {"do_train": True, "load_best_model_at_end": True, "save_strategy": "steps", "output_dir": str(folder)}
    return SimpleNamespace(run=SimpleNamespace(resume=resume), training=settings | training)


@pytest.mark.parametrize(
    ("resume", "training", "needed"),
    [
        ("never", {}, True),
        ("never", {"load_best_model_at_end": False}, False),
        ("auto", {"load_best_model_at_end": False}, True),
        ("never", {"save_strategy": "no"}, False),
        ("auto", {"do_train": False}, False),
    ],
)
def test_all_machines_need_the_folder_when_they_read_checkpoints(resume, training, needed):
    assert needs_shared_folder(recipe_of(Path("out"), resume=resume, **training)) == needed


def test_a_folder_on_a_shared_disk_passes_and_nothing_is_left_in_it(tmp_path):
    assert on_machines(lambda here, rank: check_same_disk(recipe_of(tmp_path), here)) == [None, None]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_each_machines_own_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "TOKEN_SECONDS", 0.5)
    folders = [tmp_path / "alpha", tmp_path / "beta"]
    for folder in folders:
        folder.mkdir()
    first, second = on_machines(lambda here, rank: check_same_disk(recipe_of(folders[rank]), here))
    assert first.problems[0].startswith(f"rank 1 (beta): training.output_dir: {folders[1]} is another folder here")
    assert second.problems == ["stopped by the main process: its output, on alpha, tells why"]
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_on_one_machine_nothing_is_written(tmp_path):
    check_same_disk(recipe_of(tmp_path / "none"), Meeting(Place("cpu"), None))


# --- two launchers -----------------------------------------------------------------------------------------------


def test_two_launchers_train_together_and_leave_one_result(tmp_path):
    build_whisper(tmp_path / "model")
    write_speech(tmp_path, [f"clip {i}" for i in range(4)])
    write_speech(tmp_path, ["one", "two", "three"], name="dev")
    recipe = write_recipe(tmp_path, run={"baseline": False})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs = [None, None]

    def start(rank: int) -> None:
        words = f"launch --multi_gpu --num_machines 2 --machine_rank {rank} --main_process_ip 127.0.0.1"
        words += f" --main_process_port {port} --num_processes 2"
        command = [str(Path(sys.executable).parent / "accelerate"), *words.split(), str(ROOT / "src" / "train.py"), "--config", str(recipe)]
        runs[rank] = execute(command, output_dir=tmp_path / "out", CUDA_VISIBLE_DEVICES="")

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.status for run in runs] == [0, 0], runs[0].tail + runs[1].tail
    assert runs[0].results["world_size"] == 2 and runs[0].results["status"] == "finished"
    assert runs[0].results["final"]["dev"]["rows_scored"] == 3
    assert "rank 1: " in runs[0].stdout and runs[1].stdout == ""
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".seen")]
