"""Do all machines see the same files? What a manifest names and, where it is needed, the output folder."""

import hashlib
import os
import time
import unicodedata
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from config import Recipe
from faults import UserError
from manifest import Row
from meeting import Meeting

TOKEN_SECONDS = 10  # a shared disk shows a new file to the other machines within seconds
MISSING = -1


def measure_files(rows: Sequence[Row]) -> np.ndarray:
    """Two int64 a row: a hash of its text, place and part of the file, and its sound file's size in bytes (-1: missing)."""
    paths = list(dict.fromkeys(row.audio for row in rows))
    with ThreadPoolExecutor() as threads:
        sizes = dict(zip(paths, threads.map(_size_of, paths), strict=True))
    return np.array([(_hash_row(row), sizes[row.audio]) for row in rows], dtype=np.int64).reshape(-1, 2)


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return MISSING


def _hash_row(row: Row) -> int:
    name = unicodedata.normalize("NFC", os.path.basename(row.audio))  # disks spell accents in two ways
    words = repr((row.file, row.line, name, row.text, row.language, row.task, row.start, row.end, row.speaker))
    return int.from_bytes(hashlib.blake2b(words.encode("utf-8", "backslashreplace"), digest_size=8).digest(), signed=True)


def check_same_files(rows: Sequence[Row], expected: np.ndarray) -> None:
    """Holds this machine's rows against what `measure_files` gave on the main process.

    Raises UserError with the first manifest line or sound file that differs or is missing here.
    """
    found = measure_files(rows)
    for row, own, other in zip(rows, found.tolist(), expected.tolist(), strict=False):
        if own[0] != other[0]:
            said = "this line is another one than the main process reads; give all machines the same manifests"
            raise UserError(f"{row.file}:{row.line}: {said}")
        if own[1] != other[1]:
            here = "is missing here" if own[1] == MISSING else f"has {own[1]:,} bytes here"
            there = "is missing" if other[1] == MISSING else f"has {other[1]:,} bytes"
            said = f"{here} and {there} where the main process runs; give all machines the same files"
            raise UserError(f"{row.file}:{row.line}: {row.audio} {said}")
    if len(found) != len(expected):
        said = f"the manifests have {len(found):,} rows here and {len(expected):,} where the main process reads"
        raise UserError(f"{said}; give all machines the same")


def needs_shared_folder(recipe: Recipe) -> bool:
    """Whether every machine reads from the output folder: checkpoints to go on from, or the best one at the end."""
    keeps_best = recipe.training["load_best_model_at_end"] and recipe.training["save_strategy"] != "no"
    return bool(recipe.training["do_train"] and (recipe.run.resume != "never" or keeps_best))


def check_same_disk(recipe: Recipe, meeting: Meeting) -> None:
    """Raises UserError when another machine has to read what is written into the output folder and does not see it."""
    if not meeting.spans_machines or not needs_shared_folder(recipe):
        return
    folder = Path(recipe.training["output_dir"])
    name = f".seen-by-all-{uuid.uuid4().hex}"

    def write() -> bytes:
        (folder / name).touch()
        return name.encode()

    token = folder / meeting.once(write).decode()

    def look() -> None:
        deadline = time.monotonic() + TOKEN_SECONDS
        while meeting.is_first_elsewhere and not token.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"training.output_dir: {folder} is another folder here than where the main process runs, which all machines go on from or "
                    "take the best checkpoint from: name one on a disk that they share, or --training.load_best_model_at_end false without "
                    "--run.resume auto"
                )
            time.sleep(0.2)

    try:
        meeting.together(look)
    finally:
        if meeting.place.is_main:
            token.unlink(missing_ok=True)
