"""Which part of a run survives? Checkpoints: written beside, verified, then named; damaged ones are passed over."""

import json
import os
import random
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from adapters import ADAPTER_FILE
from config import Recipe
from faults import first_line
from model import MODEL_FILE

STATE_FILE, BASELINE_FILE, CHECKSUMS_FILE = "trainer_state.json", "baseline.json", "checksums.json"
# What a resumed run reads; scaler.pt is there with float16 alone.
RESUMED_FILES = (ADAPTER_FILE, MODEL_FILE, "optimizer.pt", "scheduler.pt", "scaler.pt", STATE_FILE)
# The folder in output_dir where a checkpoint is written until it is whole, and whence an older one is removed.
SAVING = ".saving"


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders checkpoint-N, oldest step first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


# --- writing -----------------------------------------------------------------------------------------------------


def remove_leftovers(folder: Path) -> None:
    """Removes what a save that was killed has left in the output folder."""
    for path in folder.glob(f"{SAVING}*"):
        shutil.rmtree(path)


class NotWritten(OSError):
    """A file could not be written; the message names it and the space left."""


@contextmanager
def naming_the_file(folder: Path) -> Iterator[None]:
    """Raises NotWritten when the enclosed writing into `folder` fails.

    A full disk or a file that may not grow reaches Python as an error of the library that wrote, without a name.
    Safetensors leaves nothing behind; of other files it is the one written last.
    """
    try:
        yield
    except Exception as error:
        is_named = isinstance(error, NotWritten) or getattr(error, "filename", None)
        if is_named or not isinstance(error, (OSError, SafetensorError)) and "inline_container" not in str(error):
            raise
        written = [path for path in folder.glob("*") if path.is_file()]
        last = max(written, key=lambda path: path.stat().st_mtime_ns, default=folder)
        file = folder / "*.safetensors" if isinstance(error, SafetensorError) else last
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free / 2**30
        raise NotWritten(f"{file} could not be written ({free:.2f} GiB free): {first_line(error)}") from error


def open_to_read(folder: Path) -> None:
    """Gives weights the permissions of the files beside them: safetensors leaves its files to their owner alone."""
    for path in folder.glob("*.safetensors"):
        shutil.copymode(next(folder.glob("*.json")), path)


def publish(checkpoint: Path, *, most: int | None, best: str | None) -> None:
    """Moves a checkpoint written in SAVING to its place in the output folder, then removes the oldest beyond `most`.

    `best`, a path or None, stays whatever its age. Raises RuntimeError, and leaves all as it was, when the new one
    could not be resumed from.
    """
    open_to_read(checkpoint)
    write_checksums(checkpoint)
    if damage := find_damage(checkpoint):
        raise RuntimeError(f"{checkpoint} is not what was written: {damage}")
    folder = checkpoint.parent.parent
    place = folder / checkpoint.name
    if place.exists():  # a damaged one that this run had passed over
        os.replace(place, checkpoint.with_name(f"{place.name}.before"))
    os.replace(checkpoint, place)
    for old in choose_old(list_checkpoints(folder), newest=place, best=best, most=most):
        os.replace(old, checkpoint.with_name(old.name))  # never half of one under its own name
    shutil.rmtree(checkpoint.parent)


def choose_old(checkpoints: list[Path], *, newest: Path, best: str | None, most: int | None) -> list[Path]:
    """Those to remove so that `most` are left, never the newest nor the best; steps beyond the newest, which a resumed
    run passed over as damaged, go first."""
    kept = {newest, newest.with_name(Path(best).name) if best else newest}
    others = [path for path in checkpoints if path not in kept]
    others.sort(key=lambda path: _step(path) < _step(newest))
    return others[: max(len(checkpoints) - most, 0)] if most and most > 0 else []


