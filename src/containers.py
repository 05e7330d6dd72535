"""What kind of file is this, and is all of it there? Told by its bytes before a sample is decoded, never by its name."""

import os
import shlex
from typing import BinaryIO

HEAD_BYTES = 512
HEADER_SLACK_BYTES = 64  # some writers count the header among the bytes of sound
STREAMED_BYTES = 0x7F00_0000  # from here on sizes are made up: ffmpeg and sox state such when they write to a pipe
CHUNK_ORDER = {b"RIFF": "little", b"RF64": "little", b"RIFX": "big", b"FORM": "big"}  # WAV, large WAV, big-endian WAV, AIFF
AU_ORDER = {b".snd": "big", b"dns.": "little"}
OGG_PAGE_BYTES = 27 + 255 + 255 * 255  # the largest page: header, table of segments, segments

SOUND_ELSEWHERE = (  # offset, bytes there, name: sound that libsndfile does not decode
    (4, b"ftyp", "MPEG-4 (m4a, mp4, mov, 3gp)"),
    (4, b"moov", "QuickTime"),
    (4, b"mdat", "QuickTime"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "Windows Media (wma, wmv)"),
    (0, b"\x1a\x45\xdf\xa3", "Matroska or WebM"),
    (0, b"#!AMR", "AMR"),
    (8, b"AVI ", "an AVI video"),
    (0, b"FLV\x01", "a Flash video"),
    (0, b"\x00\x00\x01\xba", "an MPEG video"),
    (0, b"\x0b\x77", "AC-3"),
    (0, b"\x7f\xfe\x80\x01", "DTS"),
    (0, b"wvpk", "WavPack"),
    (0, b"TTA1", "True Audio"),
    (0, b"MAC ", "Monkey's Audio"),
    (0, b"MPCK", "Musepack"),
    (0, b".RMF", "RealMedia"),
    (0, b".ra\xfd", "RealAudio"),
    (28, b"Speex   ", "Speex"),
    (28, b"\x80theora", "an Ogg video"),
)
NO_SOUND = (  # first bytes in small letters, name and what to do
    (b"version https://git-lfs", "a Git LFS pointer; fetch the sound itself: git lfs pull"),
    (b"<!doctype html", "a web page; download the sound again"),
    (b"<html", "a web page; download the sound again"),
    (b"<?xml", "an XML text; download the sound again"),
    (b"pk\x03\x04", "a ZIP archive; unpack it"),
    (b"\x1f\x8b", "a gzip archive; unpack it"),
)


def find_fault(file: BinaryIO, name: str) -> str | None:
    """Why the file, called `name`, cannot be used, and what to do, where libsndfile would shorten or misread it without a word or
    could not say what it is. None: that is for libsndfile to find out. Raises OSError."""
    head = file.read(HEAD_BYTES)
    if not head:
        return "the file is empty"
    for start, what in NO_SOUND:
        if head.lstrip().lower().startswith(start):
            return f"this seems to be {what}"
    if kind := _name_sound_elsewhere(file, head):
        return f"this seems to be {kind}, which is not read; {suggest_conversion(name)}"
    promised, held = _count_bytes(file, head[:12])
    if promised > held + HEADER_SLACK_BYTES:
        return f"cut off: {held} of {promised} bytes of sound are there"
    if head[:4] == b"OggS" and (missing := _count_missing_of_last_page(file)):
        return f"cut off: {missing} bytes of its last page are not there"
    return None


def suggest_conversion(path: str) -> str:
    """The command that makes a readable file of one that only other programs read."""
    stem, ending = os.path.splitext(path)
    target = f"{stem}-16khz.flac" if ending == ".flac" else f"{stem}.flac"
    return "convert it: " + shlex.join(["ffmpeg", "-i", stem + ending, "-ar", "16000", target])


def skip_id3(file: BinaryIO) -> None:
    """Moves to the first byte behind the tag that MP3 files may begin with."""
    file.seek(0)
    tag = file.read(10)
    length = sum(byte << shift for byte, shift in zip(tag[6:], (21, 14, 7, 0), strict=False))  # seven bits a byte
    file.seek(10 + length if tag[:3] == b"ID3" else 0)


def _name_sound_elsewhere(file: BinaryIO, head: bytes) -> str | None:
    for offset, magic, kind in SOUND_ELSEWHERE:
        if head.startswith(magic, offset):
            return kind
    if len(head) > 376 and head[0] == head[188] == head[376] == 0x47:
        return "an MPEG transport stream"
    skip_id3(file)
    first, second = (file.read(2) + b"\0\0")[:2]
    if first == 0xFF and second & 0xF6 == 0xF0:  # twelve ones, then layer 0, which MP3 never has
        return "AAC"
    return None


def _count_bytes(file: BinaryIO, head: bytes) -> tuple[int, int]:
    """Bytes of sound that the header promises, and those that are there; (0, 0) where none are promised."""
    size = file.seek(0, os.SEEK_END)
    if head[:4] in CHUNK_ORDER:
        return _count_chunk_bytes(file, CHUNK_ORDER[head[:4]], size)
    if head[:4] in AU_ORDER:
        start, promised = (int.from_bytes(head[at : at + 4], AU_ORDER[head[:4]]) for at in (4, 8))
        return (promised, size - start) if promised < STREAMED_BYTES else (0, 0)
    if head == b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb":
        return _count_w64_bytes(file, size)
    return 0, 0


def _count_chunk_bytes(file: BinaryIO, order: str, size: int) -> tuple[int, int]:
    """As _count_bytes, for WAV and AIFF."""
    file.seek(12)
    large = None
    for _ in range(1000):
        name, length = file.read(4), int.from_bytes(file.read(4), order)
        if name == b"ds64":  # RF64 keeps the true size of its sound here, behind that of the file
            large = int.from_bytes(file.read(16)[8:], "little")
            length -= 16
        elif name in (b"data", b"SSND"):
            promised = large if large and length == 0xFFFF_FFFF else length
            return (promised, size - file.tell()) if promised == large or promised < STREAMED_BYTES else (0, 0)
        elif len(name) < 4:
            break
        file.seek(length + length % 2, os.SEEK_CUR)
    return 0, 0


def _count_w64_bytes(file: BinaryIO, size: int) -> tuple[int, int]:
    """As _count_bytes, for W64: each chunk has a name of 16 bytes and a length that counts its own 24 bytes of header."""
    file.seek(40)
    for _ in range(1000):
        name, length = file.read(16), int.from_bytes(file.read(8), "little")
        if name[:4] == b"data":
            return (length - 24, size - file.tell()) if length < 1 << 62 else (0, 0)  # ffmpeg states 2**63 into a pipe
        if length < 24:
            break
        file.seek((length - 24 + 7) // 8 * 8, os.SEEK_CUR)
    return 0, 0


def _count_missing_of_last_page(file: BinaryIO) -> int:
    """Bytes that the last page of an Ogg file states and that are not there."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - OGG_PAGE_BYTES))
    end = file.read()
    at = end.rfind(b"OggS\0")
    if at < 0:
        return 0
    page = end[at:].ljust(27, b"\0")
    return max(0, at + 27 + page[26] + sum(page[27 : 27 + page[26]]) - len(end))
