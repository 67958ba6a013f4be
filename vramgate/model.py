"""What a user writes to serve a model: `Model`, and the `Context` that the service hands to it.

Owns: the class attributes that declare how a model behaves, their checks at class definition (so that a typo
is one line at import and not a failure under load), and the parsing of inputs into `input_schema`.
Does not own: how the context is implemented (the agent's child does that), entry points, estimates.
Imports no torch: the same file is read by tools that have none.
"""

from __future__ import annotations

import abc
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import pydantic
import pydantic.fields

from vramgate.errors import InputError
from vramgate.quantities import parse_size
from vramgate.units import UnitsError, compile_units

BatchUnits = Literal["sum", "max_times_n"]

MAX_BATCH_LIMIT = 1024
MAX_LANES = 16


@runtime_checkable
class Context(Protocol):
    """What a model may ask of the service while it loads and runs.

    One context per lane, not to be shared between threads.
    """

    @property
    def device(self) -> Any:
        """The `torch.device` to put weights and inputs on."""

    @property
    def dtype(self) -> Any:
        """The `torch.dtype` that floating-point weights and inputs should have."""

    @property
    def mode(self) -> str:
        """The variant that runs: `"default"`, or the name of a declared fallback such as `"cpu"`."""

    @property
    def log(self) -> logging.Logger:
        """A logger named after the model; what it writes is in the log of the card's agent."""

    def progress(self, done: float, total: float, item: int | None = None) -> None:
        """Tell the callers how far the work is: for the item at this index, or for all with None."""

    def cancelled(self, i: int) -> bool:
        """Whether nobody waits for item `i` of the running batch any more. Its place in the answer stays."""

    def raise_if_cancelled(self) -> None:
        """Raise `vramgate.Cancelled` when every item of the running batch is cancelled.

        Cheap: call it at each step, and let the exception through.
        """

    def tensor(self, data: Any, shape: Sequence[int], dtype: Any = None) -> Any:
        """A tensor of `shape` on `device`, filled from `data`: bytes (read as `dtype`), numbers or a tensor.

        It lives in a buffer that is used again for the next batch: keep no reference after `predict` returns.
        `dtype` defaults to `Context.dtype`. Where `data` ends early, or is None, there are zeros.
        """

    def reserve(self, nbytes: int) -> None:
        """Declare `nbytes` of workspace that kernels take behind torch's back in this batch."""