def compute_checksum(path: Path) -> int:
    """CRC-32 of a file: it stands against disks and copies, not against people, and is fast on gigabytes."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def write_checksums(checkpoint: Path) -> None:
    """Writes the checksums of what a resumed run reads: safetensors and JSON have none of their own."""
    paths = [path for path in map(checkpoint.joinpath, RESUMED_FILES) if path.is_file()] + _random_states(checkpoint)
    checksums = {path.name: compute_checksum(path) for path in paths}
    (checkpoint / CHECKSUMS_FILE).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")


def _random_states(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("rng_state*.pth"))


# --- reading -----------------------------------------------------------------------------------------------------


def find_damage(checkpoint: Path) -> str | None:
    """What makes a checkpoint unusable; None for a complete one. Without checksums only the files' form tells."""
    weights = next((checkpoint / name for name in (ADAPTER_FILE, MODEL_FILE) if (checkpoint / name).is_file()), None)
    if weights is None:
        return "it holds no weights"
    try:
        json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        with safe_open(weights, framework="pt") as file:
            file.keys()
        checksums = {}
        if (checkpoint / CHECKSUMS_FILE).is_file():
            checksums = json.loads((checkpoint / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        for name, expected in checksums.items():
            if (checkpoint / name).is_file():
                if compute_checksum(checkpoint / name) != expected:
                    return f"{name} is damaged"
            elif not name.startswith("rng_state"):  # a run can go on without random states
                return f"{name} is missing"
        for path in (checkpoint / "optimizer.pt", checkpoint / "scheduler.pt", *_random_states(checkpoint)):
            with zipfile.ZipFile(path) as file:
                if path.name not in checksums and file.testzip():
                    return f"{path.name} is damaged"
    except Exception as error:  # a damaged file makes its reader raise whatever it meets
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def verify(checkpoint: Path) -> None:
    """Reads all that a resumed run reads, every number of it, into main memory. Raises RuntimeError when it cannot be used."""
    damage = find_damage(checkpoint)
    try:
        if damage is None:
            load_file(next(path for path in (checkpoint / ADAPTER_FILE, checkpoint / MODEL_FILE) if path.is_file()))
            with reading_random_states():
                for path in sorted(checkpoint.glob("*.pt")) + _random_states(checkpoint):
                    torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        damage = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if damage:
        raise RuntimeError(f"{checkpoint} cannot be resumed from: {damage}")


def reading_random_states() -> AbstractContextManager:
    """A context in which torch.load takes random states with arrays of numpy 1 and 2, beyond what is safe anyway.

    They call one function by two names in their files, and safe loading takes only that of the version at hand.
    """
    rebuild = np.random.get_state()[1].__reduce__()[0]
    names = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return torch.serialization.safe_globals([*names, np.ndarray, np.dtype, type(np.dtype(np.uint32))])


def read_random_states() -> tuple:
    """The states of all generators of this process: Python's, numpy's, torch's, and that of its card."""
    card = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), card


def write_random_states(states: tuple) -> None:
    """Puts back what `read_random_states` gave."""
    python, numpy, cpu, card = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if card is not None:
        torch.cuda.set_rng_state(card)


def find_checkpoint(folder: Path, *, world_size: int) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint to go on from, and lines worth telling: what was passed over, what is not exact."""
    notes = []
    for checkpoint in reversed(list_checkpoints(folder)):
        damage = find_damage(checkpoint)
        if damage is None:
            ranks = [f"rng_state_{rank}.pth" for rank in range(world_size)] if world_size > 1 else ["rng_state.pth"]
            if not all((checkpoint / name).is_file() for name in ranks):
                notes.append(
                    f"warning: {checkpoint.name} holds no random states for {world_size} process{'es' if world_size > 1 else ''}: "
                    "dropout is not repeated exactly; the order of the data is, when run.global_batch_size is set"
                )
            return checkpoint, notes
        notes.append(f"warning: {checkpoint} is passed over: {damage}")
    return None, notes


def find_earlier_part(folder: Path, recipe: Recipe, *, world_size: int) -> bytes:
    """What a resumed run goes on from, as JSON: `checkpoint` (path or null), `notes` worth telling, whether its training
    `is_finished` as far as the recipe asks, and the `baseline` scores."""
    checkpoint, notes = find_checkpoint(folder, world_size=world_size)
    found: dict[str, Any] = {"checkpoint": None, "notes": notes, "is_finished": False, "baseline": {}}
    if checkpoint:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        found |= {"checkpoint": str(checkpoint), "baseline": read_baseline(folder)}
        is_done = not asks_for_more(recipe, steps=state["global_step"], epochs=state["epoch"])
        found["is_finished"] = is_done or has_lost_patience(recipe, state)
    return json.dumps(found).encode()


def has_lost_patience(recipe: Recipe, state: dict[str, Any]) -> bool:
    """Whether early stopping had ended the training already when this state was saved, by the patience that the recipe has now."""
    patience = recipe.run.early_stopping_patience
    saved = state.get("stateful_callbacks", {}).get("Patience", {}).get("attributes", {})
    return patience is not None and saved.get("early_stopping_patience_counter", 0) >= patience


def asks_for_more(recipe: Recipe, *, steps: int, epochs: float) -> bool:
    """Whether the recipe wants more than the steps, or epochs, that were trained."""
    most = recipe.training["max_steps"]
    return most > steps if most > 0 else recipe.training["num_train_epochs"] > epochs


def read_baseline(folder: Path) -> dict[str, Any]:
    """The scores of the untouched model that an earlier part of this run has left; empty when there are none."""
    try:
        return json.loads((folder / BASELINE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
