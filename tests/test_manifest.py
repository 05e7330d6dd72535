"""The manifest reader takes what is written, guesses nothing, and names every fault by file and line."""

import json
import math
import unicodedata

import pytest

from faults import UserError
from manifest import Row, read_manifest

GOOD = '{"audio": "a.wav", "text": "one"}'


def write(tmp_path, *lines: str, encoding: str = "utf-8"):
    path = tmp_path / "train.jsonl"
    path.write_bytes("\n".join(lines).encode(encoding))
    return str(path)


def read_one(tmp_path, **fields) -> Row:
    (row,), bad_rows = read_manifest(write(tmp_path, json.dumps({"audio": "a.wav", "text": "one"} | fields)))
    assert not bad_rows
    return row


def problems_of(path, **columns) -> list[str]:
    with pytest.raises(UserError) as caught:
        read_manifest(path, **columns)
    return caught.value.problems


def test_a_row_holds_every_field(tmp_path):
    fields = {"language": "hi", "task": "translate", "start": 1.5, "end": "3", "duration": 9, "speaker": "s1", "accent": "north"}
    row = read_one(tmp_path, **fields)
    path = str(tmp_path / "train.jsonl")
    assert row == Row(str(tmp_path / "a.wav"), "one", path, 1, "hi", "translate", 1.5, 3.0, 9.0, "s1", {"accent": "north"})


@pytest.mark.parametrize("text", ["10", "1.50", "NA", "None", "nan", "null", "", " two  blanks ", "a\u2028b", "a\tb", "मेरी किताब"])
def test_text_is_unchanged(tmp_path, text):
    assert read_one(tmp_path, text=text).text == text


@pytest.mark.parametrize("literal", ["10", "1.50", "-0.0", "1e400", "NaN", "Infinity", "123456789012345678901234567890" * 200])
def test_a_number_is_the_text_it_was_written_as(tmp_path, literal):
    (row,), _ = read_manifest(write(tmp_path, f'{{"audio": "a.wav", "text": {literal}}}'))
    assert row.text == literal


def test_a_line_separator_in_a_text_breaks_no_line(tmp_path):
    rows, _ = read_manifest(write(tmp_path, '{"audio": "a.wav", "text": "one\u2028two\x85three"}', GOOD))
    assert [row.text for row in rows] == ["one\u2028two\x85three", "one"]


def test_lines_are_counted_as_an_editor_shows_them(tmp_path):
    rows, _ = read_manifest(write(tmp_path, "", GOOD, "  ", GOOD + "\r", "\r", GOOD))
    assert [row.line for row in rows] == [2, 4, 6]


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    rows, _ = read_manifest(write(tmp_path, GOOD, encoding="utf-8-sig"))
    assert rows[0].audio == str(tmp_path / "a.wav")


def test_another_encoding_is_named_by_line_and_column(tmp_path):
    path = write(tmp_path, GOOD, '{"audio": "a.wav", "text": "caf\xe9"}', encoding="latin-1")
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:2:32: ") and "UTF-8" in problem


@pytest.mark.parametrize(
    ("line", "column"),
    [(GOOD + " " + GOOD, len(GOOD) + 2), (f"[{GOOD}]", 1), (GOOD[:-1], len(GOOD)), ("null", 1), ("[" * 100_000, 1), ("  oops", 3)],
    ids=["two objects", "list", "missing brace", "null", "nested too deeply", "no JSON"],
)
def test_a_line_that_is_not_one_object_is_named_by_line_and_column(tmp_path, line, column):
    path = write(tmp_path, GOOD, line, GOOD)
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}:2:{column}: ")


def test_a_key_that_is_there_twice_is_an_error(tmp_path):
    (problem,) = problems_of(write(tmp_path, '{"audio": "a.wav", "text": "one", "text": "two"}'))
    assert "'text' is there twice" in problem


def test_all_broken_lines_are_told_at_once(tmp_path):
    path = write(tmp_path, "{", GOOD, "[]")
    assert [problem.split(": ")[0] for problem in problems_of(path)] == [f"{path}:1:2", f"{path}:3:1"]


def test_very_many_broken_lines_are_counted(tmp_path):
    problems = problems_of(write(tmp_path, *["{"] * 25))
    assert len(problems) == 21 and "and 5 more" in problems[-1]


@pytest.mark.parametrize(
    "fields",
    [{"audio": None}, {"audio": {"bytes": "x"}}, {"audio": ["a.wav"]}, {"audio": True}, {"audio": "  "}]
    + [{"text": None}, {"text": ["one"]}, {"text": {"en": "one"}}, {"text": False}, {"text": "half \ud83d"}]
    + [{"start": "soon"}, {"start": -1}, {"end": math.nan}, {"start": True}, {"start": [1]}]
    + [{"start": 2, "end": 2}, {"start": 2, "end": 1.5}, {"end": 0}, {"task": "dictate"}, {"language": ["en"]}],
    ids=str,
)
def test_a_value_its_column_cannot_hold_is_a_bad_row(tmp_path, fields):
    path = write(tmp_path, GOOD, json.dumps({"audio": "a.wav", "text": "one"} | fields))
    rows, (bad_row,) = read_manifest(path)
    assert len(rows) == 1
    assert (bad_row.file, bad_row.line, bad_row.reason) == (path, 2, "bad_field")
    assert next(iter(fields)) in bad_row.detail or next(reversed(fields)) in bad_row.detail


