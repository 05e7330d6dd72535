"""Training and scoring by one process, on toys: whose language is asked for, what a batch changes, what stops a run."""

import json
import logging
import shutil
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import EvalPrediction

import trainer
from config import TrainingConfig
from faults import UserError
from launching import train_here, write_recipe
from manifest import Row
from toy import build_whisper, write_clip, write_manifest, write_speech
from trainer import ExplodingLoss, WhisperTrainer


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


def test_only_scoring_needs_no_training_set_and_takes_an_adapter(speech, tmp_path, capsys):
    trained = tmp_path / "trained"
    first = train_here(write_recipe(speech, training={"output_dir": str(trained)}))
    recipe = write_recipe(
        speech,
        model={"adapter": str(trained)},
        data={"train": [str(speech / "missing.jsonl")]},
        training={"do_train": False, "output_dir": str(tmp_path / "scored")},
    )
    capsys.readouterr()
    assert train_here(recipe)["final"]["dev"] == first["final"]["dev"]
    said = capsys.readouterr().out
    assert "trained in float32" not in said and f"; with the adapter {trained}" in said and "model_preparation_time" not in said
    assert "lora.r:" not in said
    train_here(recipe, "--lora.r", "8", "--training.output_dir", str(tmp_path / "again"))
    assert f"lora.r: 8 here, 4 in the adapter {trained}, whose settings stay\n" in capsys.readouterr().out
    assert not (trained / "checkpoint-2" / "README.md").exists()


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


@pytest.mark.parametrize("words", [[], ["--training.learning_rate", "1e-4"], ["--training.max_steps", "1"], ["--check"]])
def test_a_finished_run_is_told_and_nothing_is_written_scored_or_loaded(speech, tmp_path, monkeypatch, capsys, words):
    out = tmp_path / "out"
    recipe = write_recipe(speech, training={"output_dir": str(out)})
    train_here(recipe)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")}
    monkeypatch.setattr("train.read_base_model", None)
    train_here(recipe, "--run.resume", "auto", *words)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"{out} is finished (2 of 2 steps); to train on: --training.max_steps MORE"
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")} == before


@pytest.mark.parametrize(("before", "after"), [({"max_steps": 2}, {"max_steps": 4}), ({"num_train_epochs": 1}, {"num_train_epochs": 2})])
@pytest.mark.parametrize("is_whole", [True, False], ids=["finished", "without results"])
def test_a_run_that_is_asked_for_more_than_it_has_trains_on(speech, tmp_path, before, after, is_whole):
    out = tmp_path / "out"
    keys = {"output_dir": str(out), "max_steps": -1, "eval_strategy": "epoch", "save_strategy": "epoch"}
    first = train_here(write_recipe(speech, run={"baseline": False}, training=keys | before))
    if not is_whole:
        (out / "results.json").unlink()
    again = train_here(write_recipe(speech, run={"resume": "auto"}, training=keys | after))
    assert again["train"]["steps"] > first["train"]["steps"]
    assert again["train"]["windows"] == again["train"]["steps"] - first["train"]["steps"]


def test_a_run_that_its_patience_ended_is_finished_until_it_is_given_more(speech, tmp_path, capsys):
    out = tmp_path / "out"
    keys = {"output_dir": str(out), "max_steps": 6, "eval_steps": 1, "save_steps": 1}
    recipe = write_recipe(speech, run={"early_stopping_patience": 1}, training=keys)
    first = train_here(recipe)
    assert (first["status"], first["train"]["steps"]) == ("stopped_early", 2)
    train_here(recipe, "--run.resume", "auto")
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{out} is finished (2 of 6 steps, no better dev_wer in 1 evaluations); to train on: --run.early_stopping_patience MORE"
    )
    assert train_here(recipe, "--run.resume", "auto", "--run.early_stopping_patience", "2")["train"]["steps"] > 2


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


# --- losses that stop a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "stops"),
    [
        ([0.5, 12.0], True),
        ([3.0, 2.0, 12.0], True),
        ([0.5, 6.8], False),  # not worse than guessing among 1000 tokens: 6.908
        ([5.0, 14.9], False),  # not three times the first
        ([14.0, 20.0], False),
        ([12.0], False),
    ],
)
def test_a_loss_stops_the_run_when_it_is_three_times_the_first_and_worse_than_guessing(losses, stops):
    history = [{"loss": losses[0]}, {"eval_loss": 99.0}, *({"loss": loss} for loss in losses[1:])]
    state = SimpleNamespace(log_history=history if len(losses) > 1 else history[:1])
    if not stops:
        return ExplodingLoss(1000).on_log(None, state, None)
    with pytest.raises(FloatingPointError, match=rf"from {losses[0]:.2f} to 12.00, worse than guessing \(6.91\); lower training.learning_rate"):
        ExplodingLoss(1000).on_log(None, state, None)


def test_an_evaluation_of_an_exploded_run_is_no_second_alarm():
    ExplodingLoss(1000).on_log(None, SimpleNamespace(log_history=[{"loss": 0.5}, {"loss": 12.0}, {"eval_loss": 12.0}]), None)


