"""Commas, tabs, JSON lines and folders: what is written comes back with its line, and what is broken is named by file and line."""

import csv
import io
import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faults import UserError
from launching import train_here, write_recipe
from manifest import BadRow, Row, read_manifest
from tables import read_records
from toy import build_whisper, write_clip, write_speech

HEADER = "audio,text\n"
TEXTS = ["10", "007", "1e5", "NA", "null", "None", "nan", "", " two  blanks ", "a\u2028b\x0bc\x0cd\x85e", "मेरी किताब", "'", "a\\tb"]


def write(folder: Path, content: str | bytes, name: str = "train.csv") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def problems_of(path: str, **options) -> list[str]:
    with pytest.raises(UserError) as caught:
        read_manifest(path, **options)
    assert all(problem.startswith(path) for problem in caught.value.problems)
    return caught.value.problems


def texts_by_line(path: str) -> dict[int, str]:
    rows, bad_rows = read_manifest(path)
    assert not bad_rows
    return {row.line: row.text for row in rows}


@pytest.mark.parametrize("name", ["train.csv", "train.tsv", "train.jsonl", "TRAIN.CSV"])
def test_every_form_gives_the_same_rows(tmp_path, name):
    fields = {"audio": "a.wav", "text": "one", "language": "hi", "task": "translate", "start": "1.5", "end": "3", "duration": "9"}
    fields |= {"speaker": "007", "accent": "north"}
    separator = "," if name.lower().endswith("csv") else "\t"
    table = "".join(separator.join(line) + "\n" for line in (fields, fields.values()))
    path = write(tmp_path, json.dumps(fields) if name.endswith("jsonl") else table, name)
    rows, bad_rows = read_manifest(path)
    line = 1 if name.endswith("jsonl") else 2
    assert rows == [Row(str(tmp_path / "a.wav"), "one", path, line, "hi", "translate", 1.5, 3.0, 9.0, "007", {"accent": "north"})]
    assert bad_rows == []


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["train.csv", "train.tsv"])
def test_a_text_is_taken_as_it_is_written(tmp_path, name, text):
    separator = "," if name == "train.csv" else "\t"
    assert texts_by_line(write(tmp_path, f"audio{separator}text\na.wav{separator}{text}\n", name)) == {2: text}


def test_an_empty_field_is_not_set_and_an_empty_text_is_a_text(tmp_path):
    content = "audio,text,language,task,start,end,duration,speaker,accent\na.wav,,,,,,,,\n"
    (row,), _ = read_manifest(write(tmp_path, content))
    assert row == Row(str(tmp_path / "a.wav"), "", str(tmp_path / "train.csv"), 2)


def test_segments_are_carried_along_as_their_json_text(tmp_path):
    segments = [{"start": 0.5, "end": 1.25, "text": 'say "hi"'}]
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([["audio", "text", "segments"], ["a.wav", "one", json.dumps(segments)]])
    (row,), _ = read_manifest(write(tmp_path, buffer.getvalue()))
    assert json.loads(row.extra["segments"]) == segments


def test_a_quoted_field_holds_commas_line_breaks_and_doubled_quotes(tmp_path):
    content = 'audio,text\r\na.wav,"one, ""two""\r\n\r\nthree"\r\n\r\n"b.wav",four\r\n'
    assert texts_by_line(write(tmp_path, content)) == {2: 'one, "two"\r\n\r\nthree', 6: "four"}


def test_rows_that_span_lines_are_told(tmp_path, caplog):
    caplog.set_level("INFO")
    read_manifest(write(tmp_path, HEADER + 'a.wav,one\nb.wav,"two\nc.wav,three"\n'))
    assert "the longest row begins in line 3 and has 2 lines" in caplog.text


def test_quotes_in_a_table_with_tabs_are_only_signs(tmp_path):
    content = 'path\tsentence\na.wav\t"one\nb.wav\t"two" she said\nc.wav\t""\n'
    assert texts_by_line(write(tmp_path, content, "train.tsv")) == {2: '"one', 3: '"two" she said', 4: '""'}