@pytest.mark.parametrize("line", ['{"audio": "b.wav"}', '{"text": "two"}', "{}"])
def test_a_column_missing_in_one_row_is_a_bad_row(tmp_path, line):
    rows, bad_rows = read_manifest(write(tmp_path, GOOD, line))
    assert [row.line for row in rows] == [1]
    assert [(row.line, row.reason) for row in bad_rows] == [(2, "bad_field")]


@pytest.mark.parametrize("word", [None, "", " ", "None", "null", "none"])
def test_language_and_task_may_be_left_open(tmp_path, word):
    row = read_one(tmp_path, language=word, task=word)
    assert row.language is None and row.task is None


def test_times_may_be_left_open(tmp_path):
    assert read_one(tmp_path, duration="N/A").duration is None  # a hint: no row is lost over it
    assert read_one(tmp_path, duration=math.inf).duration is None
    row = read_one(tmp_path, start=None, end="", duration=None)
    assert (row.start, row.end, row.duration) == (None, None, None)


def test_a_named_column_that_is_not_there_is_an_error(tmp_path):
    path = write(tmp_path, '{"wav": "a.wav", "sentence": "one"}')
    assert problems_of(path, audio_column="audio", text_column="text") == [
        f"{path}: column 'audio' is not there; columns are wav, sentence; set data.audio_column",
        f"{path}: column 'text' is not there; columns are wav, sentence; set data.text_column",
    ]


def test_the_only_well_known_column_is_used(tmp_path, caplog):
    caplog.set_level("INFO")
    rows, _ = read_manifest(write(tmp_path, '{"wav": "a.wav", "sentence": "one"}'))
    assert (rows[0].audio, rows[0].text, rows[0].extra) == (str(tmp_path / "a.wav"), "one", None)
    assert "'wav'" in caplog.text and "'sentence'" in caplog.text


def test_two_well_known_columns_are_an_error(tmp_path):
    path = write(tmp_path, '{"audio": "a.wav", "text": "one", "sentence": "One."}')
    (problem,) = problems_of(path)
    assert "text and sentence" in problem and "data.text_column" in problem
    rows, _ = read_manifest(path, text_column="sentence")
    assert rows[0].text == "One." and rows[0].extra == {"text": "one"}


def test_no_well_known_column_is_an_error(tmp_path):
    (problem,) = problems_of(write(tmp_path, '{"audio": "a.wav", "words": "one"}'))
    assert "columns are audio, words" in problem and "data.text_column" in problem


def test_a_table_without_a_header_is_told_by_its_first_row(tmp_path):
    (tmp_path / "train.csv").write_text("clips/1.wav,hello\nclips/2.wav,good day\n")
    (problem,) = problems_of(str(tmp_path / "train.csv"))
    assert problem == (
        f"{tmp_path / 'train.csv'}:1: line 1 must name the columns, such as audio and text; it looks like a row: clips/1.wav, hello"
    )


def test_other_columns_are_kept_as_text(tmp_path):
    row = read_one(tmp_path, age=40, native=True, place=None, tags=["a", 1])
    assert row.extra == {"age": "40", "native": "true", "tags": '["a", "1"]'}


@pytest.mark.parametrize(
    ("written", "on_disk"),
    [("clips/a.wav ", "clips/a.wav"), ("clips\\new\\tone.wav", "clips/new/tone.wav"), ("a\\b.wav", "a\\b.wav")]
    + [(unicodedata.normalize(a, "é.wav"), unicodedata.normalize(b, "é.wav")) for a, b in (("NFD", "NFC"), ("NFC", "NFD"))]
    + [(unicodedata.normalize("NFD", "é\\ü.wav"), "é/ü.wav")],
)
def test_a_path_is_found_as_the_disk_spells_it(tmp_path, written, on_disk):
    (tmp_path / on_disk).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / on_disk).touch()
    assert read_one(tmp_path, audio=written).audio == str(tmp_path / on_disk)


def test_deep_nesting_never_ends_the_reader(tmp_path):
    for depth in range(880, 1000, 3):
        path = write(tmp_path, GOOD, f'{{"audio": "a.wav", "text": "one", "more": {"[" * depth}{"]" * depth}}}')
        try:
            rows, bad_rows = read_manifest(path)
        except UserError:
            continue
        assert len(rows) + len(bad_rows) == 2


def test_a_column_name_that_is_no_text_is_spelt_out(tmp_path):
    lines = (GOOD[:-1] + f', "\\ud83d": "{value}"}}' for value in ("x", "\\ud83d"))
    rows, bad_rows = read_manifest(write(tmp_path, *lines))
    assert rows[0].extra == {"\\ud83d": "x"}
    bad_rows[0].detail.encode()


def test_an_absolute_path_stays(tmp_path):
    assert read_one(tmp_path, audio="/elsewhere/a.wav").audio == "/elsewhere/a.wav"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_manifest_without_rows_is_an_error(tmp_path, content):
    (tmp_path / "train.jsonl").write_bytes(content)
    (problem,) = problems_of(str(tmp_path / "train.jsonl"))
    assert "train.jsonl" in problem and "no rows" in problem


@pytest.mark.parametrize("name", ["none.jsonl", "rows.csv", "folder"])
def test_what_cannot_be_read_is_named(tmp_path, name):
    (tmp_path / "rows.csv").write_text("audio,text\na.wav,hello, world\n")
    (tmp_path / "folder").mkdir()
    (problem,) = problems_of(str(tmp_path / name))
    assert name in problem
