"""Pixels of an image and seconds of audio, read from the first bytes of a file and never by decoding it.

Owns: the few header formats below and what is absurd in them. The bytes come from strangers: each read is
bounded by the length that is there, each loop by a number of segments, and a header that promises more
than the bytes behind it could hold is refused, since the promise is what memory will be leased for.
Does not own: whether the rest of the file is sound; the model finds that out.

Sources: PNG (ISO/IEC 15948) IHDR; JPEG (ITU-T T.81) SOFn; GIF89a logical screen; WebP (RFC 9649); BMP (DIB
headers); RIFF/WAVE (Microsoft, 1991) fmt and data chunks; FLAC (RFC 9639) STREAMINFO.
"""

from __future__ import annotations

import struct

MAX_SIDE = 65_535
"""Pixels along one side. JPEG and GIF cannot say more; a PNG or BMP that does is no picture for a model."""

MAX_SECONDS = 86_400.0
MAX_SEGMENTS = 4_096

# Deflate shrinks by at most 1032 : 1, and a FLAC frame holds at most 65535 samples in no less than 10 bytes.
_DEFLATE_RATIO = 1_032
_FLAC_SAMPLES = 65_535
_FLAC_FRAME_BYTES = 10

_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_WAV_EXACT = {1, 3, 0xFFFE}
_WAV_OPEN_END = 0xFFFFFFFF


class HeaderError(ValueError):
    """The header is missing, cut off or absurd. The message is meant for whoever sent the file."""


def count_pixels(data: bytes) -> float:
    """Width times height of a PNG, JPEG, GIF, WebP or BMP file. Raises `HeaderError`."""
    width, height = image_size(data)
    return float(width * height)


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG, JPEG, GIF, WebP or BMP file. Raises `HeaderError`."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            width, height = _png_size(data)
        elif data.startswith(b"\xff\xd8\xff"):
            width, height = _jpeg_size(data)
        elif data.startswith((b"GIF87a", b"GIF89a")):
            width, height = struct.unpack_from("<HH", data, 6)
        elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            width, height = _webp_size(data)
        elif data.startswith(b"BM"):
            width, height = _bmp_size(data)
        else:
            raise HeaderError("is no PNG, JPEG, GIF, WebP or BMP file")
    except struct.error:
        raise HeaderError(f"is cut off: its {len(data)} bytes end within the header") from None
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise HeaderError(f"says {width} x {height} pixels; each side must be from 1 to {MAX_SIDE}")
    return width, height


def count_seconds(data: bytes) -> float:
    """Length of a WAV or FLAC file in seconds. Raises `HeaderError`."""
    try:
        if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
            seconds = _wav_seconds(data)
        elif data.startswith(b"fLaC"):
            seconds = _flac_seconds(data)
        else:
            raise HeaderError("is no WAV or FLAC file")
    except struct.error:
        raise HeaderError(f"is cut off: its {len(data)} bytes end within the header") from None
    if not 0 < seconds <= MAX_SECONDS:
        raise HeaderError(f"says {seconds:g} seconds of audio; it must be over 0 and at most {MAX_SECONDS:g}")
    return seconds


def _png_size(data: bytes) -> tuple[int, int]:
    length, kind, width, height, depth, colour = struct.unpack_from(">I4sIIBB", data, 8)
    if kind != b"IHDR" or length != 13 or colour not in _PNG_CHANNELS or depth not in (1, 2, 4, 8, 16):
        raise HeaderError("is no sound PNG file: its first chunk is not a valid IHDR")
    raw_bytes = width * height * depth * _PNG_CHANNELS[colour] // 8
    if raw_bytes > len(data) * _DEFLATE_RATIO:
        raise HeaderError(f"says {width} x {height} pixels, more than its {len(data)} bytes can hold")
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(MAX_SEGMENTS):
        mark, marker = struct.unpack_from(">BB", data, at)
        if mark != 0xFF:
            break
        if marker == 0xFF:  # a fill byte, allowed before any marker
            at += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # these stand alone, without a length
            at += 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        if length < 2 or marker in (0xD9, 0xDA):
            break
        at += 2 + length
    raise HeaderError("is no sound JPEG file: no frame header before its data")


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        low, high = struct.unpack_from("<IH", data, 24)
        both = low | high << 32
        return (both & 0xFFFFFF) + 1, (both >> 24 & 0xFFFFFF) + 1
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BI", data, 20)
        if signature == 0x2F:
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        start, width, height = struct.unpack_from("<3sHH", data, 23)
        if start == b"\x9d\x01\x2a":
            return width & 0x3FFF, height & 0x3FFF
    if len(data) < 30:
        raise HeaderError(f"is cut off: its {len(data)} bytes end within the header")
    raise HeaderError("is no sound WebP file: its first chunk is not VP8, VP8L or VP8X")


def _bmp_size(data: bytes) -> tuple[int, int]:
    (header,) = struct.unpack_from("<I", data, 14)
    if header == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
        compression = 0
    elif 40 <= header <= 124:
        width, height, _, bits, compression = struct.unpack_from("<iiHHI", data, 18)
        height = abs(height)  # negative means that rows run from the top
    else:
        raise HeaderError("is no sound BMP file: its header has an unknown size")
    if compression == 0 and width > 0 and width * height * bits // 8 > len(data):
        raise HeaderError(f"says {width} x {height} pixels, more than its {len(data)} bytes can hold")
    return width, height


def _wav_seconds(data: bytes) -> float:
    at, bytes_per_second = 12, 0
    for _ in range(MAX_SEGMENTS):
        kind, length = struct.unpack_from("<4sI", data, at)
        at += 8
        if kind == b"fmt ":
            bytes_per_second = _wav_rate(data, at)
        elif kind == b"data":
            if not bytes_per_second:
                raise HeaderError("is no sound WAV file: its data come before their format")
            here = len(data) - at
            if length == _WAV_OPEN_END:  # by a recorder that could not seek back: to the end
                length = here
            if length > here:
                raise HeaderError(f"is cut off: it says {length} bytes of audio, and {here} are there")
            return int(length) / bytes_per_second
        at += length + (length & 1)
    raise HeaderError("is no sound WAV file: too many chunks before its data")


def _wav_rate(data: bytes, at: int) -> int:
    tag, channels, rate, byte_rate, block, bits = struct.unpack_from("<HHIIHH", data, at)
    if not (1 <= channels <= 64 and 1_000 <= rate <= 768_000 and block):
        raise HeaderError(
            f"is no sound WAV file: {channels} channels at {rate} Hz in blocks of {block} bytes"
        )
    if tag not in _WAV_EXACT:
        if not byte_rate:
            raise HeaderError("is no sound WAV file: 0 bytes a second")
        return int(byte_rate)
    if block * 8 != channels * bits:
        raise HeaderError(f"is no sound WAV file: blocks of {block} bytes for {channels} x {bits} bits")
    return int(rate * block)


def _flac_seconds(data: bytes) -> float:
    kind, packed = struct.unpack_from(">B13xQ", data, 4)
    rate, samples = int(packed >> 44), int(packed & 0xFFFFFFFFF)
    if kind & 0x7F or not rate:
        raise HeaderError("is no sound FLAC file: it does not begin with a valid STREAMINFO")
    if samples > (len(data) // _FLAC_FRAME_BYTES + 1) * _FLAC_SAMPLES:
        raise HeaderError(f"says {samples} samples, more than its {len(data)} bytes can hold")
    return samples / rate
