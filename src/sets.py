"""Which rows are trained on and which are scored? All are checked once, by the main process, before weights are loaded."""

import itertools
import logging
import math
import os
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from config import DataConfig, DataSource, TrainingConfig
from data_check import REPORT_FILE, SetCheck, check_rows, describe, describe_dropped, judge_set, write_data_report
from device import Place
from faults import UserError, first_line
from hub import HubSet, open_hub_set
from labels import LabelBuilder
from machines import check_same_files, measure_files
from manifest import BadRow, Row, read_manifest
from meeting import Meeting
from mixing import Mix
from overlaps import describe_overlaps
from packing import Clips, build_packed_sampler
from speakers import choose_speakers
from streaming import FIRST_ROWS, read_first_rows

logger = logging.getLogger("manifest")  # the one that says what was taken from the tables


@dataclass
class CheckedSet:
    """Rows that can be used, how many the sources had, how long the usable ones last (seconds), and how an epoch mixes them
    (None: each once). Of a streamed set `streams` are its sources, and the rows only its first ones, without their sound.
    `clips` tells how long each row is, for packing (None: a window for each)."""

    rows: list[Row]
    rows_total: int
    seconds: float
    mix: Mix | None = None
    streams: list[HubSet] = field(default_factory=list)
    clips: Clips | None = None


@dataclass
class Table:
    """The rows of one source, and apart those with a field that cannot be used."""

    rows: list[Row]
    bad_rows: list[BadRow]


def cache_folder() -> Path:
    """Where measures of clips are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whisper-ddp"


def check_sets(data: DataConfig, labels: LabelBuilder, *, meeting: Meeting, folder: Path, with_training: bool) -> dict[str, CheckedSet]:
    """Reads and checks the training set (`with_training`), under the name "train", and every validation set.

    The main process loads sets from the Hub, decodes each clip once and writes `data_report.json` and `.html` into `folder`;
    the other ranks poll for its verdict and read the tables alone. Raises UserError with the problems of all sets, and when
    another machine's files are not the main process's own.
    """
    places = _list_places(data, with_training=with_training)
    opened: dict[str, HubSet] = {}
    tables: dict[str, list[Table]] = {}

    def examine() -> bytes:
        tables.update(_read_sets(places, data, opened))
        checks = [_check_set(name, tables[name], data=data, labels=labels) for name in tables]
        for check in checks[1:] if with_training else []:
            check.notes += describe_overlaps(checks[0], check)
        write_data_report(folder, checks)
        for check in checks:
            print(describe(check), *check.notes, sep="\n", flush=True)
        problems = [
            problem
            for check in checks
            for problem in judge_set(
                check,
                on_bad_row=data.on_bad_row,
                max_dropped_share=_most_dropped(check.name, data),
                report=str(folder / REPORT_FILE),
            )
        ]
        if problems:
            raise UserError(*problems)
        for line in describe_dropped(checks, report=folder / REPORT_FILE):
            print(line, flush=True)
        verdict = {
            check.name: {
                "dropped": _number_dropped(tables[check.name], check),
                "rows_total": check.rows_read,
                "seconds": check.seconds,
                "lengths": _measure_lengths(check, labels) if data.pack and check.name == "train" else None,
            }
            for check in checks
        }
        first_rows = _without_sound(tables["train"]) if with_training and data.streaming else None
        traits = measure_files(_list_rows(tables)) if meeting.spans_machines else None
        return pickle.dumps((verdict, pickle.dumps(opened), first_rows, traits))

    verdict, pickled, first_rows, traits = pickle.loads(meeting.once(examine))
    if first_rows:
        places.pop("train"), tables.pop("train", None)

    def read() -> dict[str, list[Table]]:
        opened.update(_open_again(pickled))
        found = tables or _read_sets(places, data, opened)
        if traits is not None and meeting.is_first_elsewhere:
            check_same_files(_list_rows(found), traits)
        return found

    tables = meeting.together(read)
    tables |= {"train": first_rows} if first_rows else {}
    result = {}
    for name, facts in verdict.items():
        if sum(len(table.rows) + len(table.bad_rows) for table in tables[name]) != facts["rows_total"]:
            raise RuntimeError(f"{name}: this process reads another number of rows than the main one did")
        numbers = itertools.count()
        parts = [[row for row in table.rows if next(numbers) not in facts["dropped"]] for table in tables[name]]
        result[name] = CheckedSet([row for part in parts for row in part], facts["rows_total"], facts["seconds"])
        if name == "train":
            _refuse_empty_sources(parts, data, report=folder / REPORT_FILE)
            result[name].mix = Mix([len(part) for part in parts], [source.weight for source in data.train])
            result[name].streams = [opened[place] for place in opened if place.startswith("data.train[")] if first_rows else []
            if data.pack:
                result[name].clips = _describe_clips(result[name], facts["lengths"], labels)
    return result


def _measure_lengths(check: SetCheck, labels: LabelBuilder) -> tuple[np.ndarray, np.ndarray]:
    """Samples and text tokens of each row: six bytes a row on their way to the other ranks."""
    tokens = (labels.count_tokens(row) for row in tqdm(check.rows, f"{check.name}: tokens", delay=2, unit="row"))
    return np.array(check.samples, dtype=np.int32), np.fromiter(tokens, dtype=np.int16, count=len(check.rows))


def _describe_clips(part: CheckedSet, lengths: tuple[np.ndarray, np.ndarray], labels: LabelBuilder) -> Clips:
    """Silence with an empty text shares windows with silence alone: between texts it would no longer be taught as empty."""
    numbers: dict[tuple[str | None, str, bool], int] = {}
    kinds = ((labels.language_of(row), labels.task_of(row), not row.text.strip()) for row in part.rows)
    groups = np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds], dtype=np.int32)
    return Clips(*lengths, groups, token_room=labels.max_length - len(labels.prefix(part.rows[0])) - 1, mix=part.mix)


def _open_again(pickled: bytes) -> dict[str, HubSet]:
    """The sets that the main process has loaded from the Hub, read from the files in its cache."""
    try:
        return pickle.loads(pickled)
    except OSError as error:
        raise UserError(
            f"sets from the Hub are loaded once, and this machine does not see the main process's cache ({first_line(error)}): "
            "set HF_HOME to a folder on a disk that all machines share"
        ) from error


def _list_rows(tables: dict[str, list[Table]]) -> list[Row]:
    """Every row that has a sound file of its own, in order."""
    return [row for parts in tables.values() for table in parts for row in table.rows if row.store is None]


def _number_dropped(tables: list[Table], check: SetCheck) -> set[int]:
    """Which rows of a set's tables, counted through all of them, the check dropped: two sources may name one line of a file."""
    kept = {id(row) for row in check.rows}
    rows = itertools.chain.from_iterable(table.rows for table in tables)
    return {number for number, row in enumerate(rows) if id(row) not in kept}


