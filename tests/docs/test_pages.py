"""The pages of docs/ say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "cli.md",
    "configuration.md",
    "errors.md",
    "http.md",
    "models.md",
    "operations.md",
    "states.md",
)


def _renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs/render.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES)
def test_a_rendered_page_equals_the_code(page: str) -> None:
    """`python docs/render.py` would change nothing."""
    rendered: str = _renderer().render_all()[page]
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == rendered


def test_guarantees_name_tests_that_exist() -> None:
    """Every promise points at tests that are there."""
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "docs/guarantees.md").read_text(encoding="utf-8"))
    assert named
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


def test_links_between_pages_lead_somewhere() -> None:
    """Relative links in README.md and docs/ point at files."""
    dead = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                dead.append(f"{page.name}: {target}")
    assert not dead


def _heads(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_into_pages_lead_to_a_heading() -> None:
    """`http.md#events` and `#events` name a heading of their page."""
    dead = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            at = page.parent / target if target else page
            if anchor not in _heads(at):
                dead.append(f"{page.name}: {target}#{anchor}")
    assert not dead
