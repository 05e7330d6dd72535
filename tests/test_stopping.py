"""Stopping on purpose: what asks for it, and that all ranks do it together."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors.torch import load_file

import checkpoints
import stopping
from faults import progress
from launching import ROOT, train_here, write_recipe
from stopping import StopAsked, StopRequest
from toy import build_whisper, write_speech


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopping")
    build_whisper(folder / "model")
    write_speech(folder, [f"clip {i}" for i in range(6)])
    write_speech(folder, [f"other {i}" for i in range(3)], name="dev")
    return folder


@pytest.fixture
def request_here(monkeypatch):
    """The request that the trainer of this process looks at, fresh."""
    import train
    import trainer

    own = StopRequest()
    for module in (train, trainer):
        monkeypatch.setattr(module, "stop_request", own)
    return own


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT / "src", capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_is_seen_from_another_thread_while_the_main_one_hangs(name):
    code = f"""
    import os, signal, threading, time
    from stopping import StopRequest
    request = StopRequest()
    request.listen()
    seen = []
    def watch():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.{name})
        time.sleep(0.3)
        seen.append(request.look())
        os._exit(0 if seen == ["{name}"] else 1)
    threading.Thread(target=watch).start()
    # In a call that does not return the interpreter runs no handler in this thread.
    held = threading.Lock()
    held.acquire()
    held.acquire()
    """
    assert run_python(code).returncode == 0


def test_a_signal_only_asks_and_the_first_reason_stays():
    code = """
    import os, signal, time
    from stopping import StopRequest
    request = StopRequest()
    request.listen()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    assert request.agree() == "SIGINT", request.reason
    print("still here")
    """
    run = run_python(code)
    assert (run.returncode, run.stdout) == (0, "still here\n")


def test_the_end_of_a_loader_worker_asks_for_nothing():
    # The loader handles SIGCHLD, and the socket gets the number of every signal that is handled.
    code = """
    import signal, subprocess, time
    from stopping import StopRequest
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    request = StopRequest()
    request.listen()
    subprocess.run(["true"])
    time.sleep(0.1)
    assert request.agree() == "", request.reason
    """
    run = run_python(code)
    assert run.returncode == 0, run.stderr


def test_workers_end_when_their_own_process_says_so_and_ask_for_nothing():
    code = """
    import multiprocessing, os, signal, subprocess, time
    from stopping import StopRequest
    request = StopRequest()
    request.listen()
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    time.sleep(0.3)
    os.kill(worker.pid, signal.SIGINT)
    subprocess.run(["kill", "-TERM", str(worker.pid)])  # from another process, as launchers signal whole groups
    time.sleep(0.3)
    assert worker.is_alive()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0, worker.exitcode
    assert request.agree() == "", request.reason
    """
    run = run_python(code)
    assert run.returncode == 0, run.stderr


def test_the_time_limit_asks_when_it_has_passed():
    request = StopRequest()
    request.set_time_limit(None)
    assert request.agree() == ""
    request.set_time_limit(0.05)
    assert request.agree() == ""
    time.sleep(0.1)
    assert request.agree() == "run.time_limit_seconds"


def stop_at(request: StopRequest, monkeypatch, *, step: int, evaluating: bool = False, batch: int = 0) -> None:
    """Asks for a stop within a step, or within a batch of the evaluation behind it."""
    from trainer import WhisperTrainer

    name = "prediction_step" if evaluating else "compute_loss"
    inner, calls = getattr(WhisperTrainer, name), []

    def asking(trainer, *args, **kwargs):
        if trainer.is_in_train and trainer.state.global_step + (not evaluating) == step:
            calls.append(step)
            if len(calls) > batch:
                request.ask("SIGTERM")
        return inner(trainer, *args, **kwargs)

    monkeypatch.setattr(WhisperTrainer, name, asking)


def recipe_for(speech, folder, **training):
    """Dropout and evaluation every second step, so that states and scores are carried over."""
    return write_recipe(
        speech,
        name=folder.name,
        lora={"r": 4, "lora_alpha": 8, "lora_dropout": 0.1},
        run={"resume": "auto", "early_stopping_patience": 4},
        training={"output_dir": str(folder), "max_steps": 6, "save_total_limit": None, "logging_steps": 1} | training,
    )


@pytest.fixture(scope="module")
def straight(speech, tmp_path_factory):
    """The folder of a run that was not stopped, and its results."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train_here(recipe_for(speech, folder))


