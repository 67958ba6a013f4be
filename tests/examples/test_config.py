"""examples/vramgate.toml is a configuration that the service takes, and it serves what is beside it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import examples.speech
import vramgate
from scheduler.settings import Settings, load_settings

FILE = Path(examples.speech.__file__).with_name("vramgate.toml")


def test_every_model_of_the_file_is_there() -> None:
    """Each entry point names a Model in a file beside the configuration."""
    settings = load_settings(FILE)
    assert set(settings.models) == {"speech", "diffusion"}
    for model in settings.models.values():
        module, name = model.entrypoint.split(":")
        assert issubclass(getattr(importlib.import_module(f"examples.{module}"), name), vramgate.Model)


def test_what_the_file_calls_a_default_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The values that its comments call defaults equal those of no file at all."""
    monkeypatch.chdir(tmp_path)
    shown, plain = load_settings(FILE), Settings()
    assert shown.clocks == plain.clocks
    assert shown.limits == plain.limits
