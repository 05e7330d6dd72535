"""What will a run need? Estimates from recipe and data, told before the weights are loaded."""

import math
import shutil
from pathlib import Path

from transformers import WhisperConfig

from adapters import count_kept_weights
from config import Recipe, TrainingConfig
from device import Place
from faults import UserError
from sets import CheckedSet, count_steps

SHARED_MEMORY = "/dev/shm"  # torch hands batches from workers to their process through files here
WINDOW_FRAMES = 3000
FLOAT_BYTES = 4
OPTIMIZER_BYTES = 8  # two moments of each trained weight
TOKENIZER_BYTES = 5_000_000  # beside the weights of every saved model
PREDICTION_BYTES = 300  # of a scored clip, beside its two texts


def find_shared_memory_shortage(arguments: TrainingConfig, *, mel_bins: int, place: Place) -> str:
    """A warning when the features that all loader workers of this machine hold ready do not fit into the shared memory; else "".

    Without room a worker dies of a bus error, hours later when other programs take the room. Containers often have 64 MB.
    """
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return ""  # no such mount: torch then has another way
    batch = max(arguments.per_device_train_batch_size if arguments.do_train else 0, arguments.per_device_eval_batch_size)
    workers, ahead = arguments.dataloader_num_workers, arguments.dataloader_prefetch_factor or 2
    needed = place.local_world_size * workers * ahead * batch * mel_bins * WINDOW_FRAMES * FLOAT_BYTES
    if needed <= free:
        return ""
    return (
        f"warning: loader workers may need {needed / 1e6:,.0f} MB of {SHARED_MEMORY}, {free / 1e6:,.0f} MB are free, and they would die of a "
        "bus error: --training.dataloader_num_workers 0, or give the container more (docker run --shm-size 8g)"
    )


def count_checkpoints(arguments: TrainingConfig, *, steps: int, epochs: float) -> int:
    """The most checkpoints that lie on the disk at once in a run of so many steps and epochs: those kept and one being written."""
    strategy, every = arguments.save_strategy, arguments.save_steps
    if strategy == "best":  # saved at most when there are new scores
        strategy, every = arguments.eval_strategy, arguments.eval_steps or arguments.logging_steps
    if strategy == "no":
        return 0
    saves = math.ceil(epochs) if strategy == "epoch" else math.ceil(steps / (every if every >= 1 else every * steps))
    if not arguments.save_total_limit:
        return saves
    kept = max(arguments.save_total_limit, 2 if arguments.load_best_model_at_end else 1)
    return min(saves, kept + 1)


def find_disk_shortage(folder: Path, *, checkpoint: int, checkpoints: int, others: int) -> str:
    """A warning when so many checkpoints, and the other files, do not fit on the disk of `folder` (all sizes in bytes); else "".

    What earlier checkpoints there take counts as free: they give way to newer ones. Raises UserError when not even one
    checkpoint, or without any the other files, fit.
    """
    free = shutil.disk_usage(folder).free
    held = sum(path.stat().st_size for path in folder.glob("checkpoint-*/*") if path.is_file())
    least, most = (checkpoint if checkpoints else others), checkpoint * checkpoints + others
    if free + held < least:
        raise UserError(
            f"training.output_dir: {folder} has {free / 1e6:,.0f} MB free, and {'one checkpoint' if checkpoints else 'the results'} "
            f"may take {least / 1e6:,.0f} MB: make room, or choose a folder on another disk"
        )
    if free + held < most:
        return (
            f"warning: {checkpoints} checkpoints and the results may take {most / 1e6:,.0f} MB of {folder}, {free / 1e6:,.0f} MB are free: "
            "make room, or --training.save_total_limit 1"
        )
    return ""


def check_free_disk(
    folder: Path, recipe: Recipe, arguments: TrainingConfig, config: WhisperConfig, checked: dict[str, CheckedSet], *, world_size: int
) -> str:
    """`find_disk_shortage` for this recipe: trained weights in float32, the optimiser's moments, every scored text before and after."""
    scored = [row for name, part in checked.items() if name != "train" for row in part.rows]
    others = sum(2 * len(row.text.encode("utf-8", "replace")) + PREDICTION_BYTES for row in scored) * (2 if arguments.do_train else 1)
    if not arguments.do_train:
        return find_disk_shortage(folder, checkpoint=0, checkpoints=0, others=others)
    trained, saved = count_kept_weights(recipe, config)
    model = FLOAT_BYTES * saved + TOKENIZER_BYTES
    steps, epochs = count_steps(checked["train"], arguments, world_size=world_size)
    return find_disk_shortage(
        folder,
        checkpoint=model + OPTIMIZER_BYTES * trained,
        checkpoints=count_checkpoints(arguments, steps=steps, epochs=epochs),
        others=others + model,
    )