class Model(abc.ABC):
    """A model to serve. Subclass it, declare what it needs, and name it in `vramgate.toml` as `"file:Class"`.

    One instance lives in one process on one card. Calls come from one thread, unless `lanes` is over 1: then
    `predict` must be safe to call from that many threads at once.

    What your code raises, SystemExit, KeyboardInterrupt, RecursionError and MemoryError included, fails the
    item that it was about as `model_error`, and an `InputError` as `rejected_by_model`; the process and the
    other items go on. What ends the process itself (`os._exit`, a signal, a stack that overflows in C) is a
    crash: each of its jobs runs again, alone, and the one that ends it alone twice fails as `crashed`.
    """

    input_schema: ClassVar[type[pydantic.BaseModel] | None] = None
    """Class of the inputs; items of a batch are instances of it. None: items are dicts, checked by nobody."""

    output_schema: ClassVar[type[pydantic.BaseModel] | None] = None
    """Class of one output, published for callers to read; answers are not checked against it."""

    units: ClassVar[str] = "1"
    """What memory grows with, as an expression over the inputs: see `vramgate.units`."""

    batch_units: ClassVar[BatchUnits] = "sum"
    """Units of a batch: the sum over its items, or (padding) the largest item times their number."""

    max_batch: ClassVar[int] = 1
    """The most items that one call of `predict` gets."""

    lanes: ClassVar[int] = 1
    """How many calls of `predict` may run at once. Each lane has a thread and a stream of its own."""

    vram: ClassVar[int | str | None] = None
    """Bytes that loading and the first run take, until they are measured: `2_000_000_000` or `"2GiB"`."""

    check_finite: ClassVar[bool] = True
    """Whether an answer with NaN or infinity is refused as `non_finite`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_declarations(cls)

    @abc.abstractmethod
    def load(self, ctx: Context) -> None:
        """Load the weights onto `ctx.device`. Called once, before anything else."""

    @abc.abstractmethod
    def predict(self, batch: list[Any], ctx: Context) -> Sequence[Any] | Iterator[Sequence[Any]]:
        """Answer a batch: one output per item, in order. An exception instance fails its item alone.

        A generator yields such lists; None in a place means nothing for that item now. The caller of an item
        that got several outputs by the end gets the list of them.

        Keys of mappings leave as JSON has them: text; numbers, booleans and None written out (`1` is `"1"`).
        Other keys, and two that would become one, are `model_error`.
        """

    @abc.abstractmethod
    def sample(self, units: float) -> Any:
        """An input (of `input_schema`, or a dict) of about `units` units, for warm-up and profiling."""

    def unload(self) -> None:
        """Let go of everything on the card. The default trusts that dropping the instance is enough."""
        return None

    def park(self) -> None:
        """Move the weights to host memory. The default does nothing, and the service then unloads instead."""
        return None

    def unpark(self, ctx: Context) -> None:
        """Bring parked weights back onto `ctx.device`."""
        return None

    @classmethod
    def parse(cls, inputs: Mapping[str, Any]) -> Any:
        """One item for `predict`, from decoded inputs. Raises `InputError` naming the first wrong field."""
        if cls.input_schema is None:
            return dict(inputs)
        try:
            return cls.input_schema.model_validate(dict(inputs))
        except pydantic.ValidationError as error:
            raise refusal(error) from None

    @classmethod
    def count_units(cls, inputs: Mapping[str, Any] | pydantic.BaseModel) -> float:
        """The units of one input. Raises `InputError` as `Units.evaluate` does."""
        if isinstance(inputs, pydantic.BaseModel):
            fields = type(inputs).model_fields
            inputs = {_wire_name(name, field): getattr(inputs, name) for name, field in fields.items()}
        return compile_units(cls.units).evaluate(inputs, defaults=_defaults(cls))

    @classmethod
    def declared_bytes(cls) -> int | None:
        """`vram` as a number of bytes, or None when nothing is declared."""
        if cls.vram is None:
            return None
        if not (nbytes := parse_size(cls.vram)):
            raise ValueError("0 bytes; leave it out when it is not known")
        return nbytes

    @classmethod
    def input_json_schema(cls) -> dict[str, Any]:
        """JSON Schema of one input, as published; any object where the model declares none."""
        if cls.input_schema is None:
            return {"type": "object"}
        return cls.input_schema.model_json_schema(mode="validation")


def refusal(error: pydantic.ValidationError) -> InputError:
    """The first wrong field of inputs that a pydantic class refused, as the error that callers are told."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if not found:
        return InputError(f"the inputs are no {error.title}")
    return InputError(found[0]["msg"], field=".".join(str(part) for part in found[0]["loc"]) or None)


def schema_defaults(json_schema: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of the top-level fields of a published input schema; units are counted with them."""
    fields: Mapping[str, Mapping[str, Any]] = json_schema.get("properties", {})
    return {name: field["default"] for name, field in fields.items() if "default" in field}


@functools.cache
def _defaults(cls: type[Model]) -> Mapping[str, Any]:
    return schema_defaults(cls.input_json_schema())


def _wire_name(name: str, field: pydantic.fields.FieldInfo) -> str:
    """The name under which callers send a field, which is also its name in the published schema."""
    return field.validation_alias if isinstance(field.validation_alias, str) else name


def batch_need(units: Sequence[float], how: BatchUnits) -> float:
    """Units of a batch out of those of its items: their sum, or (padded) the largest times their number."""
    return max(units) * len(units) if how == "max_times_n" else sum(units)


def _check_declarations(cls: type[Model]) -> None:
    for name in ("input_schema", "output_schema"):
        schema = getattr(cls, name)
        if schema is not None and not (inspect.isclass(schema) and issubclass(schema, pydantic.BaseModel)):
            raise TypeError(
                f"{cls.__name__}.{name} must be a pydantic.BaseModel class or None, got {schema!r}"
            )
    if cls.batch_units not in ("sum", "max_times_n"):
        raise ValueError(
            f'{cls.__name__}.batch_units must be "sum" or "max_times_n", got {cls.batch_units!r}'
        )
    _check_count(cls, "max_batch", MAX_BATCH_LIMIT)
    _check_count(cls, "lanes", MAX_LANES)
    try:
        fields = compile_units(cls.units).fields
    except UnitsError as error:
        raise ValueError(f"{cls.__name__}.units: {error}") from None
    schema = cls.input_schema
    if schema is not None and (
        unknown := sorted(fields - {_wire_name(*item) for item in schema.model_fields.items()})
    ):
        raise ValueError(
            f"{cls.__name__}.units = {cls.units!r} names {unknown[0]!r}, which {schema.__name__} has not"
        )
    try:
        cls.declared_bytes()
    except ValueError as error:
        raise ValueError(f"{cls.__name__}.vram: {error}") from None


def _check_count(cls: type[Model], name: str, most: int) -> None:
    value = getattr(cls, name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{cls.__name__}.{name} must be an integer from 1 to {most}, got {value!r}")
