"""What will a run need? Estimates from recipe and data, told before the weights are loaded."""

import heapq
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import WhisperConfig

from adapters import count_kept_weights
from compiling import padded_length
from config import Recipe, TrainingConfig
from device import Place
from faults import UserError
from labels import LabelBuilder
from manifest import Row
from memory_plan import FLOAT_BYTES, MemoryCounter, card_bytes, describe_memory
from packing import build_packed_sampler
from sets import CheckedSet, count_steps
from time_plan import count_operations, describe_time, measure_products

SHARED_MEMORY = "/dev/shm"  # torch hands batches from workers to their process through files here
WINDOW_FRAMES = 3000
OPTIMIZER_BYTES = 8  # two moments of each trained weight
TOKENIZER_BYTES = 5_000_000  # beside the weights of every saved model
PREDICTION_BYTES = 300  # of a scored clip, beside its two texts
SAMPLED_LABELS = 256
LONGEST_TEXTS = 16


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


def measure_labels(rows: Sequence[Row], labels: LabelBuilder) -> tuple[int, float]:
    """Label tokens of the longest row, looked for among the longest texts, and the mean of rows evenly spread."""
    longest = heapq.nlargest(LONGEST_TEXTS, rows, key=lambda row: len(row.text.encode("utf-8", "replace")))
    spread = [len(labels.build(row)) for row in rows[:: math.ceil(len(rows) / SAMPLED_LABELS)]]
    return max(*(len(labels.build(row)) for row in longest), *spread), sum(spread) / len(spread)


def measure_packed_labels(train: CheckedSet, labels: LabelBuilder, windows: Iterable[tuple[int, ...]]) -> tuple[int, float]:
    """The most label tokens of a window of packed clips, and their mean; `windows` hold numbers of rows."""
    around = len(labels.prefix(train.rows[0])) + 1
    lengths = [around + int(train.clips.tokens[list(rows)].sum()) for rows in windows]
    return max(lengths), sum(lengths) / len(lengths)


def describe_needs(recipe: Recipe, arguments: TrainingConfig, *, labels: LabelBuilder, train: CheckedSet, place: Place) -> list[str]:
    """For the log of the main process: the memory of its card, and the time of the training steps. Nothing on other ranks."""
    if not place.is_main:
        return []
    config, compiled = labels.base.config, recipe.training["torch_compile"]
    compute_type = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else torch.float32
    if train.clips:
        longest, mean = measure_packed_labels(train, labels, build_packed_sampler(train.clips, arguments, world_size=place.world_size))
    else:
        longest, mean = measure_labels(train.rows, labels)
    if compiled:
        longest, mean = (padded_length(math.ceil(length), most=config.max_target_positions) for length in (longest, mean))
    counter = MemoryCounter(
        recipe,
        config,
        compute_type=compute_type,
        world_size=place.world_size,
        label_length=longest,
        generated_length=labels.base.generation_config.max_length,
    )
    lines = [] if place.device == "cpu" else describe_memory(counter, total=card_bytes(place.device))
    checkpointed = recipe.training["gradient_checkpointing"]
    operations = count_operations(counter.shape, config, label_length=mean, checkpointed=checkpointed, compiled=compiled)
    steps, _ = count_steps(train, arguments, world_size=place.world_size)
    windows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    speed = measure_products(place.device, compute_type, config=config)
    return [*lines, describe_time(operations, steps=steps, windows=windows, speed=speed, compiled=compiled)]