@pytest.mark.parametrize(("name", "separator"), [("train.csv", ","), ("train.tsv", "\t")])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blank_lines_are_skipped_and_counted(tmp_path, name, separator, end):
    lines = ["\ufeff", f"audio{separator} text ", "", f"a.wav{separator}one", "  ", "", f"b.wav{separator}two"]
    assert texts_by_line(write(tmp_path, end.join(lines), name)) == {4: "one", 7: "two"}


COMMAS = "a field that holds commas needs double quotes around it"
RETURN = "a carriage return without a line feed"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a.wav,hello, world\nb.wav,two\n", f"2: 3 fields, the header has 2; {COMMAS}"),
        ("b.wav,two\na.wav\n", "3: 1 field, the header has 2"),
        ('a.wav,5" disk\nb.wav,two\n', "2:8: a quote inside a field"),
        ('a.wav, "one"\n', "2:8: a quote inside a field"),
        ('a.wav,"one" two\nb.wav,two\n', "2:12: text behind the quote that closes the field from line 2, column 7"),
        ('a.wav,"one\nb.wav,two"x\nc.wav,"three"\n', "3:11: text behind the quote that closes the field from line 2, column 7"),
        ('a.wav,"one\nb.wav,"two"\nc.wav,three\n', "3:8: text behind the quote that closes the field from line 2, column 7"),
        ('b.wav,two\na.wav,"one\nc.wav,three\n', "3:7: the quote that opens here is never closed"),
        ('b.wav,two\na.wav,"one""\n', "3:7: the quote that opens here is never closed"),
        ("a.wav,one\rb.wav,two\r", f"2:10: {RETURN}"),
        ('a.wav,"one"\r"b.wav",two\r', f"2:12: {RETURN}"),
        ('"a.wav",one\rb.wav,two\r', f"2:12: {RETURN}"),
        ("a.wav,one\r\r\n", f"2:10: {RETURN}"),
        ("b.wav,two\na.wav,o\0ne\n", "3:8: a NUL byte"),
    ],
)
def test_a_broken_row_is_named_by_line(tmp_path, content, told):
    path = write(tmp_path, HEADER + content)
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:{told}")


def test_a_row_of_another_width_is_an_error_with_tabs_too(tmp_path):
    path = write(tmp_path, "path\tsentence\na.wav\tone\ttwo\nb.wav\n\t\n", "train.tsv")
    assert problems_of(path) == [f"{path}:2: 3 fields, the header has 2", f"{path}:3: 1 field, the header has 2"]


@pytest.mark.parametrize(
    ("name", "header", "told"),
    [
        ("a.csv", "audio;text", "1: the header is separated by semicolons"),
        ("a.csv", "audio\ttext", "1: the header is separated by tabs; a table with tabs is named .tsv"),
        ("a.csv", "LJ001|Printing", "1: the header is separated by bars"),
        ("a.tsv", "audio,text", "1: the header is separated by commas; a table with commas is named .csv"),
        ("a.tsv", "audio;text", "1: the header is separated by semicolons"),
        ("a.csv", "audio,text,text", "1: the column 'text' is there twice"),
        ("a.csv", "audio,text, text", "1: the column 'text' is there twice"),
        ("a.csv", ",audio,text", "1: column 1 has no name (pandas: to_csv(..., index=False))"),
        ("a.tsv", "audio\ttext\t", "1: column 3 has no name"),
        ("a.csv", 'audio,"text', "1:7: the quote that opens here is never closed"),
        ("a.csv", "audio,text\ra.wav,one", f"1:11: {RETURN}"),
        ("a.tsv", "audio\ttext\ra.wav\tone", f"1:11: {RETURN}"),
    ],
)
def test_a_header_that_cannot_be_meant_stops_before_the_rows(tmp_path, name, header, told):
    path = write(tmp_path, header + "\na.wav,one\nb.wav\n", name)
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:{told}")


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_named(tmp_path, form, encoding):
    path = write(tmp_path, "audio\ttext\r\na.wav\tcafé\r\n".encode(encoding), f"train.{form}")
    assert problems_of(path)[0].startswith(f"{path}:1:") and "UTF-16" in problems_of(path)[0]


