"""Reads manifests: the records of a table become rows, every value taken as the text it is, every fault named by file and line."""

import json
import logging
import math
import os
import re
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from sys import intern
from typing import Protocol

from faults import UserError
from tables import SHOWN_FAULTS, find_table, read_records

KNOWN_COLUMNS = {  # names that public speech sets use
    "audio": ("audio", "audio_filepath", "audio_path", "path", "wav", "wav_path", "file_name", "filename"),
    "text": ("text", "sentence", "transcription", "transcript", "raw_text", "normalized_text"),
}
TASKS = ("transcribe", "translate")
NOT_SET = ("", "None", "null", "none")  # for language and task, which tables often fill with such words
_LIKE_A_FILE = re.compile(r"\.(wav|flac|mp3|ogg|opus|m4a|aiff?|webm)$", re.IGNORECASE)  # no column is called so

logger = logging.getLogger(__name__)


class SoundStore(Protocol):
    """Where the sound of rows lies that have no file of their own."""

    def read(self, line: int) -> str | bytes:
        """The sound of the row at `line`: the content of a sound file, or the path of one."""


@dataclass(slots=True)
class Row:
    """One line of a manifest. `audio` is the path as found on disk, `text` is unchanged, `file` is the manifest as typed and
    `line` counts from 1; `start` and `end` are seconds inside the file; `duration` (seconds) is a hint, never trusted;
    `extra` holds every other column as text. None: not set. A row of a Hub set has its sound in `store`; its `audio` is only a name."""

    audio: str
    text: str
    file: str
    line: int
    language: str | None = None
    task: str | None = None
    start: float | None = None
    end: float | None = None
    duration: float | None = None
    speaker: str | None = None
    extra: dict[str, str] | None = None
    store: SoundStore | None = None

    def sound(self) -> str | bytes:
        """The path of the sound, or the content of its file."""
        return self.audio if self.store is None else self.store.read(self.line)


@dataclass(slots=True)
class BadRow:
    """A row that is dropped, or kept with a warning: where it is, the fixed word for why, and the particulars."""

    file: str
    line: int
    audio: str
    reason: str
    detail: str


class _FieldError(Exception):
    """A value that its column cannot hold."""


def read_manifest(
    path: str,
    *,
    audio_folder: str | None = None,
    audio_column: str | None = None,
    text_column: str | None = None,
    fixed: dict[str, str] | None = None,
    keys: dict[str, str] | None = None,
) -> tuple[list[Row], list[BadRow]]:
    """The rows of a .jsonl, .csv or .tsv manifest in order, and apart the rows with a field that cannot be used (reason bad_field).

    `path` may be a folder with one of metadata.jsonl, metadata.csv and metadata.tsv. Audio paths are relative to `audio_folder`,
    itself relative to the manifest; None: next to it. UTF-8 with an optional byte-order mark; blank lines are skipped and counted,
    and an empty field is not set. A column that isn't named is one of the well-known names if exactly one is there; `fixed` columns
    have that value in every row; `keys` as in `choose_columns`. Whether the sound exists is for the check to tell. Raises UserError
    with every fault that makes the file unusable.
    """
    path = find_table(str(path))
    folder = os.path.join(os.path.dirname(path), audio_folder or "")
    if audio_folder and not os.path.isdir(folder):
        raise UserError(f"{path}: audio_folder: there is no folder {folder}; it is relative to the manifest")
    records = read_records(path)
    if not records:
        raise UserError(f"{path}: there are no rows in this file")
    listed = dict.fromkeys(column for _, record in records for column in record)
    audio_column, text_column = choose_columns(path, listed, audio=audio_column, text=text_column, keys=keys)
    rows, bad_rows = [], []
    for index, (line, record) in enumerate(records):
        records[index] = None  # a million records as dictionaries and as rows would not both fit
        record = record | fixed if fixed else record
        row = build_row(record, (path, line), folder=folder, audio_column=audio_column, text_column=text_column)
        (rows if isinstance(row, Row) else bad_rows).append(row)
    return rows, bad_rows


