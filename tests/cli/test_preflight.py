"""What `up` refuses before it starts anything, each in one line with the remedy."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from scheduler.settings import ConfigError, load_settings
from vramgate.cli.exits import FAILED, USAGE, Failure
from vramgate.cli.preflight import check_entrypoints, check_ports, check_simulation, lock_directory

SOURCE = "import vramgate\n\nclass Defects(vramgate.Model):\n    pass\n"


def test_a_port_in_use() -> None:
    """The port is named, and so is the option."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Failure, match=f"port {port} on 127.0.0.1.*--port") as caught:
            check_ports("127.0.0.1", [port])
    assert caught.value.exit_code == FAILED
    check_ports("127.0.0.1", [port])


@pytest.mark.parametrize("simulate", ["2x24", "24GiB", "0x24GiB", "2x1MiB", "2x1GiB,scale=0"])
def test_simulated_cards_that_cannot_be_made(simulate: str) -> None:
    """A slip in --simulate is usage, and is told before a server runs."""
    with pytest.raises(Failure, match="simulate = ") as caught:
        check_simulation(simulate)
    assert caught.value.exit_code == USAGE
    check_simulation("2x512MiB")
    check_simulation(None)


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("defects:Defects", None),
        ("defects.py:Defects", None),
        ("pack.inner:Defects", None),
        ("json:JSONDecoder", None),
        ("defect:Defects", "models.defects: entry point defect:Defects: no defect in"),
        ("defects:Defect", None),
        ("defects:Defekts", "has no Defekts; did you mean Defects"),
        ("broken:Defects", "is not valid Python"),
    ],
)
def test_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entrypoint: str, words: str | None
) -> None:
    """A file or class that is certainly not there is told by name; what only an import can show passes."""
    monkeypatch.chdir(tmp_path)
    models = tmp_path / "models"
    (models / "pack").mkdir(parents=True)
    for name in ("defects.py", "pack/inner.py"):
        (models / name).write_text(SOURCE)
    (models / "broken.py").write_text("class Defects(:\n")
    config = models / "vramgate.toml"
    config.write_text(f'[models.defects]\nentrypoint = "{entrypoint}"\n')
    settings = load_settings(config)
    if words is None:
        check_entrypoints(settings, config)
        return
    with pytest.raises(Failure, match=words) as caught:
        check_entrypoints(settings, config)
    assert caught.value.exit_code == USAGE and "\n" not in caught.value.detail


def test_one_up_per_directory(tmp_path: Path) -> None:
    """A second `up` over the same data is refused while the first holds it, and not after."""
    first = lock_directory(tmp_path / "data")
    with pytest.raises(Failure, match="another"):
        lock_directory(tmp_path / "data")
    os.close(first)
    os.close(lock_directory(tmp_path / "data"))


def test_the_environment_may_name_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points are looked up beside the file that VRAMGATE_CONFIG names, as the agent does it."""
    file = tmp_path / "elsewhere" / "vramgate.toml"
    file.parent.mkdir()
    file.write_text('[models.defects]\nentrypoint = "defects:Defects"\n')
    (file.parent / "defects.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VRAMGATE_CONFIG", str(file))
    check_entrypoints(load_settings(), None)


def test_a_configuration_that_the_environment_names_and_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, as one that the command line names."""
    monkeypatch.setenv("VRAMGATE_CONFIG", "nowhere.toml")
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load_settings()
