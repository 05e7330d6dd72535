"""Sound files become 16 kHz mono of a known length; broken ones are named by reason."""

import shlex
import struct

import numpy as np
import pytest
import soundfile

from audio import SAMPLE_RATE, WINDOW_SAMPLES, AudioError, load_audio, measure_audio

MPEG4 = b"\0\0\0\x1cftypM4A \0\0\2\0M4A isomiso2" + bytes(range(256)) * 20
ADTS = bytes.fromhex("fff16040407ffcde02004c617663") + bytes(range(256)) * 20
OGG_PAGE = b"OggS\0\2" + bytes(20) + b"\1\x50"


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


RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
OPUS_RATES = (8000, 12000, 16000, 24000, 48000)
EXACT = [("wav", subtype) for subtype in ("PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")]
EXACT += [(suffix, "PCM_16") for suffix in ("flac", "wavex", "aiff", "au", "caf", "w64", "rf64")] + [("flac", "PCM_24"), ("caf", "FLOAT")]
KINDS = [(*kind, RATES, 8, 0.999999) for kind in EXACT]  # container, coding, rates, most channels, least cosine with the original
KINDS += [("wav", subtype, RATES, 8, 0.995) for subtype in ("PCM_U8", "ALAW", "ULAW")]
KINDS += [("mp3", None, RATES, 2, 0.99), ("ogg", "VORBIS", RATES, 8, 0.99), ("ogg", "OPUS", OPUS_RATES, 8, 0.9)]


def make_chord(seconds: float, rate: int, channels: int) -> np.ndarray:
    """A tone of its own pitch in each channel: (frames, channels)."""
    time = np.arange(round(seconds * rate)) / rate
    return np.stack([0.3 * np.sin(2 * np.pi * (300 + 110 * n) * time) for n in range(channels)], axis=1).astype(np.float32)


@pytest.mark.parametrize(("suffix", "subtype", "rates", "most_channels", "likeness"), KINDS, ids=[f"{kind[0]}-{kind[1]}" for kind in KINDS])
def test_every_kind_is_read_whole_and_unchanged_at_every_rate_and_number_of_channels(
    tmp_path, suffix, subtype, rates, most_channels, likeness
):
    for rate in rates:
        for channels in sorted({1, 2, most_channels}):
            chord = make_chord(0.5, rate, channels)
            path = write(tmp_path / f"chord.{'wav' if suffix == 'wavex' else suffix}", chord, rate, format=suffix.upper(), subtype=subtype)
            measure, wave = measure_audio(path), load_audio(path)
            assert (measure.rate, measure.channels, measure.finite) == (rate, channels, True)
            assert measure.samples == len(wave) == round(len(chord) * SAMPLE_RATE / rate)  # soundfile takes codecs' padding off again
            expected = load_audio(write(tmp_path / "expected.wav", chord.mean(axis=1), rate, subtype="FLOAT"))
            cosine = wave @ expected / np.linalg.norm(wave) / np.linalg.norm(expected)
            assert cosine > likeness, (rate, channels)
            assert np.linalg.norm(wave) == pytest.approx(np.linalg.norm(expected), rel=0.1)


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


@pytest.mark.parametrize("suffix", ["vox", "gsm", "raw", "au", "snd", "mp3"])
@pytest.mark.parametrize("content", [MPEG4, ADTS, b"ID3\x03\0\0\0\0\0\x0a" + bytes(10) + ADTS, bytes(range(256)) * 20], ids=range(4))
def test_no_name_makes_sound_of_something_else(tmp_path, suffix, content):
    (tmp_path / f"clip.{suffix}").write_bytes(content)
    assert reason_of(tmp_path / f"clip.{suffix}") == "unreadable"


