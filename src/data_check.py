"""Checks every row of a set before training: each clip is decoded once, each fault is listed by file and line.

Rows read are always rows used plus rows dropped, and the reasons are fixed words.
"""

import hashlib
import html
import json
import os
import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from audio import SAMPLE_RATE, WINDOW_SAMPLES, AudioError, AudioMeasure, measure_audio
from manifest import BadRow, Row

CHECK_VERSION = 2  # counts up whenever the same bytes would be measured differently, so that older cached measures are not used
SILENT_PEAK = 1e-3  # -60 dBFS: the loudest sample is 33 of 32768, room noise in any microphone recording is above it
DURATION_SLACK_SECONDS = 0.5  # a manifest's duration may be off by this much before the row is listed
PLACEHOLDER = re.compile(r"<[^\W\d_][\w -]*>|\[[^\W\d_][\w -]*\]")  # <UNK>, [noise]: marks that would be learnt as words
REPORT_FILE = "data_report.json"
SHOWN_ROWS = 20  # rows named in a message; the report names all
SHOWN_ROWS_OF_DROPPED = 5
SHOWN_ROWS_OF_PAGE = 1000  # rows a table of the page holds
FILES_A_TASK = 16  # files one thread takes at a time; a task for each would cost a kilobyte a file

FindLabelProblem = Callable[[Row], tuple[str, str] | None]
Segment = tuple[float | None, float | None]
SoundKey = str | tuple[int, int]


@dataclass(slots=True)
class SetCheck:
    """What the check found in the set `name`: `rows` are kept (`seconds` of sound in all, `samples` at 16 kHz of each), `bad_rows`
    dropped, `warnings` are about kept rows; rows_read == len(rows) + len(bad_rows). `sounds` has a word for the content and segment
    of each kept row ("": not known), and `notes` are lines about the whole set, for the page."""

    name: str
    rows_read: int
    rows: list[Row]
    bad_rows: list[BadRow]
    warnings: list[BadRow]
    seconds: float
    samples: array = field(default_factory=lambda: array("i"))
    sounds: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def hours(self) -> float:
        """Hours of the kept rows."""
        return self.seconds / 3600

    @property
    def dropped(self) -> dict[str, int]:
        """Number of dropped rows by reason, the commonest first."""
        return dict(Counter(row.reason for row in self.bad_rows).most_common())


def check_rows(
    rows: Sequence[Row],
    *,
    name: str,
    find_label_problem: FindLabelProblem,
    min_seconds: float,
    max_seconds: float,
    cache_folder: str | None,
    reader_bad_rows: Sequence[BadRow] = (),
) -> SetCheck:
    """Decodes every clip once, in a thread for each usable core, and sorts the rows into kept and dropped, in their order.

    `find_label_problem` gives (reason, detail) for a row whose text cannot be used, else None. `reader_bad_rows` are counted as
    read and dropped. Measures are kept in `cache_folder` by the content of the files: a second check only hashes them.
    """
    check = SetCheck(name, len(rows) + len(reader_bad_rows), [], list(reader_bad_rows), [], 0.0)
    measures = _measure_rows(rows, name, cache_folder)
    for row, (sound, measure) in zip(tqdm(rows, f"{name}: texts", delay=2, unit="row"), measures, strict=True):
        label_problem = find_label_problem(row)
        problem = find_clip_problem(row, measure, min_seconds=min_seconds, max_seconds=max_seconds) or label_problem
        if problem:
            check.bad_rows.append(BadRow(row.file, row.line, row.audio, *problem))
            continue
        check.rows.append(row)
        check.sounds.append(sound)
        check.seconds += measure.seconds
        check.samples.append(measure.samples)
        check.warnings += (BadRow(row.file, row.line, row.audio, *warning) for warning in _find_warnings(row, measure))
    order = {file: place for place, file in enumerate(dict.fromkeys(row.file for row in [*rows, *reader_bad_rows]))}
    check.bad_rows.sort(key=lambda row: (order[row.file], row.line))
    return check


def find_clip_problem(
    row: Row, measure: AudioMeasure | AudioError, *, min_seconds: float, max_seconds: float
) -> tuple[str, str] | None:
    """(reason, detail) if the decoded sound cannot be used, else None.

    Sound of exactly `max_seconds` stays, and so does silence with an empty text.
    """
    if isinstance(measure, AudioError):
        return measure.reason, measure.detail
    if not measure.finite:
        return "non_finite", "some samples are NaN or infinite"
    if measure.samples < round(min_seconds * SAMPLE_RATE):
        return "too_short", f"{measure.seconds:.3f} s, data.min_duration_seconds is {min_seconds}"
    if measure.samples > WINDOW_SAMPLES:
        return "too_long", f"{measure.seconds:.3f} s, Whisper hears {WINDOW_SAMPLES / SAMPLE_RATE:g} s"
    if measure.samples > round(max_seconds * SAMPLE_RATE):
        return "too_long", f"{measure.seconds:.3f} s, data.max_duration_seconds is {max_seconds}"
    if measure.peak < SILENT_PEAK and row.text.strip():
        return "silent", f"the loudest sample is {measure.peak:.6f} of full scale, the text is not empty"
    return None