@pytest.mark.parametrize(("name", "separator"), [("train.csv", ","), ("train.tsv", "\t")])
def test_another_encoding_is_named_by_line_and_column(tmp_path, name, separator):
    content = f"audio{separator}text\na.wav{separator}one\nb.wav{separator}café\n".encode("latin-1")
    path = write(tmp_path, content, name)
    assert problems_of(path) == [f"{path}:3:10: this is not UTF-8 (byte 0xe9); save the file as UTF-8"]


def test_another_encoding_within_a_quoted_field_is_named_by_its_own_line(tmp_path):
    path = write(tmp_path, 'audio,text\na.wav,"one\ncafé"\nb.wav,two\n'.encode("latin-1"))
    assert problems_of(path) == [f"{path}:3:4: this is not UTF-8 (byte 0xe9); save the file as UTF-8"]


def test_very_many_broken_rows_are_counted(tmp_path):
    problems = problems_of(write(tmp_path, HEADER + "a.wav\n" * 25))
    assert len(problems) == 21 and "and 5 more" in problems[-1]


def test_a_quote_that_is_never_closed_takes_no_longer_than_the_file_is_long(tmp_path):
    path = write(tmp_path, HEADER + 'a.wav,"x\n' + '""y""\n' * 200_000)
    assert problems_of(path) == [f"{path}:2:7: the quote that opens here is never closed"]


@pytest.mark.parametrize("name", ["train.csv", "train.tsv"])
@pytest.mark.parametrize("rows", ["", "\n\n"])
def test_a_table_with_only_a_header_has_no_rows(tmp_path, name, rows):
    path = write(tmp_path, HEADER.replace(",", "," if name == "train.csv" else "\t") + rows, name)
    assert problems_of(path) == [f"{path}: there are no rows in this file"]


@pytest.mark.parametrize("name", ["train.xlsx", "train.parquet", "train", "train.csv.gz"])
def test_a_form_that_is_not_read_is_told_with_those_that_are(tmp_path, name):
    (problem,) = problems_of(write(tmp_path, HEADER, name))
    assert "manifests are read as .jsonl, .csv or .tsv" in problem


# --- folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv"])
@pytest.mark.parametrize("folder", ["speech", "test", "speech.csv", "with/slash/"])
def test_a_folder_is_read_by_its_metadata(tmp_path, form, folder):
    (tmp_path / folder / "test").mkdir(parents=True)
    (tmp_path / folder / "test" / "unlisted.wav").touch()
    content = {"jsonl": '{"file_name": "test/a.wav", "transcription": "one"}', "csv": "file_name,transcription\ntest/a.wav,one\n"}
    content["tsv"] = content["csv"].replace(",", "\t")
    path = write(tmp_path / folder, content[form], f"metadata.{form}")
    (row,), _ = read_manifest(str(tmp_path / folder))
    assert (row.audio, row.text, row.file) == (str(tmp_path / folder / "test" / "a.wav"), "one", path)


def test_a_folder_without_metadata_is_told_with_what_it_holds(tmp_path):
    for name in ("train.csv", "clips"):
        (tmp_path / name).touch()
    (problem,) = problems_of(str(tmp_path))
    assert "needs one of metadata.jsonl, metadata.csv, metadata.tsv; it holds clips, train.csv" in problem


def test_a_folder_with_two_metadata_files_is_an_error_and_each_can_be_named(tmp_path):
    for name in ("metadata.csv", "metadata.tsv"):
        write(tmp_path, HEADER.replace(",", "," if name.endswith("csv") else "\t") + "a.wav,one\n", name)
    (problem,) = problems_of(str(tmp_path))
    assert f"metadata.csv and metadata.tsv are both there; name the one to read: {tmp_path}/metadata.csv" in problem
    assert texts_by_line(str(tmp_path / "metadata.csv")) == {2: "one"}


