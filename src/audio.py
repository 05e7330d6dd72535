"""Reads sound: whatever libsndfile can open becomes 16 kHz mono, and what is wrong with a file has one fixed word.

Lengths are those of the decoded samples; a header is believed only where it shows that the file was cut off.
"""

import io
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import soundfile
import soxr

SAMPLE_RATE = 16_000  # samples a second that Whisper hears
WINDOW_SECONDS = 30  # length of the window its encoder sees
WINDOW_SAMPLES = WINDOW_SECONDS * SAMPLE_RATE  # 480000: more would be cut without a word by the feature extractor

BLOCK_VALUES = 1 << 18  # values decoded at a time: 1 MiB as float32, so an hour of sound needs no more memory than a word
SEGMENT_SLACK_SECONDS = 0.01  # a segment may end this much behind its file: transcribers round
HEADER_SLACK_BYTES = 64  # some writers count the header among the bytes of sound
STREAMED_BYTES = 0x7FFF_0000  # ffmpeg (0xFFFFFFFF) and sox (just under 0x7FFFF000) state such sizes when they write to a pipe
MP3_SLACK_SECONDS = 0.1  # two frames at 16 kHz, which encoders count differently
UNKNOWN_FRAMES = 2**63 - 1  # libsndfile's SF_COUNT_MAX: the file doesn't say how long it is
CHUNK_ORDER = {b"RIFF": "little", b"RF64": "little", b"RIFX": "big", b"FORM": "big"}  # WAV, large WAV, big-endian WAV, AIFF


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

    def seekable(self) -> bool:
        return False


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
    try:
        _refuse_cut_off_chunk(file)
        with _ForwardSound(io.BytesIO(file) if isinstance(file, bytes) else file) as sound:
            first, last = _choose_frames(sound, start, end)
            if first:
                sound.seek(first)
            block_frames = max(1, BLOCK_VALUES // sound.channels)
            missing = last - first
            while missing and len(block := sound.read(min(missing, block_frames), dtype="float32", always_2d=True)):
                yield sound.samplerate, block
                missing -= len(block)
            if missing and _is_length_promised(sound, missing, file=file):
                raise AudioError("unreadable", f"cut off: {missing} of {last - first} samples are not there")
            if missing == last - first:
                raise AudioError("empty_audio", "the file holds no samples")
            if end is not None and missing > SEGMENT_SLACK_SECONDS * sound.samplerate:
                seconds = missing / sound.samplerate
                raise AudioError("bad_segment", f"the segment goes to {end} s, the file ends {seconds:.3f} s earlier")
    # TypeError: a name ending in .raw, which soundfile takes for sound without a header.
    except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
        raise AudioError("unreadable", str(getattr(error, "error_string", error))) from error


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


def _refuse_cut_off_chunk(content: str | bytes) -> None:
    """WAV and AIFF state how many bytes of sound follow. Where fewer do, libsndfile shortens the clip without a word."""
    with _open(content) as file:
        order = CHUNK_ORDER.get(file.read(12)[:4])
        large = None
        for _ in range(1000 if order else 0):
            name, length = file.read(4), int.from_bytes(file.read(4), order)
            if name == b"ds64":  # RF64 keeps the true size of its sound here, behind that of the file
                large = int.from_bytes(file.read(16)[8:], "little")
                length -= 16
            elif name in (b"data", b"SSND"):
                promised = large if large and length == 0xFFFF_FFFF else length
                place = file.tell()
                held = file.seek(0, os.SEEK_END) - place
                if promised > held + HEADER_SLACK_BYTES and (promised == large or promised < STREAMED_BYTES):
                    raise AudioError("unreadable", f"cut off: {held} of {promised} bytes of sound are there")
                return
            elif len(name) < 4:
                return
            file.seek(length + length % 2, os.SEEK_CUR)


def _is_length_promised(sound: soundfile.SoundFile, missing: int, *, file: str | bytes) -> bool:
    """Whether `missing` frames mean a cut file: for MP3 files without a Xing or Info header, libsndfile only guesses a length."""
    if sound.format != "MP3":
        return sound.frames != UNKNOWN_FRAMES
    with _open(file) as content:
        tag = content.read(10)
        if tag[:3] == b"ID3":  # its size is in the last four bytes, seven bits each
            content.seek(sum(byte << shift for byte, shift in zip(tag[6:], (21, 14, 7, 0), strict=False)), os.SEEK_CUR)
        else:
            content.seek(0)
        first_frame = content.read(1500)
    return missing > MP3_SLACK_SECONDS * sound.samplerate and (b"Xing" in first_frame or b"Info" in first_frame)
