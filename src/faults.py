"""How a run ends when something is wrong: the user's mistakes in plain words, failures with rank, phase and step."""

from collections.abc import Callable
from contextlib import contextmanager


class UserError(Exception):
    """Mistakes in the recipe, the environment or the data: one plain message for each, shown without a traceback.

    `problems` is the list of messages; each names section and key as typed, or file and line, and what to do.
    """

    def __init__(self, *problems: str):
        self.problems = list(problems)
        super().__init__("\n".join(problems))


def first_line(error: Exception) -> str:
    """What an error of a library says, in one line; its kind when it says nothing."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    return text.splitlines()[0] if text else type(error).__name__


OUT_OF_MEMORY_HINT = (
    ". Lower training.per_device_train_batch_size (in evaluation per_device_eval_batch_size); run.global_batch_size keeps the steps "
    "what they were. Or: training.gradient_checkpointing true, model.quantization 8bit"
)


class RunFailure(Exception):
    """A failure while running; its message names the rank, the phase, the step and the error."""


class Progress:
    """Where this process is, for messages and for the watchdog.

    `phase` is one of load, data, forward, backward, evaluate, save; `step` counts optimiser steps; `clips` names what is
    worked on. `beats` counts the places passed, the same ones in the same order on every rank. Work that is `patient` may
    pass no place for long: the processor time and the traffic of the process and its workers then count as life. One that
    `waits` for the main process is not judged. `keeps` says that a stop waits for this work; else there is nothing to keep,
    and the process may leave at once.
    """

    def __init__(self):
        self.phase = "load"
        self.step = 0
        self.clips: Callable[[], str] = str
        self.beats = 0
        self.patient = 0
        self.waits = False
        self.keeps = False

    def beat(self, phase: str | None = None) -> None:
        """Passes a place, which may be where a `phase` begins. Takes a few microseconds."""
        self.phase = phase or self.phase
        self.beats += 1

    @contextmanager
    def during(self, phase: str, *, patient: bool = False, keeps: bool | None = None):
        """Names the phase of the enclosed work. It stays named when the work fails, so that the failure can tell."""
        before, kept = self.phase, self.keeps
        self.patient += patient
        self.keeps = self.keeps if keeps is None else keeps
        self.beat(phase)
        yield
        self.patient -= patient
        self.keeps = kept
        self.beat(before)


progress = Progress()


def describe_failure(error: BaseException, *, rank: int | str) -> str:
    """The line that tells a failure: rank, phase, step and error."""
    if isinstance(error, RunFailure):
        return str(error)
    kind = type(error).__name__
    hint = OUT_OF_MEMORY_HINT if kind == "OutOfMemoryError" else ""
    return f"rank {rank}, phase {progress.phase}, step {progress.step}: {kind}: {error}{hint}"
