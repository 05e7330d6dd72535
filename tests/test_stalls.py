"""Faults in real two-process runs: each ends in time with its cause told, leaves no damaged checkpoint, and the next run goes on.

The ranks are forked from a process that has the imports done (forking.py). A core runs always, the rest with -m long.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from checkpoints import find_damage, list_checkpoints
from forking import Launcher
from launching import ROOT, TWO_PROCESSES, train_here, write_recipe
from toy import build_whisper, write_speech

STALL_SECONDS = 6
SECONDS_TO_END = 30
SECONDS_TO_END_BY_FORCE = STALL_SECONDS + 45


@pytest.fixture(scope="module")
def launcher():
    kept = Launcher()
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stalls")
    build_whisper(folder / "model")
    write_speech(folder, [f"clip {i}" for i in range(6)])
    write_speech(folder, [f"other {i}" for i in range(3)], name="dev")
    return folder


def recipe_in(speech, folder, **run):
    return write_recipe(
        speech,
        name=folder.name,
        run={"baseline": False, "resume": "auto", "stall_timeout_seconds": float(STALL_SECONDS)} | run,
        training={"output_dir": str(folder / "out"), "max_steps": 6, "eval_steps": 3, "save_steps": 3, "save_total_limit": 1},
    )


def check_folder(out, *, expected: str | None) -> None:
    """No checkpoint is damaged; the newest one is the expected one."""
    found = list_checkpoints(out)
    assert [find_damage(checkpoint) for checkpoint in found] == [None] * len(found)
    assert (found[-1].name if found else None) == expected


def check_that_it_goes_on(recipe, capsys, *, expected: str | None) -> None:
    capsys.readouterr()
    results = train_here(recipe)
    assert results["status"] == "finished" and results["train"]["steps"] == 6
    told = capsys.readouterr().out
    assert (f"{expected}\n" in told) if expected else ("starting anew" in told)


def fault(kind: str, rank: int, phase: str, step: int, *, message: str, checkpoint: str | None, long: bool = True):
    marks = [pytest.mark.long] if long else []
    return pytest.param(kind, rank, phase, step, message, checkpoint, id=f"{kind} in {phase} on rank {rank}", marks=marks)


FAILURE = "rank {rank}, phase {phase}, step {step}: "
STALL = "stalled: rank {rank} has made no progress for"


@pytest.mark.parametrize(
    ("kind", "rank", "phase", "step", "message", "checkpoint"),
    [
        fault("raise", 1, "load", 0, message=FAILURE + "ValueError: a planted fault", checkpoint=None),
        fault("raise", 0, "data", 3, message=FAILURE + "ValueError: a planted fault", checkpoint="checkpoint-3", long=False),
        fault("raise", 1, "evaluate", 6, message=FAILURE + "ValueError: a planted fault", checkpoint="checkpoint-3"),
        fault("raise", 0, "save", 6, message=FAILURE + "ValueError: a planted fault", checkpoint="checkpoint-3"),
        fault("oom", 1, "backward", 5, message=FAILURE + "OutOfMemoryError: CUDA out of memory (planted). Lower", checkpoint="checkpoint-3"),
        fault("oom", 0, "evaluate", 6, message=FAILURE + "OutOfMemoryError", checkpoint="checkpoint-3"),
        fault("full", 0, "save", 6, message="rank {rank}, phase save, step {step}: ", checkpoint="checkpoint-3", long=False),
        fault("SIGKILL", 1, "forward", 5, message="rank 0, phase ", checkpoint="checkpoint-3", long=False),
        fault("SIGKILL", 0, "save", 6, message="rank 1", checkpoint="checkpoint-3"),
        fault("SIGKILL", 1, "evaluate", 6, message="rank 0, phase evaluate, step 6: ", checkpoint="checkpoint-3"),
        fault("SIGSTOP", 1, "backward", 5, message="stalled: rank {rank} has not answered for", checkpoint="checkpoint-3"),
        fault("SIGSTOP", 0, "evaluate", 6, message="stalled: rank {rank} has not answered for", checkpoint="checkpoint-3"),
        fault("stuck", 1, "load", 0, message=STALL, checkpoint=None),
        fault("stuck", 0, "data", 0, message=STALL, checkpoint=None),
        fault("stuck", 1, "forward", 1, message=" s (phase forward, step 1); rank 0 waits for it", checkpoint=None, long=False),
        fault("stuck", 0, "backward", 4, message=STALL, checkpoint="checkpoint-3"),
        fault("stuck", 1, "evaluate", 6, message=STALL, checkpoint="checkpoint-3"),
        fault("stuck", 1, "save", 6, message=STALL, checkpoint="checkpoint-3"),
    ],
)  # fmt: skip
def test_a_fault_ends_the_job_in_time_and_the_next_run_goes_on(
    launcher, speech, tmp_path, capsys, kind, rank, phase, step, message, checkpoint
):
    recipe, out = recipe_in(speech, tmp_path), tmp_path / "out"
    end = launcher.run(recipe, fault={"kind": kind, "rank": rank, "phase": phase, "step": step})
    assert all(status not in (0, None) for status in end["statuses"]), end["output"][-3000:]
    limit = {"SIGSTOP": SECONDS_TO_END_BY_FORCE, "stuck": STALL_SECONDS + SECONDS_TO_END}.get(kind, SECONDS_TO_END)
    assert end["after"] < limit
    words = message.format(rank=rank, phase=phase, step=step)
    assert words in end["output"], end["output"][-3000:]
    if kind in ("stuck", "SIGSTOP"):
        report = (out / "stall_report.txt").read_text()
        assert "thread MainThread:" in report and "last collective: " in report
        assert ("meet(kind, path)" in report) == (kind == "stuck")  # the very line where it hangs
    check_folder(out, expected=checkpoint)
    assert not (out / "results.json").exists()
    check_that_it_goes_on(recipe, capsys, expected=checkpoint)


def stop(signals: dict | None, fault: dict | None, *, saved: str | None, name: str, long: bool = True):
    return pytest.param(signals, fault, saved, id=name, marks=[pytest.mark.long] if long else [])


@pytest.mark.parametrize(
    ("signals", "fault", "saved"),
    [
        stop({"'epoch': '0.3333'": "SIGTERM"}, None, saved="checkpoint-", name="SIGTERM to all in training"),
        stop({"'epoch': '0.3333'": "SIGINT"}, None, saved="checkpoint-", name="SIGINT to all in training"),
        stop(None, {"kind": "SIGTERM", "rank": 1, "phase": "forward", "step": 4}, saved="checkpoint-4", name="SIGTERM to one rank", long=False),
        stop(None, {"kind": "SIGTERM", "rank": 0, "phase": "evaluate", "step": 3}, saved="checkpoint-3", name="SIGTERM in an evaluation"),
        stop(None, {"kind": "SIGTERM", "rank": 1, "phase": "save", "step": 3}, saved="checkpoint-", name="SIGTERM while saving"),
        stop(None, {"kind": "SIGTERM", "rank": 0, "phase": "load", "step": 0}, saved=None, name="SIGTERM while loading"),
        stop(None, {"kind": "SIGTERM", "rank": 1, "phase": "data", "step": 0}, saved=None, name="SIGTERM while data is checked"),
    ],
)  # fmt: skip
def test_a_stop_on_purpose_saves_and_ends_well_on_all_ranks(launcher, speech, tmp_path, capsys, signals, fault, saved):
    recipe, out = recipe_in(speech, tmp_path), tmp_path / "out"
    end = launcher.run(recipe, fault=fault, signals=signals)
    assert end["statuses"] == [0, 0], end["output"][-3000:]
    assert end["after"] < 25
    results = json.loads((out / "results.json").read_text())
    assert results["status"] == "stopped_early"
    assert any(name in results["why"] for name in ("SIGTERM", "SIGINT"))
    found = list_checkpoints(out)
    assert bool(found) == (saved is not None) and (saved or "") in "".join(checkpoint.name for checkpoint in found)
    check_folder(out, expected=found[-1].name if found else None)
    check_that_it_goes_on(recipe, capsys, expected=found[-1].name if found else None)


@pytest.mark.parametrize(
    ("kind", "phase", "step"),
    [
        pytest.param("busy", "load", 0, marks=pytest.mark.long),
        pytest.param("busy", "data", 0),
        pytest.param("busy", "save", 3, marks=pytest.mark.long),
    ],
)
def test_long_work_is_no_stall(launcher, speech, tmp_path, kind, phase, step):
    recipe = recipe_in(speech, tmp_path)
    end = launcher.run(recipe, fault={"kind": kind, "rank": 0, "phase": phase, "step": step})
    assert end["statuses"] == [0, 0], end["output"][-3000:]
    assert end["after"] > 12


def test_a_clip_that_vanishes_after_the_check_is_named_and_the_next_run_goes_on_without_it(launcher, speech, tmp_path, capsys):
    shutil.copytree(speech, tmp_path / "copy")
    recipe, out = recipe_in(tmp_path / "copy", tmp_path, max_eval_samples=None), tmp_path / "out"
    clip = tmp_path / "copy" / "train" / "3.wav"
    fault = {"kind": "remove", "rank": 0, "phase": "forward", "step": 3, "path": str(clip)}
    end = launcher.run(recipe, "--data.max_dropped_share", "0.5", fault=fault)
    assert all(status not in (0, None) for status in end["statuses"]), end["output"][-3000:]
    assert f"train.jsonl:4: {clip}: missing_file" in end["output"] and "it was readable when it was checked" in end["output"]
    check_folder(out, expected="checkpoint-3")
    loaded = yaml.safe_load(recipe.read_text())
    loaded["data"]["max_dropped_share"] = 0.5
    recipe.write_text(yaml.safe_dump(loaded))
    check_that_it_goes_on(recipe, capsys, expected="checkpoint-3")


def start_launcher(recipe, *, processes: int) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """accelerate's launcher, once training is under way, and its processes."""
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--num_processes", str(processes), "--main_process_port", "0"]
    command += ["--config_file", str(TWO_PROCESSES)] if processes > 1 else ["--cpu"]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command += [str(ROOT / "src" / "train.py"), "--config", str(recipe), "--training.max_steps", "5000", "--training.logging_steps", "1", "--training.dataloader_num_workers", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True, **pipes)
    for line in process.stdout:
        if "'loss'" in line:
            break
    return process, psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize(
    ("processes", "signals"),
    [(2, "SIGTERM"), (1, "SIGTERM"), pytest.param(2, "SIGKILL", marks=pytest.mark.long), pytest.param(1, "SIGKILL", marks=pytest.mark.long)],
)
def test_the_end_of_the_launcher_saves_and_leaves_no_process_behind(speech, tmp_path, processes, signals):
    recipe, out = recipe_in(speech, tmp_path), tmp_path / "out"
    launcher, ranks = start_launcher(recipe, processes=processes)
    try:
        launcher.send_signal(getattr(signal, signals))
        _, alive = psutil.wait_procs(ranks, timeout=28)
        assert not alive
        launcher.communicate(timeout=40)
    finally:
        for process in psutil.Process().children(recursive=True):
            if process.pid in {rank.pid for rank in ranks}:
                process.kill()
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    results = json.loads((out / "results.json").read_text())
    assert results["status"] == "stopped_early" and "SIGTERM" in results["why"]
    check_folder(out, expected=f"checkpoint-{results['train']['steps']}")
