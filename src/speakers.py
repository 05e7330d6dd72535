"""Which rows belong to a part of the speakers? By a hash of the speaker alone: the same for any order, machine and other rows."""

import hashlib
import json

from config import DataSource
from faults import UserError
from manifest import Row

_OWN_FIELDS = ("speaker", "language", "task")


def name_speaker(row: Row, columns: list[str]) -> list[str | None]:
    """The row's values of the columns that together name its speaker."""
    return [getattr(row, column) if column in _OWN_FIELDS else (row.extra or {}).get(column) for column in columns]


def place_speaker(values: list[str | None]) -> float:
    """Where the speaker lies from 0 to 1 (excluded); speakers are spread evenly."""
    digest = hashlib.blake2b(json.dumps(values).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def speaker_columns(source: DataSource) -> list[str]:
    """The columns that name a speaker, by name."""
    columns = source.speaker_column or "speaker"
    return [columns] if isinstance(columns, str) else columns


def is_chosen(row: Row, source: DataSource) -> bool:
    """Whether the row's speaker belongs to the source's share; without a share all do."""
    if source.speaker_share is None:
        return True
    low, high = source.speaker_share
    return low <= place_speaker(name_speaker(row, speaker_columns(source))) < high


def choose_speakers(rows: list[Row], source: DataSource, place: str) -> list[Row]:
    """The rows of the source's share of speakers, with the speaker's name where columns for it are given.

    `place` is the source's place in the recipe. Raises UserError for a column that no row has.
    """
    if source.speaker_share is None and source.speaker_column is None:
        return rows
    columns = speaker_columns(source)
    for column in columns:
        if rows and not any(name_speaker(row, [column])[0] for row in rows):
            there = ", ".join(dict.fromkeys(name for row in rows for name in row.extra or ()))
            others = f"other columns are {there}" if there else "there are no other columns"
            raise UserError(f"{place}.speaker_column: no row of {source.name} has a value in '{column}'; {others}")
    chosen = [row for row in rows if is_chosen(row, source)]
    if source.speaker_column is not None:
        for row in chosen:
            row.speaker = " / ".join(value or "" for value in name_speaker(row, columns))
    return chosen
