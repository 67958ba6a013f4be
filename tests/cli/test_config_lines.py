"""What is said about a configuration that cannot be used: one line that names the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.settings import ConfigError, load_settings


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            '[models.x]\nentrypiont = "a:B"',
            "{path}: unknown key models.x.entrypiont; did you mean models.x.entrypoint?",
        ),
        (
            '[models.x]\nversion = "1"',
            "{path}: models.x.entrypoint is missing; write `module:Class` or `path/file.py:Class`",
        ),
        (
            '[models.x]\nentrypoint = "shout.Shout"',
            "configuration: models.x.entrypoint: write module:Class or file.py:Class, got 'shout.Shout'",
        ),
        (
            "[clocks]\nbeat_s = 9",
            "configuration: clocks: beat_s is 9.0, above a third of session_s (10.0)",
        ),
        (
            'redis_url = "http://user:secret@box:6379"',
            "configuration: redis_url: Redis URL must specify one of the following schemes "
            "(redis://, rediss://, unix://), got 'http://box:6379'",
        ),
    ],
)
def test_the_line_names_the_key_and_the_remedy(tmp_path: Path, text: str, line: str) -> None:
    """A misspelt key is told before what is missing by it, and nothing is said twice."""
    path = tmp_path / "vramgate.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as told:
        load_settings(path)
    assert told.value.detail == line.format(path=path)
