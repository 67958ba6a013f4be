"""Synthesises `speech-like.wav`: two phrases with silence around them, close enough to speech for a detector.

A sine is not speech, and a detector says so. What it listens for is here: a voice of many harmonics whose
pitch moves, formants that glide from vowel to vowel, syllables about four times a second, hiss between them.
Where the phrases begin and end is known, so that segments can be checked. Nothing but the standard library.

    python examples/make_speech_like.py [FILE]
"""

from __future__ import annotations

import array
import math
import random
import sys
import wave
from pathlib import Path

RATE = 16_000
SECONDS = 6.0
PHRASES = ((0.8, 2.6), (3.7, 5.2))
"""Beginning and end of each phrase, in seconds."""

SYLLABLE_S = 0.26
HISS_S = 0.06
PITCH_HZ = 125.0
PEAK = 0.5

# The first three formants of five vowels, in Hz, as textbooks give them for an adult voice.
VOWELS = {
    "a": (730, 1090, 2440),
    "e": (530, 1840, 2480),
    "i": (270, 2290, 3010),
    "o": (570, 840, 2410),
    "u": (300, 870, 2240),
}
BANDWIDTHS = (80.0, 110.0, 160.0)
ORDER = "aeoiuaeiao"


def synthesise() -> array.array[int]:
    """All samples of the file, 16 bits each."""
    chance = random.Random(7)
    samples = [chance.gauss(0.0, 1e-4) for _ in range(int(SECONDS * RATE))]
    for start, end in PHRASES:
        for at, value in enumerate(_phrase(end - start, chance), int(start * RATE)):
            samples[at] += value
    peak = max(abs(value) for value in samples)
    return array.array("h", (round(32767 * PEAK * value / peak) for value in samples))


def _phrase(seconds: float, chance: random.Random) -> list[float]:
    out, phase = [], 0.0
    for n in range(int(seconds * RATE)):
        t = n / RATE
        syllable, within = divmod(t, SYLLABLE_S)
        pitch = PITCH_HZ * (1.15 - 0.25 * t / seconds + 0.04 * math.sin(2 * math.pi * 5.1 * t))
        phase += 2 * math.pi * pitch / RATE
        loud = (
            math.sin(math.pi * min(1.0, within / (SYLLABLE_S - HISS_S))) ** 0.5
            if within < SYLLABLE_S - HISS_S
            else 0
        )
        voice = loud * _voice(phase, pitch, _formants(syllable, within / SYLLABLE_S)) if loud > 0.02 else 0.0
        hiss = (
            0.03 * chance.gauss(0.0, 1.0) if within >= SYLLABLE_S - HISS_S else 0.004 * chance.gauss(0.0, 1.0)
        )
        out.append(voice + hiss)
    return out


def _formants(syllable: float, part: float) -> list[float]:
    here = VOWELS[ORDER[int(syllable) % len(ORDER)]]
    after = VOWELS[ORDER[(int(syllable) + 1) % len(ORDER)]]
    glide = max(0.0, part - 0.5) * 2
    return [a + (b - a) * glide for a, b in zip(here, after, strict=True)]


def _voice(phase: float, pitch: float, formants: list[float]) -> float:
    """Harmonics of a glottal pulse (12 dB an octave down), each as loud as the formants near it make it."""
    total = 0.0
    for k in range(1, int(4_000 / pitch) + 1):
        hz = k * pitch
        gain = sum(1.0 / (1.0 + ((hz - f) / b) ** 2) for f, b in zip(formants, BANDWIDTHS, strict=True))
        total += (gain + 0.02) / k**0.7 * math.sin(k * phase)
    return total


def main() -> None:
    """Write the file, by default beside this script."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("speech-like.wav")
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(synthesise().tobytes())
    print(f"{path}: {SECONDS:g} s, phrases at {', '.join(f'{a:g} to {b:g} s' for a, b in PHRASES)}")


if __name__ == "__main__":
    main()
