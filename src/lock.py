"""Does another run write into this folder? One process holds its lock, and the system takes it back when that process ends."""

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from faults import UserError

LOCK_FILE = ".lock"
_held: dict[Path, IO[str]] = {}  # for the life of this process


def lock_folder(folder: Path) -> None:
    """Takes the lock of a run's output folder; does nothing where this process has it already or the disk knows no locks.

    Raises UserError naming the process that has it, OSError when the file cannot be written.
    """
    path = (folder / LOCK_FILE).resolve()
    if path.exists() and any(os.path.samestat(path.stat(), os.fstat(file.fileno())) for file in _held.values()):
        return  # its own, perhaps under the name that the folder had before
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise UserError(
            f"training.output_dir: {folder} is being written by another run ({holder}). Wait for its end, stop it, or choose another folder"
        ) from None
    except OSError as error:
        file.close()
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            return
        raise
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _held[path] = file
