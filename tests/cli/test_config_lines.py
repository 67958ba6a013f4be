"""What is said about a configuration that cannot be used: one line that names the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.misconfiguration import known_keys
from scheduler.settings import ConfigError, Settings, load_settings


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
            "configuration: models.x.entrypoint: expected module:Class or path/file.py:Class, "
            "got 'shout.Shout'",
        ),
        (
            "[clocks]\nbeat_s = 9",
            "configuration: clocks: beat_s is 9.0, above a third of session_s (10.0)",
        ),
        (
            'redis_url = "http://user:secret@box:6379"',
            "configuration: redis_url: expected redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix://PATH, "
            "got 'http://box:6379'",
        ),
        (
            '[models.x]\nentrypoint = "a:B"\ncards = "GPU-1"',
            'configuration: models.x.cards: expected "all" or a list such as '
            '["GPU-7a41e0c2-...", "myhost:0"], got \'GPU-1\'',
        ),
        (
            '[models.x]\nentrypoint = "a:B"\nlane = 2',
            "{path}: unknown key models.x.lane; there are entrypoint, cards, concurrency, version",
        ),
        (
            '[models."my model"]\nentrypoint = "a:B"',
            "configuration: models.my model: expected a name that matches "
            "^[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}$, got 'my model'",
        ),
        ("[models]\nx = 1", "configuration: models.x: expected a table, got 1"),
        (
            '[gateway]\nport = "http"',
            "configuration: gateway.port: expected a whole number from 0 to 65535, got 'http'",
        ),
        (
            "[limits]\nbody_bytes = 1",
            "configuration: limits.body_bytes: expected a size such as 12GiB from 1 KiB to 512 MiB, got 1",
        ),
        (
            "[clocks]\nmax_wait_s = 0",
            "configuration: clocks.max_wait_s: expected a duration such as 30s, "
            "above 0 s and at most 86400 s, got 0",
        ),
        (
            "[gateway]\nport = true",
            "configuration: gateway.port: expected a whole number from 0 to 65535, got True",
        ),
        (
            "[clocks]\nmax_wait_s = true",
            "configuration: clocks.max_wait_s: expected a duration such as 30s, "
            "above 0 s and at most 86400 s, got True",
        ),
        (
            '[placement]\npolicy = "best"',
            'configuration: placement.policy: expected "spread" or "pack", got \'best\'',
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


@pytest.mark.parametrize("key", sorted(known_keys(Settings)))
def test_no_setting_is_refused_in_the_words_of_a_library(tmp_path: Path, key: str) -> None:
    """A value of a wrong kind: the line names the key itself, what was expected, and what was given."""
    *tables, name = key.replace("*", "x").split(".")
    lines = [f"[{'.'.join(tables)}]"] if tables else []
    lines += ['entrypoint = "a:B"'] if tables[:1] == ["models"] and name != "entrypoint" else []
    path = tmp_path / "vramgate.toml"
    path.write_text("\n".join([*lines, f"{name} = [{{}}]"]))
    with pytest.raises(ConfigError) as told:
        load_settings(path)
    line = told.value.detail
    assert line.startswith(f"configuration: {'.'.join([*tables, name])}: expected ") and line.endswith(
        "got [{}]"
    )
    assert "nput" not in line and "valid" not in line


@pytest.mark.parametrize("value", ["redis://:secret@box", "[]", "{"])
def test_a_table_in_the_environment_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The variable is named, and how a single key of it is written; its value may be a secret."""
    monkeypatch.setenv("VRAMGATE_REDIS", value)
    with pytest.raises(
        ConfigError, match=r"VRAMGATE_REDIS: expected a JSON object; .* VRAMGATE_REDIS__KEY"
    ) as told:
        load_settings()
    assert "secret" not in told.value.detail
