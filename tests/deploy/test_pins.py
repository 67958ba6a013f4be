"""constraints.txt and pyproject.toml speak of the same packages."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.nginx import REPOSITORY

PINS = {
    canonicalize_name(requirement.name): requirement
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
    for requirement in [Requirement(line)]
}


def declared() -> Iterator[Requirement]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for lines in [project["dependencies"], *project["optional-dependencies"].values()]:
        yield from (Requirement(line) for line in lines)


@pytest.mark.parametrize("requirement", list(declared()), ids=lambda requirement: str(requirement.name))
def test_every_direct_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    """What the tests run with is what the metadata allows."""
    (pin,) = PINS[canonicalize_name(requirement.name)].specifier
    assert pin.operator == "=="
    assert requirement.specifier.contains(pin.version)


def test_pins_are_exact_and_hold_for_every_build() -> None:
    """Each line is one exact version, none of them a local one: torch comes as a CPU or a CUDA build."""
    for name, requirement in PINS.items():
        (pin,) = requirement.specifier
        assert pin.operator == "==", name
        assert "+" not in pin.version, name
