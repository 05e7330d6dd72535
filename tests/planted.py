"""The training command with one fault, planted where a phase begins: FAULT holds kind, rank, phase and step as JSON."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import faults


def plant(kind: str, *, rank: int, phase: str, step: int, path: str = "") -> None:
    """Lets this process, if it has that rank, meet the fault as it enters `phase` of `step`, once."""
    if rank not in (int(os.environ.get("RANK", "0")), -1):
        return
    beat, met = faults.Progress.beat, []

    def beat_and_fail(progress: faults.Progress, entered: str | None = None) -> None:
        beat(progress, entered)
        if entered == phase and progress.step == step and not met:
            met.append(kind)
            print(f"planted: {kind} in {phase} of step {step}", flush=True)
            meet(kind, path)

    faults.Progress.beat = beat_and_fail


def meet(kind: str, path: str) -> None:
    """The fault itself; `path` is a file to be removed, or the process id file of the launcher."""
    if kind == "raise":
        raise ValueError("a planted fault")
    elif kind == "oom":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory (planted)")
    elif kind == "stuck":
        time.sleep(3600)
    elif kind == "slow":
        time.sleep(12)
    elif kind == "busy":
        end = time.monotonic() + 12
        while time.monotonic() < end:
            pass
    elif kind == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # above what the output of this process takes
    elif kind == "remove":
        Path(path).unlink()
    else:
        os.kill(os.getpid(), getattr(signal, kind))


def main(argv: list[str]) -> None:
    """Plants the fault that the environment names, waits for its share of DELAYS (seconds by rank), and trains."""
    if "FAULT" in os.environ:
        plant(**json.loads(os.environ["FAULT"]))
    if "DELAYS" in os.environ:
        time.sleep(json.loads(os.environ["DELAYS"])[int(os.environ["RANK"])])
    import train

    train.start(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
