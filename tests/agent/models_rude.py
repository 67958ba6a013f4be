"""Models whose code raises what is no Exception, or leaves, at every place where it is called."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic

import vramgate


class Leaving:
    """Wants to end the process when it is dropped, printed as a number, or sent."""

    def __del__(self) -> None:
        raise SystemExit(3)

    def __lt__(self, other: object) -> bool:
        return False

    def __float__(self) -> float:
        raise SystemExit(4)


class Answer(pydantic.BaseModel):
    """Cannot be turned into plain values."""

    @pydantic.model_serializer
    def leave(self) -> dict[str, Any]:
        raise SystemExit(5)


class Wish(pydantic.BaseModel):
    """A validator that raises what `text` names."""

    text: str = "sample"

    @pydantic.field_validator("text")
    @classmethod
    def obey(cls, text: str) -> str:
        where, _, what = text.partition(":")
        if where == "validate":
            raise_named(what)
        return text


def raise_named(what: str) -> None:
    """An exception by its name; `ValueError` is what a validator is meant to raise."""
    kinds = (SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, ValueError)
    raise {kind.__name__: kind for kind in kinds}[what]("it wants to leave")


_asked: set[type] = set()


class Calm(vramgate.Model):
    """Answers with the size of its batch; the others leave at one place."""

    max_batch = 4

    def load(self, ctx: vramgate.Context) -> None:
        return None

    def predict(self, batch: list[Any], ctx: vramgate.Context) -> Sequence[Any] | Iterator[Sequence[Any]]:
        return [len(batch)] * len(batch)

    def sample(self, units: float) -> Any:
        return {"text": "sample"}


class Rude(Calm):
    """Leaves in validators, while units are counted, in predict, in what it returns and in what it drops."""

    input_schema = Wish

    @classmethod
    def count_units(cls, inputs: Any) -> float:
        where, _, what = (inputs["text"] if isinstance(inputs, dict) else inputs.text).partition(":")
        if where == "units":
            raise_named(what)
        return 1.0

    def predict(self, batch: list[Wish], ctx: vramgate.Context) -> Sequence[Any]:
        return [self._one(*item.text.partition(":")[::2], len(batch), ctx) for item in batch]

    def _one(self, where: str, what: str, size: int, ctx: vramgate.Context) -> Any:
        match where:
            case "slow":
                time.sleep(float(what))
            case "predict":
                raise_named(what)
            case "return":
                return SystemExit(what)
            case "send":
                return Answer()
            case "progress":
                ctx.progress(Leaving(), 2)  # type: ignore[arg-type]
            case "drop":
                Leaving()
            case "thread":
                thread = threading.Thread(target=sys.exit)
                thread.start()
                thread.join()
            case "interrupt":
                _thread.interrupt_main()
            case "fork":
                if os.fork() == 0:
                    sys.exit(0)
            case "shout":
                # Into every socket, those to the supervisor among them.
                for fd in Path("/proc/self/fd").iterdir():
                    if fd.is_socket():
                        os.write(int(fd.name), b"\xff" * 8)
                time.sleep(600)
            case "recurse":
                return self._one(where, what, size, ctx)
            case "memory":
                return bytearray(2**62)
            case "kill":
                os._exit(0)
        return size


class Flowing(Calm):
    """Yields, and leaves in the middle, at its end, or in the conversion of one item's piece."""

    input_schema = Wish

    def predict(self, batch: list[Wish], ctx: vramgate.Context) -> Iterator[Sequence[Any]]:
        time.sleep(0.3 * any(item.text == "slow" for item in batch))
        try:
            yield [Answer() if item.text == "piece" else 1 for item in batch]
            if any(item.text == "next" for item in batch):
                raise SystemExit(6)
            yield [2 for _ in batch]
        finally:
            if any(item.text == "close" for item in batch):
                raise SystemExit(7)


class ExitsAtLoad(Calm):
    """Leaves while it loads."""

    def load(self, ctx: vramgate.Context) -> None:
        sys.exit("there is no licence")


class ExitsAtSample(Calm):
    """Leaves when it is asked for a sample: it serves, unmeasured."""

    vram = "8MiB"

    def sample(self, units: float) -> Any:
        sys.exit("there is no sample")


class ExitsAtSecondSample(Calm):
    """Has a small sample and leaves at a larger one."""

    units = "x"

    def sample(self, units: float) -> Any:
        return {"x": units} if units <= 1 else sys.exit("there is no larger sample")


class ExitsAtUnload(Calm):
    """Leaves when it is told to let go."""

    def unload(self) -> None:
        sys.exit("it will not let go")


class ExitsAtBytes(Calm):
    """Leaves when it is asked for its size."""

    @classmethod
    def declared_bytes(cls) -> int | None:
        if cls in _asked:
            sys.exit("it does not say")
        _asked.add(cls)
        return None


def _with_schema(name: str, extra: dict[Any, Any]) -> type[vramgate.Model]:
    schema = type("Extra", (Wish,), {"model_config": pydantic.ConfigDict(json_schema_extra=extra)})
    return type(name, (Calm,), {"input_schema": schema, "__module__": __name__})


HugeNumber = _with_schema("HugeNumber", {"examples": [{"n": 10**30}]})
SetInside = _with_schema("SetInside", {"examples": {1, 2}})
NumberedKey = _with_schema("NumberedKey", {"examples": [{1: "one"}]})
Surrogate = _with_schema("Surrogate", {"description": "\udcff"})
BytesInside = _with_schema("BytesInside", {"examples": [b"x"]})


class Nan(pydantic.BaseModel):
    """A default that JSON does not have."""

    value: float = float("nan")


class NanDefault(Calm):
    """Publishes NaN."""

    input_schema = Nan


class ExitingSchema(Calm):
    """Leaves when its schema is asked for."""

    @classmethod
    def input_json_schema(cls) -> dict[str, Any]:
        sys.exit("it has no schema")
