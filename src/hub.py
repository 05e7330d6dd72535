"""Reads speech sets of the Hub, whole or as a stream. Sound stays as it is stored and is decoded by audio.py alone."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import pyarrow.compute
from datasets import Audio, ClassLabel, Features, Value
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled

from audio import as_file
from config import DataSource
from faults import UserError
from hub_ids import is_hub_id
from manifest import BadRow, Row, build_row, choose_columns

ROWS_AT_ONCE = 1000  # of the columns beside the sound
PARQUET_COPY = "refs/convert/parquet"  # the revision where the Hub keeps its own copy of a set, a folder for each configuration


@dataclass
class HeldSound:
    """A store of one row: the sound of a clip on its way through a stream."""

    sound: Any

    def read(self, line: int) -> str | bytes:
        """Raises AudioError when the row holds no sound."""
        return as_file(self.sound)


@dataclass
class ColumnOnDisk:
    """A store that reads a row's sound when it is asked for, from files mapped into memory; survives fork and pickling."""

    rows: datasets.Dataset
    column: str

    def read(self, line: int) -> str | bytes:
        """Raises AudioError when the row holds no sound."""
        return as_file(self.rows[line - 1][self.column])


@dataclass
class HubSet:
    """One opened split: its rows, with sound not decoded, and the columns that hold sound and text.

    It pickles as names of files, so that other processes open the same rows without a look at the network.
    """

    source: DataSource
    rows: datasets.Dataset | datasets.IterableDataset
    audio_column: str
    text_column: str

    def read(self) -> tuple[list[Row], list[BadRow]]:
        """Every row as manifests give them, the sound left on disk, and apart those with a field that cannot be used."""
        names = _read_names(self.rows, self.audio_column)
        store = ColumnOnDisk(self.rows.select_columns([self.audio_column]), self.audio_column)
        others = self.rows.remove_columns([self.audio_column])
        rows, bad_rows, line = [], [], 0
        for batch in others.iter(ROWS_AT_ONCE):
            for values in zip(*batch.values(), strict=True):
                line += 1
                name = names[line - 1] or f"row {line}"
                row = self._build_row(dict(zip(batch, values, strict=True)), name, line=line, store=store)
                (rows if isinstance(row, Row) else bad_rows).append(row)
        return rows, bad_rows

    def build_row(self, values: dict[str, Any], line: int) -> Row | BadRow:
        """The row of one record of a stream, with its sound held in memory."""
        sound = values[self.audio_column]
        name = sound.get("path") if isinstance(sound, dict) else None
        return self._build_row(values, name or f"row {line}", line=line, store=HeldSound(sound))

    def _build_row(self, values: dict[str, Any], name: str, *, line: int, store: HeldSound | ColumnOnDisk) -> Row | BadRow:
        features = self.rows.features
        record = {column: _as_field(value, features[column]) for column, value in values.items() if column != self.audio_column}
        record |= {self.audio_column: name} | self.source.fixed_fields()
        place = (self.source.name, line)
        return build_row(record, place, audio_column=self.audio_column, text_column=self.text_column, store=store)


