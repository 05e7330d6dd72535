"""A launcher for tests: ranks are forked from a process that has the imports done, and ended as torch's launcher ends them."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS_BEFORE_KILLING = 30


class Launcher:
    """Keeps a process with all imports done; `run` forks two ranks from it."""

    def __init__(self):
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        environ = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT
        )

    def run(
        self,
        recipe: Path,
        *overrides: str,
        seconds: float = 120,
        fault: dict | None = None,
        signals: dict | None = None,
        delays: list[float] | None = None,
    ) -> dict:
        """Trains by two processes. `fault` is planted (planted.py); `signals` maps words of the output to a signal for both;
        `delays` are seconds that the ranks sleep first.

        Gives `statuses` by rank (negative: the signal that ended it; None: still running after `seconds`, and killed),
        `seconds` it took, `after` (seconds from the planted fault or signal to the end of the last rank) and `output`.
        """
        task = {"argv": ["--config", str(recipe), *overrides], "seconds": seconds, "fault": fault, "signals": signals, "delays": delays}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the kept process."""
        self._process.stdin.close()
        self._process.wait(timeout=60)


def main() -> None:
    """Imports once, then runs a task a line."""
    import train  # noqa: F401

    results = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(run_ranks(**json.loads(line))), file=results, flush=True)


def run_ranks(
    *, argv: list[str], seconds: float, fault: dict | None, signals: dict | None, delays: list[float] | None, ranks: int = 2
) -> dict:
    """Forks the ranks, waits for them, and ends the others when one has failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp())
    facts = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if fault:
        facts["FAULT"] = json.dumps(fault)
    if delays:
        facts["DELAYS"] = json.dumps(delays)
    files = [folder / f"{rank}" for rank in range(ranks)]
    started = time.monotonic()
    pids = {fork(argv, facts | {"RANK": rank, "LOCAL_RANK": rank}, files[rank]): rank for rank in range(ranks)}
    statuses, met, ending = [None] * ranks, None, None
    while pids and time.monotonic() < started + seconds:
        time.sleep(0.05)
        output = "".join(file.read_text(errors="replace") for file in files if file.exists())
        if met is None and "planted: " in output:
            met = time.monotonic()
        for word, name in (signals or {}).items():
            if word in output:
                met, signals = time.monotonic(), None
                for pid in pids:
                    os.kill(pid, getattr(signal, name))
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
        if ending is None and any(statuses):
            ending = time.monotonic()
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
        if ending and time.monotonic() > ending + SECONDS_BEFORE_KILLING:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    now = time.monotonic()
    output = "\n".join(file.read_text(errors="replace") for file in files)
    return {"statuses": statuses, "seconds": now - started, "after": now - met if met else None, "output": output}


def fork(argv: list[str], facts: dict, file: Path) -> int:
    """Forks one rank with `facts` in its environment and its output in `file`; gives its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.environ.update({name: str(value) for name, value in facts.items()})
        import planted

        planted.main(argv)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return 0


if __name__ == "__main__":
    main()
