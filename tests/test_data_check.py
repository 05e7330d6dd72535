"""The data check decodes every clip once, loses no row without a reason, and says where each fault is."""

import json
import os

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

import data_check
from audio import SAMPLE_RATE, AudioMeasure
from data_check import SetCheck, check_rows, describe, find_clip_problem, judge_set, write_data_report
from manifest import BadRow, Row, read_manifest


def make_tone(seconds: float) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE)).astype(np.float32)


def write_clip(folder, name: str, wave=None, **how) -> str:
    soundfile.write(folder / name, make_tone(0.5) if wave is None else wave, SAMPLE_RATE, **how)
    return name


def write_manifest(folder, *rows: dict) -> str:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"text": "one"} | row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def check(manifest, *, max_seconds=30.0, cache_folder=None, find_label_problem=lambda row: None) -> SetCheck:
    rows, bad_rows = read_manifest(manifest)
    return check_rows(
        rows,
        name="train",
        find_label_problem=find_label_problem,
        min_seconds=0.1,
        max_seconds=max_seconds,
        cache_folder=cache_folder,
        reader_bad_rows=bad_rows,
    )


def reasons(found: SetCheck) -> dict[int, str]:
    return {row.line: row.reason for row in found.bad_rows}


def warnings(found: SetCheck) -> dict[int, str]:
    return {row.line: row.reason for row in found.warnings}


@pytest.fixture
def ten_rows(tmp_path) -> str:
    """Row 7 is a text file with the name of a sound, row 9 has no file."""
    names = [write_clip(tmp_path, f"{line}.wav") for line in range(1, 11)]
    (tmp_path / "7.wav").write_text("this is not sound\n")
    (tmp_path / "9.wav").unlink()
    return write_manifest(tmp_path, *({"audio": name} for name in names))


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """The clips that are decoded from now on."""
    measure, calls = data_check.measure_audio, []
    monkeypatch.setattr(data_check, "measure_audio", lambda path, **segment: calls.append(path) or measure(path, **segment))
    return calls


def test_unreadable_and_missing_files_are_listed_by_line(ten_rows, tmp_path):
    found = check(ten_rows)
    assert [row.line for row in found.rows] == [1, 2, 3, 4, 5, 6, 8, 10]
    assert [(row.file, row.line, row.audio, row.reason) for row in found.bad_rows] == [
        (ten_rows, 7, str(tmp_path / "7.wav"), "unreadable"),
        (ten_rows, 9, str(tmp_path / "9.wav"), "missing_file"),
    ]
    assert found.seconds == pytest.approx(8 * 0.5)


def test_rows_read_are_rows_used_plus_rows_dropped(tmp_path):
    write_clip(tmp_path, "a.wav")
    manifest = write_manifest(tmp_path, {"audio": "a.wav"}, {"audio": None}, {"audio": "none.wav"}, {"audio": "a.wav", "text": ""})
    found = check(manifest, find_label_problem=lambda row: None if row.text else ("empty_text", "the text is empty"))
    assert found.rows_read == 4 == len(found.rows) + len(found.bad_rows)
    assert reasons(found) == {2: "bad_field", 3: "missing_file", 4: "empty_text"}
    assert found.dropped == {"bad_field": 1, "missing_file": 1, "empty_text": 1}


def test_length_is_judged_on_decoded_samples(tmp_path):
    clips = [write_clip(tmp_path, f"{seconds}.flac", make_tone(seconds)) for seconds in (31.2, 30.0, 30.01)]
    found = check(write_manifest(tmp_path, *({"audio": clip, "duration": 5} for clip in clips)))
    assert reasons(found) == {1: "too_long", 3: "too_long"}


def test_no_recipe_lengthens_the_window(tmp_path):
    clip = write_clip(tmp_path, "long.flac", make_tone(31))
    assert reasons(check(write_manifest(tmp_path, {"audio": clip}), max_seconds=60.0)) == {1: "too_long"}


def test_the_recipe_can_ask_for_shorter_clips(tmp_path):
    clips = [write_clip(tmp_path, f"{seconds}.wav", make_tone(seconds)) for seconds in (2.0, 2.01)]
    found = check(write_manifest(tmp_path, *({"audio": clip} for clip in clips)), max_seconds=2.0)
    assert reasons(found) == {2: "too_long"}