def _refuse_empty_sources(parts: list[list[Row]], data: DataConfig, *, report: Path) -> None:
    empty = [number for number, part in enumerate(parts) if not part]
    if empty:
        names = {number: data.train[number].name for number in empty}
        raise UserError(*(f"data.train[{number}]: no row of {name} can be used; {report} tells why" for number, name in names.items()))


def _is_streamed(name: str, data: DataConfig) -> bool:
    return name == "train" and data.streaming


def _most_dropped(name: str, data: DataConfig) -> float:
    """Of a stream's first rows only one must be left: too few are known for a share."""
    return 1.0 if _is_streamed(name, data) else data.max_dropped_share


def _without_sound(tables: list[Table]) -> list[Table]:
    return [Table([replace(row, store=None) for row in table.rows], table.bad_rows) for table in tables]


def _list_places(data: DataConfig, *, with_training: bool) -> dict[str, dict[str, DataSource]]:
    """Set name -> place in the recipe -> source."""
    places: dict[str, dict[str, DataSource]] = {}
    for place, source in data.sources().items():
        name = place.removeprefix("data.validation.") if place.startswith("data.validation.") else "train"
        if with_training or name != "train":
            places.setdefault(name, {})[place] = source
    return places


def _read_sets(places: dict[str, dict[str, DataSource]], data: DataConfig, opened: dict[str, HubSet]) -> dict[str, list[Table]]:
    """The tables of every set; sets from the Hub are added to `opened` where they are not there yet."""
    tables, problems = {}, []
    for name, sources in places.items():
        for place, source in sources.items():
            try:
                table = _read_source(source, place, data=data, opened=opened)
            except UserError as error:
                problems += error.problems
                continue
            tables.setdefault(name, []).append(table)
    if problems:
        raise UserError(*problems)
    return tables