def test_a_run_whose_loss_explodes_is_stopped_at_its_next_log(speech, tmp_path, monkeypatch):
    stock, calls = trainer.mean_token_loss, []

    def explode(*args, **words):
        calls.append(1)
        return stock(*args, **words) * 10.0 ** (len(calls) > 2)

    monkeypatch.setattr(trainer, "mean_token_loss", explode)
    recipe = write_recipe(speech, run={"baseline": False}, training={"output_dir": str(tmp_path / "out"), "max_steps": 9, "logging_steps": 1, "save_steps": 9, "eval_steps": 9})
    with pytest.raises(FloatingPointError, match="worse than guessing"):
        train_here(recipe)
    assert len(calls) == 3


# --- what a run takes --------------------------------------------------------------------------------------------


def test_rows_that_a_scored_set_lost_are_counted_beside_its_score(speech, tmp_path):
    rows = [json.loads(line) for line in (speech / "dev.jsonl").read_text().splitlines()][:3]
    long = write_clip(tmp_path / "long.wav", seconds=31)
    rows = [row | {"audio": str(speech / row["audio"])} for row in rows] + [{"audio": str(long), "text": "too long", "duration": 3.0}]
    dev = write_manifest(tmp_path / "dev.jsonl", rows)
    recipe = write_recipe(
        speech,
        data={"validation": {"dev": str(dev)}, "max_dropped_share": 0.5},
        training={"do_train": False, "output_dir": str(tmp_path / "out")},
    )
    scores = train_here(recipe)["final"]["dev"]
    assert (scores["rows_scored"], scores["rows_total"]) == (3, 4)
    report = json.loads((tmp_path / "out" / "data_report.json").read_text())["sets"]["dev"]
    assert report["dropped"] == {"too_long": 1}


def test_generation_keeps_its_cache_between_checkpointed_steps_and_training_has_none(speech, tmp_path, monkeypatch):
    from transformers.models.whisper.modeling_whisper import WhisperDecoder

    forward, trained, generated = WhisperDecoder.forward, [], []

    def spy(self, input_ids=None, **words):
        result = forward(self, input_ids=input_ids, **words)
        if self.training:
            trained.append(result.past_key_values)
        elif input_ids.shape[1] <= 4:  # the references are longer
            generated.append(input_ids.shape[1])
        return result

    monkeypatch.setattr(WhisperDecoder, "forward", spy)
    checkpointed = {"gradient_checkpointing": True, "max_steps": 2, "eval_steps": 1, "save_steps": 1}
    train_here(write_recipe(speech, run={"baseline": False}, training=checkpointed | {"output_dir": str(tmp_path / "out")}))
    assert trained == [None] * 2
    # Two evaluations of two batches with two tasks each: the prompt, then one position for each further token.
    assert generated == [4, 1, 1, 1] * 8