def test_a_wrong_duration_is_listed_and_the_sound_decides(tmp_path):
    long, short = write_clip(tmp_path, "long.wav", make_tone(2.1)), write_clip(tmp_path, "short.wav", make_tone(0.02))
    row = {"audio": long, "duration": 31.0, "text": "one <UNK>"}
    found = check(write_manifest(tmp_path, row, {"audio": short, "duration": 5.0}, {"audio": long, "duration": 2.5}))
    assert [row.line for row in found.rows] == [1, 3]
    assert [(row.line, row.reason) for row in found.warnings] == [(1, "duration_mismatch"), (1, "placeholder_text")]
    assert reasons(found) == {2: "too_short"}


@pytest.mark.parametrize("text", ["<UNK>", "a [unk] b", "[noise]", "<Laughter>", "[background noise]"])
def test_placeholders_in_a_text_are_listed(tmp_path, text):
    manifest = write_manifest(tmp_path, {"audio": write_clip(tmp_path, "a.wav"), "text": text})
    assert warnings(check(manifest)) == {1: "placeholder_text"}


@pytest.mark.parametrize("text", ["3 < 4 > 2", "[1]", "<|en|>", "a < b", "one"])
def test_other_brackets_are_no_placeholders(tmp_path, text):
    manifest = write_manifest(tmp_path, {"audio": write_clip(tmp_path, "a.wav"), "text": text})
    assert warnings(check(manifest)) == {}


def test_channels_that_cancel_are_kept_and_listed(tmp_path):
    tone = make_tone(0.5)
    both = write_clip(tmp_path, "both.wav", np.stack([tone, tone], axis=1))
    opposite = write_clip(tmp_path, "opposite.wav", np.stack([tone, -tone], axis=1))
    found = check(write_manifest(tmp_path, {"audio": both}, {"audio": opposite}))
    assert len(found.rows) == 2
    assert warnings(found) == {2: "near_silent_mix"}


def test_silence_with_a_text_is_dropped_and_without_kept(tmp_path):
    silent = write_clip(tmp_path, "silent.wav", make_tone(0.5) * 1e-3)
    found = check(write_manifest(tmp_path, {"audio": silent}, {"audio": silent, "text": " "}))
    assert reasons(found) == {1: "silent"}
    assert [row.line for row in found.rows] == [2]


def test_broken_clips_have_their_reason(tmp_path):
    broken = make_tone(0.5)
    broken[100] = np.nan
    rows = [{"audio": write_clip(tmp_path, "nan.wav", broken, subtype="FLOAT")}]
    rows += [{"audio": write_clip(tmp_path, "empty.wav", np.zeros(0))}]
    rows += [{"audio": write_clip(tmp_path, "a.wav"), "start": 0.2, "end": 0.9}]
    rows += [{"audio": write_clip(tmp_path, "cut.wav")}]
    os.truncate(tmp_path / "cut.wav", 5000)
    assert reasons(check(write_manifest(tmp_path, *rows))) == {1: "non_finite", 2: "empty_audio", 3: "bad_segment", 4: "unreadable"}


def test_the_fault_of_the_clip_is_told_before_that_of_the_text(tmp_path):
    manifest = write_manifest(tmp_path, {"audio": write_clip(tmp_path, "short.wav", make_tone(0.02))})
    assert reasons(check(manifest, find_label_problem=lambda row: ("empty_text", "the text is empty"))) == {1: "too_short"}


def test_parts_of_one_file_are_checked_apart(tmp_path):
    clip = write_clip(tmp_path, "long.flac", make_tone(40))
    found = check(write_manifest(tmp_path, {"audio": clip}, {"audio": clip, "start": 1, "end": 3}, {"audio": clip, "start": 35}))
    assert reasons(found) == {1: "too_long"}
    assert found.seconds == pytest.approx(2 + 5)


def test_a_second_check_decodes_nothing(tmp_path, decoded):
    clips = [write_clip(tmp_path, f"{seconds}.wav", make_tone(seconds)) for seconds in (0.5, 0.7, 31)]
    manifest = write_manifest(tmp_path, *({"audio": clip} for clip in clips), {"audio": clips[0], "start": 0.1, "end": 0.3})
    first = check(manifest, cache_folder=str(tmp_path / "cache"))
    assert len(decoded) == 4
    assert check(manifest, cache_folder=str(tmp_path / "cache")) == first
    assert len(decoded) == 4