@pytest.mark.parametrize(("step", "evaluating"), [(3, False), (4, False), (4, True), (6, True)])
def test_a_stopped_run_that_goes_on_equals_the_straight_one(speech, straight, tmp_path, monkeypatch, request_here, step, evaluating):
    folder, expected = straight
    recipe = recipe_for(speech, tmp_path / "stopped")
    with monkeypatch.context() as patch:
        stop_at(request_here, patch, step=step, evaluating=evaluating)
        first = train_here(recipe)
    assert first["status"] == "stopped_early"
    assert first["why"].startswith(f"stopped by SIGTERM behind step {step}, saved in checkpoint-{step}")
    assert first["final"] == {}
    request_here.reason = ""
    second = train_here(recipe)
    for part in ("status", "best", "final", "baseline"):
        assert second[part] == expected[part]
    weights = [load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / "stopped")]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    if step == 6:
        return  # its checkpoint is the stopped run's own, from before the evaluation
    states = [json.loads((path / "checkpoint-6" / "trainer_state.json").read_text()) for path in (folder, tmp_path / "stopped")]
    for key in ("global_step", "best_global_step", "best_metric", "stateful_callbacks"):
        assert states[1][key] == states[0][key]
    scores = [[entry["eval_dev_wer"] for entry in state["log_history"] if "eval_dev_wer" in entry] for state in states]
    assert scores[1] == scores[0]


def check_that_it_goes_on_as_if_not_stopped(recipe_of, tmp_path, monkeypatch, request: StopRequest, **stop) -> None:
    """The same training straight and stopped once: log, best step and early stopping agree, and nothing is left that waits."""
    straight = train_here(recipe_of(tmp_path / "straight"))
    with monkeypatch.context() as patch:
        stop_at(request, patch, **stop)
        assert train_here(recipe_of(tmp_path / "stopped"))["status"] == "stopped_early"
    request.reason = ""
    resumed = train_here(recipe_of(tmp_path / "stopped"))
    for part in ("status", "best", "final"):
        assert resumed[part] == straight[part]
    assert not progress.keeps
    if resumed["train"]["steps"] == stop["step"]:
        return  # its checkpoint is the stopped run's own
    last = f"checkpoint-{straight['train']['steps']}/trainer_state.json"
    states = [json.loads((tmp_path / name / last).read_text()) for name in ("straight", "stopped")]
    scored = [[(entry["step"], key) for entry in state["log_history"] for key in entry if key.endswith("_wer")] for state in states]
    assert scored[1] == scored[0]
    for key in ("best_global_step", "best_metric", "stateful_callbacks"):
        assert states[1][key] == states[0][key]


def test_a_stop_between_two_scored_sets_is_made_up_for_by_both(speech, tmp_path, monkeypatch, request_here):
    write_speech(speech, [f"more {i}" for i in range(3)], name="more")
    sets = {"train": [str(speech / "train.jsonl")], "validation": {name: str(speech / f"{name}.jsonl") for name in ("dev", "more")}}

    def recipe_of(folder):
        run = {"resume": "auto", "early_stopping_patience": 4, "baseline": False}
        training = {"output_dir": str(folder), "max_steps": 6, "save_total_limit": None, "metric_for_best_model": "dev_loss"}
        return write_recipe(speech, name=folder.name, data=sets, run=run, training=training)

    check_that_it_goes_on_as_if_not_stopped(recipe_of, tmp_path, monkeypatch, request_here, step=4, evaluating=True, batch=2)


