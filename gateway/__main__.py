"""`python -m gateway`: read the command line, check that the packages are ours, serve."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

EXIT_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    shadow = _shadowed()
    if shadow is not None:
        print(f"vramgate gateway: {shadow}", file=sys.stderr)
        return 1

    from scheduler.logs import setup_logging
    from scheduler.settings import ConfigError, load_settings

    setup_logging(as_json=given.log_json)
    try:
        settings = load_settings(
            given.config,
            pool=given.pool,
            redis_url=given.redis,
            gateway={
                "host": given.host,
                "port": given.port,
                "workers": given.workers,
                "insecure": True if given.insecure else None,
                "drain_s": given.drain,
                "grace_s": given.grace,
            },
        )
    except ConfigError as error:
        print(f"vramgate gateway: {error.detail}", file=sys.stderr)
        return EXIT_USAGE
    with _shared_metrics(settings.gateway.workers):
        from gateway import serve

        try:
            return serve.serve(settings)
        except serve.CannotStart as error:
            print(f"vramgate gateway: {error.detail}", file=sys.stderr)
            return error.exit_code


@contextlib.contextmanager
def _shared_metrics(workers: int) -> Iterator[None]:
    """A folder in which several workers share their counts.

    prometheus_client looks for it once, at its import.
    """
    if workers == 1:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="vramgate-metrics-", ignore_cleanup_errors=True) as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vramgate gateway", description="HTTP in front of one pool's ledger."
    )
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes a free one")
    parser.add_argument("--workers", type=int, help="worker processes")
    parser.add_argument("--config", type=Path, help="configuration file")
    parser.add_argument("--redis", help="URL of the ledger's server")
    parser.add_argument("--pool", help="the scheduling domain to serve")
    parser.add_argument(
        "--insecure", action="store_true", help="serve other addresses than loopback without keys"
    )
    parser.add_argument("--drain", metavar="DURATION", help="after SIGTERM: keep listening for so long")
    parser.add_argument("--grace", metavar="DURATION", help="after SIGTERM: finish what waits within so long")
    parser.add_argument("--log-json", action="store_true", help="log one JSON object per line")
    return parser


def _shadowed() -> str | None:
    """What lies in front of our own packages on the path; a user's project may well have a scheduler.py."""
    home = Path(__file__).resolve().parent.parent
    for name in ("scheduler", "vramgate"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if found is None or found.parent.parent != home:
            return (
                f"the package {name} is taken from {found}, and not from {home}; "
                "start with `python -P -m gateway`"
            )
    return None


if __name__ == "__main__":
    sys.exit(main())
