"""How runs end when something is wrong: status, plain words, once, in time."""

import json
import sys
import time

import pytest

from launching import ROOT, execute, launch, train_here, write_recipe
from toy import build_whisper, write_clip, write_manifest, write_speech


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    build_whisper(folder / "model")
    write_speech(folder, [f"clip {i}" for i in range(6)])
    write_speech(folder, [f"other {i}" for i in range(3)], name="dev")
    return folder


def test_mistakes_in_a_recipe_end_with_status_2_and_one_plain_line_each(speech):
    recipe = write_recipe(speech, name="wrong", training={"lerning_rate": 1e-4, "max_steps": "many"}, model={"quantization": "3bit"})
    run = launch(recipe)
    assert run.status == 2
    lines = run.stderr.strip().splitlines()
    assert sum(line.startswith(str(recipe)) for line in lines) == 3
    assert "Traceback" not in run.stderr
    assert "training.lerning_rate: unknown key; did you mean training.learning_rate?" in run.stderr
    assert run.stdout == ""


def test_two_processes_tell_a_mistake_once(speech):
    recipe = write_recipe(speech, name="twice", training={"lerning_rate": 1e-4})
    run = launch(recipe, processes=2)
    assert run.status != 0
    assert (run.stdout + run.stderr).count("did you mean training.learning_rate?") == 1


def test_ranks_set_by_hand_end_in_seconds_with_the_launch_line(speech):
    started = time.monotonic()
    run = launch(write_recipe(speech, name="ranks"), WORLD_SIZE="2", RANK="0")
    assert run.status == 2
    assert "LOCAL_RANK is missing" in run.stderr
    assert "accelerate launch --num_processes 2 src/train.py" in run.stderr
    assert time.monotonic() - started < 60


def test_a_launcher_without_a_port_is_refused_at_once(speech):
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    run = launch(write_recipe(speech, name="port"), **ranks, MASTER_PORT="0", timeout=60)
    assert run.status == 2
    assert "MASTER_PORT is not set" in run.stderr


def test_a_check_tries_all_but_the_weights(speech, tmp_path, capsys):
    model = build_whisper(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"these are no weights")
    recipe = write_recipe(speech, name="check", model={"name": str(model)}, training={"output_dir": str(tmp_path / "out")})
    assert train_here(recipe, "--check") is None
    assert f"--check: this run can start: accelerate launch src/train.py --config {recipe}\n" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"data_report.json", "data_report.html", ".lock"}
    # What a check leaves is no earlier run.
    assert train_here(recipe, "--check") is None


def test_bad_rows_are_listed_by_file_and_line_before_weights_are_loaded(speech, tmp_path):
    clips = [write_clip(tmp_path / f"{i}.wav") for i in range(8)]
    rows = [{"audio": clip.name, "text": f"clip {i}"} for i, clip in enumerate(clips)]
    rows.insert(6, {"audio": "text.wav", "text": "seven"})
    rows.insert(8, {"audio": "missing.wav", "text": "nine"})
    (tmp_path / "text.wav").write_text("this is not audio")
    manifest = write_manifest(tmp_path / "train.jsonl", rows)
    out = tmp_path / "out"
    recipe = write_recipe(
        speech, name="rows", data={"train": [str(manifest)], "on_bad_row": "fail"}, training={"output_dir": str(out)}
    )
    run = launch(recipe, "--check")
    assert run.status == 2
    assert f"{manifest}:7: unreadable" in run.stderr
    assert f"{manifest}:9: missing_file" in run.stderr
    assert "Traceback" not in run.stderr
    report = json.loads((out / "data_report.json").read_text())["sets"]["train"]
    assert (report["rows_read"], report["rows_used"], report["dropped"]) == (10, 8, {"unreadable": 1, "missing_file": 1})
    assert [(row["line"], row["reason"]) for row in report["bad_rows"]] == [(7, "unreadable"), (9, "missing_file")]
    # With the same data and a policy that drops, the other eight are trained on.
    results = train_here(recipe, "--data.on_bad_row", "drop", "--data.max_dropped_share", "0.5", "--training.output_dir", str(out))
    assert results["train"]["steps"] == 2


def test_a_rank_that_fails_ends_the_job_and_the_end_of_the_output_tells_why(speech, tmp_path):
    recipe = write_recipe(speech, name="failing", run={"baseline": False}, training={"output_dir": str(tmp_path / "out")})
    script = ROOT / "tests" / "failing.py"
    started = time.monotonic()
    run = launch(recipe, processes=2, script=script, FAIL_RANK="1", FAIL_STEP="2", timeout=150)
    assert run.status != 0
    assert "rank 1, phase forward, step 2: ValueError: a planted fault" in run.tail
    assert time.monotonic() - started < 120
    assert run.results is None


def test_one_process_that_fails_ends_with_phase_and_step(speech, tmp_path):
    recipe = write_recipe(speech, name="failing1", run={"baseline": False}, training={"output_dir": str(tmp_path / "out")})
    run = launch(recipe, script=ROOT / "tests" / "failing.py", FAIL_RANK="0", FAIL_STEP="1")
    assert run.status == 1
    assert run.stderr.rstrip().splitlines()[-1].endswith("rank 0, phase forward, step 1: ValueError: a planted fault")


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_clips(speech, tmp_path, monkeypatch):
    import trainer

    def spoilt(outputs, labels, *, num_items_in_batch, label_smoothing=0.0):
        return outputs.logits.sum() * float("nan")

    monkeypatch.setattr(trainer, "mean_token_loss", spoilt)
    recipe = write_recipe(
        speech, name="nan", run={"baseline": False, "max_skipped_steps": 1}, training={"output_dir": str(tmp_path / "out"), "warmup_steps": 9}
    )
    with pytest.raises(FloatingPointError, match=r"step 1: the loss is nan on .*train.jsonl:\d+ \(.*wav\).*; step 2: .*max_skipped_steps is 1"):
        train_here(recipe)
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_an_earlier_run_is_never_overwritten(speech, tmp_path):
    from faults import UserError

    recipe = write_recipe(speech, name="again", training={"output_dir": str(tmp_path / "out")})
    train_here(recipe)
    with pytest.raises(UserError, match="holds an earlier run .*--run.resume auto"):
        train_here(recipe)


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_other_launchers_work_too(speech, tmp_path, launcher):
    from pathlib import Path

    words = {"accelerate": ["launch"], "torchrun": ["--standalone", "--nproc_per_node", "2"]}[launcher]
    recipe = write_recipe(speech, name=launcher, training={"output_dir": str(tmp_path / "out")})
    program = str(Path(sys.executable).parent / launcher)
    run = execute([program, *words, str(ROOT / "src" / "train.py"), "--config", str(recipe), "--check"])
    assert run.status == 0, run.tail
    assert run.stdout.count("--check: this run can start") == 1
