"""What will a run need? Estimates from the recipe alone, told before the weights are loaded."""

import shutil

from config import TrainingConfig
from device import Place

SHARED_MEMORY = "/dev/shm"  # torch hands batches from workers to their process through files here
WINDOW_FRAMES = 3000
FLOAT_BYTES = 4


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