def test_changed_content_is_decoded_again(tmp_path, decoded):
    clips = [write_clip(tmp_path, name) for name in ("a.wav", "b.wav")]
    manifest = write_manifest(tmp_path, *({"audio": clip} for clip in clips))
    check(manifest, cache_folder=str(tmp_path / "cache"))
    decoded.clear()
    before = os.stat(tmp_path / "b.wav")
    write_clip(tmp_path, "b.wav", np.zeros(8000))
    os.utime(tmp_path / "b.wav", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reasons(check(manifest, cache_folder=str(tmp_path / "cache"))) == {2: "silent"}
    assert decoded == [str(tmp_path / "b.wav")]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped digit", "other JSON", "not UTF-8"])
def test_a_damaged_cache_is_not_used(tmp_path, decoded, damage):
    manifest = write_manifest(tmp_path, {"audio": write_clip(tmp_path, "a.wav")})
    found = check(manifest, cache_folder=str(tmp_path / "cache"))
    (cache,) = (tmp_path / "cache").iterdir()
    content = cache.read_bytes()
    damaged = {"empty": b"", "cut": content[:-9], "other JSON": b'{"a": [1]}', "not UTF-8": b"\xff" + content}
    cache.write_bytes(damaged.get(damage, content.replace(b"8000", b"9000")))
    assert cache.read_bytes() != content
    assert check(manifest, cache_folder=str(tmp_path / "cache")) == found
    assert len(decoded) == 2
    assert cache.read_bytes() == content


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "cache").write_text("a file, where a folder is needed")
    manifest = write_manifest(tmp_path, {"audio": write_clip(tmp_path, "a.wav")})
    assert len(check(manifest, cache_folder=str(tmp_path / "cache")).rows) == 1


def test_bad_rows_stay_in_the_order_of_the_manifest(tmp_path):
    manifest = write_manifest(tmp_path, {"audio": "none.wav"}, {"audio": None}, {"audio": "none.wav"})
    assert [row.line for row in check(manifest).bad_rows] == [1, 2, 3]


def make_check(kept: int, bad: int) -> SetCheck:
    rows = [Row("a.wav", "one", "train.jsonl", line) for line in range(1, kept + 1)]
    bad_rows = [BadRow("train.jsonl", kept + 1 + i, f"{i}.wav", "missing_file", "there is no such file") for i in range(bad)]
    return SetCheck("train", kept + bad, rows, bad_rows, [], 3600.0 * 3.21)


def test_fail_lists_all_bad_rows(ten_rows, tmp_path):
    messages = judge_set(check(ten_rows), on_bad_row="fail", max_dropped_share=0.5)
    assert len(messages) == 2
    assert messages[0].startswith(f"{ten_rows}:7: unreadable: {tmp_path / '7.wav'}: ")
    assert messages[1].startswith(f"{ten_rows}:9: missing_file: {tmp_path / '9.wav'}: ")


def test_drop_goes_on_up_to_the_share(ten_rows):
    found = check(ten_rows)
    assert judge_set(found, on_bad_row="drop", max_dropped_share=0.5) == []
    assert judge_set(found, on_bad_row="drop", max_dropped_share=0.2) == []
    (message,) = judge_set(found, on_bad_row="drop", max_dropped_share=0.1)
    assert "20.0%" in message and "1 unreadable" in message and f"{ten_rows}:7: " in message


def test_very_many_bad_rows_are_counted():
    messages = judge_set(make_check(1, 25), on_bad_row="fail", max_dropped_share=0.1)
    assert len(messages) == 21 and messages[-1] == "train: and 5 more: see data_report.json"


@pytest.mark.parametrize("on_bad_row", ["drop", "fail"])
@pytest.mark.parametrize("bad", [0, 3])
def test_a_set_without_rows_left_is_refused(on_bad_row, bad):
    assert judge_set(make_check(0, bad), on_bad_row=on_bad_row, max_dropped_share=1.0)


def test_the_log_line_counts_rows_hours_and_reasons():
    assert describe(make_check(1234, 6)) == "train: 1,234 of 1,240 rows, 3.21 h; dropped: 6 missing_file"
    assert describe(make_check(3, 0)) == "train: 3 of 3 rows, 3.21 h"


