"""Reads sound: whatever libsndfile can open becomes 16 kHz mono, and what is wrong with a file has one fixed word.

Lengths are those of the decoded samples; a header is believed only where it shows that the file was cut off.
"""

import io
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import soundfile
import soxr

from containers import find_fault, skip_id3, suggest_conversion

SAMPLE_RATE = 16_000  # samples a second that Whisper hears
WINDOW_SECONDS = 30  # length of the window its encoder sees
WINDOW_SAMPLES = WINDOW_SECONDS * SAMPLE_RATE  # 480000: more would be cut without a word by the feature extractor

BLOCK_VALUES = 1 << 18  # values decoded at a time: 1 MiB as float32, so an hour of sound needs no more memory than a word
SEGMENT_SLACK_SECONDS = 0.01  # a segment may end this much behind its file: transcribers round
MP3_SLACK_SECONDS = 0.1  # two frames at 16 kHz, which encoders count differently
NO_HEADER = "this is taken for sound without a header, whose rate and coding nobody can tell; convert it to WAV or FLAC, stating both"
UNKNOWN_FRAMES = 2**63 - 1  # libsndfile's SF_COUNT_MAX: the file doesn't say how long it is


class AudioError(Exception):
    """A clip that cannot be used: `reason` is missing_file, unreadable, empty_audio or bad_segment; `detail` says more."""

    def __init__(self, reason: str, detail: str):
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


@dataclass(slots=True)
class AudioMeasure:
    """What was decoded: `samples` at 16 kHz, as many as `load_audio` gives; `rate` (Hz) and `channels` of the file; `peak`, the
    largest |x| of any channel, and `mixed_peak`, that of their mean (1.0 is full scale); `finite`, false with NaN or infinity."""

    samples: int
    rate: int
    channels: int
    peak: float
    mixed_peak: float
    finite: bool

    @property
    def seconds(self) -> float:
        """How long the clip lasts at 16 kHz, in seconds."""
        return self.samples / SAMPLE_RATE


class _ForwardSound(soundfile.SoundFile):
    """soundfile seeks after every read of a seekable file: slow, and fails for FLAC files that don't state their length."""

    states_length = True

    def seekable(self) -> bool:
        """No: soundfile then reads on without seeking."""
        return False


class _Longer:
    """A file that claims to be far longer, so that libsndfile, which guesses the length of some MP3 files from their size and
    stops there, goes on to their end."""

    at_end = False

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As a file's own, and remembers whether the end was sought."""
        self.at_end = whence == os.SEEK_END
        return super().seek(offset, whence)

    def tell(self) -> int:
        """The place in bytes; at the end a thousand times as many."""
        return super().tell() * (1000 if self.at_end else 1)


class _LongerFile(_Longer, io.FileIO):
    pass


class _LongerContent(_Longer, io.BytesIO):
    pass


def as_file(sound: Any) -> str | bytes:
    """The path of a sound file, or the content of one.

    `sound` may be either, and what libraries hand out: {"bytes", "path"}, {"array", "sampling_rate"}, or a decoder with
    `get_all_samples`. Raises AudioError for anything else.
    """
    if isinstance(sound, Mapping) and sound.get("array") is not None:
        return _write_wave(np.asarray(sound["array"], dtype=np.float32), sound["sampling_rate"])
    if isinstance(sound, Mapping):
        sound = sound.get("bytes") or sound.get("path")
    if hasattr(sound, "get_all_samples"):
        samples = sound.get_all_samples()
        return _write_wave(np.asarray(samples.data, dtype=np.float32), samples.sample_rate)
    if isinstance(sound, (bytes, bytearray, memoryview)):
        return bytes(sound)
    if not isinstance(sound, (str, os.PathLike)):
        raise AudioError("missing_file", "the row holds no sound")
    return os.fspath(sound)


def _write_wave(samples: np.ndarray, rate: int) -> bytes:
    """Samples (frames,) or (channels, frames) as the content of a WAV file, each value as it is."""
    content = io.BytesIO()
    soundfile.write(content, samples.T, int(rate), format="WAV", subtype="FLOAT")
    return content.getvalue()


def load_audio(sound: Any, *, start: float | None = None, end: float | None = None) -> np.ndarray:
    """The clip, or its part from `start` to `end` seconds: 1-D float32 at 16 kHz, the mean of all channels.

    `sound` is what `as_file` takes. Raises AudioError.
    """
    mixed = []
    for rate, block in _decode_blocks(as_file(sound), start=start, end=end):
        mixed.append(_mix_channels(block))
    wave = np.concatenate(mixed)
    if rate == SAMPLE_RATE:
        return wave
    length = _count_resampled(len(wave), rate)
    wave = soxr.resample(wave, rate, SAMPLE_RATE, quality="HQ")  # librosa's soxr_hq
    return np.pad(wave[:length], (0, max(0, length - len(wave))))