def _read_source(source: DataSource, place: str, *, data: DataConfig, opened: dict[str, HubSet]) -> Table:
    names = ("audio_column", "text_column")
    columns: dict = {name: getattr(source, name) or getattr(data, name) for name in names}
    columns["keys"] = {name.removesuffix("_column"): f"{place if getattr(source, name) else 'data'}.{name}" for name in names}
    is_stream = data.streaming and place.startswith("data.train[")
    if source.hub and place not in opened:
        opened[place] = open_hub_set(source, place, streaming=is_stream, **columns)
    if is_stream:
        return Table(*read_first_rows(opened[place], place))
    if source.hub:
        rows, bad_rows = opened[place].read()
    elif not os.path.exists(source.path):
        raise UserError(f"{place}.path: there is no file or folder {source.path}; paths count from the working directory, {os.getcwd()}")
    else:
        rows, bad_rows = read_manifest(source.path, audio_folder=source.audio_folder, fixed=source.fixed_fields(), **columns)
    chosen = choose_speakers(rows, source, place)
    if len(chosen) < len(rows):
        left_out = f"{len(rows) - len(chosen):,} of {len(rows):,} rows"
        logger.info("%s: %s of %s are left out by speaker_share", place, left_out, source.name)
    return Table(chosen, bad_rows)


def _check_set(name: str, tables: list[Table], *, data: DataConfig, labels: LabelBuilder) -> SetCheck:
    notes = []
    if _is_streamed(name, data):
        notes = [f"{name} is streamed: the first {FIRST_ROWS} rows of each source were checked, the others are as they come"]
    check = check_rows(
        [row for table in tables for row in table.rows],
        name=name,
        reader_bad_rows=[row for table in tables for row in table.bad_rows],
        find_label_problem=labels.find_problem,
        min_seconds=data.min_duration_seconds,
        max_seconds=data.max_duration_seconds,
        cache_folder=None if _is_streamed(name, data) else cache_folder(),
    )
    check.notes += notes
    return check


def count_steps(train: CheckedSet, arguments: TrainingConfig, *, world_size: int) -> tuple[int, float]:
    """Optimiser steps of the whole run, and the epochs that they are (of a stream: of its first rows)."""
    whole = world_size * arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    packed = build_packed_sampler(train.clips, arguments, world_size=world_size) if train.clips else None
    windows = len(packed) if packed else sum(train.mix.clips) if train.mix else len(train.rows)
    an_epoch = math.ceil(windows / whole)
    steps = arguments.max_steps if arguments.max_steps > 0 else math.ceil(arguments.num_train_epochs * an_epoch)
    return steps, steps / an_epoch


def describe_plan(train: CheckedSet, data: DataConfig, arguments: TrainingConfig, *, place: Place) -> str:
    """For the log: clips and hours, steps, warm-up and epochs, the global batch with its sum, clips by source where they differ in
    weight, and how they are packed."""
    each, accumulated = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    whole = place.world_size * each * accumulated
    clips = train.mix.clips if train.mix else [len(train.rows)]
    packed = build_packed_sampler(train.clips, arguments, world_size=place.world_size) if train.clips else None
    steps, epochs = count_steps(train, arguments, world_size=place.world_size)
    epochs = "streamed" if train.streams else f"{epochs:.1f} epochs of {len(train.rows):,} clips, {train.seconds / 3600:.1f} h"
    line = (
        f"{steps:,} steps ({epochs}), {arguments.get_warmup_steps(steps):,} of warm-up, each of {whole} "
        f"{'windows' if packed else 'clips'} = {place.world_size} process"
        f"{'es' if place.world_size > 1 else ''} x {each} at once x {accumulated} accumulated"
    )
    if packed:
        line += f"\n{packed.describe()}"
    if train.mix is None or train.mix.is_plain:
        return line
    if train.streams:
        total = sum(train.mix.weights)
        shares = [f"{weight / total:.0%} {source.name}" for weight, source in zip(train.mix.weights, data.train, strict=True)]
    else:
        counts = zip(clips, data.train, train.mix.sizes, strict=True)
        shares = [f"{count:,} clips of the {size:,} in {source.name}" for count, source, size in counts]
    return f"{line}\n{'clips' if train.streams else 'an epoch'}: {', '.join(shares)}"
