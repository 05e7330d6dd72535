"""Reads manifests: one JSON object a line, every value taken as the text it is, every fault named by file and line."""

import json
import logging
import math
import os
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from sys import intern
from typing import Protocol

from faults import UserError

KNOWN_COLUMNS = {  # names that public speech sets use
    "audio": ("audio", "audio_filepath", "audio_path", "path", "wav", "wav_path", "file_name", "filename"),
    "text": ("text", "sentence", "transcription", "transcript", "raw_text", "normalized_text"),
}
TASKS = ("transcribe", "translate")
NOT_SET = ("", "None", "null", "none")  # for language and task, which tables often fill with such words
SHOWN_FAULTS = 20  # messages shown of a file that isn't JSON lines at all

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
    path: str, *, audio_column: str | None = None, text_column: str | None = None, fixed: dict[str, str] | None = None
) -> tuple[list[Row], list[BadRow]]:
    """The rows of a .jsonl manifest in order, and apart the rows with a field that cannot be used (reason bad_field).

    UTF-8 with an optional byte-order mark; blank lines are skipped and counted. A column that isn't named is one of the
    well-known names if exactly one is there. `fixed` columns have that value in every row. Whether the sound exists is for the check to tell.
    Raises UserError with every fault that makes the file unusable: file, line and column.
    """
    path = str(path)
    if not path.lower().endswith((".jsonl", ".json")):
        raise UserError(f"{path}: manifests are read as .jsonl: one JSON object a line, with audio and text")
    records = _read_records(path)
    if not records:
        raise UserError(f"{path}: there are no rows in this file")
    listed = dict.fromkeys(column for _, record in records for column in record)
    audio_column, text_column = choose_columns(path, listed, audio=audio_column, text=text_column)
    rows, bad_rows = [], []
    for index, (line, record) in enumerate(records):
        records[index] = None  # a million records as dictionaries and as rows would not both fit
        row = build_row(record | fixed if fixed else record, path, line=line, audio_column=audio_column, text_column=text_column)
        (rows if isinstance(row, Row) else bad_rows).append(row)
    return rows, bad_rows


def _read_records(path: str) -> list[tuple[int, dict]]:
    """(line, object) for every line that isn't blank; raises UserError with all faults."""
    decoder = json.JSONDecoder(object_pairs_hook=_build_record, parse_int=str, parse_float=str, parse_constant=str)
    records, problems = [], []
    try:
        with open(path, "rb") as file:
            for number, content in enumerate(file, 1):  # bytes are split at \n alone: U+2028 stays in its text
                if number == 1:
                    content = content.removeprefix(b"\xef\xbb\xbf")
                content = content.rstrip(b"\r\n")
                if not content.strip():
                    continue
                try:
                    record = decoder.decode(content.decode("utf-8"))
                    if not isinstance(record, dict):
                        raise _FieldError("1: this is no JSON object; every line must be one: {\"audio\": ..., \"text\": ...}")
                    records.append((number, record))
                except (ValueError, RecursionError, _FieldError) as error:
                    problems.append(f"{path}:{number}:{_describe_fault(content, error)}")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    if problems:
        more = len(problems) - SHOWN_FAULTS
        raise UserError(*problems[:SHOWN_FAULTS], *([f"{path}: and {more} more lines that cannot be read"] if more > 0 else []))
    return records


def _build_record(pairs: list[tuple[str, object]]) -> dict:
    record = {intern(key): value for key, value in pairs}
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _FieldError(f"1: the key '{_as_valid_text(twice)}' is there twice")
    return record


def _describe_fault(content: bytes, error: Exception) -> str:
    """COLUMN: what is wrong with a line that isn't one JSON object in UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        column = len(content[: error.start].decode("utf-8")) + 1
        return f"{column}: this is not UTF-8 (byte 0x{content[error.start]:02x}); save the file as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        if error.msg == "Extra data":
            return f"{error.colno}: something follows the JSON value; every line must be one object"
        return f"{error.colno}: {error.msg}; every line must be one whole JSON object"
    if isinstance(error, RecursionError):
        return "1: lists or objects are nested too deeply"
    return str(error)


def choose_columns(path: str, columns: Iterable[str], **wanted: str | None) -> list[str]:
    """The column for each kind (audio, text): the wanted one, or the only one with a well-known name; raises UserError."""
    columns = list(columns)
    listed = _as_valid_text(", ".join(columns[:SHOWN_FAULTS]))
    chosen, problems = [], []
    for kind, column in wanted.items():
        present = [known for known in (KNOWN_COLUMNS[kind] if column is None else (column,)) if known in columns]
        if not present:
            problems.append(f"{path}: column '{column or kind}' is not there; columns are {listed}; set data.{kind}_column")
        elif len(present) > 1:
            names = " and ".join(present)
            problems.append(f"{path}: {names} could each be the {kind} column; set data.{kind}_column to one of them")
        elif column is None and present[0] != kind:
            logger.info("%s: the %s column is '%s'", path, kind, present[0])
        chosen += present[:1]
    if problems:
        raise UserError(*problems)
    return chosen


def build_row(
    record: dict, path: str, *, line: int, audio_column: str, text_column: str, store: SoundStore | None = None
) -> Row | BadRow:
    """The row of a record, or a BadRow with reason bad_field. With a `store` the audio is a name that no disk knows."""
    try:
        row = _fill_row(record, path, line=line, audio_column=audio_column, text_column=text_column, store=store)
    except _FieldError as error:
        audio = record.get(audio_column)
        return BadRow(path, line, _as_valid_text(audio) if isinstance(audio, str) else "", "bad_field", str(error))
    return row


def _fill_row(
    record: dict, path: str, *, line: int, audio_column: str, text_column: str, store: SoundStore | None
) -> Row:
    """Raises _FieldError for a value that cannot be used."""
    audio = _require_text(record, audio_column).strip()
    if not audio:
        raise _FieldError(f"{audio_column} is empty")
    audio = _find_file(audio, os.path.dirname(path)) if store is None else audio
    row = Row(audio, _require_text(record, text_column), path, line, store=store)
    for column, value in record.items():
        if value is None or column == audio_column or column == text_column:
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
    return row


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


def _read_seconds(column: str, value: object) -> float | None:
    if value == "":
        return None
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
