"""Training and scoring by one process, on toys: whose language is asked for, what a batch changes, what stops a run."""

import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from faults import UserError
from launching import train_here, write_recipe
from toy import build_whisper, write_manifest, write_speech
from trainer import WhisperTrainer


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    build_whisper(folder / "model")
    write_speech(folder, [f"clip {i} " * (1 + i % 3) for i in range(6)])
    dev = write_speech(folder, [f"other {i}" for i in range(4)], name="dev")
    rows = [json.loads(line) for line in dev.read_text().splitlines()]
    for row, language, task in zip(rows, ["fr", None, "en", "fr"], ["translate", None, "transcribe", "translate"], strict=True):
        row |= {"language": language, "task": task}
    write_manifest(dev, rows)
    return folder


def scores_only(speech, out, **training):
    return write_recipe(speech, training={"do_train": False, "output_dir": str(out)} | training)


def predictions(out):
    lines = (out / "predictions" / "final-dev.jsonl").read_text().splitlines()
    return [json.loads(line)["hypothesis"] for line in lines]


def test_generation_is_asked_for_each_rows_own_language_and_one_task_a_call(speech, tmp_path, monkeypatch):
    from transformers import WhisperForConditionalGeneration

    calls, generate = [], WhisperForConditionalGeneration.generate

    def spy(self, *args, **words):
        calls.append((words["task"], words["language"]))
        return generate(self, *args, **words)

    monkeypatch.setattr(WhisperForConditionalGeneration, "generate", spy)
    train_here(scores_only(speech, tmp_path / "out", per_device_eval_batch_size=4))
    assert calls == [("transcribe", ["hi", "en"]), ("translate", ["fr", "fr"])]


def test_rows_grouped_by_task_come_back_in_their_places():
    def generate(encoder_outputs, attention_mask, language, task):
        codes = {"hi": 1, "fr": 2, "en": 3}
        rows = [[codes[word], 7, 99, 5] if task == "transcribe" else [codes[word], 8, 8, 8] for word in language]
        return torch.tensor(rows)

    whisper = SimpleNamespace(generate=generate)
    trainer = SimpleNamespace(
        model=whisper,
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        labels=SimpleNamespace(is_multilingual=True, end=99),
    )
    ids = WhisperTrainer.generate(
        trainer, torch.zeros(3, 4, 2), ["hi", "fr", "en"], ["transcribe", "translate", "transcribe"]
    )
    assert ids.tolist() == [[1, 7, 99, -100], [2, 8, 8, 8], [3, 7, 99, -100]]


def test_transcripts_and_scores_do_not_depend_on_the_batch_and_no_mask_is_missed(speech, tmp_path, caplog):
    logging.getLogger("transformers").propagate = True
    one = train_here(scores_only(speech, tmp_path / "one", per_device_eval_batch_size=1))
    four = train_here(scores_only(speech, tmp_path / "four", per_device_eval_batch_size=4, dataloader_num_workers=2))
    assert predictions(tmp_path / "one") == predictions(tmp_path / "four")
    loss = one["final"]["dev"].pop("loss")
    assert four["final"]["dev"].pop("loss") == pytest.approx(loss, abs=1e-6)
    assert one["final"] == four["final"]
    assert "attention mask" not in caplog.text


def test_only_scoring_needs_no_training_set_and_takes_an_adapter(speech, tmp_path):
    trained = tmp_path / "trained"
    first = train_here(write_recipe(speech, training={"output_dir": str(trained)}))
    recipe = write_recipe(
        speech,
        model={"adapter": str(trained)},
        data={"train": [str(speech / "missing.jsonl")]},
        training={"do_train": False, "output_dir": str(tmp_path / "scored")},
    )
    assert train_here(recipe)["final"]["dev"] == first["final"]["dev"]


def test_resuming_behind_the_last_step_trains_no_further(speech, tmp_path):
    out = tmp_path / "out"
    recipe = write_recipe(speech, training={"output_dir": str(out)})
    first = train_here(recipe)
    weights = load_file(out / "adapter_model.safetensors")
    (out / "results.json").unlink()
    again = train_here(recipe, "--run.resume", "auto")
    assert again["train"]["steps"] == 2
    assert again["final"] == first["final"]
    torch.testing.assert_close(load_file(out / "adapter_model.safetensors"), weights, rtol=0, atol=0)


def test_a_moved_run_is_resumed_with_its_early_stopping_count(speech, tmp_path):
    out = tmp_path / "out"
    recipe = write_recipe(
        speech,
        run={"early_stopping_patience": 3},
        training={"output_dir": str(out), "max_steps": 8, "eval_steps": 1, "save_steps": 1, "save_total_limit": None},
    )
    straight = train_here(recipe)
    assert (straight["status"], straight["train"]["steps"]) == ("stopped_early", 4)
    shutil.move(out, tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoint-4")
    (tmp_path / "moved" / "results.json").unlink()
    again = train_here(recipe, "--training.output_dir", str(tmp_path / "moved"), "--run.resume", "auto")
    assert (again["status"], again["train"]["steps"]) == ("stopped_early", 4)


def test_a_resumed_run_keeps_the_recipes_own_steps_and_refuses_another_adapter(speech, tmp_path):
    out = tmp_path / "out"
    recipe = write_recipe(speech, training={"output_dir": str(out)})
    train_here(recipe)
    (out / "results.json").unlink()
    with pytest.raises(UserError, match="lora.r: 4 -> 8; a run goes on with the model it began with"):
        train_here(recipe, "--run.resume", "auto", "--lora.r", "8")
    words = ["--training.max_steps", "4", "--training.eval_steps", "1", "--training.save_steps", "1"]
    train_here(recipe, "--run.resume", "auto", "--training.save_total_limit", "null", *words)
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--lora.target_modules", "[q_proj, vproj]"], "lora.target_modules: no module is called vproj"),
        (["--lora.layers_to_transform", "[7]"], "lora.layers_to_transform: .*the encoder has 2 layers, the decoder 2"),
        (["--model.adapter", "/nowhere"], "model.adapter: /nowhere"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_by_the_check(speech, tmp_path, words, reason):
    recipe = write_recipe(speech, training={"output_dir": str(tmp_path / "out")})
    with pytest.raises(UserError, match=reason):
        train_here(recipe, "--check", *words)


def test_a_run_without_one_real_step_fails(speech, tmp_path):
    recipe = write_recipe(speech, run={"baseline": False}, training={"output_dir": str(tmp_path / "out"), "max_steps": 1, "warmup_steps": 5})
    with pytest.raises(RuntimeError, match="no step changed the model"):
        train_here(recipe, "--training.load_best_model_at_end", "false", "--training.eval_strategy", "no", "--training.save_strategy", "no")