def measure_audio(sound: Any, *, start: float | None = None, end: float | None = None) -> AudioMeasure:
    """Decodes the clip, or its part from `start` to `end` seconds, once and block by block, and tells what is in it.

    `sound` is what `as_file` takes. Raises AudioError.
    """
    frames, peak, mixed_peak, finite = 0, 0.0, 0.0, True
    for rate, block in _decode_blocks(as_file(sound), start=start, end=end):
        frames += len(block)
        block_peak = _find_peak(block)
        if not math.isfinite(block_peak):
            finite = False
            continue
        peak = max(peak, block_peak)
        mixed_peak = max(mixed_peak, block_peak if block.shape[1] == 1 else _find_peak(_mix_channels(block)))
    return AudioMeasure(_count_resampled(frames, rate), rate, block.shape[1], peak, mixed_peak, finite)


def _find_peak(block: np.ndarray) -> float:
    """Largest |x|; NaN or infinity when one is in the block, as max and min hand them on."""
    return max(abs(float(block.max())), abs(float(block.min())))


def _mix_channels(block: np.ndarray) -> np.ndarray:
    """(frames, channels) to (frames,): the mean."""
    return block[:, 0] if block.shape[1] == 1 else block.mean(axis=1)


def _count_resampled(frames: int, rate: int) -> int:
    """Samples at 16 kHz: the nearest whole number, half upwards, as soxr counts, but exact: 30 s at any rate are 480000."""
    return (2 * frames * SAMPLE_RATE + rate) // (2 * rate)


def _open(file: str | bytes) -> BinaryIO:
    return io.BytesIO(file) if isinstance(file, bytes) else open(file, "rb")


def _decode_blocks(file: str | bytes, *, start: float | None, end: float | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the file's rate with float32 blocks (frames, channels), at least one; raises AudioError."""
    if isinstance(file, str) and not os.path.exists(file):
        raise AudioError("missing_file", "there is no such file")
    if isinstance(file, str) and not os.path.isfile(file):
        raise AudioError("unreadable", "this is not a file")
    name = "clip" if isinstance(file, bytes) else file
    try:
        with _open(file) as content:
            fault = find_fault(content, name)
        if fault:
            raise AudioError("unreadable", fault)
        with _open_sound(file) as sound:
            if sound.format == "RAW":  # libsndfile believes names such as .vox and .gsm, whatever is in the file
                raise AudioError("unreadable", NO_HEADER)
            first, last = _choose_frames(sound, start, end)
            if first:
                sound.seek(first)
            block_frames = max(1, BLOCK_VALUES // sound.channels)
            missing = last - first
            while missing and len(block := sound.read(min(missing, block_frames), dtype="float32", always_2d=True)):
                yield sound.samplerate, block
                missing -= len(block)
            slack = MP3_SLACK_SECONDS * sound.samplerate if sound.subtype.startswith("MPEG_LAYER") else 0
            if sound.states_length and missing > slack:
                raise AudioError("unreadable", f"cut off: {missing} of {last - first} samples are not there")
            if missing == last - first:
                raise AudioError("empty_audio", "the file holds no samples")
            if end is not None and missing > SEGMENT_SLACK_SECONDS * sound.samplerate:
                seconds = missing / sound.samplerate
                raise AudioError("bad_segment", f"the segment goes to {end} s, the file ends {seconds:.3f} s earlier")
    except TypeError as error:  # a name ending in .raw
        raise AudioError("unreadable", NO_HEADER) from error
    except soundfile.SoundFileError as error:
        what = str(getattr(error, "error_string", error)).rstrip(".")
        raise AudioError("unreadable", f"{what}; if a player plays it, {suggest_conversion(name)}") from error
    except (OSError, ValueError) as error:
        raise AudioError("unreadable", str(error)) from error


def _choose_frames(sound: soundfile.SoundFile, start: float | None, end: float | None) -> tuple[int, int]:
    """First frame, and the one behind the last, of a segment given in seconds; raises AudioError if it isn't in the file."""
    rate, total = sound.samplerate, sound.frames
    first = round((start or 0.0) * rate)
    last = total if end is None else round(end * rate)
    if total == 0:
        raise AudioError("empty_audio", "the file holds no samples")
    if first >= min(last, total) or last - total > SEGMENT_SLACK_SECONDS * rate:
        span = f"from {start or 0} s to {'the end' if end is None else f'{end} s'}"
        raise AudioError("bad_segment", f"the segment goes {span}, the file is {total / rate:.3f} s long")
    return first, min(last, total)


@contextmanager
def _open_sound(file: str | bytes) -> Iterator[_ForwardSound]:
    """The opened sound. MP3 of changing bitrate can only be counted by a header that some files lack: these are read to their end."""
    with _ForwardSound(io.BytesIO(file) if isinstance(file, bytes) else file) as sound:
        sound.states_length = sound.frames != UNKNOWN_FRAMES
        if not sound.subtype.startswith("MPEG_LAYER") or _states_mp3_length(file):
            yield sound
            return
    with (_LongerContent if isinstance(file, bytes) else _LongerFile)(file) as longer, _ForwardSound(longer) as sound:
        sound.states_length = False
        yield sound


def _states_mp3_length(file: str | bytes) -> bool:
    with _open(file) as content:
        skip_id3(content)
        start = content.read(1 << 16).lstrip(b"\0")[:1500]  # some files begin with blank bytes
    return b"Xing" in start or b"Info" in start
