"""How does a row become a batch? Audio is decoded and turned into log-mel features when it is needed, never stored."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from audio import SAMPLE_RATE, AudioError, load_audio
from labels import LabelBuilder
from manifest import Row
from mixing import Mix
from packing import PAUSE_SAMPLES, Clips


class SpeechDataset(Dataset):
    """Rows of checked speech; an item is one example, made in the loader's worker. An index is the number of a row, or a tuple of
    numbers whose clips share a window.

    An item holds `input_features` (mel bins x 3000 frames, float32), `labels` (list of ids), `row_id` (list of one number, counted
    from `first_id`, for each clip), `seconds` (of sound, pauses between clips apart), `language` and `task` (for generation), and
    `attention_mask` (3000 frames, 1 within the sound) on request. `mix` says how often an epoch meets the rows of each source;
    None: once. `clips` tells how long they are when an epoch packs them; None: it does not.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        labels: LabelBuilder,
        *,
        first_id: int = 0,
        with_mask: bool = False,
        mix: Mix | None = None,
        clips: Clips | None = None,
    ):
        self.rows = rows
        self.labels = labels
        self.first_id = first_id
        self.with_mask = with_mask
        self.mix = mix
        self.clips = clips

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | tuple[int, ...]) -> dict[str, Any]:
        numbers = index if isinstance(index, tuple) else (index,)
        row_ids = [self.first_id + number for number in numbers]
        return build_example([self.rows[number] for number in numbers], self.labels, row_ids=row_ids, with_mask=self.with_mask)


def build_example(rows: Sequence[Row], labels: LabelBuilder, *, row_ids: list[int], with_mask: bool = False) -> dict[str, Any]:
    """One example of a row, or of several one after another, as `SpeechDataset` describes it.

    Raises RuntimeError for sound that cannot be read or has no finite features.
    """
    waves = [_load(row) for row in rows]
    pause = np.zeros(PAUSE_SAMPLES, dtype=np.float32)
    waveform = np.concatenate([part for wave in waves for part in (pause, wave)][1:])
    features = labels.base.processor.feature_extractor(
        waveform,
        sampling_rate=SAMPLE_RATE,
        return_attention_mask=with_mask,
        return_tensors="np",
    )
    if not np.isfinite(features["input_features"]).all():
        names = ", ".join(f"{row.file}:{row.line}: {row.audio}" for row in rows)
        raise RuntimeError(f"{names}: its features are not finite")
    item = {
        "input_features": features["input_features"][0],
        "labels": labels.build(*rows),
        "row_id": row_ids,
        "seconds": sum(len(wave) for wave in waves) / SAMPLE_RATE,
        "language": labels.language_of(rows[0]),
        "task": labels.task_of(rows[0]),
    }
    if with_mask:
        item["attention_mask"] = features["attention_mask"][0]
    return item


def _load(row: Row) -> np.ndarray:
    try:
        return load_audio(row.sound(), start=row.start, end=row.end)
    except AudioError as error:
        raise RuntimeError(f"{row.file}:{row.line}: {row.audio}: {error}; it was readable when it was checked") from error


def collate(
    items: list[dict[str, Any]], *, start: int, pad: int, features_type: torch.dtype = torch.float32, length_of: Callable[[int], int] = int
) -> dict[str, Any]:
    """Joins examples to a batch; `length_of` gives the length of the batch for its longest row.

    Returns `input_features` (batch x mel bins x 3000, of `features_type`), `labels` (batch x length, int64, -100 behind each
    row's own length), `decoder_input_ids` (the labels one later, beginning with `start`), the lists `row_id` (of all clips),
    `seconds`, `language` and `task`, and `attention_mask` and the list `note` when the examples have them.
    """
    length = length_of(max(len(item["labels"]) for item in items))
    labels = torch.full((len(items), length), -100)
    decoder_input_ids = torch.full((len(items), length), pad)
    for row, item in enumerate(items):
        ids = torch.tensor(item["labels"])
        labels[row, : len(ids)] = ids
        decoder_input_ids[row, 0] = start
        decoder_input_ids[row, 1 : len(ids)] = ids[:-1]
    batch = {
        "input_features": torch.from_numpy(np.stack([item["input_features"] for item in items])).to(features_type),
        "labels": labels,
        "decoder_input_ids": decoder_input_ids,
        "row_id": [row_id for item in items for row_id in item["row_id"]],
        "seconds": [item["seconds"] for item in items],
        "language": [item["language"] for item in items],
        "task": [item["task"] for item in items],
    }
    if "attention_mask" in items[0]:
        batch["attention_mask"] = torch.from_numpy(np.stack([item["attention_mask"] for item in items]))
    if "note" in items[0]:
        batch["note"] = [item["note"] for item in items]
    return batch