def test_full_fine_tuning_learns_the_same_however_a_batch_is_split(speech, tmp_path, monkeypatch):
    from gradients import KeepingTrainer

    monkeypatch.setattr("train.WhisperTrainer", KeepingTrainer)
    kept = []
    for batch, accumulation in ((4, 1), (1, 4)):
        folder = tmp_path / str(batch)
        folder.mkdir()
        monkeypatch.setenv("GRADIENTS", str(folder))
        split = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "output_dir": str(folder / "out")}
        train_here(write_recipe(speech, lora=None, run={"baseline": False}, training=split | {"learning_rate": 1e-5}))
        kept.append([torch.load(folder / f"step{step}-rank0.pt") for step in range(2)])
    for whole, parts in zip(*kept, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_scoring_keeps_ids_and_no_logits(speech, tmp_path, monkeypatch):
    compute, seen = WhisperTrainer.compute_row_scores, []

    def spy(self, prediction):
        seen.append(prediction)
        return compute(self, prediction)

    monkeypatch.setattr(WhisperTrainer, "compute_row_scores", spy)
    train_here(scores_only(speech, tmp_path / "out"))
    (prediction,) = seen
    assert prediction.predictions.shape == (4, prediction.predictions.shape[1]) and prediction.predictions.dtype == np.int64
    assert (prediction.predictions.nbytes + prediction.label_ids.nbytes) / 4 < 10_000
    assert prediction.inputs is None


def test_no_features_are_stored_on_disk(speech, tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("tempfile.tempdir", None)
    for part in ("one", "two"):
        train_here(write_recipe(speech, training={"output_dir": str(tmp_path / part)}))
    stored = sum(path.stat().st_size for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "TMPDIR") for path in (tmp_path / name).rglob("*"))
    assert stored < 100_000, "one clip's features are 960,000 bytes"


# --- random states of another machine ----------------------------------------------------------------------------


def as_of_other_numpy(path):
    """Rewrites a random state as the other major version of numpy would have named its arrays' function."""
    here, there = ("numpy._core", "numpy.core") if np.__version__ >= "2" else ("numpy.core", "numpy._core")
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name).replace(here.encode(), there.encode()) for name in file.namelist()}
        assert parts != {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in parts.items():
            file.writestr(name, content)


RANDOM_STATES = {
    "another numpy": as_of_other_numpy,
    "none": lambda path: path.unlink(),
    "two ranks": lambda path: [shutil.copy(path, path.with_name(f"rng_state_{rank}.pth")) for rank in range(2)] and path.unlink(),
}


@pytest.mark.parametrize("kind", RANDOM_STATES)
def test_a_run_is_resumed_from_random_states_of_another_kind(speech, tmp_path, capsys, kind):
    out = tmp_path / "out"
    steps = {"output_dir": str(out), "max_steps": 4, "eval_steps": 2, "save_steps": 2, "save_total_limit": None}
    recipe = write_recipe(speech, run={"baseline": False}, training=steps)
    first = train_here(recipe)
    shutil.rmtree(out / "checkpoint-4")
    (out / "results.json").unlink()
    (out / "checkpoint-2" / "checksums.json").unlink()
    RANDOM_STATES[kind](out / "checkpoint-2" / "rng_state.pth")
    again = train_here(recipe, "--run.resume", "auto")
    assert again["train"]["steps"] == 4
    assert ("random states" in capsys.readouterr().out) == (kind != "another numpy")
    if kind == "another numpy":
        assert again["final"] == first["final"]


# --- whatever the set, the batch and the number of processes -----------------------------------------------------


def batches_by_rank(count: int, *, batch: int, processes: int, shuffled: bool) -> list[list[list[int]]]:
    """The row numbers that each rank is given, batch by batch, by the loader that the stock trainer prepares."""
    even = TrainingConfig(output_dir="out", use_cpu=True).accelerator_config.even_batches
    generator = torch.Generator()
    ranks = []
    for rank in range(processes):
        loader = DataLoader(range(count), batch, shuffle=shuffled, generator=generator.manual_seed(7))
        own = prepare_data_loader(loader, num_processes=processes, process_index=rank, even_batches=even)
        ranks.append([numbers.tolist() for numbers in own.base_dataloader])
    return ranks


SPLITS = {"count": st.integers(1, 40), "batch": st.integers(1, 6), "processes": st.integers(1, 5)}


@settings(deadline=None, derandomize=True, max_examples=150)
@given(**SPLITS, shuffled=st.booleans())
def test_rule_2_ranks_do_equally_many_batches_of_equal_size_and_leave_no_row_out(count, batch, processes, shuffled):
    ranks = batches_by_rank(count, batch=batch, processes=processes, shuffled=shuffled)
    sizes = [[len(numbers) for numbers in batches] for batches in ranks]
    assert all(own == sizes[0] for own in sizes)
    assert {number for batches in ranks for numbers in batches for number in numbers} == set(range(count))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(**SPLITS, order=st.randoms(use_true_random=False))
def test_rule_12_each_row_is_scored_once_with_its_own_text_and_loss_however_a_set_is_split(count, batch, processes, order):
    ranks = batches_by_rank(count, batch=batch, processes=processes, shuffled=False)
    gathered = [number for step in zip(*ranks, strict=True) for numbers in step for number in numbers]
    order.shuffle(gathered)
    first_id = 100
    rows = [Row(f"{i}.wav", f"text {i}", "dev.jsonl", i + 1) for i in range(count)]
    seen = {}

    def keep(references, hypotheses, **_):
        seen.update(zip(references, hypotheses, strict=True))
        return {"rows": len(references)}

    scored = SimpleNamespace(
        expected_rows=count,
        scored_rows={first_id + i: ("dev", row) for i, row in enumerate(rows)},
        base=SimpleNamespace(generation_config=SimpleNamespace(max_length=4), processor=SimpleNamespace(tokenizer=None)),
        labels=SimpleNamespace(language_of=lambda row: "en"),
        texts={},
        scores={},
        rows_total={"dev": count},
        is_in_train=False,
    )
    table = np.array([[first_id + i, 2.0 * i, 2.0] for i in gathered])
    ids = np.array([[i, -100] for i in gathered])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "compute_scores", keep)
        patch.setattr(trainer, "decode_ids", lambda ids, tokenizer: [f"text {own[0]}" for own in ids])
        result = WhisperTrainer.compute_row_scores(scored, EvalPrediction(ids, table))
    assert result["rows"] == count
    assert seen == {row.text: row.text for row in rows}
    assert result["loss"] == pytest.approx(sum(2.0 * i for i in range(count)) / (2 * count))


def test_every_logged_loss_has_the_share_of_time_that_went_into_waiting_for_data(speech, tmp_path, monkeypatch):
    import time

    from speech import SpeechDataset

    stock = SpeechDataset.__getitem__

    def slow(self, index):
        time.sleep(1.0)
        return stock(self, index)

    monkeypatch.setattr(SpeechDataset, "__getitem__", slow)
    out = tmp_path / "out"
    steps = {"max_steps": 4, "eval_steps": 4, "save_steps": 4, "logging_steps": 2, "output_dir": str(out)}
    train_here(write_recipe(speech, run={"baseline": False}, training=steps))
    history = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    shares = [entry["data_wait_share"] for entry in history if "loss" in entry]
    assert len(shares) == 3  # after steps 1, 2 and 4
    assert all(0.05 < share <= 1 for share in shares)