COMMON_VOICE = "client_id\tpath\tsentence\tup_votes\taccents\tlocale\nf00\tcommon_voice_hi_1.mp3\tवह \"अच्छा\" है\t2\t\thi\n"


def test_audio_lies_in_the_folder_that_is_named(tmp_path):
    (tmp_path / "clips").mkdir()
    path = write(tmp_path, COMMON_VOICE, "validated.tsv")
    (row,), _ = read_manifest(path, audio_folder="clips")
    assert (row.audio, row.text) == (str(tmp_path / "clips" / "common_voice_hi_1.mp3"), 'वह "अच्छा" है')
    assert row.extra == {"client_id": "f00", "up_votes": "2", "locale": "hi"}
    (row,), _ = read_manifest(path, audio_folder=str(tmp_path / "clips"))
    assert row.audio == str(tmp_path / "clips" / "common_voice_hi_1.mp3")


def test_an_audio_folder_that_is_not_there_is_told(tmp_path):
    path = write(tmp_path, COMMON_VOICE, "validated.tsv")
    assert problems_of(path, audio_folder="clisp") == [
        f"{path}: audio_folder: there is no folder {tmp_path}/clisp; it is relative to the manifest"
    ]


def test_a_run_takes_tables_with_their_audio_folder_and_names_bad_rows_by_line(tmp_path):
    build_whisper(tmp_path / "model")
    write_speech(tmp_path, ["one"], name="dev")
    for name in ("a.mp3", "b.mp3"):
        write_clip(tmp_path / "cv" / "clips" / name)
    table = write(tmp_path / "cv", "path\tsentence\na.mp3\tone\nnone.mp3\ttwo\nb.mp3\tthree\n", "train.tsv")
    data = {"train": [{"path": table, "audio_folder": "clips"}], "max_dropped_share": 0.5}
    train_here(write_recipe(tmp_path, data=data), "--check")
    report = json.loads((tmp_path / "out" / "data_report.json").read_text())["sets"]["train"]
    assert (report["rows_read"], report["rows_used"]) == (3, 2)
    (bad_row,) = report["bad_rows"]
    assert (bad_row["file"], bad_row["line"], bad_row["reason"]) == (table, 3, "missing_file")


# --- any text, and any damage ------------------------------------------------------------------------------------

ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
ROUND_TRIP = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ROUND_TRIP
@given(texts=st.lists(ANY_TEXT, min_size=1), quote_all=st.booleans())
def test_any_texts_come_back_from_a_table_with_commas(tmp_path, texts, quote_all):
    buffer, lines = io.StringIO(newline=""), []
    form = {"quoting": csv.QUOTE_ALL, "lineterminator": "\n"} if quote_all else {}  # with \n alone, csv leaves a \r without quotes
    writer = csv.writer(buffer, **form)
    writer.writerow(["audio", "text"])
    for text in texts:
        lines.append(buffer.getvalue().count("\n") + 1)
        writer.writerow(["a.wav", text])
    assert texts_by_line(write(tmp_path, buffer.getvalue())) == dict(zip(lines, texts, strict=True))


