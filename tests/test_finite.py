"""A step that is not finite changes nothing; too many in a row stop the run and name the clips."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer
from finite import FiniteSteps
from launching import train_here, write_recipe
from toy import build_whisper, write_speech

OPTIMIZERS = {
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


class Training:
    """The trainer's order of calls around an optimiser step, with a gradient that can be chosen."""

    def __init__(self, kind: str = "adamw", *, most_skipped: int = 3):
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = OPTIMIZERS[kind]([self.weight])
        self.steps = FiniteSteps(lambda ids: ", ".join(f"clip {i}" for i in ids), most_skipped=most_skipped)
        self.number = 0

    def step(self, *losses: float, gradient: float = 1.0, is_scaled: bool = False) -> None:
        self.number += 1
        for i, loss in enumerate(losses or (1.0,)):
            self.steps.watch(torch.tensor(loss), torch.tensor([10 * self.number + i]))
        self.weight.grad = torch.tensor([1.0, gradient, 2.0])
        norm = torch.nn.utils.clip_grad_norm_([self.weight], 1.0)
        self.steps.guard(norm, self.optimizer, step=self.number, is_scaled=is_scaled)
        if not is_scaled or torch.isfinite(norm):
            self.optimizer.step()

    def state(self) -> dict:
        return copy.deepcopy({"weight": self.weight.detach(), "optimizer": self.optimizer.state_dict()["state"]})


