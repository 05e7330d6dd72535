"""Training sets read from the Hub while training: nothing is downloaded whole, and every clip is checked as it comes.

Each reader, a loader worker of a rank, has rows of its own and reads them without end, so every rank makes as many batches
as the recipe has steps, however many rows are dropped and wherever they lie.
"""

import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec.asyn
import numpy as np
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from audio import AudioError, measure_audio
from config import DataConfig
from data_check import find_clip_problem
from device import Place
from hub import HubSet
from labels import LabelBuilder
from manifest import BadRow, Row
from speakers import choose_speakers, is_chosen
from speech import build_example

FIRST_ROWS = 100  # rows of each source that are checked before the weights are loaded
SHUFFLED_ROWS = 256  # clips that a reader holds as they are stored: 50 to 100 MB
JUDGED_ROWS = 1000  # rows over all processes from which on the share of dropped ones counts
REMEMBERED_CLIPS = 10_000  # whose names can still be told when a loss is not finite: more than a process has in one step

logger = logging.getLogger("manifest")  # the one that says what was taken from the tables


@dataclass
class Note:
    """What a reader tells with a clip: its name, and the rows read for it, the dropped ones among them."""

    name: str
    read: int
    dropped: list[BadRow]


def read_first_rows(hub_set: HubSet, place: str) -> tuple[list[Row], list[BadRow]]:
    """The first rows of a stream that are the source's own, as a set on disk gives them; raises UserError as `choose_speakers`."""
    seen: list[Row] = []
    rows: list[Row] = []
    bad_rows: list[BadRow] = []
    left_out = 0
    for row in _read_rows(hub_set.rows, hub_set):
        if isinstance(row, BadRow):
            bad_rows.append(row)
        else:
            seen += [row] if len(seen) < FIRST_ROWS else []
            is_own = is_chosen(row, hub_set.source)
            rows += [row] if is_own else []
            left_out += not is_own
        if len(rows) + len(bad_rows) >= FIRST_ROWS:
            break
    choose_speakers(seen, hub_set.source, place)
    if left_out:
        first = f"{left_out:,} of the first {left_out + len(rows):,} rows"
        logger.info("%s: %s of %s are left out by speaker_share", place, first, hub_set.source.name)
    return rows, bad_rows


def _read_rows(stream: Any, hub_set: HubSet, *, reader: int = 0, readers: int = 1) -> Iterator[Row | BadRow]:
    """The rows of a stream whose number belongs to the reader."""
    # Batches of one: iterated row by row, the library would share files out between loader workers, and leave some without.
    for line, values in enumerate(stream.iter(batch_size=1), 1):
        if line % readers == reader:
            yield hub_set.build_row({column: value for column, (value,) in values.items()}, line)


