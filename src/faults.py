"""How a run ends when something is wrong: the user's mistakes in plain words, failures with rank, phase and step."""

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


class RunFailure(Exception):
    """A failure while running; its message names the rank, the phase, the step and the error."""


class Progress:
    """Where this process is: `phase` is one of load, data, forward, backward, evaluate, save; `step` counts optimiser steps."""

    def __init__(self):
        self.phase = "load"
        self.step = 0

    @contextmanager
    def during(self, phase: str):
        """Names the phase of the enclosed work. It stays named when the work fails, so that the failure can tell."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before


progress = Progress()