def choose_columns(
    path: str, columns: Iterable[str], *, audio: str | None, text: str | None, keys: dict[str, str] | None = None
) -> list[str]:
    """The columns of audio and text: the wanted one each, or the only one with a well-known name; raises UserError.

    `keys` are the recipe's keys for the two columns as they were typed; None: those of the data section.
    """
    columns, keys, wanted = list(columns), keys or {}, {"audio": audio, "text": text}
    listed = _as_valid_text(", ".join(columns[:SHOWN_FAULTS]))
    if any(_LIKE_A_FILE.search(column) for column in columns) and not {*columns} & {*KNOWN_COLUMNS["audio"], audio}:
        raise UserError(f"{path}:1: line 1 must name the columns, such as audio and text; it looks like a row: {listed}")
    chosen, problems = [], []
    for kind, column in wanted.items():
        present = [known for known in (KNOWN_COLUMNS[kind] if column is None else (column,)) if known in columns]
        key = keys.get(kind, f"data.{kind}_column")
        if not present:
            problems.append(f"{path}: column '{column or kind}' is not there; columns are {listed}; set {key}")
        elif len(present) > 1:
            names = " and ".join(present)
            problems.append(f"{path}: {names} could each be the {kind} column; set {key} to one of them")
        elif column is None and present[0] != kind:
            logger.info("%s: the %s column is '%s'", path, kind, present[0])
        chosen += present[:1]
    if problems:
        raise UserError(*problems)
    return chosen


def build_row(
    record: dict,
    place: tuple[str, int],
    *,
    audio_column: str,
    text_column: str,
    folder: str = "",
    store: SoundStore | None = None,
) -> Row | BadRow:
    """The row of a record at `place` (file and line), or a BadRow with reason bad_field.

    Audio is relative to `folder`; with a `store` it is a name that no disk knows.
    """
    try:
        audio = _require_text(record, audio_column).strip()
        if not audio:
            raise _FieldError(f"{audio_column} is empty")
        row = Row(audio if store else _find_file(audio, folder), _require_text(record, text_column), *place, store=store)
        _fill_row(row, record, needed=(audio_column, text_column))
    except _FieldError as error:
        audio = record.get(audio_column)
        return BadRow(*place, _as_valid_text(audio) if isinstance(audio, str) else "", "bad_field", str(error))
    return row


def _fill_row(row: Row, record: dict, *, needed: tuple[str, str]) -> None:
    """Raises _FieldError for a value that cannot be used."""
    for column, value in record.items():
        if value is None or value == "" or column in needed:
            continue
        if column in ("start", "end"):
            setattr(row, column, _read_seconds(column, value))
        elif column == "duration":
            with suppress(_FieldError):  # a hint: a row is not lost over "N/A"
                row.duration = _read_seconds(column, value)
        elif column in ("language", "task", "speaker"):
            word = _require_text(record, column).strip()
            if column == "speaker" or word not in NOT_SET:
                setattr(row, column, intern(word) or None)
        else:
            row.extra = row.extra or {}
            column = _as_valid_text(column)
            row.extra[column] = _require_text({column: _as_text(value)}, column)
    if row.task not in (None, *TASKS):
        raise _FieldError(f"task is '{row.task}', not transcribe or translate")
    if row.end is not None and row.end <= (row.start or 0.0):
        raise _FieldError(f"end ({row.end} s) is not behind start ({row.start or 0.0} s)")


def _require_text(record: dict, column: str) -> str:
    if column not in record:
        raise _FieldError(f"{column} is missing")
    value = record[column]
    if not isinstance(value, str):
        kind = {type(None): "null", bool: "true or false", list: "a list", dict: "an object"}[type(value)]
        raise _FieldError(f"{column} is {kind}, not text")
    if value != _as_valid_text(value):
        raise _FieldError(f"{column} holds half a surrogate pair, which no text can")
    return value


def _read_seconds(column: str, value: object) -> float:
    try:
        seconds = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise _FieldError(f"{column} is {_as_valid_text(_as_text(value))}, not a number of seconds from 0 on")
    return seconds


def _as_text(value: object) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise _FieldError("lists or objects are nested too deeply") from None


def _as_valid_text(text: str) -> str:
    """The text with halves of surrogate pairs (JSON can spell them, UTF-8 cannot) written as escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _find_file(audio: str, folder: str) -> str:
    """The path as the disk spells it: as the row does, or with backslashes as separators, or with é as one sign or two."""
    as_written = os.path.join(folder, audio)
    if (audio.isascii() and "\\" not in audio) or os.path.exists(as_written):
        return as_written
    for spelt in dict.fromkeys((audio, audio.replace("\\", "/"))):
        for form in ("NFC", "NFD"):
            candidate = os.path.join(folder, unicodedata.normalize(form, spelt))
            if os.path.exists(candidate):
                return candidate
    return as_written