class StreamedSpeech(IterableDataset):
    """Examples as `SpeechDataset` makes them, without end, each with a `note`; this process's share of them."""

    def __init__(
        self, sets: Sequence[HubSet], labels: LabelBuilder, *, data: DataConfig, place: Place, seed: int, with_mask: bool = False
    ):
        self.sets, self.labels, self.data, self.place = sets, labels, data, place
        self.seed, self.with_mask = seed, with_mask

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker:
            fsspec.asyn.reset_lock()  # taken over from the parent by fork, it may never be released
        reader, readers = self.place.rank * workers + number, self.place.world_size * workers
        for count, (row, note) in enumerate(self.read(reader, readers)):
            example = build_example([row], self.labels, row_ids=[count * readers + reader], with_mask=self.with_mask)
            yield example | {"note": note}

    def read(self, reader: int, readers: int) -> Iterator[tuple[Row, Note]]:
        """Usable rows for one of `readers`, without end; each from a source chosen by weight.

        The order depends on the seed and these two numbers. Raises RuntimeError when a source has no usable rows.
        """
        chance = random.Random(f"{self.seed} {reader} {readers}")
        streams = [self._read_good_rows(hub_set, reader, readers) for hub_set in self.sets]
        weights = [hub_set.source.weight for hub_set in self.sets]
        while True:
            yield next(chance.choices(streams, weights)[0])

    def _read_good_rows(self, hub_set: HubSet, reader: int, readers: int) -> Iterator[tuple[Row, Note]]:
        read, dropped = 0, []
        chance = random.Random(f"{self.seed} {reader} {hub_set.source.name}")
        for turn in itertools.count():
            is_empty = True
            for row in _shuffle(self._read_pass(hub_set, turn, reader, readers), chance):
                read += 1
                bad_row = row if isinstance(row, BadRow) else self._find_problem(row)
                if bad_row is None:
                    is_empty = False
                    yield row, Note(f"{row.file} ({row.audio})", read, dropped)
                    read, dropped = 0, []
                    continue
                dropped.append(bad_row)
                if len(dropped) == JUDGED_ROWS:
                    raise RuntimeError(f"{hub_set.source.name}: {JUDGED_ROWS:,} rows one after another cannot be used: {_count(dropped)}")
            if is_empty and readers == 1:
                raise RuntimeError(f"{hub_set.source.name}: no row can be used: {_count(dropped) or 'there are none'}")
            if is_empty:
                reader, readers = 0, 1  # fewer rows than readers: this one repeats those of the others

    def _read_pass(self, hub_set: HubSet, turn: int, reader: int, readers: int) -> Iterator[Row | BadRow]:
        """The reader's rows of one pass over a source: whole files where these divide evenly, else single rows by number."""
        stream = hub_set.rows
        if stream.num_shards % readers == 0:
            stream, reader, readers = stream.shard(readers, reader), 0, 1
        # Files in another order each pass, the same for all readers; clips are shuffled once they are the reader's own.
        # One file at a time: to read several at once the library starts threads, and sleeps 5 s when it ends them.
        stream = stream.shuffle(generator=np.random.default_rng([self.seed, turn]), buffer_size=1, max_buffer_input_shards=1)
        for row in _read_rows(stream, hub_set, reader=reader, readers=readers):
            if isinstance(row, BadRow) or is_chosen(row, hub_set.source):
                yield row

    def _find_problem(self, row: Row) -> BadRow | None:
        try:
            measure = measure_audio(row.sound(), start=row.start, end=row.end)
        except AudioError as error:
            measure = error
        limits = {"min_seconds": self.data.min_duration_seconds, "max_seconds": self.data.max_duration_seconds}
        problem = find_clip_problem(row, measure, **limits) or self.labels.find_problem(row)
        return BadRow(row.file, row.line, row.audio, *problem) if problem else None


def _shuffle(rows: Iterable[Row | BadRow], chance: random.Random) -> Iterator[Row | BadRow]:
    """Every row once; a full buffer gives up a random one for each that comes."""
    held = []
    for row in rows:
        held.append(row)
        if len(held) > SHUFFLED_ROWS:
            place = chance.randrange(len(held))
            held[place], held[-1] = held[-1], held[place]
            yield held.pop()
    chance.shuffle(held)
    yield from held


def _count(dropped: Iterable[BadRow]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in Counter(row.reason for row in dropped).most_common())


def build_loader(examples: StreamedSpeech, *, device: str, **words: Any) -> DataLoader:
    """A loader whose batches are this process's own: nothing is split between processes again, nor sent by the main one."""
    return prepare_data_loader(
        DataLoader(examples, **words), device=device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
    )


class StreamReport:
    """What the stream has shown to this process: rows read, dropped ones by reason, names of the last clips."""

    def __init__(self, data: DataConfig, world_size: int):
        self.data, self.world_size = data, world_size
        self.read, self.dropped, self.first = 0, Counter(), None
        self.names: dict[int, str] = {}

    def add(self, row_ids: Sequence[int], notes: Sequence[Note]) -> None:
        """Counts what was read for a batch; raises RuntimeError as `judge` does."""
        for row_id, note in zip(row_ids, notes, strict=True):
            self.names[row_id] = note.name
            self.read += note.read
            self.dropped.update(row.reason for row in note.dropped)
            self.first = self.first or next(iter(note.dropped), None)
        for row_id in list(self.names)[:-REMEMBERED_CLIPS]:
            del self.names[row_id]
        if self.read * self.world_size >= JUDGED_ROWS or self.data.on_bad_row == "fail":
            self.judge()

    def judge(self) -> None:
        """Raises RuntimeError when a row was dropped and none may be, or more than data.max_dropped_share."""
        share = self.dropped.total() / max(self.read, 1)
        if self.dropped and (self.data.on_bad_row == "fail" or share > self.data.max_dropped_share):
            limit = "on_bad_row is fail" if self.data.on_bad_row == "fail" else f"max_dropped_share is {self.data.max_dropped_share}"
            row = self.first
            raise RuntimeError(f"{self.describe()}; data.{limit}; the first: {row.file}: {row.audio}: {row.reason}: {row.detail}")

    def describe(self) -> str:
        """One line for the log: train, streamed: 1,240 rows read, dropped: 4 too_long, 2 unreadable."""
        counts = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.most_common())
        return f"train, streamed by this process: {self.read:,} rows read, dropped: {counts or 'none'}"