@pytest.mark.parametrize("gradient", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_skipped_step_leaves_weights_and_optimiser_as_they_were(kind, gradient):
    spoilt, healthy = Training(kind), Training(kind)
    for run in (spoilt, healthy):
        run.step()
    spoilt.step(gradient=gradient)  # the norm of 1e30 is infinite in float32
    assert spoilt.steps.was_skipped()
    torch.testing.assert_close(spoilt.state(), healthy.state(), rtol=0, atol=0)
    for run in (spoilt, healthy):
        run.step()
        assert not run.steps.was_skipped()
    torch.testing.assert_close(spoilt.state(), healthy.state(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_first_step_can_be_skipped(kind):
    training = Training(kind)
    training.step(gradient=math.nan)
    assert torch.equal(training.weight, torch.ones(3))
    training.step()
    assert torch.isfinite(training.weight).all() and not torch.equal(training.weight, torch.ones(3))


def test_an_infinite_loss_with_a_finite_gradient_is_seen_in_the_gradient():
    weight = torch.nn.Parameter(torch.ones(2))
    steps = FiniteSteps(str, most_skipped=3)
    steps.watch(weight.sum() + math.inf, torch.tensor([0])).backward()
    assert torch.isnan(weight.grad).all()
    weight.grad = None
    loss = weight.sum() * 3
    assert torch.equal(steps.watch(loss, torch.tensor([0])), loss)


def test_the_clips_of_the_losses_that_are_not_finite_are_named_else_all_of_the_step(capsys):
    training = Training()
    training.step(1.0, math.nan, 2.0, gradient=math.nan)
    training.step(1.0, 2.0, gradient=math.inf)
    training.step()
    training.steps.judge()
    assert capsys.readouterr().out.splitlines() == [
        "warning: skipped step 1: the loss is nan on clip 11 (rank 0)",
        "warning: skipped step 2: the gradient is not finite; its clips: clip 20, clip 21 (rank 0)",
    ]
    assert training.steps.skipped == 2


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.booleans(), max_size=12), st.integers(0, 3))
def test_the_run_stops_at_the_first_step_beyond_the_most_in_a_row(is_finite, most):
    training, expected, row = Training(most_skipped=most), None, 0
    for number, finite in enumerate(is_finite, 1):
        row = 0 if finite else row + 1
        if row > most:
            expected = number
            break
    try:
        for finite in is_finite:
            training.step(*(() if finite else (math.nan,)), gradient=1.0 if finite else math.nan)
        training.steps.judge()
    except FloatingPointError as error:
        named = [f"step {n}: the loss is nan on clip {10 * n} (rank 0)" for n in range(expected - most, expected + 1)]
        assert str(error) == f"{'; '.join(named)}; run.max_skipped_steps is {most}"
        assert training.number <= expected + 1  # judged while the next one is at work
    else:
        assert expected is None
        assert training.steps.skipped == is_finite.count(False)


def test_a_gradient_scalers_own_skips_are_no_fault_but_a_loss_that_is_not_finite_is():
    training = Training(most_skipped=1)
    for _ in range(4):
        training.step(gradient=math.inf, is_scaled=True)
        assert training.steps.was_skipped()
    training.steps.judge()
    assert training.steps.skipped == 0
    training.step(math.nan, gradient=math.nan, is_scaled=True)
    training.step(gradient=math.inf, is_scaled=True)  # says nothing about the row
    training.step(math.inf, gradient=math.nan, is_scaled=True)
    with pytest.raises(FloatingPointError, match="step 5: the loss is nan on clip 50 .*step 7: the loss is inf on clip 70"):
        training.steps.judge()


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finite")
    build_whisper(folder / "model")
    write_speech(folder, [f"clip {i} " * (1 + i % 3) for i in range(6)])
    write_speech(folder, ["other"], name="dev")
    return folder


@pytest.mark.parametrize(("optim", "max_grad_norm"), [("adamw_torch_fused", 1.0), ("adamw_torch", 0.0)])
def test_a_run_goes_on_after_steps_that_are_not_finite_and_reports_them(speech, tmp_path, monkeypatch, capsys, optim, max_grad_norm):
    stock, calls = trainer.mean_token_loss, []

    def spoilt(*args, **words):
        calls.append(1)
        # Two micro-batches a step: steps 1 and 4 are not finite.
        return stock(*args, **words) * (math.nan if len(calls) in (2, 7, 8) else 1.0)

    monkeypatch.setattr(trainer, "mean_token_loss", spoilt)
    steps = {"max_steps": 5, "logging_steps": 1, "eval_steps": 5, "save_steps": 5, "gradient_accumulation_steps": 2}
    out = tmp_path / "out"
    recipe = write_recipe(
        speech,
        run={"baseline": False},
        training=steps | {"output_dir": str(out), "optim": optim, "max_grad_norm": max_grad_norm},
    )
    results = train_here(recipe)
    assert (results["status"], results["train"]["steps"], results["train"]["skipped_steps"]) == ("finished", 5, 2)
    assert math.isfinite(results["train"]["loss"])
    said = capsys.readouterr().out
    assert said.count("warning: skipped step 1: the loss is nan on ") == said.count("warning: skipped step 4: the loss is nan on ") == 1
    history = json.loads((out / "checkpoint-5" / "trainer_state.json").read_text(), parse_constant=pytest.fail)["log_history"]
    logged = {entry["step"]: entry for entry in history if "learning_rate" in entry}
    assert [step for step, entry in logged.items() if "loss" not in entry] == [1, 4]
    assert all(5 < logged[step]["loss"] < 10 for step in (2, 3, 5))
    assert [logged[step].get("skipped_steps") for step in range(1, 6)] == [1, 1, 1, 2, 2]


def test_a_logged_loss_is_the_mean_of_the_steps_that_were_not_skipped(speech, tmp_path, monkeypatch):
    stock, losses = trainer.mean_token_loss, []

    def spoilt(*args, **words):
        loss = stock(*args, **words)
        losses.append(loss.item() if len(losses) != 1 else math.nan)
        return loss * (losses[-1] / losses[-1])

    monkeypatch.setattr(trainer, "mean_token_loss", spoilt)
    steps = {"max_steps": 4, "logging_steps": 4, "logging_first_step": False, "eval_strategy": "no", "save_steps": 4}
    recipe = write_recipe(speech, run={"baseline": False}, training=steps | {"output_dir": str(tmp_path), "load_best_model_at_end": False})
    logged = train_here(recipe)["train"]["loss"]
    assert logged == pytest.approx(sum(losses[:1] + losses[2:]) / 3, rel=1e-5)
