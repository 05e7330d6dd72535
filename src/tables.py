"""Reads the three forms of table, .jsonl, .csv and .tsv, as the records that are written there: nothing is guessed or converted.

The bytes are split at line feeds alone, so U+2028 and the like stay in their text, and every fault has its file and line.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from sys import intern

from faults import UserError

FOLDER_TABLES = ("metadata.jsonl", "metadata.csv", "metadata.tsv")  # Hugging Face's audiofolder has these names
SHOWN_FAULTS = 20  # messages shown of a file that is something else altogether
BLANK = " \t\r\n\v\f"  # a line of JSON lines that holds nothing else is skipped
CLOSING_QUOTE = re.compile('(?<!")"(?:"")*(?!")')  # a run of quotes that are not all doubled
SEPARATORS = {
    ",": "commas; a table with commas is named .csv",
    "\t": "tabs; a table with tabs is named .tsv",
    ";": "semicolons, as Excel writes where the comma is the decimal sign; save it anew with commas, or with tabs as .tsv",
    "|": "bars; save it with commas as .csv, or with tabs as .tsv, and with a header",
}

logger = logging.getLogger("manifest")

Lines = Iterator[tuple[int, str]]
Records = Iterator[tuple[int, dict]]


class _Fault(Exception):
    """What is wrong with a line, and where: both count from 1, and a column of 0 means all of the line."""

    def __init__(self, message: str, line: int, column: int = 0):
        self.line, self.column = line, column
        super().__init__(message)


class _OpenQuote(_Fault):
    """A quoted field that does not end: it may go on in the next line."""


class _Problems:
    """The faults of a table, as messages: the first of each line, and no more than can be read."""

    def __init__(self, path: str):
        self.path, self.told, self.lines, self.last_line = path, [], 0, 0

    def add(self, fault: _Fault) -> None:
        """Keeps a fault, if it is the first of its line."""
        if fault.line == self.last_line:
            return
        self.last_line = fault.line
        self.lines += 1
        if self.lines <= SHOWN_FAULTS:
            column = f":{fault.column}" if fault.column else ""
            self.told.append(f"{self.path}:{fault.line}{column}: {fault}")

    def stop_if_any(self) -> None:
        """Raises UserError with what was kept."""
        more = self.lines - len(self.told)
        if self.told:
            raise UserError(*self.told, *([f"{self.path}: and {more} more lines that cannot be read"] if more else []))


def find_table(path: str) -> str:
    """The table itself: `path`, or in a folder the only one called metadata. Raises UserError if that is not exactly one."""
    if not os.path.isdir(path):
        return path
    there = sorted(os.listdir(path))
    tables = [name for name in there if name in FOLDER_TABLES]
    if len(tables) == 1:
        return os.path.join(path, tables[0])
    if tables:
        raise UserError(f"{path}: {' and '.join(tables)} are both there; name the one to read: {os.path.join(path, tables[0])}")
    more = ", ..." if len(there) > SHOWN_FAULTS else ""
    listed = os.fsencode(", ".join(there[:SHOWN_FAULTS]) or "nothing").decode("utf-8", "backslashreplace")
    raise UserError(f"{path}: a folder needs one of {', '.join(FOLDER_TABLES)}; it holds {listed}{more}")


def read_records(path: str) -> list[tuple[int, dict]]:
    """(line, record) for every row; a row that spans lines has the first one's number. The values of .csv and .tsv are texts,
    those of JSON what they are, but numbers as they were written. Raises UserError with all faults."""
    form = os.path.splitext(path)[1].lower()
    if form not in FORMS:
        raise UserError(f"{path}: manifests are read as .jsonl, .csv or .tsv, or as a folder with one of {', '.join(FOLDER_TABLES)}")
    problems = _Problems(path)
    try:
        with open(path, "rb") as file:
            records = list(FORMS[form](_decode_lines(file, problems), problems))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    problems.stop_if_any()
    return records


def _decode_lines(file: Iterator[bytes], problems: _Problems) -> Lines:
    """Every line with its end. One that is no text is told, and goes on with marks in place of the wrong bytes."""
    for number, content in enumerate(file, 1):
        if number == 1:
            if content.startswith((b"\xff\xfe", b"\xfe\xff")):
                problems.add(_Fault("this is UTF-16 (Excel's 'Unicode Text'); save the file as UTF-8", 1))
                return
            content = content.removeprefix(b"\xef\xbb\xbf")
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            text = content.decode("utf-8", "replace")
            column = len(content[: error.start].decode("utf-8")) + 1
            problems.add(_Fault(f"this is not UTF-8 (byte 0x{content[error.start]:02x}); save the file as UTF-8", number, column))
        if "\0" in text:
            problems.add(_Fault("a NUL byte is no text; if this is UTF-16, save the file as UTF-8", number, text.index("\0") + 1))
        yield number, text


# --- JSON lines --------------------------------------------------------------------------------------------------


def _read_json(lines: Lines, problems: _Problems) -> Records:
    decoder = json.JSONDecoder(object_pairs_hook=_build_record, parse_int=str, parse_float=str, parse_constant=str)
    for number, text in lines:
        text = text.rstrip("\r\n")
        if not text.strip(BLANK):
            continue
        try:
            record = decoder.decode(text)
            if not isinstance(record, dict):
                raise ValueError('this is no JSON object; every line must be one: {"audio": ..., "text": ...}')
            yield number, record
        except json.JSONDecodeError as error:
            extra = error.msg == "Extra data"
            what = "something follows the JSON value; every line must be one object"
            problems.add(_Fault(what if extra else f"{error.msg}; every line must be one whole JSON object", number, error.colno))
        except RecursionError:
            problems.add(_Fault("lists or objects are nested too deeply", number, 1))
        except ValueError as error:
            problems.add(_Fault(str(error), number, 1))


def _build_record(pairs: list[tuple[str, object]]) -> dict:
    record = {intern(key): value for key, value in pairs}
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key '{twice.encode('utf-8', 'backslashreplace').decode()}' is there twice")
    return record


# --- commas and tabs ---------------------------------------------------------------------------------------------


def _read_commas(lines: Lines, problems: _Problems) -> Records:
    """RFC 4180: double quotes around a field that holds commas, line breaks or quotes, and those inside it are doubled."""
    longest = (0, 0)

    def split(number: int, text: str) -> list[str]:
        nonlocal longest
        if '"' not in text:
            return _split_plain(number, text, ",")
        parts = [text]
        while True:
            try:
                fields = _split_quoted(number, _without_end("".join(parts)))
                longest = max(longest, (len(parts), number))
                return fields
            except _OpenQuote:
                for _, more in lines:
                    parts.append(more)
                    if CLOSING_QUOTE.search(more):
                        break
                else:
                    raise

    yield from _read_separated(lines, problems, separator=",", split=split)
    if longest[0] > 1:
        logger.info("%s: quoted fields hold line breaks; the longest row begins in line %d and has %d lines", problems.path, *longest[::-1])


def _read_tabs(lines: Lines, problems: _Problems) -> Records:
    """A tab separates, a line is a row, and a quote is a quote: as in Common Voice's files."""
    yield from _read_separated(lines, problems, separator="\t", split=lambda number, text: _split_plain(number, text, "\t"))


