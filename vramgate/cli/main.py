"""The console script `vramgate`: which commands there are, and how each ends.

Owns the list of commands and the way from an exception to an exit code. Does not own what a command does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from vramgate.cli import ask, demo, operate, services, up, views
from vramgate.cli.exits import DONE, INTERRUPTED, USAGE, exit_code_of, say

app = typer.Typer(
    name="vramgate",
    help="A gate for GPU memory: work is admitted by leases of bytes on a named card.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(up.up)
app.command()(demo.demo)
app.command()(services.gateway)
app.command()(services.agent)
app.command()(views.cards)
app.command()(views.leases)
app.command()(views.jobs)
app.command()(views.queue)
app.command()(views.models)
app.command()(ask.infer)
app.add_typer(operate.job, name="job")
app.add_typer(operate.card, name="card")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vramgate {version('vramgate')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def vramgate(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. One line on stderr for a failure, never a stack trace (python -X dev
    shows it).
    """
    try:
        ended = app(
            list(arguments) if arguments is not None else None, prog_name="vramgate", standalone_mode=False
        )
        return ended if isinstance(ended, int) else DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Without this, Python complains at exit about what it
        # cannot flush.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return DONE
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        # Errors of usage have no public class in typer; they are told by what they can say.
        if hasattr(error, "format_message"):
            print(f"vramgate: {_usage_line(error)}", file=sys.stderr)
            return int(getattr(error, "exit_code", USAGE))
        if sys.flags.dev_mode:
            raise
        say(error)
        return exit_code_of(error)


def _usage_line(error: Exception) -> str:
    said = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "vramgate"
    return f"{said.rstrip('.')}; see `{command} --help`"


if __name__ == "__main__":
    sys.exit(main())
