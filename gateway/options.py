"""The options of one infer call: priority, the three clocks, and the least bytes to lease.

Owns: names, types, bounds, and the refusal that names a wrong one. Does not own: the defaults of the clocks,
which are settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from gateway.hints import did_you_mean
from scheduler.expectation import expected
from scheduler.settings import ClockSettings
from vramgate.errors import InvalidInput, Refused
from vramgate.quantities import Size

MAX_PRIORITY = 9
_DAY_S = 86_400.0
_SIZE = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 2**53},
        {"type": "string", "pattern": r"^[1-9][0-9]{0,2}(\.[0-9]{1,3})? ?(KiB|MiB|GiB|TiB)$"},
    ]
}


class Options(BaseModel):
    """What a caller may ask for beside the inputs. None: the setting's default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    priority: int = Field(4, ge=0, le=MAX_PRIORITY, description="9 is most urgent")
    max_wait_s: float | None = Field(
        None,
        gt=0,
        le=_DAY_S,
        allow_inf_nan=False,
        description="Seconds that the job may wait for a card, per attempt",
    )
    run_timeout_s: float | None = Field(
        None, gt=0, le=_DAY_S, allow_inf_nan=False, description="Seconds that a run may take, per attempt"
    )
    total_timeout_s: float | None = Field(
        None,
        gt=0,
        le=7 * _DAY_S,
        allow_inf_nan=False,
        description="Seconds from submit to answer; never reset",
    )
    vram: Annotated[Size, WithJsonSchema(_SIZE)] | None = Field(
        None, ge=1, lt=2**53, description="May raise the estimate, not lower it"
    )

    def max_wait_ms(self, clocks: ClockSettings) -> int:
        return _ms(self.max_wait_s, clocks.max_wait_s)

    def run_timeout_ms(self, clocks: ClockSettings) -> int:
        return _ms(self.run_timeout_s, clocks.run_timeout_s)

    def total_timeout_ms(self, clocks: ClockSettings) -> int:
        return _ms(self.total_timeout_s, clocks.total_timeout_s)


def _ms(given_s: float | None, default_s: float) -> int:
    return max(1, round((default_s if given_s is None else given_s) * 1000))


DEFAULTS = Options()


def read_options(given: Any) -> Options:
    """Options out of a decoded body. Raises InvalidInput that names the option, its bound and the value."""
    if given is None or given == {}:
        return DEFAULTS
    if not isinstance(given, Mapping):
        raise InvalidInput(f"options must be an object, got {type(given).__name__}", field="options")
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        raise _explain(error) from None


def read_query(given: Sequence[tuple[str, str]]) -> Options:
    """Options out of query parameters, where the body is nothing but the input."""
    if not given:
        return DEFAULTS
    [(name, times)] = Counter(name for name, _ in given).most_common(1)
    if times > 1:
        raise InvalidInput(f"option {name[:80]!r} is given {times} times", field=f"options.{name[:80]}")
    try:
        return Options.model_validate_strings(dict(given), strict=False)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> Refused:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or "options"
    if first["type"] == "extra_forbidden":
        known = Options.model_fields
        hint = did_you_mean(name, known, otherwise=f"there are {', '.join(known)}")
        return InvalidInput(f"unknown option {name[:80]!r}; {hint}", field=f"options.{name[:80]}")
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    if first["type"] == "value_error":
        said = first["msg"].removeprefix("Value error, ")
        return InvalidInput(f"option {name}: {said}", field=f"options.{name}")
    wanted = expected(Options.model_fields[name])
    return InvalidInput(f"option {name}: expected {wanted}, got {shown}", field=f"options.{name}")
