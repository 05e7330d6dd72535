"""What becomes of a step whose loss or gradient is not finite? Every rank skips it; too many in a row stop the run."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from console import say


class Step(NamedTuple):
    """One optimiser step: its number, the gradient's norm followed by this rank's losses (on the CPU, when `event` has
    come), the clips of each loss, and whether a gradient scaler was at work."""

    number: int
    values: torch.Tensor
    row_ids: list[Sequence[int]]
    event: torch.cuda.Event | None
    is_scaled: bool

    def read(self) -> list[float]:
        """The norm and the losses; waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        return self.values.tolist()


class FiniteSteps:
    """Skips optimiser steps whose gradient is not finite and stops the run at more than `most_skipped` in a row.

    Ranks share the averaged gradient, so each of them skips by itself. A step is judged while the next one is at work,
    so as not to wait for the device. `row_names` turns row ids into words for the messages.
    """

    def __init__(self, row_names: Callable[[Sequence[int]], str], *, most_skipped: int):
        self.row_names, self.most_skipped = row_names, most_skipped
        self.skipped = 0
        self._in_a_row: list[str] = []
        self._losses: list[tuple[torch.Tensor, Sequence[int]]] = []
        self._last: Step | None = None
        self._steps = self._broken = 0

    def watch(self, loss: torch.Tensor, row_ids: Sequence[int]) -> torch.Tensor:
        """Remembers the loss of a micro-batch; gives it back, as NaN when it is not finite.

        The gradient of an infinite loss can be finite; that of NaN is NaN, and through the mean it is so on every rank.
        """
        self._losses.append((loss.detach(), row_ids))
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def guard(self, norm: torch.Tensor, optimizer: Any, *, step: int, is_scaled: bool) -> None:
        """Lets the optimiser's next step change nothing when the gradient's norm is not finite; judges the step before.

        A gradient scaler (`is_scaled`) skips by itself. Fused optimisers read on the device whether to skip; for others
        this waits for the device and takes the gradients away.
        """
        self.judge()
        values = torch.stack([norm.detach().float(), *(loss.float().to(norm.device) for loss, _ in self._losses)])
        event = None
        if values.is_cuda:
            event, values = torch.cuda.Event(), values.to("cpu", non_blocking=True)
            event.record()
        self._last = Step(step, values, [row_ids for _, row_ids in self._losses], event, is_scaled)
        self._losses = []
        self._steps += 1
        if is_scaled:
            return
        inner = getattr(optimizer, "optimizer", optimizer)  # within accelerate's own
        # What torch.amp.GradScaler asks and sets, too.
        if getattr(inner, "_step_supports_amp_scaling", False):
            inner.found_inf = 1.0 - torch.isfinite(norm).float()
        elif self.was_skipped():
            inner.zero_grad(set_to_none=True)

    def was_skipped(self) -> bool:
        """Whether the newest step was skipped, by a gradient scaler or here; waits for the device."""
        return self._last is not None and not math.isfinite(self._last.read()[0])

    def judge(self) -> None:
        """Tells of the newest step when it was skipped; raises FloatingPointError when there were too many in a row.

        Every rank must call it at the same points. A gradient scaler's own skips, of steps with finite losses, do not count.
        """
        last, self._last = self._last, None
        if last is None:
            return
        norm, *losses = last.read()
        if math.isfinite(norm):
            self._in_a_row = []
            return
        self._broken += 1
        broken = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        clips = [row_id for i in broken or range(len(losses)) for row_id in last.row_ids[i]]
        told = gather_object([(losses[broken[0]] if broken else None, self.row_names(clips))])
        faults = [f"the loss is {loss} on {names} (rank {rank})" for rank, (loss, names) in enumerate(told) if loss is not None]
        if last.is_scaled and not faults:
            return
        clips_by_rank = "; ".join(f"{names} (rank {rank})" for rank, (_, names) in enumerate(told))
        fault = f"step {last.number}: {'; '.join(faults) or f'the gradient is not finite; its clips: {clips_by_rank}'}"
        self._in_a_row.append(fault)
        if len(self._in_a_row) > self.most_skipped:
            raise FloatingPointError(f"{'; '.join(self._in_a_row)}; run.max_skipped_steps is {self.most_skipped}")
        self.skipped += 1
        say(f"warning: skipped {fault}")

    def count_finite(self) -> tuple[int, int]:
        """Steps since the last call, and how many of them were finite; judges the newest."""
        self.judge()
        counts = self._steps, self._steps - self._broken
        self._steps = self._broken = 0
        return counts
