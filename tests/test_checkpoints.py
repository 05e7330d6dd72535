"""What a run can go on from is whole or not there: checkpoints are named when they are verified, and damaged ones passed over."""

import json
import os
import re
import resource
import shutil
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import checkpoints
import trainer
from checkpoints import choose_old, find_checkpoint, find_damage, list_checkpoints, publish, read_baseline, verify, write_checksums
from faults import progress
from launching import ROOT, launch, train_here, write_recipe
from output import write_json
from toy import build_whisper, write_speech
from trainer import WhisperTrainer


@pytest.fixture
def out(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def write_checkpoint(folder: Path, step: int, *, weights: str = "adapter_model.safetensors", ranks: int = 1, checksums: bool = True) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    save_file({"lora_A": torch.randn(8, 8)}, checkpoint / weights)
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"state": torch.randn(64)}, checkpoint / name)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name in ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]:
        torch.save({}, checkpoint / name)
    if checksums:
        write_checksums(checkpoint)
    return checkpoint


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def flip(path: Path) -> None:
    """Changes one byte in the middle of the stored numbers."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_newest_checkpoint_is_that_of_the_highest_step(out):
    for step in (9, 100, 10):
        write_checkpoint(out, step)
    (out / "checkpoint-best").mkdir()
    assert find_checkpoint(out, world_size=1) == (out / "checkpoint-100", [])


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "model.safetensors"])
def test_an_adapters_and_a_full_models_checkpoint_are_complete(out, weights):
    checkpoint = write_checkpoint(out, 5, weights=weights)
    assert find_checkpoint(out, world_size=1) == (checkpoint, [])


def test_no_checkpoint_is_none(out):
    assert find_checkpoint(out, world_size=1) == (None, [])


DAMAGES = {
    "weights cut off": lambda checkpoint: cut(checkpoint / "adapter_model.safetensors"),
    "weights cut off in the header": lambda checkpoint: cut(checkpoint / "adapter_model.safetensors", 0.05),
    "weights empty": lambda checkpoint: cut(checkpoint / "adapter_model.safetensors", 0),
    "weights missing": lambda checkpoint: (checkpoint / "adapter_model.safetensors").unlink(),
    "optimizer cut off": lambda checkpoint: cut(checkpoint / "optimizer.pt"),
    "optimizer empty": lambda checkpoint: cut(checkpoint / "optimizer.pt", 0),
    "optimizer missing": lambda checkpoint: (checkpoint / "optimizer.pt").unlink(),
    "optimizer changed": lambda checkpoint: flip(checkpoint / "optimizer.pt"),
    "scheduler cut off": lambda checkpoint: cut(checkpoint / "scheduler.pt", 0.9),
    "state missing": lambda checkpoint: (checkpoint / "trainer_state.json").unlink(),
    "state cut off": lambda checkpoint: cut(checkpoint / "trainer_state.json"),
    "state empty": lambda checkpoint: cut(checkpoint / "trainer_state.json", 0),
    "all missing": lambda checkpoint: [path.unlink() for path in checkpoint.iterdir()],
}


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_line(out, damage, checksums):
    for step in (5, 10):
        write_checkpoint(out, step, checksums=checksums)
    DAMAGES[damage](out / "checkpoint-10")
    checkpoint, notes = find_checkpoint(out, world_size=1)
    assert checkpoint == out / "checkpoint-5"
    (note,) = notes
    assert note.startswith(f"warning: {out / 'checkpoint-10'} is passed over: ") and len(note.splitlines()) == 1


FILES = ["adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth"]
DAMAGE = st.fixed_dictionaries({
    "name": st.sampled_from(FILES),
    "how": st.sampled_from(["flip", "zero", "cut", "grow", "swap"]),
    "place": st.floats(0, 1, exclude_max=True),
    "bit": st.integers(0, 7),
})


def damage_bytes(content: bytes, *, how: str, place: float, bit: int) -> bytes:
    at = int(place * len(content))
    changed = {"flip": bytes([content[at] ^ 1 << bit]), "zero": b"\0", "cut": b"", "grow": content[at : at + 1] + b"0", "swap": content[at : at + 2][::-1]}
    return content[:at] if how == "cut" else content[:at] + changed[how] + content[at + (2 if how == "swap" else 1) :]


def read_all(checkpoint: Path) -> str:
    """Everything a resumed run reads, as text."""
    states = [torch.load(checkpoint / name, weights_only=True) for name in FILES if not name.endswith(("safetensors", "json"))]
    weights = {name: tensor.tolist() for name, tensor in load_file(checkpoint / FILES[0]).items()}
    return str((weights, states, json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))))


@settings(deadline=None, derandomize=True, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=DAMAGE)
def test_rule_13_a_checkpoint_damaged_at_any_byte_is_recognised_or_reads_as_it_was(out, damage):
    checkpoint = out / "checkpoint-5"
    if not checkpoint.exists():
        write_checkpoint(out, 5)
    path = checkpoint / damage.pop("name")
    content, before = path.read_bytes(), read_all(checkpoint)
    path.write_bytes(damage_bytes(content, **damage))
    try:
        found, notes = find_checkpoint(out, world_size=1)
        if found:
            assert read_all(checkpoint) == before
        else:
            assert len(notes) == 1 and len(notes[0].splitlines()) == 1
    finally:
        path.write_bytes(content)


def test_when_all_are_damaged_none_is_left_and_each_is_told(out):
    for step in (5, 10):
        cut(write_checkpoint(out, step) / "optimizer.pt")
    checkpoint, notes = find_checkpoint(out, world_size=1)
    assert checkpoint is None and len(notes) == 2


@pytest.mark.parametrize(("written", "resumed", "exact"), [(1, 1, True), (2, 2, True), (1, 2, False), (2, 1, False), (2, 4, False)])
def test_random_states_of_another_number_of_processes_are_a_warning_only(out, written, resumed, exact):
    checkpoint = write_checkpoint(out, 5, ranks=written)
    found, notes = find_checkpoint(out, world_size=resumed)
    assert found == checkpoint and len(notes) == (not exact)
    assert exact or f"no random states for {resumed} process" in notes[0]


def test_a_missing_random_state_is_a_warning_only(out):
    checkpoint = write_checkpoint(out, 5)
    (checkpoint / "rng_state.pth").unlink()
    found, notes = find_checkpoint(out, world_size=1)
    assert found == checkpoint and notes[0].startswith("warning: checkpoint-5 holds no random states")


def test_a_baseline_comes_back_or_is_empty(out):
    assert read_baseline(out) == {}
    write_json(out / "baseline.json", {"dev": {"wer": 30.0}})
    assert read_baseline(out) == {"dev": {"wer": 30.0}}
    cut(out / "baseline.json")
    assert read_baseline(out) == {}


@pytest.mark.parametrize("missing", ["scaler.pt", "scheduler.pt", "trainer_state.json"])
def test_a_checkpoint_without_one_of_its_own_files_is_passed_over(out, missing):
    checkpoint = write_checkpoint(out, 5, checksums=False)
    torch.save({}, checkpoint / "scaler.pt")
    write_checksums(checkpoint)
    assert find_damage(checkpoint) is None
    (checkpoint / missing).unlink()
    found, (note,) = find_checkpoint(out, world_size=1)
    assert found is None and missing in note


def test_random_states_of_every_rank_have_checksums(out):
    checkpoint = write_checkpoint(out, 5, ranks=2)
    flip(checkpoint / "rng_state_1.pth")
    assert find_damage(checkpoint) == "rng_state_1.pth is damaged"


def test_verifying_reads_every_number(out):
    checkpoint = write_checkpoint(out, 5)
    verify(checkpoint)
    (checkpoint / "optimizer.pt").write_bytes((checkpoint / "checksums.json").read_bytes())
    (checkpoint / "checksums.json").unlink()
    with pytest.raises(RuntimeError, match=f"^{checkpoint} cannot be resumed from: BadZipFile"):
        verify(checkpoint)


class Unsafe:
    pass


def test_verifying_refuses_what_safe_loading_would_refuse(out):
    checkpoint = write_checkpoint(out, 5)
    torch.save({"state": Unsafe()}, checkpoint / "optimizer.pt")
    write_checksums(checkpoint)
    assert find_damage(checkpoint) is None
    with pytest.raises(RuntimeError, match="cannot be resumed from: UnpicklingError"):
        verify(checkpoint)


# --- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "newest", "best", "most", "removed"),
    [
        ([1, 2, 3], 3, None, 2, [1]),
        ([1, 2, 3], 3, None, 1, [1, 2]),
        ([1, 2, 3], 3, None, None, []),
        ([1, 2, 3], 3, None, 0, []),
        ([1, 2, 3], 3, "/moved/out/checkpoint-1", 2, [2]),
        ([1, 2, 3], 3, "/moved/out/checkpoint-1", 1, [2]),
        ([1, 2, 3], 3, "/moved/out/checkpoint-3", 1, [1, 2]),
        ([1, 2, 3, 4], 4, "/moved/out/checkpoint-2", 3, [1]),
        ([1, 2, 8], 3, None, 2, [1, 8]),  # a resumed run passed 8 over
        ([1, 2, 8, 9], 3, None, 3, [8, 9]),
        ([1, 2, 3], 3, "/gone/checkpoint-0", 3, []),
        ([3], 3, None, 1, []),
    ],
)
def test_the_newest_and_the_best_checkpoint_are_never_removed(out, steps, newest, best, most, removed):
    found = [out / f"checkpoint-{step}" for step in sorted({*steps, newest})]
    old = choose_old(found, newest=out / f"checkpoint-{newest}", best=best, most=most)
    assert sorted(path.name for path in old) == [f"checkpoint-{step}" for step in removed]


def write_beside(out: Path, step: int) -> Path:
    (out / ".saving").mkdir()
    return write_checkpoint(out / ".saving", step, checksums=False)


def test_a_checkpoint_that_cannot_be_resumed_from_gets_no_name_and_nothing_is_removed_for_it(out):
    write_checkpoint(out, 5)
    beside = write_beside(out, 10)
    cut(beside / "optimizer.pt")
    with pytest.raises(RuntimeError, match="checkpoint-10 is not what was written"):
        publish(beside, most=1, best=None)
    assert find_checkpoint(out, world_size=1) == (out / "checkpoint-5", [])
    assert list_checkpoints(out) == [out / "checkpoint-5"]


def test_a_damaged_checkpoint_gives_way_to_a_new_one_of_the_same_step(out):
    cut(write_checkpoint(out, 5) / "optimizer.pt")
    publish(write_beside(out, 5), most=1, best=None)
    assert find_checkpoint(out, world_size=1) == (out / "checkpoint-5", [])
    assert not (out / ".saving").exists()


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    build_whisper(folder / "model")
    write_speech(folder, [f"clip {i} " * (1 + i % 4) for i in range(8)])
    write_speech(folder, [f"clip {i} " * (1 + i % 4) for i in range(6)], name="six")
    write_speech(folder, [f"other {i}" for i in range(3)], name="dev")
    return folder


def saving_recipe(speech: Path, out: Path, **training) -> Path:
    """Four steps, a checkpoint after the second and the fourth, one kept."""
    steps = {"max_steps": 4, "eval_strategy": "no", "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": False}
    return write_recipe(speech, run={"baseline": False}, training=steps | {"output_dir": str(out)} | training)


class Killed(BaseException):
    """A process that is killed runs no handler of errors; neither does any here for this."""


def killing(function, moment: int, moments: list[str]):
    """The function itself, but the call that comes as number `moment` is the process's last."""

    def call(*args, **words):
        moments.append(function.__name__)
        if len(moments) == moment + 1:
            raise Killed
        return function(*args, **words)

    return call


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("moment", range(5))
def test_a_process_killed_at_any_moment_of_naming_a_checkpoint_leaves_a_good_one(out, monkeypatch, moment, most):
    moments = []
    for step in (3, 5):
        write_checkpoint(out, step)
    beside = write_beside(out, 10)
    with monkeypatch.context() as patch:
        for owner, name in [(checkpoints, "write_checksums"), (checkpoints, "find_damage"), (os, "replace"), (shutil, "rmtree")]:
            patch.setattr(owner, name, killing(getattr(owner, name), moment, moments))
        with pytest.raises(Killed):
            publish(beside, most=most, best=None)
    found, notes = find_checkpoint(out, world_size=1)
    assert (found.name, notes) == ("checkpoint-5" if moment < 3 else "checkpoint-10", [])
    assert all(find_damage(checkpoint) is None for checkpoint in list_checkpoints(out))