ELSEWHERE = {
    "MPEG-4": MPEG4,
    "QuickTime": b"\0\0\0\x08mdat",
    "Windows Media": bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"),
    "Matroska or WebM": bytes.fromhex("1a45dfa39f4286810142f781"),
    "AMR": b"#!AMR-WB\n\x04\x80",
    "an AVI video": b"RIFF\xd2\x1c\x01\0AVI LIST",
    "a Flash video": b"FLV\x01\x04\0\0\0\x09",
    "an MPEG video": bytes.fromhex("000001ba2100010001a19d15"),
    "an MPEG transport stream": (b"G@\x11\x10" + bytes(184)) * 3,
    "AC-3": bytes.fromhex("0b77ce928c402f84"),
    "DTS": bytes.fromhex("7ffe8001fc3c75b0"),
    "WavPack": b"wvpk\xfc\x60\0\0\x10\x04",
    "RealMedia": b".RMF\0\0\0\x12",
    "Speex": OGG_PAGE + b"Speex   1.2.1",
    "an Ogg video": OGG_PAGE + b"\x80theora\x03\x02",
    "AAC": ADTS,
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_sound_that_other_programs_read_is_named_with_the_command_that_converts_it(tmp_path, kind):
    for name, target in (("my clip.wav", "my clip.flac"), ("clip.flac", "clip-16khz.flac")):
        (tmp_path / name).write_bytes(ELSEWHERE[kind] + bytes(2000))
        with pytest.raises(AudioError) as caught:
            measure_audio(str(tmp_path / name))
        assert caught.value.detail.startswith(f"this seems to be {kind}")
        command = ["ffmpeg", "-i", str(tmp_path / name), "-ar", "16000", str(tmp_path / target)]
        assert caught.value.detail.endswith(f"convert it: {shlex.join(command)}")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"),
        (b"\n<!DOCTYPE HTML>\n<title>Sign in</title>", "a web page"),
        (b"PK\x03\x04\x14\0", "a ZIP archive"),
        (b"\x1f\x8b\x08\0", "a gzip archive"),
        (b"", "empty"),
    ],
)
def test_what_lies_in_the_place_of_sound_is_named(tmp_path, content, told):
    (tmp_path / "clip.wav").write_bytes(content)
    with pytest.raises(AudioError, match=told):
        measure_audio(str(tmp_path / "clip.wav"))


def test_a_wav_with_a_foreign_coding_is_told_how_to_convert(tmp_path):
    path = write(tmp_path / "clip.wav", make_noise(1000))
    content = bytearray(open(path, "rb").read())
    content[20:22] = struct.pack("<H", 0x00FF)  # AAC
    open(path, "wb").write(content)
    with pytest.raises(AudioError, match=f"ffmpeg -i {path} -ar 16000 {tmp_path}/clip.flac"):
        measure_audio(path)


def make_mp3_without_length(folder) -> bytes:
    """5 s of noise and 5 s of near silence at a changing bitrate, without the frame that states the length."""
    wave = np.concatenate([make_noise(80000), 1e-3 * make_noise(80000)])
    content = open(write(folder / "whole.mp3", wave), "rb").read()
    return content[content.index(content[:2], 4) :]


@pytest.mark.parametrize("container", ["mp3", "mp3 with a tag", "wav"])
def test_an_mp3_that_does_not_state_its_length_is_read_to_its_end(tmp_path, container):
    content = make_mp3_without_length(tmp_path)
    if container == "wav":
        coding = struct.pack("<HHIIHHHHIHHH", 0x55, 1, 16000, 3000, 1, 0, 12, 1, 2, 108, 1, 0)  # MPEGLAYER3WAVEFORMAT
        chunks = b"".join(name + struct.pack("<I", len(data)) + data for name, data in ((b"fmt ", coding), (b"data", content)))
        content = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
    elif container == "mp3 with a tag":
        content = b"ID3\x03\0\0" + bytes([0, 6, 0, 0]) + bytes(6 << 14) + content  # a picture
    (tmp_path / "bare").write_bytes(content)
    path = str(tmp_path / "bare")
    assert measure_audio(path).samples == len(load_audio(path)) == pytest.approx(160000, abs=3 * 576)
    assert np.allclose(load_audio(path, start=1.0, end=2.0), load_audio(path)[16000:32000], atol=1e-3)
    assert reason_of(path, start=9.0, end=12.0) == "bad_segment"


def test_a_folder_is_unreadable(tmp_path):
    assert reason_of(tmp_path) == "unreadable"


def test_a_file_without_samples_is_empty(tmp_path):
    assert reason_of(write(tmp_path / "empty.wav", np.zeros(0))) == "empty_audio"
    assert reason_of(write(tmp_path / "empty.flac", np.zeros(0))) in ("empty_audio", "unreadable")


@pytest.mark.parametrize("suffix", ["wav", "rf64", "aiff", "flac", "mp3", "au", "caf", "w64", "ogg", "opus"])
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_a_file_that_was_cut_off_is_unreadable(tmp_path, suffix, share):
    how = {"format": "OGG", "subtype": "OPUS"} if suffix == "opus" else {}
    assert reason_of(cut(write(tmp_path / f"noise.{suffix}", make_noise(80000), **how), share)) == "unreadable"


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000 - 24])
def test_an_au_written_to_a_pipe_is_read_to_its_end(tmp_path, size):
    path = write(tmp_path / "streamed.au", make_noise(16000))
    content = bytearray(open(path, "rb").read())
    content[8:12] = struct.pack(">I", size)
    open(path, "wb").write(content)
    assert measure_audio(path).samples == 16000


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


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_seen(tmp_path, value):
    wave = make_tone(1.0)
    wave[5000] = value
    measure = measure_audio(write(tmp_path / "broken.wav", wave, subtype="FLOAT"))
    assert not measure.finite and measure.samples == 16000