@ROUND_TRIP
@given(texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\t\r\n")), min_size=1))
def test_any_texts_come_back_from_a_table_with_tabs(tmp_path, texts):
    content = "audio\ttext\n" + "".join(f"a.wav\t{text}\n" for text in texts)
    assert texts_by_line(write(tmp_path, content, "train.tsv")) == dict(enumerate(texts, 2))


@ROUND_TRIP
@given(texts=st.lists(ANY_TEXT, min_size=1), ascii_only=st.booleans())
def test_any_texts_come_back_from_json_lines(tmp_path, texts, ascii_only):
    content = "".join(json.dumps({"audio": "a.wav", "text": text}, ensure_ascii=ascii_only) + "\n" for text in texts)
    assert texts_by_line(write(tmp_path, content, "train.jsonl")) == dict(enumerate(texts, 1))


ROWS = [
    {"audio": "a.wav", "text": "one, two", "language": "en", "start": "0.25", "end": "1.5", "segments": '[{"start": 0, "text": "x"}]'},
    {"audio": "é.wav", "text": 'दो "quoted"', "language": "", "start": "0", "end": "1e1", "segments": ""},
    {"audio": "c\\d.wav", "text": "three \u2028 \U0001f600\nfour", "language": "hi", "start": "", "end": "", "segments": "[]"},
]
SPLICES = [b"\n", b"\r", b"\r\n", b'"', b'""', b",", b"\t", b"{", b"}", b"[" * 3000, b"\\", b"\\ud83d", b"\\u0000", b"null", b"\xff", b"\0"]
SPLICES += [b"\xef\xbb\xbf", b"\xff\xfe", b"\xe2\x80\xa8", b"1e999", b"9" * 400, b'"\n"', b', "x": {"y": [1, {}]}', b"\xc3", b"  ", b"NaN", b";"]


def write_rows(form: str) -> bytes:
    if form == "jsonl":
        return "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()
    if form == "tsv":
        rows = [ROWS[0].keys(), *([value.replace("\n", " ") for value in row.values()] for row in ROWS)]
        return "\r\n".join("\t".join(row) for row in rows).encode()
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([ROWS[0].keys(), *(row.values() for row in ROWS)])
    return buffer.getvalue().encode()


def damage(content: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(chance.randint(1, 5)):
        at = chance.randrange(len(damaged) + 1)
        kind = chance.choice(("flip", "splice", "splice", "delete", "lines"))
        if kind == "flip" and at < len(damaged):
            damaged[at] ^= 1 << chance.randrange(8)
        elif kind == "splice":
            damaged[at:at] = chance.choice(SPLICES)
        elif kind == "delete":
            del damaged[at : at + chance.choice((1, 1, 2, 20))]
        else:
            lines = damaged.split(b"\n")
            lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))
            damaged = bytearray(b"\n".join(lines))
    return bytes(damaged)


def records_by_other_means(content: bytes, form: str) -> list[list[str]] | int:
    """The rows as Python's own csv module reads them, and for JSON lines their number."""
    if form == "jsonl":
        return sum(bool(line.strip()) for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    text = content.removeprefix(b"\xef\xbb\xbf").decode()
    if form == "tsv":
        rows = [line.removesuffix("\r").split("\t") for line in text.split("\n")]
    else:
        rows = [*csv.reader(io.StringIO(text, newline=""), strict=True)]
    return [row for row in rows if any(len(row) > 1 or field.strip(" \r") for field in row)][1:]


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "folder"])
def test_a_damaged_manifest_gives_every_row_or_a_user_error(tmp_path, form):
    chance = random.Random(form)
    endings = {"rows": 0, "bad rows": 0, "errors": 0}
    for number in range(2500):
        written = chance.choice(("jsonl", "csv", "tsv")) if form == "folder" else form
        content = damage(write_rows(written), chance)
        path = write(tmp_path, content, f"metadata.{written}")
        try:
            rows, bad_rows = read_manifest(str(tmp_path) if form == "folder" else path)
        except UserError as error:
            str(error).encode()
            assert all(problem.startswith(path) for problem in error.problems), (number, content)
            endings["errors"] += 1
        else:
            expected = records_by_other_means(content, written)
            read = expected if written == "jsonl" else [[*record.values()] for _, record in read_records(path)]
            assert read == expected, (number, content)
            assert len(rows) + len(bad_rows) == (expected if written == "jsonl" else len(expected)), (number, content)
            assert all(isinstance(row, Row) for row in rows) and all(isinstance(row, BadRow) for row in bad_rows)
            repr([*rows, *bad_rows]).encode()
            "".join(row.audio + getattr(row, "text", "") + getattr(row, "detail", "") for row in [*rows, *bad_rows]).encode()
            endings["bad rows" if bad_rows else "rows"] += 1
        Path(path).unlink()
    assert min(endings.values()) > 50, endings  # each way out was taken, so the damage is neither too slight nor too great
