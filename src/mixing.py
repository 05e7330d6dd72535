"""In which order does an epoch meet the rows? By the weight of their source, and none again before all of its source were met."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
from torch.utils.data import Sampler


@dataclass(frozen=True)
class Mix:
    """How many usable rows each source has, and how many times an epoch meets each of them."""

    sizes: list[int]
    weights: list[float]

    @property
    def is_plain(self) -> bool:
        """Whether an epoch meets every row once."""
        return all(weight == 1 for weight in self.weights)

    @property
    def clips(self) -> list[int]:
        """Clips an epoch from each source: at least one of a source that has rows."""
        return [max(1, round(weight * size)) if size else 0 for size, weight in zip(self.sizes, self.weights, strict=True)]


class TrainingSampler(Sampler[int]):
    """Row numbers of one epoch; the sources' rows follow one another. The order depends on seed and epoch alone.

    An epoch is a whole number of global batches, filled up from its own beginning: however these are split between
    processes and accumulation, each step has the same rows.
    """

    def __init__(self, mix: Mix, *, seed: int, global_batch_size: int):
        self.mix, self.seed, self.global_batch_size, self.epoch = mix, seed, global_batch_size, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration gives."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(sum(self.mix.clips) / self.global_batch_size) * self.global_batch_size

    def __iter__(self) -> Iterator[int]:
        chosen, first = [], 0
        for source, (size, count) in enumerate(zip(self.mix.sizes, self.mix.clips, strict=True)):
            chosen += [first + row for row in self._choose_rows(source, size, count)]
            first += size
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(chosen))
        return islice(cycle([chosen[place] for place in order]), len(self))

    def _choose_rows(self, source: int, size: int, count: int) -> list[int]:
        """`count` rows of an endless row of passes over the source, each in an order of its own, from where the last epoch ended."""
        place, end, rows = self.epoch * count, (self.epoch + 1) * count, []
        while place < end:
            turn, begin = divmod(place, size)
            order = np.random.default_rng([self.seed, source, turn]).permutation(size)
            rows += order[begin : begin + end - place].tolist()
            place = min(end, (turn + 1) * size)
        return rows
