"""Sound files become 16 kHz mono of a known length; broken ones are named by reason."""

import struct

import numpy as np
import pytest
import soundfile

from audio import SAMPLE_RATE, WINDOW_SAMPLES, AudioError, load_audio, measure_audio


def make_tone(seconds: float, rate: int = SAMPLE_RATE) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)


def make_noise(frames: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.3, 0.3, frames).astype(np.float32)


def write(path, wave, rate=SAMPLE_RATE, **how) -> str:
    soundfile.write(path, wave, rate, **how)
    return str(path)


def cut(path, share: float) -> str:
    content = open(path, "rb").read()
    open(path, "wb").write(content[: int(len(content) * share)])
    return str(path)


def reason_of(path, **segment) -> str:
    reasons = set()
    for read in (load_audio, measure_audio):
        with pytest.raises(AudioError) as caught:
            read(str(path), **segment)
        reasons.add(caught.value.reason)
    assert len(reasons) == 1
    return reasons.pop()


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_every_rate_becomes_16_khz_with_nearly_the_same_features(tmp_path, rate):
    from transformers import WhisperFeatureExtractor

    extract = WhisperFeatureExtractor()
    wave = load_audio(write(tmp_path / "tone.wav", make_tone(1.0, rate), rate))
    assert abs(len(wave) - 16000) <= 1 and wave.dtype == np.float32 and wave.ndim == 1
    original = load_audio(write(tmp_path / "original.wav", make_tone(1.0)))
    blocks = [extract(x, sampling_rate=SAMPLE_RATE, return_tensors="np").input_features for x in (wave, original)]
    assert np.abs(blocks[0] - blocks[1]).mean() < 0.02


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000, 96000, 192000])
@pytest.mark.parametrize("frames", [1, 7, 1003, 12345])
def test_measured_length_is_the_loaded_length(tmp_path, rate, frames):
    path = write(tmp_path / "noise.wav", make_noise(frames), rate)
    assert measure_audio(path).samples == len(load_audio(path))


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 44100, 48000])
def test_thirty_seconds_fill_the_window_at_any_rate(tmp_path, rate):
    assert measure_audio(write(tmp_path / "long.wav", np.zeros(30 * rate), rate)).samples == WINDOW_SAMPLES


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "ogg", "aiff", "w64", "rf64"])
def test_common_formats_are_read_whole(tmp_path, suffix):
    measure = measure_audio(write(tmp_path / f"noise.{suffix}", make_noise(40000)))
    assert (measure.samples, measure.rate, measure.channels, measure.finite) == (40000, 16000, 1, True)


def test_blocks_join_to_the_whole_file(tmp_path, monkeypatch):
    path = write(tmp_path / "noise.wav", make_noise(1000))
    whole = load_audio(path)
    monkeypatch.setattr("audio.BLOCK_VALUES", 64)
    assert np.array_equal(load_audio(path), whole)
    assert measure_audio(path).peak == pytest.approx(np.abs(whole).max())


def test_channels_are_averaged(tmp_path):
    left, right = make_tone(0.5, 8000), 0.5 * make_tone(0.5, 8000)
    stereo = load_audio(write(tmp_path / "stereo.wav", np.stack([left, right], axis=1), 8000, subtype="FLOAT"))
    mono = load_audio(write(tmp_path / "mono.wav", (left + right) / 2, 8000, subtype="FLOAT"))
    assert stereo.shape == (8000,)
    assert np.allclose(stereo, mono, atol=1e-6)


def test_opposite_channels_show_in_the_mixed_peak(tmp_path):
    tone = make_tone(0.5)
    measure = measure_audio(write(tmp_path / "opposite.wav", np.stack([tone, -tone], axis=1)))
    assert measure.peak == pytest.approx(0.3, abs=1e-3)
    assert measure.mixed_peak < 1e-3


