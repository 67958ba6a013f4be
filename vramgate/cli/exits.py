"""How a command ends: the exit codes of the contract, and one line for each failure.

Owns the mapping of an exception to a code and a line. Owns no wording of its own beyond that: what happened
and what to do next is said where it is known.
"""

from __future__ import annotations

import sys

from scheduler.settings import ConfigError
from vramgate.errors import Refused, StoreUnavailable, Unreachable, VramgateError

DONE, FAILED, USAGE, MISSING, UNREACHABLE = range(5)
INTERRUPTED = 130


class Failure(VramgateError):
    """A command cannot do what it was asked to; `exit_code` is what the process ends with."""

    def __init__(self, detail: str, *, exit_code: int = FAILED) -> None:
        super().__init__(detail)
        self.exit_code = exit_code


class Misuse(Failure):
    """The command line itself cannot be carried out."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, exit_code=USAGE)


class Missing(Failure):
    """What was named is not there."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, exit_code=MISSING)


class NothingReachable(Failure):
    """Nobody answered; the line says where it looked."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, exit_code=UNREACHABLE)


def exit_code_of(error: Exception) -> int:
    """The exit code that stands for `error`."""
    match error:
        case Failure():
            return error.exit_code
        case ConfigError():
            return USAGE
        case StoreUnavailable() | Unreachable():
            return UNREACHABLE
        case Refused() if error.status == 404:
            return MISSING
        case _:
            return FAILED


def say(error: Exception) -> None:
    """One line on stderr: what happened, to which id, and what to do next."""
    tell(error.detail if isinstance(error, VramgateError) else f"{type(error).__name__}: {error}")


def tell(text: str) -> None:
    """One line on stderr."""
    line = " ".join(line.strip() for line in text.splitlines() if line.strip())
    # What was typed may be shown; what would move the cursor is written out.
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    print(f"vramgate: {shown}", file=sys.stderr)
