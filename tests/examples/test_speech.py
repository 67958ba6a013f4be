"""examples/speech.py: real audio, real network; the state in the module is what could go wrong."""

from __future__ import annotations

import array
import importlib.util
import math
import runpy
import sys
import wave
from pathlib import Path
from typing import Any

import pytest

import vramgate
from examples import make_speech_like, speech
from examples.speech import Recording, Speech, find_segments, read_wav, write_wav

SHIPPED = speech.SAMPLE_FILE.read_bytes()
TOLERANCE_S = 0.15


@pytest.fixture
def model(ctx: Any) -> Speech:
    made = Speech()
    made.load(ctx)
    return made


def cut(start_s: float, end_s: float) -> bytes:
    rate, samples = read_wav(SHIPPED)
    return write_wav(rate, samples[round(start_s * rate) : round(end_s * rate)])


def halved(data: bytes) -> bytes:
    rate, samples = read_wav(data)
    pairs = zip(samples[::2], samples[1::2], strict=False)
    return write_wav(rate // 2, array.array("h", ((a + b) // 2 for a, b in pairs)))


def near_phrases(segments: list[dict[str, float]]) -> bool:
    return len(segments) == len(make_speech_like.PHRASES) and all(
        abs(found["start"] - start) < TOLERANCE_S and abs(found["end"] - end) < TOLERANCE_S
        for found, (start, end) in zip(segments, make_speech_like.PHRASES, strict=True)
    )


def test_finds_the_phrases_where_they_are(model: Speech, ctx: Any) -> None:
    """The shipped recording has two phrases, and both are found within 150 ms; so they are at 8 kHz and in
    stereo."""
    (answer,) = model.predict([Recording(audio=SHIPPED)], ctx)
    assert answer["seconds"] == make_speech_like.SECONDS
    assert near_phrases(answer["segments"])
    (answer,) = model.predict([Recording(audio=halved(SHIPPED))], ctx)
    assert near_phrases(answer["segments"])
    rate, samples = read_wav(SHIPPED)
    stereo = bytearray(write_wav(rate, array.array("h", (value for value in samples for _ in range(2)))))
    stereo[22:24], stereo[28:32], stereo[32:34] = b"\2\0", (4 * rate).to_bytes(4, "little"), b"\4\0"
    (answer,) = model.predict([Recording(audio=bytes(stereo))], ctx)
    assert near_phrases(answer["segments"])


def test_silence_and_a_sine_are_not_speech(model: Speech, ctx: Any) -> None:
    """Nothing is found where nothing is said."""
    silence = array.array("h", bytes(64_000))
    sine = array.array("h", (round(9_000 * math.sin(2 * math.pi * 440 * n / 16_000)) for n in range(32_000)))
    for samples in (silence, sine):
        (answer,) = model.predict([Recording(audio=write_wav(16_000, samples))], ctx)
        assert answer == {"segments": [], "seconds": 2.0}


def test_a_batch_answers_as_its_items_alone(model: Speech, ctx: Any) -> None:
    """Rows do not leak into each other, nor one batch into the next: mixed lengths and rates answer the
    same."""
    items = [
        Recording(audio=data)
        for data in (
            SHIPPED,
            cut(0.5, 3.0),
            halved(cut(3.0, 6.0)),
            cut(0, 0.02),
            halved(SHIPPED),
            cut(2.8, 4.9),
        )
    ]
    alone = [model.predict([item], ctx)[0] for item in items]
    assert model.predict(items, ctx) == alone
    assert model.predict(list(reversed(items)), ctx) == list(reversed(alone))


def test_a_cancelled_run_leaves_no_state_behind(model: Speech, ctx: Any) -> None:
    """A batch that nobody waits for ends early, and the next one answers as if it had never been."""
    ctx.cancel_after = 64
    with pytest.raises(vramgate.Cancelled):
        model.predict([Recording(audio=SHIPPED)], ctx)
    assert max(done for done, _, _ in ctx.seen) < 188
    ctx.cancel_after, ctx.gone = None, set()
    (answer,) = model.predict([Recording(audio=SHIPPED)], ctx)
    assert near_phrases(answer["segments"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no WAV"),
        (b"RIFF\x00\x00\x00\x00WAVE", "no WAV"),
        (SHIPPED[:30], "no WAV"),
        (SHIPPED[:44], "no samples"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "no WAV"),
        (write_wav(44_100, array.array("h", [1, 2, 3])), "44100 Hz"),
        (SHIPPED[:34] + b"\x08\x00" + SHIPPED[36:], "8 bits"),
    ],
    ids=["empty", "bare", "cut", "silent", "png", "rate", "width"],
)
def test_bad_audio_fails_alone(model: Speech, ctx: Any, data: bytes, words: str) -> None:
    """An unreadable file is an InputError about `audio` in its place; its batch mates are answered."""
    bad, good = model.predict([Recording(audio=data), Recording(audio=SHIPPED)], ctx)
    assert isinstance(bad, vramgate.InputError)
    assert bad.field == "audio"
    assert words in bad.detail
    assert near_phrases(good["segments"])


def test_samples_have_the_size_that_was_asked_for(model: Speech, ctx: Any) -> None:
    """sample(units) counts as about so many units, and the model answers it."""
    for units in (0.5, 3.0, 14.0):
        assert Speech.count_units(Speech.sample(model, units)) == pytest.approx(units, rel=0.01)
    (answer,) = model.predict([model.sample(12.0)], ctx)
    assert len(answer["segments"]) == 4


def test_the_wheel_s_package_is_never_imported(model: Speech) -> None:
    """Only the file inside the wheel is used."""
    assert importlib.util.find_spec("silero_vad") is not None
    assert "silero_vad" not in sys.modules


@pytest.mark.parametrize(
    ("chances", "segments"),
    [
        ([], []),
        ([0.9] * 5, []),
        ([0.1] * 10 + [0.9] * 10 + [0.1] * 10, [{"start": 0.29, "end": 0.67}]),
        ([0.9] * 10 + [0.1] * 2 + [0.9] * 10, [{"start": 0.0, "end": 0.704}]),
        ([0.9] * 10 + [0.4] * 20, [{"start": 0.0, "end": 0.96}]),
    ],
    ids=["none", "too short", "one", "short pause", "between the thresholds"],
)
def test_find_segments(chances: list[float], segments: list[dict[str, float]]) -> None:
    """Short speech is dropped, a short pause is bridged, and the lower threshold ends a segment."""
    assert find_segments(chances, len(chances) * speech.WINDOW_S) == segments


def test_the_shipped_recording_is_what_the_script_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running the script again writes the file that is shipped, to one step of rounding."""
    made = tmp_path / "again.wav"
    monkeypatch.setattr(sys, "argv", ["make_speech_like.py", str(made)])
    runpy.run_path(make_speech_like.__file__, run_name="__main__")
    with wave.open(str(made)) as again:
        assert (again.getframerate(), again.getnchannels()) == (16_000, 1)
    _, ours = read_wav(made.read_bytes())
    _, shipped = read_wav(SHIPPED)
    assert len(ours) == len(shipped)
    assert max(abs(a - b) for a, b in zip(ours, shipped, strict=True)) <= 1