def test_a_segment_is_the_same_part_of_the_file(tmp_path):
    path = write(tmp_path / "noise.flac", make_noise(3 * SAMPLE_RATE))
    part = load_audio(path, start=0.5, end=1.75)
    assert np.array_equal(part, load_audio(path)[8000:28000])
    assert measure_audio(path, start=0.5, end=1.75).samples == 20000


def test_a_segment_may_end_a_few_milliseconds_behind_the_file(tmp_path):
    path = write(tmp_path / "noise.wav", make_noise(SAMPLE_RATE))
    assert measure_audio(path, start=0.5, end=1.005).samples == 8000


@pytest.mark.parametrize("segment", [{"start": 0.5, "end": 1.2}, {"start": 1.0}, {"start": 2.0, "end": 3.0}])
def test_a_segment_outside_the_file_is_refused(tmp_path, segment):
    assert reason_of(write(tmp_path / "noise.wav", make_noise(SAMPLE_RATE)), **segment) == "bad_segment"


def test_a_missing_file_is_named_so(tmp_path):
    assert reason_of(tmp_path / "none.wav") == "missing_file"


@pytest.mark.parametrize("name", ["text.wav", "text.flac", "text.mp3", "text.raw"])
@pytest.mark.parametrize("content", [b"", b"this is not sound, whatever its name says\n", b"RIFF", b"RIFF\0\0\0\0WAVE" + bytes(100)])
def test_what_is_no_sound_is_unreadable(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert reason_of(tmp_path / name) == "unreadable"


def test_a_folder_is_unreadable(tmp_path):
    assert reason_of(tmp_path) == "unreadable"


def test_a_file_without_samples_is_empty(tmp_path):
    assert reason_of(write(tmp_path / "empty.wav", np.zeros(0))) == "empty_audio"
    assert reason_of(write(tmp_path / "empty.flac", np.zeros(0))) in ("empty_audio", "unreadable")


@pytest.mark.parametrize("suffix", ["wav", "rf64", "aiff", "flac", "mp3"])
@pytest.mark.parametrize("share", [0.9, 0.5])
def test_a_file_that_was_cut_off_is_unreadable(tmp_path, suffix, share):
    assert reason_of(cut(write(tmp_path / f"noise.{suffix}", make_noise(80000)), share)) == "unreadable"


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000 - 24])
def test_a_wav_written_to_a_pipe_is_read_to_its_end(tmp_path, size):
    path = write(tmp_path / "streamed.wav", make_noise(16000))
    content = bytearray(open(path, "rb").read())
    at = content.index(b"data")
    content[4:8] = content[at + 4 : at + 8] = struct.pack("<I", size)
    open(path, "wb").write(content)
    assert measure_audio(path).samples == 16000


def test_a_flac_of_unstated_length_is_read_to_its_end(tmp_path):
    path = write(tmp_path / "streamed.flac", make_noise(40000))
    content = bytearray(open(path, "rb").read())
    content[21] &= 0xF0  # total samples: the last 36 bits before the checksum of STREAMINFO
    content[22:26] = bytes(4)
    open(path, "wb").write(content)
    assert measure_audio(path).samples == 40000
    assert measure_audio(path, start=1.0, end=2.0).samples == 16000
    assert reason_of(path, start=1.0, end=3.0) == "bad_segment"


def test_an_mp3_whose_length_is_only_guessed_is_kept(tmp_path):
    content = open(write(tmp_path / "noise.mp3", make_noise(80000)), "rb").read()
    second_frame = content.index(content[:2], 4)
    picture = b"ID3\x03\0\0" + bytes([0, 6, 0, 0]) + bytes(6 << 14)  # makes libsndfile guess too long
    (tmp_path / "bare.mp3").write_bytes(picture + content[second_frame:])
    measure = measure_audio(str(tmp_path / "bare.mp3"))
    assert measure.samples == len(load_audio(str(tmp_path / "bare.mp3"))) > 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_seen(tmp_path, value):
    wave = make_tone(1.0)
    wave[5000] = value
    measure = measure_audio(write(tmp_path / "broken.wav", wave, subtype="FLOAT"))
    assert not measure.finite and measure.samples == 16000