def _read_separated(lines: Lines, problems: _Problems, *, separator: str, split: Callable[[int, str], list[str]]) -> Records:
    header = None
    for number, text in lines:
        if not text.strip(" \r\n"):
            continue
        try:
            fields = split(number, text)
            if header is None:
                header = _check_header(number, fields, separator)
            elif len(fields) == len(header):
                yield number, dict(zip(header, fields))
            else:
                count, more = len(fields), separator == "," and len(fields) > len(header)
                quote = "; a field that holds commas needs double quotes around it" if more else ""
                raise _Fault(f"{count} field{'s' if count > 1 else ''}, the header has {len(header)}{quote}", number)
        except _Fault as fault:
            problems.add(fault)
            if header is None:
                return


def _check_header(number: int, fields: list[str], separator: str) -> list[str]:
    names = [intern(name.strip()) for name in fields]
    if len(names) == 1:
        for other, what in SEPARATORS.items():
            if other != separator and other in names[0]:
                raise _Fault(f"the header is separated by {what}", number)
    if "" in names:
        raise _Fault(f"column {names.index('') + 1} has no name (pandas: to_csv(..., index=False))", number)
    for name in names:
        if names.count(name) > 1:
            raise _Fault(f"the column '{name}' is there twice", number)
    return names


def _without_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _split_plain(number: int, text: str, separator: str) -> list[str]:
    row = _without_end(text)
    if "\r" in row:
        raise _stray_return(number, row.index("\r") + 1)
    return row.split(separator)


def _split_quoted(number: int, row: str) -> list[str]:
    """The fields of one row that begins in line `number`; raises _OpenQuote if its last field goes on behind its end."""
    fields, at = [], 0
    while True:
        start = at
        if row.startswith('"', at):
            at = row.find('"', start + 1)
            while at >= 0 and row.startswith('"', at + 1):
                at = row.find('"', at + 2)
            if at < 0:
                raise _OpenQuote("the quote that opens here is never closed", *_locate(number, row, start))
            fields.append(row[start + 1 : at].replace('""', '"'))
            at += 1
        else:
            at = row.find(",", start)
            at = len(row) if at < 0 else at
            fields.append(row[start:at])
            if '"' in fields[-1]:
                what = "a quote inside a field; put quotes around the whole field and write this one twice"
                raise _Fault(what, *_locate(number, row, row.index('"', start)))
            if "\r" in fields[-1]:
                raise _stray_return(*_locate(number, row, row.index("\r", start)))
        if at == len(row):
            return fields
        if row[at] == "\r":
            raise _stray_return(*_locate(number, row, at))
        if row[at] != ",":
            opened = "line {}, column {}".format(*_locate(number, row, start))
            what = f"text behind the quote that closes the field from {opened}; a quote inside a field is written twice"
            raise _Fault(what, *_locate(number, row, at))
        at += 1


def _locate(number: int, row: str, at: int) -> tuple[int, int]:
    """Line and column of a place in a row that begins in line `number`."""
    return number + row.count("\n", 0, at), at - row.rfind("\n", 0, at)


def _stray_return(line: int, column: int) -> _Fault:
    return _Fault("a carriage return without a line feed (old Mac, or written twice); save the file with line ends \\n or \\r\\n", line, column)


FORMS: dict[str, Callable[[Lines, _Problems], Records]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_commas,
    ".tsv": _read_tabs,
}
