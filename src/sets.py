"""Which rows are trained on and which are scored? All are checked once, by the main process, before weights are loaded."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from config import DataConfig, DataSource, TrainingConfig
from data_check import SetCheck, check_rows, describe, judge_set, write_data_report
from device import Meeting, Place
from faults import UserError
from labels import LabelBuilder
from manifest import BadRow, Row, read_manifest


@dataclass
class CheckedSet:
    """Rows that can be used, how many the manifests had, and how long the usable ones last."""

    rows: list[Row]
    rows_total: int
    seconds: float


def cache_folder() -> Path:
    """Where measures of clips are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whisper-ddp"


def check_sets(data: DataConfig, labels: LabelBuilder, *, meeting: Meeting, folder: Path, with_training: bool) -> dict[str, CheckedSet]:
    """Reads and checks the training set (`with_training`), under the name "train", and every validation set.

    The main process decodes each clip once and writes `data_report.json` and `.html` into `folder`; the other ranks
    poll for its verdict and read the manifests alone. Raises UserError with the problems of all sets.
    """
    sources = {"train": data.train if with_training else [], **{name: [source] for name, source in data.validation.items()}}
    sources = {name: listed for name, listed in sources.items() if listed}
    tables: dict[str, tuple[list[Row], list[BadRow]]] = {}

    def examine() -> bytes:
        tables.update(_read_sets(sources, data))
        checks = [_check_set(name, *tables[name], data=data, labels=labels) for name in tables]
        write_data_report(folder, checks)
        for check in checks:
            print(describe(check), flush=True)
        problems = [
            problem
            for check in checks
            for problem in judge_set(check, on_bad_row=data.on_bad_row, max_dropped_share=data.max_dropped_share)
        ]
        if problems:
            raise UserError(*problems)
        verdict = {
            check.name: {
                "bad": [(row.file, row.line) for row in check.bad_rows],
                "rows_total": check.rows_read,
                "seconds": check.seconds,
            }
            for check in checks
        }
        return json.dumps(verdict).encode()

    verdict = json.loads(meeting.once(examine))
    tables = tables or _read_sets(sources, data)
    result = {}
    for name, facts in verdict.items():
        if sum(map(len, tables[name])) != facts["rows_total"]:
            raise RuntimeError(f"{name}: this process reads another number of rows than the main one did")
        bad = {tuple(place) for place in facts["bad"]}
        rows = [row for row in tables[name][0] if (row.file, row.line) not in bad]
        result[name] = CheckedSet(rows, facts["rows_total"], facts["seconds"])
    return result


def _read_sets(sources: dict[str, list[DataSource]], data: DataConfig) -> dict[str, tuple[list[Row], list[BadRow]]]:
    tables, problems = {}, []
    for name, listed in sources.items():
        rows: list[Row] = []
        bad: list[BadRow] = []
        for source in listed:
            try:
                more, worse = read_manifest(
                    source.path, audio_folder=source.audio_folder, audio_column=data.audio_column, text_column=data.text_column
                )
            except UserError as error:
                problems += error.problems
                continue
            rows += more
            bad += worse
        tables[name] = (rows, bad)
    if problems:
        raise UserError(*problems)
    return tables


def _check_set(name: str, rows: list[Row], bad: list[BadRow], *, data: DataConfig, labels: LabelBuilder) -> SetCheck:
    return check_rows(
        rows,
        name=name,
        reader_bad_rows=bad,
        find_label_problem=labels.find_problem,
        min_seconds=data.min_duration_seconds,
        max_seconds=data.max_duration_seconds,
        cache_folder=cache_folder(),
    )


def describe_plan(train: CheckedSet, arguments: TrainingConfig, *, place: Place) -> str:
    """One line for the log: the steps, the epochs, and the global batch with its sum."""
    each, accumulated = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    whole = place.world_size * each * accumulated
    steps = arguments.max_steps
    if steps <= 0:
        micro_batches = math.ceil(len(train.rows) / (place.world_size * each))
        steps = math.ceil(arguments.num_train_epochs * math.ceil(micro_batches / accumulated))
    return (
        f"{steps:,} steps ({steps * whole / len(train.rows):.1f} epochs) of {whole} clips = {place.world_size} process"
        f"{'es' if place.world_size > 1 else ''} x {each} at once x {accumulated} accumulated"
    )
