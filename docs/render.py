"""Renders what docs/ has from the code: `python docs/render.py`; a test compares.

Some pages are tables of the code as a whole. In others only the parts between `<!-- rendered: NAME -->` and
`<!-- end -->` are; the rest of them is written by hand.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from typer.main import get_command

import vramgate.model
from gateway.options import Options
from gateway.routes import OPERATIONS, Parameter
from scheduler import scripts, transitions
from scheduler.expectation import expected
from scheduler.settings import ENV_PREFIX, ClockSettings, ModelSettings, Settings
from vramgate.cli.main import app
from vramgate.errors import TABLE, by_code
from vramgate.quantities import format_size

Row = tuple[str, ...]

DOCS = Path(__file__).resolve().parent
COMMON_FROM = 5
"""An option that so many commands have, with the same words, is told once."""

RENDERED_BY = "Rendered by `python docs/render.py`; a test holds it equal to the code."


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        RENDERED_BY,
        "",
        "Flags win over the environment, the environment over `vramgate.toml` in the working directory",
        "(or what `--config FILE` or `VRAMGATE_CONFIG` names), the file over the defaults. An unknown key is",
        "an error that suggests one.",
        "Sizes are written `12GiB`, durations `10m`. A key `a.b` is the variable `VRAMGATE_A__B`.",
    ]
    for title, prefix, model in _sections():
        rows = [
            (f"`{prefix}{name}`", _default(field), expected(field), field.description or "", f"`{variable}`")
            for name, field in model.model_fields.items()
            if _section_of(field) is None and name != "models"
            for variable in (ENV_PREFIX + (prefix + name).upper().replace(".", "__"),)
        ]
        lines += [
            "",
            f"## {title}",
            "",
            table(("key", "default", "takes", "help", "variable"), rows).rstrip(),
        ]
    return "\n".join([*lines, ""])


def _sections() -> list[tuple[str, str, type[BaseModel]]]:
    found: list[tuple[str, str, type[BaseModel]]] = [("The process", "", Settings)]
    for name, field in Settings.model_fields.items():
        section = _section_of(field)
        if section is not None:
            found.append((f"[{name}]", f"{name}.", section))
    return [*found, ("[models.NAME]", "models.NAME.", ModelSettings)]


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return ""
    is_size = any(isinstance(each, BeforeValidator) for each in field.metadata) and isinstance(value, int)
    if is_size and value >= 2**20:
        return format_size(value).replace(" ", "")
    return f"`{value}`"


RETRY: Mapping[str, str] = {
    "no": "no",
    "after": "after `Retry-After`",
    "maybe": "maybe",
    "yes": "yes, with the same key",
}


def errors() -> str:
    lines = [
        "# Errors",
        "",
        RENDERED_BY,
        "",
        "Every refusal and every failure is a problem document (RFC 9457), `type` = `urn:vramgate:<code>`;",
        "the client raises `vramgate.errors.<Class>`.",
        "",
    ]
    rows = [
        (
            f"`{row.code}`",
            str(row.status),
            RETRY[row.retry],
            f"`{by_code(row.code).__name__}`",
            row.job_state or "",
            row.title,
        )
        for row in TABLE.values()
    ]
    heads = ("code", "status", "retry", "class", "a stored job ends as", "meaning")
    return "\n".join([*lines, table(heads, rows)])


_FIELD = re.compile(r"(Guarantee|Fence|KEYS|ARGV|Returns|Cost): ")


def ledger_scripts() -> str:
    lines = [
        "# The operations of the ledger",
        "",
        RENDERED_BY,
        "",
        "Each is one file of `lua/`; these are their headers. Arguments and replies are msgpack.",
    ]
    for name in scripts.names():
        header: list[str] = []
        for line in (scripts.LUA / f"{name}.lua").read_text(encoding="utf-8").splitlines():
            if not line.startswith("-- ") or line.startswith("-- include:"):
                break
            header.append(line[3:])
        text = " ".join(header).removeprefix(f"{name}: ")
        lines += ["", f"## {name}", "", _FIELD.sub(r"\n- **\1**: ", text).replace(" \n", "\n")]
    return "\n".join([*lines, ""])


def routes() -> str:
    rows = [
        (f"`{each.method} {each.path}`", ", ".join(map(str, each.success)), each.summary, _query(each.query))
        for each in OPERATIONS
    ]
    return table(("route", "status", "what it does", "query"), rows)


def _query(query: Mapping[str, Parameter]) -> str:
    return "; ".join(f"`{name}`: {each.about}" for name, each in query.items())


def infer_options() -> str:
    clocks = ClockSettings()
    rows = []
    for name, field in Options.model_fields.items():
        setting = f"`clocks.{name}`, {getattr(clocks, name):g} s" if hasattr(clocks, name) else ""
        rows.append((f"`{name}`", expected(field), setting or _default(field), field.description or ""))
    return table(("option", "takes", "default", "meaning"), rows)


def statuses() -> str:
    rows = []
    for status in sorted({row.status for row in TABLE.values()}):
        codes = [row for row in TABLE.values() if row.status == status]
        told = "; ".join(f"`{row.code}`: {row.title[0].lower()}{row.title[1:]}" for row in codes)
        retries = list(dict.fromkeys(RETRY[row.retry] for row in codes))
        rows.append((str(status), told, " or ".join(retries)))
    return table(("status", "codes", "try again?"), rows)


def pinned() -> str:
    codes = [each.code for each in transitions.TRANSITIONS if each.pinned and each.code]
    freeing = [each.code for each in transitions.TRANSITIONS if each.code and not each.pinned]
    return (
        f"Kept under the key: success, {', '.join(f'`{code}`' for code in codes)}. "
        f"These free it: {', '.join(f'`{code}`' for code in freeing)}.\n"
    )


def attributes() -> str:
    rows = [(f"`{name}`", f"`{default}`", about) for name, default, about in _declared(vramgate.model.Model)]
    return table(("attribute", "default", "meaning"), rows)


def _declared(kind: type) -> Iterator[tuple[str, str, str]]:
    """Class attributes with their defaults and the text below each."""
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    for node, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and node.value is not None:
            assert isinstance(after.value, ast.Constant)
            yield ast.unparse(node.target), ast.unparse(node.value), _one_line(str(after.value.value))


def context() -> str:
    rows = []
    for name, member in vars(vramgate.Context).items():
        if name.startswith("_") or inspect.getdoc(member) is None:
            continue
        call = "" if isinstance(member, property) else _arguments(member)
        rows.append((f"`ctx.{name}{call}`", _one_line(inspect.getdoc(member) or "")))
    return table(("member", "meaning"), rows)


def _arguments(member: Callable[..., object]) -> str:
    names = [
        name if each.default is each.empty else f"{name}={each.default}"
        for name, each in inspect.signature(member).parameters.items()
        if name != "self"
    ]
    return f"({', '.join(names)})"


def commands() -> str:
    """Each command with its options; those that most commands have are told once, in `common_options`."""
    common = _common()
    parts = []
    for path, command in _commands(get_command(app), "vramgate"):
        words = [_argument(each) for each in command.params if each.param_type_name == "argument"]
        own = [row for row in map(_option, _options(command)) if row not in common]
        below = table(("option", "meaning"), own) if own else ""
        parts.append(f"### `{' '.join([path, *words])}`\n\n{_one_line(command.help)}\n\n{below}".rstrip("\n"))
    return "\n\n".join(parts) + "\n"


def common_options() -> str:
    return table(("option", "meaning"), _common())


def _common() -> list[Row]:
    rows = [
        _option(each) for _, command in _commands(get_command(app), "vramgate") for each in _options(command)
    ]
    return [row for row in dict.fromkeys(rows) if rows.count(row) >= COMMON_FROM]


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, below in getattr(command, "commands", {}).items():
        if hasattr(below, "commands"):
            yield from _commands(below, f"{path} {name}")
        else:
            yield f"{path} {name}", below


def _options(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "option"]


def _option(option: Any) -> Row:
    value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    return f"`{option.opts[0]}{value}`", _one_line(option.help or "")


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def table(heads: Row, rows: Sequence[Row]) -> str:
    written = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in (heads, *rows)
    ]
    return written[0] + "|---" * len(heads) + "|\n" + "".join(written[1:])


def _one_line(text: str) -> str:
    return " ".join(text.split())


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "errors.md": errors,
    "operations.md": ledger_scripts,
    "states.md": transitions.render_docs,
}
PARTS: Mapping[str, Callable[[], str]] = {
    "attributes": attributes,
    "commands": commands,
    "common_options": common_options,
    "context": context,
    "infer_options": infer_options,
    "pinned": pinned,
    "routes": routes,
    "statuses": statuses,
}


_PART = re.compile(r"(?<=<!-- rendered: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def with_parts(page: Path) -> str:
    """A page with its rendered parts as the code has them now."""
    text = page.read_text(encoding="utf-8")
    return _PART.sub(lambda part: f"{part[1]}{part[2]}{PARTS[part[1]]()}", text)


def render_all() -> dict[str, str]:
    whole = {name: render() for name, render in PAGES.items()}
    partly = {page.name: with_parts(page) for page in sorted(DOCS.glob("*.md")) if page.name not in PAGES}
    return whole | partly


if __name__ == "__main__":
    for page, text in render_all().items():
        (DOCS / page).write_text(text, encoding="utf-8")
