"""Two runs never write into one folder; what a dead run leaves is no obstacle."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import lock
from faults import UserError
from lock import lock_folder

SRC = Path(__file__).parent.parent / "src"
HOLD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from lock import lock_folder
lock_folder(Path(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(SRC), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_told_who_is_writing(tmp_path, holder):
    with pytest.raises(UserError) as caught:
        lock_folder(tmp_path)
    (problem,) = caught.value.problems
    said = f"training.output_dir: {tmp_path} is being written by another run (process {holder.pid} on {socket.gethostname()})."
    assert problem.startswith(said)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_dead_run_leaves_is_no_obstacle(tmp_path, holder, end):
    holder.send_signal(end)
    holder.wait()
    assert (tmp_path / ".lock").is_file()
    lock_folder(tmp_path)
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_the_process_that_has_it_may_ask_again(tmp_path):
    lock_folder(tmp_path)
    lock_folder(tmp_path)
    (tmp_path / ".lock").unlink()
    lock_folder(tmp_path)
    assert (tmp_path / ".lock").is_file()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_disk_without_locks_is_gone_on_with(tmp_path, monkeypatch, number):
    def refuse(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    lock_folder(tmp_path)


def test_other_errors_are_not_swallowed(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="broken"):
        lock_folder(tmp_path)
