"""vramgate.media: sizes out of headers, and nothing that is absurd."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vramgate.media import HeaderError, count_pixels, count_seconds, image_size


def png(width: int, height: int, *, depth: int = 8, colour: int = 2, padding: int = 100) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunk = struct.pack(">I4s", 13, b"IHDR") + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return b"\x89PNG\r\n\x1a\n" + chunk + bytes(padding)


def jpeg(width: int, height: int, *, marker: int = 0xC0, before: bytes = b"") -> bytes:
    app = b"\xff\xe0" + struct.pack(">H5s9x", 16, b"JFIF\0")
    frame = struct.pack(">BBHBHHB", 0xFF, marker, 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + app + before + frame + b"\xff\xda" + bytes(50)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(20)


def webp(kind: bytes, payload: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(payload)) + payload
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp(width: int, height: int, *, bits: int = 24, compression: int = 0, rows: int = 4000) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + rows, 0, 0, 54) + info + bytes(rows)


def wav(
    data: int, *, rate: int = 16_000, channels: int = 1, bits: int = 16, tag: int = 1, says: int | None = None
) -> bytes:
    block = channels * bits // 8
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, tag, channels, rate, rate * block, block, bits)
    head = (
        form
        + b"LIST"
        + struct.pack("<I", 3)
        + b"abc\0"
        + b"data"
        + struct.pack("<I", data if says is None else says)
    )
    return b"RIFF" + struct.pack("<I", 4 + len(head) + data) + b"WAVE" + head + bytes(data)


def flac(rate: int, samples: int, *, payload: int = 10_000) -> bytes:
    info = (
        struct.pack(">HH", 4096, 4096)
        + bytes(6)
        + struct.pack(">Q", rate << 44 | 15 << 36 | samples)
        + bytes(16)
    )
    return b"fLaC" + b"\x80" + len(info).to_bytes(3, "big") + info + bytes(payload)


VP8X = webp(b"VP8X", bytes(4) + (639).to_bytes(3, "little") + (479).to_bytes(3, "little"))
VP8L = webp(b"VP8L", b"\x2f" + struct.pack("<I", 639 | 479 << 14) + bytes(20))
VP8 = webp(b"VP8 ", b"\x10\x02\x00\x9d\x01\x2a" + struct.pack("<HH", 640, 480) + bytes(20))


@pytest.mark.parametrize(
    "data",
    [
        png(640, 480, padding=1000),
        png(640, 480, depth=1, colour=0),
        jpeg(640, 480),
        jpeg(640, 480, marker=0xC2),
        jpeg(640, 480, before=b"\xff\xff\xfe\x00\x04\xff\xc0" + b"\xff\xc4\x00\x02"),
        gif(640, 480),
        VP8X,
        VP8L,
        VP8,
        bmp(640, 480, rows=640 * 480 * 3),
        bmp(640, -480, rows=640 * 480 * 3),
        bmp(640, 480, bits=8, compression=1),
        b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 640, 480, 1, 1) + bytes(640 * 480 // 8),
    ],
    ids=[
        "png",
        "png1",
        "jpeg",
        "progressive",
        "segments",
        "gif",
        "vp8x",
        "vp8l",
        "vp8",
        "bmp",
        "top-down",
        "rle",
        "os2",
    ],
)
def test_image_sizes(data: bytes) -> None:
    """Each format says 640 x 480, and no prefix of it raises anything but HeaderError."""
    assert image_size(data) == (640, 480)
    assert count_pixels(data) == 640 * 480
    for end in range(60):
        try:
            image_size(data[:end])
        except HeaderError:
            pass


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no PNG"),
        (b"hello", "is no PNG"),
        (png(640, 480)[:20], "cut off"),
        (png(99_999_999, 1), "99999999 x 1"),
        (png(99_999_999, 1, padding=10**6), "from 1 to 65535"),
        (png(1, 99_999_999, depth=1, colour=0, padding=100_000), "from 1 to 65535"),
        (png(60_000, 60_000), "more than its"),
        (png(0, 480), "0 x 480"),
        (png(640, 480, depth=7), "IHDR"),
        (png(640, 480, colour=5), "IHDR"),
        (jpeg(640, 480)[:24], "cut off"),
        (jpeg(0, 480), "0 x 480"),
        (b"\xff\xd8\xff\xe0\x00\x00" + bytes(100), "frame header"),
        (b"\xff\xd8\xff\xda\x00\x08" + bytes(100), "frame header"),
        (b"\xff\xd8" + b"\xff\xe0\x00\x02" * 10_000, "frame header"),
        (gif(0, 0), "0 x 0"),
        (gif(640, 480)[:8], "cut off"),
        (VP8X[:26], "cut off"),
        (webp(b"ANIM", bytes(30)), "first chunk"),
        (webp(b"VP8X", bytes(4) + b"\xff" * 6), "16777216 x 16777216"),
        (bmp(-640, 480), "-640 x 480"),
        (bmp(60_000, 60_000), "more than its"),
        (b"BM" + bytes(12) + struct.pack("<I", 13) + bytes(100), "unknown size"),
    ],
)
def test_absurd_images(data: bytes, words: str) -> None:
    """A header that is missing, cut off or promises what its bytes cannot hold is refused in words."""
    with pytest.raises(HeaderError) as refused:
        count_pixels(data)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (wav(32_000), 1.0),
        (wav(32_000, channels=2), 0.5),
        (wav(16_000, rate=8_000, bits=8, channels=2), 1.0),
        (wav(64_000, bits=32, tag=3), 1.0),
        (wav(32_000, tag=0xFFFE), 1.0),
        (wav(16_000, bits=4, channels=2, tag=0x11), 1.0),
        (wav(32_000, says=0xFFFFFFFF), 1.0),
        (flac(48_000, 96_000), 2.0),
    ],
    ids=["mono", "stereo", "8bit", "float", "extensible", "adpcm", "open end", "flac"],
)
def test_audio_lengths(data: bytes, seconds: float) -> None:
    """Seconds follow from rate, channels, width and the bytes that are there; prefixes raise HeaderError
    only."""
    assert count_seconds(data) == pytest.approx(seconds)
    for end in range(90):
        try:
            count_seconds(data[:end])
        except HeaderError:
            pass


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no WAV"),
        (b"ID3" + bytes(100), "is no WAV"),
        (wav(0), "0 seconds"),
        (wav(1000, says=2**31), "cut off"),
        (wav(1000)[:30], "cut off"),
        (wav(1000, rate=1), "1 Hz"),
        (wav(1000, rate=2**30), "channels at"),
        (wav(1000, channels=0), "0 channels"),
        (wav(1000, tag=2, bits=0), "blocks of 0"),
        (b"RIFF\0\0\0\0WAVEdata\x04\0\0\0abcd", "before their format"),
        (b"RIFF\0\0\0\0WAVE" + b"LIST\0\0\0\0" * 10_000, "too many chunks"),
        (flac(0, 100), "STREAMINFO"),
        (flac(48_000, 0), "0 seconds"),
        (flac(48_000, 2**36 - 1), "more than its"),
        (flac(48_000, 2**36 - 1, payload=12_000_000), "at most 86400"),
        (flac(48_000, 96_000)[:20], "cut off"),
    ],
)
def test_absurd_audio(data: bytes, words: str) -> None:
    """A header that is missing, cut off or promises what its bytes cannot hold is refused in words."""
    with pytest.raises(HeaderError) as refused:
        count_seconds(data)
    assert words in str(refused.value)


_STARTS = st.sampled_from(
    [png(9, 9), jpeg(9, 9), gif(9, 9), VP8X, VP8L, VP8, bmp(9, 9), wav(64), flac(8_000, 64)]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(start=_STARTS, cut=st.integers(0, 60), rest=st.binary(max_size=80))
def test_any_bytes_give_a_size_or_a_header_error(start: bytes, cut: int, rest: bytes) -> None:
    """Garbage behind any prefix of a sound header raises nothing but HeaderError."""
    for measure in (count_pixels, count_seconds):
        try:
            assert measure(start[:cut] + rest) > 0
        except HeaderError:
            pass