def test_what_a_killed_save_leaves_is_not_resumed_from_and_is_gone_afterwards(speech, tmp_path, monkeypatch):
    out, stock = tmp_path / "out", WhisperTrainer._save_scaler

    def kill(self, folder):
        if self.state.global_step == 4:
            raise Killed
        stock(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(WhisperTrainer, "_save_scaler", kill)
        with pytest.raises(Killed):
            train_here(saving_recipe(speech, out))
    progress.phase = "load"
    assert (out / ".saving" / "checkpoint-4" / "optimizer.pt").is_file()
    assert find_checkpoint(out, world_size=1) == (out / "checkpoint-2", [])
    train_here(saving_recipe(speech, out), "--run.resume", "auto", "--check")
    assert (out / ".saving").exists()  # a check changes nothing: the run may be at work
    assert train_here(saving_recipe(speech, out), "--run.resume", "auto")["train"]["steps"] == 4
    assert [path.name for path in out.glob(".*")] == [".lock"] and list_checkpoints(out) == [out / "checkpoint-4"]


WRITERS = {
    "*.safetensors": (peft.peft_model, "safe_save_file"),
    "optimizer.pt": (WhisperTrainer, "_save_optimizer_and_scheduler"),
    "rng_state.pth": (trainer, "gather_object"),
}


@pytest.mark.parametrize("file", WRITERS)
def test_a_full_disk_ends_the_run_with_the_file_named_and_the_older_checkpoint_stays(speech, tmp_path, monkeypatch, file):
    owner, name = WRITERS[file]
    out, stock = tmp_path / "out", getattr(owner, name)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def without_space(*args, **words):
        if (out / "checkpoint-1").exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        return stock(*args, **words)

    monkeypatch.setattr(owner, name, without_space)
    try:
        with pytest.raises(OSError) as caught:
            train_here(saving_recipe(speech, out, save_steps=1, max_steps=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"{out / '.saving' / 'checkpoint-2' / file} could not be written (")
    assert progress.phase == "save"
    progress.phase = "load"
    assert find_checkpoint(out, world_size=1) == (out / "checkpoint-1", [])


def test_a_trained_tensor_that_is_not_finite_never_becomes_a_checkpoint(speech, tmp_path, monkeypatch):
    stock = WhisperTrainer._save_checkpoint

    def spoil(self, *args):
        if self.state.global_step == 4:
            next(tensor for name, tensor in self.model.named_parameters() if "lora_A" in name).data[0, 0] = float("inf")
        stock(self, *args)

    monkeypatch.setattr(WhisperTrainer, "_save_checkpoint", spoil)
    with pytest.raises(FloatingPointError, match="^not finite: 1 trained tensors: .*lora_A"):
        train_here(saving_recipe(speech, tmp_path / "out"))
    progress.phase = "load"
    assert [path.name for path in (tmp_path / "out").glob("*checkpoint*")] == ["checkpoint-2"]
    assert not (tmp_path / "out" / ".saving").exists()


def test_ranks_without_a_common_disk_take_the_main_processs_decisions_and_its_best_model(speech, tmp_path):
    out, elsewhere, state = tmp_path / "out", tmp_path / "elsewhere", tmp_path / "state.json"
    steps = {"max_steps": 6, "eval_steps": 1, "save_steps": 1, "save_total_limit": 1, "output_dir": str(out)}
    recipe = write_recipe(speech, run={"baseline": False, "early_stopping_patience": 2}, training=steps)
    script = ROOT / "tests" / "apart.py"
    folders = {"FOLDER_OF_RANK_0": str(out), "FOLDER_OF_RANK_1": str(elsewhere)}
    run = launch(recipe, processes=2, script=script, STATE_OF_RANK_1=str(state), timeout=150, **folders)
    assert run.status == 0, run.tail
    assert run.results["best"] == {"metric": "dev_wer", "value": 30.0, "step": 6}
    other = json.loads(state.read_text())
    assert (other["steps"], other["best_metric"], Path(other["best"]).name) == (6, 30.0, "checkpoint-6")
    assert not elsewhere.exists()
    assert re.search(r"warning: skipped step 3: the loss is nan on .*train.jsonl:\d+ \(.*\) \(rank 1\)\n", run.stdout)
    assert run.results["train"]["skipped_steps"] == 1
    assert {path.name for path in (out / "checkpoint-6").glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    saved = load_file(out / "adapter_model.safetensors")
    assert sorted(map(str, other["weights"].values())) == sorted(str(tensor.tolist()) for tensor in saved.values())


def test_a_run_goes_on_alike_on_another_number_of_processes(speech, tmp_path):
    straight, two, one = (tmp_path / name for name in ("straight", "two", "one"))
    steps = {"max_steps": 6, "save_steps": 1, "save_total_limit": None, "logging_steps": 1, "eval_strategy": "no"}
    recipe = write_recipe(
        speech,
        data={"train": [str(speech / "six.jsonl")]},  # six clips: the second batch of four is filled up from the first
        run={"baseline": False, "global_batch_size": 4},
        training=steps | {"output_dir": str(straight), "load_best_model_at_end": False, "lr_scheduler_type": "cosine"},
    )
    first = train_here(recipe)
    for begun, goes_on, step in ((straight, two, 3), (two, one, 5)):
        shutil.copytree(begun, goes_on)
        (goes_on / "results.json").unlink()
        for checkpoint in list_checkpoints(goes_on)[step:]:
            shutil.rmtree(checkpoint)
        words = ["--training.output_dir", str(goes_on), "--run.resume", "auto"]
        if goes_on == two:
            run = launch(recipe, *words, processes=2, timeout=200)
            assert run.status == 0, run.tail
            assert "no random states for 2 processes" in run.stdout
        else:
            train_here(recipe, *words)
        histories = [json.loads((out / "checkpoint-6" / "trainer_state.json").read_text())["log_history"] for out in (straight, goes_on)]
        assert len(histories[0]) == len(histories[1]) == 6
        for expected, entry in zip(*histories, strict=True):
            assert entry["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert (entry["learning_rate"], entry["epoch"]) == (expected["learning_rate"], expected["epoch"])
        results = json.loads((goes_on / "results.json").read_text())
        assert results["global_batch_size"] == 4
        assert results["final"]["dev"]["loss"] == pytest.approx(first["final"]["dev"]["loss"], abs=1e-5)
