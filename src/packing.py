"""Which short clips share a 30 s window? Decided anew each epoch from lengths alone, and alike on every rank.

A window holds clips of one language and one task, each once, with a pause between them. Nothing here hears or reads a clip.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import cycle, islice

import numpy as np
from torch.utils.data import Sampler

from audio import SAMPLE_RATE, WINDOW_SAMPLES, WINDOW_SECONDS
from config import TrainingConfig
from mixing import Mix, TrainingSampler

# 0.2 s: longer than the closure of any stop consonant, so it is heard as a pause, and words cut tightly do not run together.
PAUSE_SAMPLES = 3200
FRAME_SAMPLES = 160  # clips are measured in whole frames of the features, upwards
# Frames that the clips of a window have between them; each brings a pause, and that of the last lies behind the window.
WINDOW_FRAMES = (WINDOW_SAMPLES + PAUSE_SAMPLES) // FRAME_SAMPLES
# How far clips may leave the order of their lengths. More makes an epoch less like the one before, and windows less full:
# the smaller ones are for an epoch that needs too many windows otherwise.
SPREADS = (0.3, 0.1, 0.03, 0.0)
PACKING = 1 << 20  # keeps these random numbers apart from those that choose the rows


@dataclass(frozen=True, eq=False)
class Clips:
    """What packing needs to know of the training rows, an array entry for each: `samples` at 16 kHz, `tokens` of the text and
    `groups`, a number for each kind of clip that shares no window with another kind. `token_room` is what the labels of a window
    hold beside their prefix and end; `mix` says how often an epoch meets each row."""

    samples: np.ndarray
    tokens: np.ndarray
    groups: np.ndarray
    token_room: int
    mix: Mix

    @cached_property
    def sizes(self) -> np.ndarray:
        """The greater of each clip's shares of a window, that of the time and that of the tokens, in frames of the window.

        Clips whose sizes sum to no more than WINDOW_FRAMES break neither limit, and each alone fits.
        """
        frames = -(-self.samples.astype(np.int64) // FRAME_SAMPLES) + PAUSE_SAMPLES // FRAME_SAMPLES
        return np.maximum(frames, -(-self.tokens.astype(np.int64) * WINDOW_FRAMES // self.token_room)).clip(max=WINDOW_FRAMES)


def pack(sizes: np.ndarray, groups: np.ndarray, *, chance: np.random.Generator, spread: float) -> list[tuple[int, ...]]:
    """Puts every clip into one window: windows of clip numbers, in random order within each, of one group each.

    Best fit, the longest clips first: a clip goes where it leaves the least room. With `spread` 0.3 lengths count as up to 30 %
    more or less, which changes who meets whom; with 0 the number of windows depends on the sizes and groups alone.
    """
    lengths = sizes * chance.uniform(1 - spread, 1 + spread, len(sizes))
    order = np.lexsort((-lengths, groups))
    ends = np.flatnonzero(np.diff(groups[order])) + 1
    windows, count = np.empty(len(sizes), dtype=np.int64), 0
    for clips in np.split(order, ends):
        placed, used = _fit(sizes[clips].tolist())
        windows[clips] = np.array(placed, dtype=np.int64) + count
        count += used
    shuffled = np.lexsort((chance.random(len(sizes)), windows))
    numbers, ends = shuffled.tolist(), np.cumsum(np.bincount(windows)).tolist()
    return [tuple(numbers[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _fit(sizes: list[int]) -> tuple[list[int], int]:
    """The window of each clip, and the number of windows."""
    by_room: list[list[int]] = [[] for _ in range(WINDOW_FRAMES + 1)]
    # Bit n is set where a window with n free frames is: the next one that fits is found without a search.
    rooms, used, placed = 0, 0, []
    for size in sizes:
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            window = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, window, used = WINDOW_FRAMES, used, used + 1
        room -= size
        by_room[room].append(window)
        rooms |= 1 << room
        placed.append(window)
    return placed, used


def split(windows: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Makes `count` windows of fewer: those with the most clips are halved. No clip is met twice.

    Stays below `count` only where every window is down to one clip.
    """
    heap = [(-len(clips), number) for number, clips in enumerate(windows)]
    windows = list(windows)
    heapq.heapify(heap)
    while len(windows) < count and heap[0][0] < -1:
        _, number = heapq.heappop(heap)
        clips = windows[number]
        windows[number] = clips[: len(clips) // 2]
        windows.append(clips[len(clips) // 2 :])
        for half in (number, len(windows) - 1):
            heapq.heappush(heap, (-len(windows[half]), half))
    return windows


class PackedSampler(Sampler[tuple[int, ...]]):
    """Windows of one epoch, each a tuple of row numbers, for a dataset that joins them; loader workers need no state.

    They depend on the clips, the seed and the epoch alone, and hold the rows that `TrainingSampler` chooses for that epoch, each
    as often as it does. Every epoch has the same whole number of global batches: where packing needs fewer windows some are
    split, so that none is repeated. Only an epoch of too few clips for that is a window a clip, filled up from its own beginning.
    A run has `epochs` epochs or `windows` windows, whichever ends it.
    """

    def __init__(self, clips: Clips, *, seed: int, global_batch_size: int, epochs: float = 1, windows: float = math.inf):
        self.clips, self.seed, self.epoch = clips, seed, 0
        self._length = _count_windows(clips, seed, global_batch_size, epochs=epochs, windows=windows)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration gives."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        rows, groups = _choose_rows(self.clips, self.seed, self.epoch)
        chance = np.random.default_rng([self.seed, self.epoch, PACKING])
        for spread in SPREADS:
            windows = pack(self.clips.sizes[rows], groups, chance=chance, spread=spread)
            if len(windows) <= len(self):
                break
        windows = split(windows, len(self))
        numbers = rows.tolist()
        for place in islice(cycle(chance.permutation(len(windows)).tolist()), len(self)):
            yield tuple(numbers[clip] for clip in windows[place])

    def describe(self) -> str:
        """Lines for the log: how many clips share how many windows, how full these are, and a hint where there is little to share."""
        rows, _ = _choose_rows(self.clips, self.seed, 0)
        samples = self.clips.samples[rows]
        seconds = samples.sum(dtype=np.int64) / SAMPLE_RATE / len(self)
        line = f"packed: {len(rows):,} clips in {len(self):,} windows, {seconds:.1f} s each of {WINDOW_SECONDS}"
        share = (samples > WINDOW_SAMPLES / 2).mean()
        if share > 0.5:
            line += f"\nhint: {share:.0%} of the clips are longer than half a window; data.pack has little to share"
        return line


def build_packed_sampler(clips: Clips, arguments: TrainingConfig, *, world_size: int) -> PackedSampler:
    """The sampler of a run with these arguments over `world_size` processes."""
    size = world_size * arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    if arguments.max_steps > 0:
        return PackedSampler(clips, seed=seed, global_batch_size=size, epochs=math.inf, windows=arguments.max_steps * size)
    return PackedSampler(clips, seed=seed, global_batch_size=size, epochs=arguments.num_train_epochs)


def _choose_rows(clips: Clips, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of an epoch in ascending order, and their groups; a row's second time is of another group, so that it does not
    follow itself in a window."""
    sampler = TrainingSampler(clips.mix, seed=seed, global_batch_size=1)
    sampler.set_epoch(epoch)
    rows = np.sort(np.fromiter(sampler, dtype=np.int64, count=len(sampler)))
    numbers = np.arange(len(rows))
    times = numbers - np.maximum.accumulate(np.where(np.diff(rows, prepend=-1) > 0, numbers, 0))
    return rows, clips.groups[rows] * (times.max(initial=0) + 1) + times


@lru_cache(maxsize=1)  # for the log first, then for training
def _count_windows(clips: Clips, seed: int, global_batch_size: int, *, epochs: float, windows: float) -> int:
    """The windows of each epoch of a run: enough for every one of them.

    Where all rows are met each epoch, lengths in their strict order always need as many windows, so one epoch tells; else each
    is counted.
    """
    most, epoch, length = 0, 0, 0
    while epoch < epochs and epoch * length < windows and not (epoch and clips.mix.is_plain):
        rows, groups = _choose_rows(clips, seed, epoch)
        chance = np.random.default_rng([seed, epoch, PACKING])
        needed = (len(pack(clips.sizes[rows], groups, chance=chance, spread=spread)) for spread in (SPREADS[0], SPREADS[-1]))
        most = max(most, *needed)
        length = math.ceil(most / global_batch_size) * global_batch_size
        epoch += 1
    return length