def test_the_report_has_the_promised_form(ten_rows, tmp_path):
    found = check(ten_rows)
    found.warnings.append(BadRow(ten_rows, 1, "a.wav", "placeholder_text", "the text holds <UNK>"))
    write_data_report(str(tmp_path / "run"), [found])
    report = json.loads((tmp_path / "run" / "data_report.json").read_text(encoding="utf-8"))
    train = report["sets"]["train"]
    assert set(train) == {"rows_read", "rows_used", "hours", "dropped", "bad_rows", "warnings"}
    assert (train["rows_read"], train["rows_used"]) == (10, 8)
    assert train["hours"] == pytest.approx(8 * 0.5 / 3600, abs=1e-6)
    assert train["dropped"] == {"unreadable": 1, "missing_file": 1}
    assert [(row["line"], row["reason"]) for row in train["bad_rows"]] == [(7, "unreadable"), (9, "missing_file")]
    assert set(train["bad_rows"][0]) == set(train["warnings"][0]) == {"file", "line", "audio", "reason", "detail"}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["data_report.html", "data_report.json"]


def test_the_page_escapes_what_rows_hold_and_needs_nothing_else(tmp_path):
    found = make_check(1, 0)
    found.bad_rows.append(BadRow("t.jsonl", 2, "<script>x</script>.wav", "unreadable", "a & b \udc80"))
    write_data_report(str(tmp_path), [found])
    page = (tmp_path / "data_report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page and "a &amp; b" in page
    assert "http" not in page and "src=" not in page


# --- whatever the clips ------------------------------------------------------------------------------------------

CLIPS = {  # name -> the reason for which a row with this clip and a text is dropped
    "good.wav": None,
    "good.flac": None,
    "exactly30.wav": None,
    "over30.wav": "too_long",
    "short.wav": "too_short",
    "silent.wav": "silent",
    "text.wav": "unreadable",
    "cut.wav": "unreadable",
    "nan.wav": "non_finite",
    "empty.wav": "empty_audio",
    "missing.wav": "missing_file",
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for name in ("good.wav", "good.flac", "cut.wav"):
        write_clip(folder, name)
    (folder / "cut.wav").write_bytes((folder / "cut.wav").read_bytes()[:5000])
    (folder / "text.wav").write_text("this is not sound\n")
    for name, wave in {
        "exactly30.wav": make_tone(30),
        "over30.wav": np.append(make_tone(30), np.float32(0)),
        "short.wav": make_tone(0.1)[:-1],
        "silent.wav": np.zeros(SAMPLE_RATE, np.float32),
        "empty.wav": np.zeros(0, np.float32),
    }.items():
        write_clip(folder, name, wave)
    write_clip(folder, "nan.wav", np.array([np.nan] * SAMPLE_RATE, np.float32), subtype="FLOAT")
    return folder


ROWS = st.lists(
    st.fixed_dictionaries({
        "audio": st.sampled_from(list(CLIPS)),
        "text": st.sampled_from(["one", "NA", "", "<UNK>"]),
        "duration": st.sampled_from([0, 0.5, 29, 31, -1, "N/A", None]),
    }),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(rows=ROWS)
def test_rules_7_and_8_any_mix_of_clips_is_used_or_dropped_row_by_row_for_what_was_decoded(clips, rows):
    found = check(
        write_manifest(clips, *rows), find_label_problem=lambda row: None if row.text else ("empty_text", "")
    )
    expected = {}
    for line, own in enumerate(rows, 1):
        reason = CLIPS[own["audio"]]
        if not own["text"] and reason in (None, "silent"):
            reason = "empty_text"
        if reason:
            expected[line] = reason
    assert reasons(found) == expected
    assert found.rows_read == len(rows) == len(found.rows) + len(found.bad_rows)
    assert sum(found.dropped.values()) == len(found.bad_rows)
    assert [row.line for row in found.rows] == [line for line in range(1, len(rows) + 1) if line not in expected]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    shortest=st.floats(0, 29.9),
    spread=st.floats(0, 30),
    off=st.integers(-2, 2),
    which=st.sampled_from(["shortest", "longest", "window"]),
)
def test_rule_6_a_clip_of_exactly_a_limit_stays_and_one_sample_beyond_it_goes(shortest, spread, off, which):
    longest = min(30.0, shortest + spread)
    limit = {"shortest": shortest, "longest": longest, "window": 30.0}[which]
    samples = max(1, round(limit * SAMPLE_RATE) + off)
    measure = AudioMeasure(samples, SAMPLE_RATE, 1, 0.5, 0.5, True)
    problem = find_clip_problem(Row("a.wav", "a", "t.jsonl", 1), measure, min_seconds=shortest, max_seconds=longest)
    reason = problem[0] if problem else None
    least, most = round(shortest * SAMPLE_RATE), round(longest * SAMPLE_RATE)
    assert reason == ("too_short" if samples < least else "too_long" if samples > most else None)
