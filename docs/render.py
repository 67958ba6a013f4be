"""Renders the pages of docs/ that are tables of the code: `python docs/render.py`; a test compares."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from scheduler import scripts, transitions
from scheduler.settings import ENV_PREFIX, ModelSettings, Settings
from vramgate.errors import TABLE, by_code
from vramgate.quantities import format_size

DOCS = Path(__file__).resolve().parent
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
        lines += [
            "",
            f"## {title}",
            "",
            "| key | default | bounds | help | variable |",
            "|---|---|---|---|---|",
        ]
        for name, field in model.model_fields.items():
            if _section_of(field) is None and name != "models":
                variable = ENV_PREFIX + (prefix + name).upper().replace(".", "__")
                cells = (
                    f"`{prefix}{name}`",
                    _default(field),
                    _bounds(field),
                    field.description or "",
                    f"`{variable}`",
                )
                lines.append(f"| {' | '.join(cells)} |")
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


def _bounds(field: FieldInfo) -> str:
    kinds = (
        get_args(field.annotation)
        if get_origin(field.annotation) in (Union, UnionType)
        else (field.annotation,)
    )
    for kind in kinds:
        if get_origin(kind) is Literal:
            return " or ".join(f"`{choice}`" for choice in get_args(kind))
    words: list[str] = []
    for bound in field.metadata:
        match bound:
            case Ge(ge=low):
                words.append(f"≥ {low}")
            case Gt(gt=low):
                words.append(f"> {low}")
            case Le(le=high):
                words.append(f"≤ {high}")
            case _:
                pattern = getattr(bound, "pattern", None)
                if pattern:
                    words.append(f"`{pattern}`".replace("|", "\\|"))
    return ", ".join(words)


def errors() -> str:
    retry: Mapping[str, str] = {
        "no": "no",
        "after": "after `Retry-After`",
        "maybe": "maybe",
        "yes": "yes, with the same key",
    }
    lines = [
        "# Errors",
        "",
        RENDERED_BY,
        "",
        "Every refusal and every failure is a problem document (RFC 9457), `type` = `urn:vramgate:<code>`;",
        "the client raises `vramgate.errors.<Class>`.",
        "",
        "| code | status | retry | class | a stored job ends as | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for row in TABLE.values():
        name = by_code(row.code).__name__
        cells = (
            f"`{row.code}`",
            str(row.status),
            retry[row.retry],
            f"`{name}`",
            row.job_state or "",
            row.title,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


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


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "errors.md": errors,
    "operations.md": ledger_scripts,
    "states.md": transitions.render_docs,
}


def render_all() -> dict[str, str]:
    return {name: render() for name, render in PAGES.items()}


if __name__ == "__main__":
    for page, text in render_all().items():
        (DOCS / page).write_text(text, encoding="utf-8")