@pytest.mark.parametrize("evaluating", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_stop_at_a_last_step_within_an_epoch_is_evaluated_as_an_epochs_end(speech, tmp_path, monkeypatch, request_here, evaluating):
    def recipe_of(folder):
        return recipe_for(speech, folder, eval_strategy="epoch", save_strategy="epoch", max_steps=8, metric_for_best_model="dev_loss")

    check_that_it_goes_on_as_if_not_stopped(recipe_of, tmp_path, monkeypatch, request_here, step=8, evaluating=evaluating)


def test_a_stop_in_the_evaluation_before_the_first_step_has_nothing_to_save(speech, tmp_path, monkeypatch, request_here):
    with monkeypatch.context() as patch:
        stop_at(request_here, patch, step=0, evaluating=True)
        results = train_here(recipe_for(speech, tmp_path / "out", eval_on_start=True))
    assert (results["status"], results["why"]) == ("stopped_early", "stopped by SIGTERM before the first step")


def test_a_stop_waits_until_its_checkpoint_is_read_back_and_its_results_are_written(speech, tmp_path, monkeypatch, request_here):
    exits, verify = [], checkpoints.verify

    def slowly(checkpoint):
        time.sleep(2.5)  # the watchdog looks every second
        verify(checkpoint)

    monkeypatch.setattr(checkpoints, "verify", slowly)
    monkeypatch.setattr(os, "_exit", exits.append)
    stop_at(request_here, monkeypatch, step=1)
    results = train_here(recipe_for(speech, tmp_path / "out"))
    assert results["why"].startswith("stopped by SIGTERM behind step 1, saved in checkpoint-1")
    assert not exits and not progress.keeps


def test_what_early_stopping_has_ended_is_not_trained_on_until_the_recipe_has_more_patience(speech, tmp_path, monkeypatch):
    from trainer import WhisperTrainer

    def end(trainer, sets, stage):
        raise KeyboardInterrupt

    recipe = recipe_for(speech, tmp_path / "out", max_steps=30, metric_for_best_model="dev_wer", save_total_limit=1)
    words = ["--run.baseline", "false", "--run.early_stopping_patience"]
    with monkeypatch.context() as patch:
        patch.setattr(WhisperTrainer, "score", end)  # ended by force before the last scores
        with pytest.raises(KeyboardInterrupt):
            train_here(recipe, *words, "1")
    ended = checkpoints.list_checkpoints(tmp_path / "out")
    results = train_here(recipe, *words, "1")
    assert results["why"] == "no better dev_wer in 1 evaluations"
    assert checkpoints.list_checkpoints(tmp_path / "out") == ended
    (tmp_path / "out" / "results.json").unlink()
    results = train_here(recipe, *words, "3")
    state = json.loads((checkpoints.list_checkpoints(tmp_path / "out")[-1] / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["Patience"]["args"]["early_stopping_patience"] == 3
    assert results["train"]["steps"] > int(ended[-1].name.rpartition("-")[2]) + 2


def test_a_stop_takes_the_scores_of_the_untouched_model_along(speech, tmp_path, monkeypatch, request_here):
    with monkeypatch.context() as patch:
        stop_at(request_here, patch, step=1)
        results = train_here(recipe_for(speech, tmp_path / "out"))
    assert set(results["baseline"]) == {"dev"}
    assert results["train"]["steps"] == 1


def test_a_time_limit_in_the_recipe_stops_and_saves(speech, tmp_path, monkeypatch, request_here):
    from trainer import WhisperTrainer

    inner = WhisperTrainer.compute_loss

    def slow(trainer, *args, **kwargs):
        if trainer.state.global_step == 2:
            request_here.limit = 0.0  # the clock is past it
        return inner(trainer, *args, **kwargs)

    recipe = recipe_for(speech, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(WhisperTrainer, "compute_loss", slow)
        results = train_here(recipe, "--run.time_limit_seconds", "3600")
    assert results["status"] == "stopped_early"
    assert "run.time_limit_seconds behind step 3" in results["why"]


def test_a_check_that_was_stopped_does_not_say_that_the_run_can_start(speech, tmp_path, monkeypatch):
    import train

    seen = []
    monkeypatch.setattr(train, "run", lambda *words, watchdog, **more: seen.append(watchdog.stop_status))
    for words in (["--check"], []):
        train_here(recipe_for(speech, tmp_path / "out"), *words)
    assert seen == [1, 0]


def test_the_end_of_accelerates_launcher_ends_its_single_process(tmp_path):
    """accelerate starts one process by Popen and, ended itself, leaves it behind."""
    child = tmp_path / "child.py"
    child.write_text(
        "import os, sys, time\nsys.path.insert(0, sys.argv[1])\nfrom stopping import StopRequest, end_with_launcher\n"
        "request = StopRequest()\nrequest.listen()\nend_with_launcher()\nprint(os.getpid(), flush=True)\n"
        "while not request.look():\n    time.sleep(0.05)\nopen(sys.argv[2], 'w').write(request.reason)\n"
    )
    launcher = tmp_path / "accelerate"
    launcher.write_text("import subprocess, sys\nsubprocess.run([sys.executable, *sys.argv[1:]])\n")
    said = tmp_path / "said"
    process = subprocess.Popen([sys.executable, str(launcher), str(child), str(ROOT / "src"), str(said)], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while not said.exists() and time.monotonic() < end:
        time.sleep(0.05)
    if not said.exists():
        os.kill(pid, signal.SIGKILL)
    assert said.read_text() == "SIGTERM"


def test_a_process_started_by_a_shell_outlives_it(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(stopping.ctypes, "CDLL", lambda name: calls.append(name))
    stopping.end_with_launcher()
    assert not calls
    assert issubclass(StopAsked, Exception)