def open_hub_set(
    source: DataSource,
    place: str,
    *,
    audio_column: str | None,
    text_column: str | None,
    keys: dict[str, str] | None = None,
    streaming: bool = False,
) -> HubSet:
    """Loads the split of a source, from the Hub, the cache, or a local folder; with `streaming` nothing but its description.

    `place` is the source's place in the recipe, `keys` as in `manifest.choose_columns`. Raises UserError when it cannot be
    had, or lacks a column.
    """
    is_local = os.path.isdir(source.hub)
    if not is_local and not is_hub_id(source.hub) or source.hub.endswith((".jsonl", ".csv", ".tsv")):
        raise UserError(f"{place}.hub: there is no folder {source.hub}; a manifest is named by path")
    if is_local and source.revision not in (None, PARQUET_COPY):
        raise UserError(f"{place}.revision: belongs to sets on the Hub; {source.hub} is a folder on this machine, which has none")
    if streaming and "[" in source.split:
        raise UserError(f"{place}.split: {source.split} is a part of a split, and a stream reads whole ones; leave the brackets out")
    if source.revision == PARQUET_COPY and not source.config and not is_local:
        raise UserError(f"{place}.config: is missing; at {PARQUET_COPY} a set without one is all of its configurations at once")
    part = {"data_dir" if source.revision == PARQUET_COPY else "name": source.config}
    try:
        rows = datasets.load_dataset(source.hub, **part, split=source.split, revision=source.revision, streaming=streaming)
        features = rows.features or rows._resolve_features().features
    except (DatasetsError, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        raise UserError(_explain(error, source, place)) from error
    audio_column, text_column = _choose_columns(features, source.name, audio=audio_column, text=text_column, keys=keys)
    _refuse_column_without_sound(features, audio_column, source, key=(keys or {}).get("audio", f"{place}.audio_column"))
    rows = rows.select_columns([name for name in features if name in (audio_column, text_column) or _is_plain(features[name])])
    if not _is_decoded(features[audio_column]):
        rows = rows.cast_column(audio_column, Audio(decode=False))
    return HubSet(source, rows, audio_column, text_column)


def _choose_columns(features: Features, name: str, *, audio: str | None, text: str | None, keys: dict[str, str] | None) -> list[str]:
    """As for manifests, but that a column declared as sound is known by that, whatever its name."""
    sounds = [column for column, feature in features.items() if isinstance(feature, Audio)]
    if audio is None and len(sounds) == 1:
        audio = sounds[0]
    return choose_columns(name, features, audio=audio, text=text, keys=keys)


def _refuse_column_without_sound(features: Features, audio_column: str, source: DataSource, *, key: str) -> None:
    """Text is taken for paths of sound files only where no column of the set holds sound."""
    sounds = [column for column, feature in features.items() if _can_hold_sound(feature) and not _is_plain(feature)]
    if not _can_hold_sound(features[audio_column]) or (sounds and audio_column not in sounds):
        known = f"sound is in {' and '.join(sounds)}" if sounds else "no column of the set does"
        raise UserError(f"{source.name}: column '{audio_column}' holds no sound ({known}); set {key}")


def _is_decoded(feature: Any) -> bool:
    return isinstance(feature, dict) and {"array", "sampling_rate"} <= feature.keys()


def _can_hold_sound(feature: Any) -> bool:
    if isinstance(feature, Value):
        return feature.dtype.removeprefix("large_") in ("binary", "string")
    return isinstance(feature, Audio) or _is_decoded(feature) or (isinstance(feature, dict) and {"bytes", "path"} <= feature.keys())


def _is_plain(feature: Any) -> bool:
    """Whether a column can be a text. Lists, structures and bytes are not used, and in memory they would be heavy."""
    return isinstance(feature, ClassLabel) or (isinstance(feature, Value) and "binary" not in feature.dtype)


def _read_names(rows: datasets.Dataset, audio_column: str) -> list[str | None]:
    """The path that each row states for its sound, read without the sound beside it."""
    if not isinstance(rows.features[audio_column], Audio):
        return [None] * len(rows)
    return pyarrow.compute.struct_field(rows.data.column(audio_column), "path").to_pylist()


def _as_field(value: Any, feature: Any) -> Any:
    """A value as a manifest would write it: text; what is no text, number or null stays, to be refused where it counts."""
    if isinstance(feature, ClassLabel) and isinstance(value, int):
        return feature.int2str(value) if 0 <= value < feature.num_classes else None
    return value if value is None or isinstance(value, (str, list, dict)) else json.dumps(value, default=str).strip('"')


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explain(error: Exception, source: DataSource, place: str) -> str:
    """The one line for a set that cannot be loaded: what is wrong, and what to do."""
    text = " ".join(str(error).split())
    listed = re.search(r"\[(.*?)\]", text)
    known = listed.group(1).replace("'", "") if listed else ""
    name, page = source.hub, f"https://huggingface.co/datasets/{source.hub}"
    if any(isinstance(cause, GatedRepoError) for cause in _causes(error)) or "is a gated dataset" in text:
        return f"{place}.hub: {name} is gated: ask for access at {page}, then log in here: hf auth login (huggingface-cli login)"
    if "scripts are no longer supported" in text:
        return (
            f"{place}.hub: {name} is a loading script, and those are never run: the Hub may have a copy of it, "
            f"{place}.revision: {PARQUET_COPY}; else convert the set to Parquet, or write a manifest"
        )
    if ("Unknown split" in text or "Bad split" in text) and known:
        return f"{place}.split: {name} has no split {source.split}; there are {known}"
    if "BuilderConfig" in text and known:
        return f"{place}.config: {name} has no configuration {source.config}; there are {known}"
    if "Config name is missing" in text and known:
        return f"{place}.config: is missing; {name} has {known}"
    if "Revision" in text and source.revision:
        return f"{place}.revision: {name} has no revision {source.revision}; see {page}/tree/main"
    if any(isinstance(cause, (ConnectionError, OfflineModeIsEnabled)) for cause in _causes(error)) or "find cache" in text:
        return (
            f"{place}.hub: there is no folder {name} here, and as a set on the Hub {name} is not in the cache and the Hub cannot be "
            "reached; give a local folder, or load it once with a network"
        )
    if isinstance(error, DatasetNotFoundError):
        return (
            f"{place}.hub: there is no folder {name} here, and on the Hub no set {name} that you can read; see {page}, "
            "and if it is private: hf auth login"
        )
    deepest = [cause for cause in _causes(error)][-1]
    said = " ".join(str(deepest).split())
    return f"{place}.hub: {name} cannot be loaded: {text}" + (f": {said}" if said and said not in text else "")
