"""The real command, in one and in two processes (gloo), on a two-layer Whisper."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import find_damage, list_checkpoints, reading_random_states
from gradients import KeepingTrainer
from launching import ROOT, launch, train_here, write_recipe
from toy import build_whisper, write_speech
from trainer import WhisperTrainer


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    """A folder with a toy model, eight training clips with texts of unequal length and five validation clips."""
    folder = tmp_path_factory.mktemp("speech")
    build_whisper(folder / "model")
    write_speech(folder, [f"clip {i} " * (1 + i % 4) for i in range(8)])
    write_speech(folder, [f"other {i}" for i in range(5)], name="dev")
    return folder


def gradients(
    folder: Path, speech: Path, monkeypatch, *, processes: int, batch: int, accumulation: int, checkpointing: bool = False
) -> list[dict[str, torch.Tensor]]:
    """The gradients of two steps at a global batch of 4, clipped, as rank 0 hands them to the optimiser; ranks must agree."""
    kept = folder / f"{processes}x{batch}x{accumulation}{checkpointing}"
    kept.mkdir()
    recipe = write_recipe(
        speech,
        run={"baseline": True},  # scoring first must not keep the ranks from averaging
        training={
            "output_dir": str(kept / "out"),
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "max_grad_norm": 0.05,
            "gradient_checkpointing": checkpointing,
        },
    )
    if processes == 1:
        monkeypatch.setenv("GRADIENTS", str(kept))
        monkeypatch.setattr("train.WhisperTrainer", KeepingTrainer)
        train_here(recipe)
    else:
        script = ROOT / "tests" / "gradients.py"
        run = launch(recipe, processes=processes, script=script, GRADIENTS=str(kept))
        assert run.status == 0, run.tail
    steps = []
    for step in range(2):
        ranks = [torch.load(kept / f"step{step}-rank{rank}.pt", weights_only=True) for rank in range(processes)]
        for other in ranks[1:]:
            torch.testing.assert_close(other, ranks[0], rtol=0, atol=0)
        steps.append(ranks[0])
    return steps


def test_gradients_depend_on_the_global_batch_alone_checkpointed_or_not(speech, tmp_path, monkeypatch):
    whole = gradients(tmp_path, speech, monkeypatch, processes=1, batch=4, accumulation=1)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in whole[0].values()]))
    torch.testing.assert_close(norm, torch.tensor(0.05), rtol=1e-4, atol=0)  # clipping is at work
    for processes, batch, accumulation, checkpointing in [(1, 1, 4, False), (2, 1, 2, False), (2, 2, 1, True)]:
        split = gradients(
            tmp_path, speech, monkeypatch, processes=processes, batch=batch, accumulation=accumulation, checkpointing=checkpointing
        )
        for step, expected in zip(split, whole, strict=True):
            torch.testing.assert_close(step, expected, rtol=1e-5, atol=1e-7)


def test_two_processes_score_every_row_of_an_uneven_set_once(speech, tmp_path):
    recipe = write_recipe(speech, training={"output_dir": str(tmp_path / "one"), "do_train": False})
    run = launch(recipe, "--training.output_dir", str(tmp_path / "two"), processes=2)
    assert run.status == 0, run.tail
    one, two = train_here(recipe)["final"]["dev"], run.results["final"]["dev"]
    assert one["rows_scored"] == two["rows_scored"] == 5
    assert run.results["world_size"] == 2
    assert two.pop("loss") == pytest.approx(one.pop("loss"), abs=1e-6)
    assert one == two


def with_scaler(init):
    """A trainer whose gradients are scaled by a factor that grows at the third step."""

    def build(self, **words):
        init(self, **words)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    return build


def read_states(checkpoint: Path) -> dict[str, str]:
    """All that a resumed run reads beside weights and history, as text by file."""
    with reading_random_states():
        states = {path.name: str(torch.load(path, weights_only=True)) for path in checkpoint.glob("*.pt*")}
    history = json.loads((checkpoint / "trainer_state.json").read_text())
    for key in ("log_history", "best_model_checkpoint", "total_flos"):
        del history[key]
    return states | {"trainer_state.json": json.dumps(history, indent=1)}


@pytest.mark.parametrize(("processes", "scaled"), [(1, False), (1, True), (2, False)])
def test_a_resumed_run_equals_the_straight_run(speech, tmp_path, monkeypatch, processes, scaled):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    if scaled:
        monkeypatch.setattr(WhisperTrainer, "__init__", with_scaler(WhisperTrainer.__init__))
    recipe = write_recipe(
        speech,
        model={"apply_spec_augment": True, "mask_time_prob": 0.5, "mask_feature_prob": 0.5},
        lora={"r": 4, "lora_alpha": 8, "lora_dropout": 0.1},
        run={"early_stopping_patience": 3},
        training={"output_dir": str(straight), "max_steps": 4, "eval_steps": 1, "save_steps": 2, "save_total_limit": None}
        | {"load_best_model_at_end": False},
    )

    def train(*overrides: str) -> dict:
        if processes == 1:
            return train_here(recipe, *overrides)
        run = launch(recipe, *overrides, processes=processes)
        assert run.status == 0, run.tail
        return run.results

    first = train()
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoint-4")
    (resumed / "results.json").unlink()
    (resumed / "adapter_model.safetensors").unlink()
    again = train("--training.output_dir", str(resumed), "--run.resume", "auto")
    for name in ("adapter_model.safetensors", "checkpoint-4/adapter_model.safetensors"):
        torch.testing.assert_close(load_file(resumed / name), load_file(straight / name), rtol=0, atol=0)
    states = read_states(resumed / "checkpoint-4")
    assert states == read_states(straight / "checkpoint-4")
    assert ("scaler.pt" in states) == scaled and len([name for name in states if name.startswith("rng_state")]) == processes
    assert "early_stopping_patience_counter" in states["trainer_state.json"]
    for part in ("baseline", "best", "final"):
        assert again[part] == first[part]
    assert json.loads((resumed / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
    assert again["train"]["windows"] == first["train"]["windows"] / 2  # it did not begin anew


@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_quantised_training_runs_on_cpu_in_two_processes(speech, tmp_path, quantization):
    recipe = write_recipe(speech, model={"quantization": quantization}, training={"output_dir": str(tmp_path / "out")})
    run = launch(recipe, processes=2)
    assert run.status == 0, run.tail
    assert f"{quantization[0]}-bit, computed in float32" in run.stdout
    assert run.results["status"] == "finished"
    assert run.results["train"]["steps"] == 2
    assert set(run.results["final"]) == {"dev"}


def test_workers_are_forked_without_a_word_from_the_tokenizer(speech, tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    recipe = write_recipe(speech, run={"baseline": False}, training={"output_dir": str(tmp_path / "out"), "dataloader_num_workers": 2})
    run = launch(recipe, timeout=120)
    assert run.status == 0, run.tail
    assert "being forked" not in run.stdout + run.stderr


def test_two_processes_evaluate_and_save_every_step_and_keep_one_checkpoint(speech, tmp_path):
    every_step = {"max_steps": 5, "eval_steps": 1, "save_steps": 1, "save_total_limit": 1, "load_best_model_at_end": False}
    recipe = write_recipe(speech, training=every_step | {"output_dir": str(tmp_path / "out")})
    run = launch(recipe, processes=2)
    assert run.status == 0, run.tail
    kept = list_checkpoints(tmp_path / "out")
    assert [path.name for path in kept] == ["checkpoint-5"]
    assert find_damage(kept[0]) is None
    assert {"tokenizer.json", "processor_config.json", "checksums.json"} <= {path.name for path in kept[0].iterdir()}


def test_tensorboard_logs_of_all_stages_go_into_the_output_folder(speech, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_here(write_recipe(speech, training={"output_dir": str(tmp_path / "out"), "report_to": "tensorboard"}))
    assert list((tmp_path / "out" / "logs").glob("events.*"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_early_stopping_ends_the_run_and_says_why(speech, tmp_path):
    recipe = write_recipe(
        speech,
        run={"early_stopping_patience": 1},
        training={"output_dir": str(tmp_path / "out"), "max_steps": 6, "eval_steps": 1, "save_steps": 1},
    )
    results = train_here(recipe)
    assert results["status"] == "stopped_early"
    assert results["why"] == "no better dev_wer in 1 evaluations"
    assert results["train"]["steps"] < 6


def test_the_best_adapter_comes_back_at_the_end(speech, tmp_path, monkeypatch):
    import trainer

    rates = iter([50.0, 30.0, 20.0, 25.0, 20.0])  # untouched, steps 1 to 3, final
    compute = trainer.compute_scores
    monkeypatch.setattr(trainer, "compute_scores", lambda *args, **words: compute(*args, **words) | {"wer": next(rates)})
    recipe = write_recipe(
        speech,
        training={"output_dir": str(tmp_path / "out"), "max_steps": 3, "eval_steps": 1, "save_steps": 1, "save_total_limit": None},
    )
    results = train_here(recipe)
    assert results["best"] == {"metric": "dev_wer", "value": 20.0, "step": 2}
    final, best = (load_file(tmp_path / "out" / name) for name in ("adapter_model.safetensors", "checkpoint-2/adapter_model.safetensors"))
    torch.testing.assert_close(final, best, rtol=0, atol=0)


def test_the_output_folder_alone_transcribes_offline_with_the_stock_libraries(speech, tmp_path):
    from transformers import GenerationConfig, WhisperForConditionalGeneration, WhisperProcessor

    out = tmp_path / "out"
    train_here(write_recipe(speech, training={"output_dir": str(out)}))
    processor = WhisperProcessor.from_pretrained(out)
    model = WhisperForConditionalGeneration.from_pretrained(out)
    model.generation_config = GenerationConfig.from_pretrained(out)
    assert "lora_A" in " ".join(model.state_dict())
    features = processor([0.1] * 16_000, sampling_rate=16_000, return_tensors="pt").input_features
    for words in ({}, {"language": "fr"}, {"return_timestamps": True}, {"language": "hi", "return_timestamps": True}):
        assert model.generate(features, **words).shape[0] == 1
    kept = {path.name for path in out.iterdir()}
    assert {"recipe.yaml", "results.json", "README.md", "data_report.json", "data_report.html", "curves.png"} <= kept