def _find_warnings(row: Row, measure: AudioMeasure) -> Iterator[tuple[str, str]]:
    if row.duration is not None and abs(row.duration - measure.seconds) > DURATION_SLACK_SECONDS:
        yield "duration_mismatch", f"the manifest says {row.duration:g} s, the sound is {measure.seconds:.3f} s long"
    if measure.mixed_peak < SILENT_PEAK <= measure.peak:
        yield "near_silent_mix", f"the {measure.channels} channels cancel each other when they are averaged"
    if mark := PLACEHOLDER.search(row.text):
        yield "placeholder_text", f"the text holds {mark.group()}"


def _measure_rows(rows: Sequence[Row], name: str, cache_folder: str | None) -> list[tuple[str, AudioMeasure | AudioError]]:
    """For each row the key of its content and segment ("": not known), and its measure.

    A file is hashed once, however many rows are parts of it.
    """
    caches = {file: _choose_cache_path(cache_folder, file) for file in dict.fromkeys(row.file for row in rows)}
    known = {}
    for path in caches.values():
        known |= _load_measures(path)
    segments: dict[SoundKey, tuple[Row, dict[Segment, None]]] = {}
    for row in rows:
        segments.setdefault(_sound_key(row), (row, {}))[1][row.start, row.end] = None
    files = list(segments.values())
    tasks = [files[at : at + FILES_A_TASK] for at in range(0, len(files), FILES_A_TASK)]
    found = {}
    with (
        ThreadPoolExecutor(_count_usable_cores()) as threads,
        tqdm(desc=f"{name}: clips", total=len(files), delay=2, unit="file") as bar,
    ):
        results = threads.map(lambda task: [_measure_file(*file, known) for file in task], tasks)
        for task, measured in zip(tasks, results, strict=True):
            for (row, _), by_segment in zip(task, measured, strict=True):
                found |= {(_sound_key(row), *segment): measure for segment, measure in by_segment.items()}
            bar.update(len(task))
    for file, path in caches.items():
        entries = (found[_sound_key(row), row.start, row.end] for row in rows if row.file == file)
        _save_measures(path, dict(entry for entry in entries if isinstance(entry[1], AudioMeasure)), known)
    return [found[_sound_key(row), row.start, row.end] for row in rows]


def _sound_key(row: Row) -> SoundKey:
    """Rows with the same key are parts of the same sound; one record of a Hub set may hold several, each in a store of its own."""
    return row.audio if row.store is None else (id(row.store), row.line)


def _measure_file(
    row: Row, segments: dict[Segment, None], known: dict[str, AudioMeasure]
) -> dict[Segment, tuple[str, AudioMeasure | AudioError]]:
    """(cache key, measure) for each segment; what is known for the same bytes is not decoded again."""
    try:
        sound = row.sound()
    except AudioError as error:
        return {segment: ("", AudioError(error.reason, error.detail)) for segment in segments}
    content = ""
    if isinstance(sound, bytes):
        content = hashlib.blake2b(sound, digest_size=16).hexdigest()
    elif os.path.isfile(sound):
        try:
            with open(sound, "rb") as file:
                content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError:
            pass  # measure_audio meets the same and names it
    measured = {}
    for start, end in segments:
        key = f"{CHECK_VERSION}-{content}-{start}-{end}" if content else ""
        measure = known.get(key) if content else None
        if measure is None:
            try:
                measure = measure_audio(sound, start=start, end=end)
            except AudioError as error:
                measure = AudioError(error.reason, error.detail)  # a fresh one: tracebacks would keep every block alive
        measured[start, end] = key, measure
    return measured


def _count_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _choose_cache_path(cache_folder: str | None, manifest: str) -> str | None:
    if cache_folder is None:
        return None
    place = manifest if manifest.startswith("hub:") else os.path.abspath(manifest)
    name = hashlib.blake2b(os.fsencode(place), digest_size=8).hexdigest()
    return os.path.join(cache_folder, f"measures-{name}.json")


