"""How does a run stop on purpose? Signals and the clock only ask; all ranks stop together, behind a whole step."""

import ctypes
import os
import signal
import socket
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

# In the order of their weight, where ranks have different ones.
REASONS = ("", "run.time_limit_seconds", "SIGINT", "SIGTERM")
# Launchers end by force what has not ended 30 s after a signal.
STOP_SECONDS = 24
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class StopAsked(Exception):
    """The run ends on purpose, for the reason that the message names; what was trained is saved."""


class StopRequest:
    """What asks this process to stop: `reason` is one of REASONS, empty while nothing does; `since` is when it came.

    Times are seconds of the monotonic clock.
    """

    def __init__(self):
        self.reason = ""
        self.since: float | None = None
        self.limit: float = float("inf")
        self._signals: socket.socket | None = None

    def ask(self, reason: str) -> None:
        """Asks for a stop; the first reason stays."""
        if not self.reason:
            self.since, self.reason = time.monotonic(), reason  # in this order: other threads look for a reason

    def listen(self) -> None:
        """From now on SIGTERM and SIGINT ask for a stop. Must be called in the main thread.

        A handler runs only when the interpreter does, and a collective that hangs does not let it; the number of the
        signal also goes into a socket at once, where `look` finds it from another thread.
        """
        self._signals, writer = socket.socketpair()
        self._signals.setblocking(False)
        writer.setblocking(False)
        self._writer = writer  # closed, it would take the numbers away
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.ask(signal.Signals(number).name))
        os.register_at_fork(after_in_child=_work_on)

    def set_time_limit(self, seconds: float | None) -> None:
        """Asks for a stop when `seconds` from now have passed; None: never."""
        self.limit = float("inf") if seconds is None else time.monotonic() + seconds

    def look(self) -> str:
        """The reason that this process has by now, of signals and clock; empty without one."""
        if self._signals is not None:
            try:
                for number in self._signals.recv(16):
                    # Others are handled too: loader workers that end send SIGCHLD.
                    if number in (signal.SIGTERM, signal.SIGINT):
                        self.ask(signal.Signals(number).name)
            except BlockingIOError:
                pass
        if time.monotonic() > self.limit:
            self.ask("run.time_limit_seconds")
        return self.reason

    def agree(self) -> str:
        """The reason of all ranks, the same on each; empty: go on. One number over the CPUs' group, on every rank at once."""
        number = REASONS.index(self.look())
        if dist.is_initialized():
            word = torch.tensor([number])
            dist.all_reduce(word, op=dist.ReduceOp.MAX)
            number = int(word)
        if number:
            self.ask(REASONS[number])
        return REASONS[number]


def _work_on() -> None:
    """In a worker, as it is forked: signals for all processes of a job leave it at work, since the step at hand needs its batches.

    SIGTERM is blocked, whatever handler the loader sets, and read by a thread that can tell who sent it.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_the_parent_says_so, daemon=True).start()


def _end_when_the_parent_says_so() -> None:
    parent = os.getppid()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


stop_request = StopRequest()


def end_with_launcher() -> None:
    """Lets the end of the launcher ask this process to stop: accelerate's leaves a single process behind when it is ended.

    Linux only; started by anything else than a launcher, a process keeps running when its parent ends (nohup, a shell).
    """
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        if any(name in word for word in words[:4] for name in (b"accelerate", b"torchrun", b"torch.distributed.run")):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
