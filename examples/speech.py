"""Voice activity: WAV in, the segments that hold speech out, in seconds.

The network is the TorchScript file inside the `silero-vad` wheel, loaded by torch alone; the package around
it is never imported. It reads windows of 32 ms and keeps its state (a recurrent one, and the tail of the last
window) *in the module*, not in its arguments. So:

* Batches: the rows of one call have a row of state each. All items of a batch walk through their windows
  side by side, from a reset; a shorter one is padded with silence and its surplus windows are not looked at.
* Lanes: two threads in one module would mix their states. One lane, or a copy of the module for each.
"""

from __future__ import annotations

import array
import functools
import importlib.util
import io
import itertools
import sys
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pydantic
import torch

import vramgate

WINDOW_S = 0.032
RATES = (8_000, 16_000)
CHECK_EVERY = 32
"""Windows between two looks at whether anybody still waits; about a second of audio."""

START_AT, STOP_AT = 0.5, 0.35
MIN_SPEECH_S, MIN_SILENCE_S, PAD_S = 0.25, 0.1, 0.03

SAMPLE_FILE = Path(__file__).with_name("speech-like.wav")


class Recording(pydantic.BaseModel):
    """A WAV file: 16-bit PCM, 8 or 16 kHz, any number of channels."""

    audio: bytes


class Segment(pydantic.BaseModel):
    start: float
    end: float


class Activity(pydantic.BaseModel):
    segments: list[Segment]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Clip:
    """One decoded item: its place in the batch, and mono samples of 16 bits."""

    place: int
    rate: int
    samples: array.array[int]

    @property
    def windows(self) -> int:
        return -(-len(self.samples) // window_samples(self.rate))


class Speech(vramgate.Model):
    input_schema = Recording
    output_schema = Activity
    units = "seconds(audio)"
    batch_units = "max_times_n"  # the batch is padded to its longest item
    max_batch = 8
    lanes = 1  # see above
    vram = "64MiB"

    def load(self, ctx: vramgate.Context) -> None:
        path = str(network_file())
        self.network = torch.jit.load(path, map_location=ctx.device).eval()  # type: ignore[no-untyped-call]

    def predict(self, batch: list[Recording], ctx: vramgate.Context) -> list[Any]:
        answers: list[Any] = [None] * len(batch)
        clips: list[_Clip] = []
        for place, item in enumerate(batch):
            try:
                clips.append(_Clip(place, *read_wav(item.audio)))
            except vramgate.InputError as error:
                answers[place] = error  # this item's fault, and no other's
        # The file holds one network for each rate, so rows of different rates cannot share a call.
        for rate in RATES:
            rows = [clip for clip in clips if clip.rate == rate]
            if not rows:
                continue
            for clip, chances in zip(rows, self._listen(rows, ctx), strict=True):
                seconds = len(clip.samples) / rate
                answers[clip.place] = {
                    "segments": find_segments(chances[: clip.windows], seconds),
                    "seconds": round(seconds, 3),
                }
        return answers

    def _listen(self, rows: Sequence[_Clip], ctx: vramgate.Context) -> list[list[float]]:
        """The chance of speech in each window of each row."""
        size, windows = window_samples(rows[0].rate), max(clip.windows for clip in rows)
        padded = b"".join(clip.samples.tobytes().ljust(2 * size * windows, b"\0") for clip in rows)
        with torch.inference_mode():
            samples = ctx.tensor(padded, (len(rows), size * windows), torch.int16).float() / 32768
            chances = torch.empty(len(rows), windows, device=samples.device)
            self.network.reset_states()
            for n in range(windows):
                if n % CHECK_EVERY == 0:
                    ctx.raise_if_cancelled()
                    for clip in rows:
                        ctx.progress(min(n, clip.windows), clip.windows, item=clip.place)
                chances[:, n] = self.network(samples[:, n * size : (n + 1) * size], rows[0].rate)[:, 0]
            self.network.reset_states()  # the state of this batch is no use to anybody
            return cast("list[list[float]]", chances.tolist())

    def sample(self, units: float) -> Recording:
        """The shipped recording, repeated and cut to `units` seconds."""
        rate, samples = read_wav(_sample_bytes())
        count = max(1, round(units * rate))
        return Recording(
            audio=write_wav(rate, array.array("h", itertools.islice(itertools.cycle(samples), count)))
        )


def network_file() -> Path:
    """The TorchScript file in the wheel, found without importing the package."""
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "examples/speech.py needs the silero-vad wheel: pip install --no-deps silero-vad"
        )
    return Path(spec.origin).with_name("data") / "silero_vad.jit"


def window_samples(rate: int) -> int:
    """Samples in one window: 256 at 8 kHz, 512 at 16 kHz."""
    return round(rate * WINDOW_S)


def read_wav(data: bytes) -> tuple[int, array.array[int]]:
    """Rate and mono samples. Raises `vramgate.InputError` for anything that the network cannot hear."""
    try:
        with wave.open(io.BytesIO(data)) as wav:
            channels, width, rate = wav.getnchannels(), wav.getsampwidth(), wav.getframerate()
            frames = wav.readframes(wav.getnframes())
    except (wave.Error, EOFError) as error:
        raise vramgate.InputError(
            f"is no WAV file of plain PCM: {error or 'it ends early'}", field="audio"
        ) from None
    if width != 2:
        raise vramgate.InputError(f"has samples of {8 * width} bits; send 16", field="audio")
    if rate not in RATES:
        raise vramgate.InputError(f"is sampled at {rate} Hz; send 8000 or 16000 Hz", field="audio")
    samples = array.array("h", frames[: len(frames) // (2 * channels) * 2 * channels])
    if sys.byteorder == "big":
        samples.byteswap()
    if not samples:
        raise vramgate.InputError("holds no samples", field="audio")
    if channels > 1:
        samples = array.array(
            "h", (sum(samples[i : i + channels]) // channels for i in range(0, len(samples), channels))
        )
    return rate, samples


def write_wav(rate: int, samples: array.array[int]) -> bytes:
    """A mono WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(rate)
        wav.writeframes(samples.tobytes())
    return file.getvalue()


def find_segments(chances: Sequence[float], seconds: float) -> list[dict[str, float]]:
    """Segments out of the chances of speech in each window.

    Speech begins at START_AT and ends when the chance has stayed under STOP_AT for MIN_SILENCE_S; what is
    shorter than MIN_SPEECH_S is dropped, and the rest gets PAD_S at both ends.
    """
    found = [(a, b) for a, b in _runs(chances) if b - a >= MIN_SPEECH_S]
    return [
        {"start": round(max(0.0, a - PAD_S), 3), "end": round(min(seconds, b + PAD_S), 3)} for a, b in found
    ]


def _runs(chances: Sequence[float]) -> Iterator[tuple[float, float]]:
    start: float | None = None
    quiet: float | None = None
    for n, chance in enumerate(chances):
        now = n * WINDOW_S
        if chance >= START_AT:
            start, quiet = now if start is None else start, None
        elif start is not None and chance < STOP_AT:
            quiet = now if quiet is None else quiet
            if now + WINDOW_S - quiet >= MIN_SILENCE_S:
                yield start, quiet
                start = quiet = None
    if start is not None:
        yield start, len(chances) * WINDOW_S if quiet is None else quiet


@functools.cache
def _sample_bytes() -> bytes:
    return SAMPLE_FILE.read_bytes()
