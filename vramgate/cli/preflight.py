"""What `up` can tell to be wrong before it starts anything: addresses that it may not serve, ports that are
taken, entry points that are not there.

Owns these checks, each with one line that names the thing and the remedy. Nothing of the user's is imported
here; what only an import shows is said by the agent.
"""

from __future__ import annotations

import ast
import difflib
import fcntl
import importlib.util
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from scheduler.exposure import why_not_served
from scheduler.settings import Settings, config_file, model_directories
from vramgate.cli.exits import Failure, Misuse


def check_ports(host: str, ports: Sequence[int]) -> None:
    """Raise Failure for the first port that cannot be listened on."""
    for port in ports:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError) as error:
                raise Failure(
                    f"port {port} on {host} cannot be used: {error}; choose another with --port"
                ) from None


def check_door(settings: Settings) -> None:
    """Raise Misuse for an address that gateways may not serve."""
    why = why_not_served(settings.gateway)
    if why is not None:
        raise Misuse(why)


def check_simulation(simulate: str | None) -> None:
    """Raise Misuse for simulated cards that cannot be made."""
    if simulate is None:
        return
    from gpu_agent.device.simulated import SimSpec  # only who simulates needs the agent's part

    try:
        SimSpec.parse(simulate)
    except ValueError as error:
        raise Misuse(str(error)) from None


def check_entrypoints(settings: Settings, config: Path | None) -> None:
    """Raise Misuse for a model whose file or class is not there."""
    file, directories = config_file(config), model_directories(config)
    for name, model in settings.models.items():
        where, _, wanted = model.entrypoint.rpartition(":")
        source = _source_of(where, directories)
        if source is None:
            looked = " and ".join(map(str, directories))
            raise Misuse(f"{file}: models.{name}: entry point {model.entrypoint}: no {where} in {looked}")
        if source.suffix == ".py":
            _check_class(f"{file}: models.{name}", source, wanted)


def lock_directory(data_dir: Path) -> int:
    """Hold `data_dir` for this process; the descriptor is the lock. Raises Failure when another `up` runs
    there.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(data_dir / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Failure(
            f"another `vramgate up` or `demo` runs over {data_dir}; stop it, or use another directory"
        ) from None
    return descriptor


def _source_of(where: str, directories: Sequence[Path]) -> Path | None:
    """The file that an entry point names, in the order in which the agent looks."""
    if where.endswith(".py"):
        return next((directory / where for directory in directories if (directory / where).is_file()), None)
    relative = Path(*where.split("."))
    for directory in directories:
        for candidate in (directory / relative / "__init__.py", (directory / relative).with_suffix(".py")):
            if candidate.is_file():
                return candidate
    try:
        spec = importlib.util.find_spec(where.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    # An installed package: which file a dotted name leads to is decided by its import.
    return None if spec is None else Path("installed")


def _check_class(place: str, source: Path, wanted: str) -> None:
    try:
        module = ast.parse(source.read_text(), filename=str(source))
    except SyntaxError as error:
        raise Misuse(f"{place}: {source} is not valid Python: {error.msg}, line {error.lineno}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise Misuse(f"{place}: {source} cannot be read: {error}") from None
    classes = [node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    # Only where no other statement could make the name is its absence certain.
    if wanted in classes or wanted in source.read_text():
        return
    near = difflib.get_close_matches(wanted, classes, 1, 0.6)
    raise Misuse(f"{place}: {source} has no {wanted}" + (f"; did you mean {near[0]}?" if near else ""))