def _load_measures(path: str | None) -> dict[str, AudioMeasure]:
    """Measures by key; none if the cache cannot be read or isn't as it was written."""
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            checksum, content = json.load(file)
        if checksum != _sum_up(content):
            return {}
        return {key: AudioMeasure(*values) for key, values in json.loads(content).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _save_measures(path: str | None, measures: dict[str, AudioMeasure], known: dict[str, AudioMeasure]) -> None:
    """Replaces the cache if something is new; a folder that cannot be written means no cache."""
    if path is None or measures.keys() <= known.keys():
        return
    content = json.dumps({key: list(asdict(measure).values()) for key, measure in measures.items()})
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _write_atomically(path, json.dumps([_sum_up(content), content]))
    except OSError:
        pass


def _sum_up(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _write_atomically(path: str, content: str) -> None:
    """The file is the old one or the whole new one, whenever the process ends. Half surrogate pairs become escapes."""
    handle, beside = tempfile.mkstemp(dir=os.path.dirname(path), prefix=f".{os.path.basename(path)}.")
    try:
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(content)
        os.chmod(beside, 0o644)  # mkstemp makes files that nobody else may read
        os.replace(beside, path)
    except BaseException:  # an interruption, too, must leave nothing behind
        os.unlink(beside)
        raise


def judge_set(check: SetCheck, *, on_bad_row: str, max_dropped_share: float, report: str = REPORT_FILE) -> list[str]:
    """The messages that stop a run: every bad row with `on_bad_row` fail; with drop, one if more than the share is dropped or no
    row is left. Empty: the set can be used. `report` is the path of the file that lists all bad rows."""
    if on_bad_row == "fail" and check.bad_rows:
        more = len(check.bad_rows) - SHOWN_ROWS
        messages = [_describe_row(row) for row in check.bad_rows[:SHOWN_ROWS]]
        return messages + ([f"{check.name}: and {more:,} more: see {report}"] if more > 0 else [])
    share = len(check.bad_rows) / check.rows_read if check.rows_read else 0.0
    if check.rows and share <= max_dropped_share:
        return []
    fault = f"{share:.1%} are dropped, data.max_dropped_share is {max_dropped_share}" if check.rows else "no rows are left"
    first = [f"  {_describe_row(row)}" for row in check.bad_rows[:SHOWN_ROWS_OF_DROPPED]]
    more = len(check.bad_rows) - len(first)
    last = [f"  and {more:,} more: see {report}"] if more > 0 else []
    if not check.rows and {*check.dropped} == {"missing_file"}:
        last.append("  audio paths count from the manifest's own folder; the source's audio_folder names another one")
    if next(iter(check.dropped), None) == "bad_segment":
        last.append("  start and end are seconds inside the sound of the row; where clips are cut already, leave these two columns out")
    return ["\n".join([f"{describe(check)}: {fault}", *first, *last])]


def describe(check: SetCheck) -> str:
    """One line for the log: train: 1,234 of 1,240 rows, 3.21 h; dropped: 4 too_long, 2 unreadable."""
    line = f"{check.name}: {len(check.rows):,} of {check.rows_read:,} rows, {check.hours:.2f} h"
    if check.bad_rows:
        line += "; dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in check.dropped.items())
    return line


def describe_dropped(checks: Sequence[SetCheck], *, report: Path) -> list[str]:
    """Lines for the log when rows are left out: the first of each set, and where all of them are listed."""
    lines = []
    for check in checks:
        lines += [f"left out of {check.name}: {_describe_row(row)}" for row in check.bad_rows[:SHOWN_ROWS_OF_DROPPED]]
    return [*lines, f"all rows left out: {report}"] if lines else []


def _describe_row(row: BadRow) -> str:
    return f"{row.file}:{row.line}: {row.reason}: {row.audio}: {row.detail}"


def write_data_report(folder: str, checks: Sequence[SetCheck]) -> None:
    """Writes data_report.json and data_report.html into `folder`, made if need be. Raises OSError if it cannot be written."""
    os.makedirs(folder, exist_ok=True)
    sets = {
        check.name: {
            "rows_read": check.rows_read,
            "rows_used": len(check.rows),
            "hours": round(check.hours, 6),
            "dropped": check.dropped,
            "bad_rows": [asdict(row) for row in check.bad_rows],
            "warnings": [asdict(row) for row in check.warnings],
        }
        for check in checks
    }
    _write_atomically(os.path.join(folder, REPORT_FILE), json.dumps({"sets": sets}, ensure_ascii=False, indent=1) + "\n")
    _write_atomically(os.path.join(folder, "data_report.html"), _build_page(checks))


def _build_page(checks: Sequence[SetCheck]) -> str:
    sections = "".join(
        f"<h2>{html.escape(check.name)}</h2>\n<p>{html.escape(describe(check))}</p>\n"
        + "".join(f"<p>{html.escape(note)}</p>\n" for note in check.notes)
        + _build_table("Dropped rows", check.bad_rows)
        + _build_table("Warnings: these rows are used", check.warnings)
        for check in checks
    )
    return PAGE.replace("SECTIONS", sections)


def _build_table(title: str, rows: Sequence[BadRow]) -> str:
    if not rows:
        return ""
    cells = [(f"{row.file}:{row.line}", row.reason, row.audio, row.detail) for row in rows[:SHOWN_ROWS_OF_PAGE]]
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in cells)
    more = len(rows) - SHOWN_ROWS_OF_PAGE
    rest = f"<p>and {more:,} more: see {REPORT_FILE}</p>\n" if more > 0 else ""
    head = "<tr><th>row</th><th>reason</th><th>audio</th><th>detail</th></tr>"
    return f"<h3>{title} ({len(rows):,})</h3>\n<table>\n{head}\n{lines}</table>\n{rest}"


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Data report</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.875rem; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid #8884; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
td:nth-child(2) { white-space: nowrap; }
</style>
<h1>Data report</h1>
<p>Every clip counted here was decoded and its text tokenised. Lines count from 1, as an editor shows them.</p>
SECTIONS</html>
"""
