"""Does the model learn, and is what was saved what was learnt? Checks for training that looks normal and teaches nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from model import load_weights, trainable_parameters


class LearningCheck(TrainerCallback):
    """Stops a run that teaches nothing within its first two real steps.

    A real step was not skipped (`was_skipped`, of no arguments, tells after it) and had a learning rate above zero. After
    the first, every LoRA B matrix must have moved; after the second, every other trained tensor too (the gradient of A is
    exactly zero while B is). Every trained tensor must have a finite gradient.
    """

    def __init__(self, model: torch.nn.Module, was_skipped: Callable[[], bool]):
        self.was_skipped = was_skipped
        self.tensors = dict(trainable_parameters(model))
        self.before: dict[str, torch.Tensor] = {}
        self.steps = 0
        self.learning_rate = 0.0
        self.first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remembers where this part of the run begins."""
        self.first_step = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judges a run without any real step."""
        if state.global_step > self.first_step and not self.steps:
            raise RuntimeError("no step changed the model: the learning rate was 0, or every step was skipped")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remembers the tensors before the first real step."""
        self.learning_rate = max(group["lr"] for group in kwargs["optimizer"].param_groups)
        if self.steps < 2 and not self.before:
            self.before = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judges gradients and moves after each of the first two real steps."""
        if self.steps >= 2 or self.learning_rate == 0.0 or self.was_skipped():
            return
        self.steps += 1
        broken = [n for n, t in self.tensors.items() if t.grad is None or not torch.isfinite(t.grad).all()]
        if broken:
            raise RuntimeError(f"no finite gradient reaches {_few(broken)}")
        expected = [name for name in self.tensors if self.steps == 2 or "lora_B" in name]
        still = [name for name in expected if torch.equal(self.before[name], self.tensors[name]) and self._can_show(name)]
        if still:
            raise RuntimeError(f"step {self.steps} with learning rate {self.learning_rate:g} did not change {_few(still)}")
        if self.steps == 2:
            self.before = {}

    def _can_show(self, name: str) -> bool:
        """Whether a step of the learning rate's size is more than half the spacing of the tensor's smallest number."""
        tensor = self.tensors[name]
        return self.learning_rate > tensor.abs().min().item() * torch.finfo(tensor.dtype).eps / 2


def check_weights(model: torch.nn.Module) -> None:
    """Raises FloatingPointError naming the trained tensors that are not finite."""
    tensors = dict(trainable_parameters(model))
    finite = torch.stack([torch.isfinite(tensor).all() for tensor in tensors.values()]).tolist()
    broken = [name for name, is_finite in zip(tensors, finite, strict=True) if not is_finite]
    if broken:
        raise FloatingPointError(f"not finite: {_few(broken)}")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} trained tensors: {', '.join(names[:3])}{more}"


def check_saved_weights(model: torch.nn.Module, folder: Path, loss: Any) -> None:
    """Reads the saved weights back into `model` and compares: they must give the same loss.

    `loss` is a function of no arguments that computes the loss (a float) of the model as it is. Raises RuntimeError when
    the saved files give another one.
    """
    before = loss()
    for _, parameter in trainable_parameters(model):
        parameter.data.zero_()
    load_weights(model, folder)
    after = loss()
    if before != after:
        raise RuntimeError(f"{folder}: the saved weights give a loss of {after}, those in memory {before}")
