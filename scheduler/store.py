"""One pool on one server: connections, scripts, retries. Owns every Redis command of vramgate; knows no rule
of the ledger.

redis-py's defaults are wrong for a queue, so each is stated here: a bounded pool whose callers wait, short
timeouts, health checks, no hidden retries of commands. What is retried is the call of a script, because every
script is idempotent by an id or a number that its caller chose (`emit` is not, and is not retried).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgpack
import redis.asyncio as aioredis
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    MaxConnectionsError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from scheduler import scripts
from scheduler.blocking import BlockingLine
from scheduler.keys import Keys
from scheduler.logs import log_event
from scheduler.pipelining import ScriptLine, to_its_end
from scheduler.records import LAYOUT, other_layouts
from scheduler.settings import Settings, without_password
from vramgate import errors

logger = logging.getLogger("vramgate.ledger")

RETRIES = 2
BACKOFF = ExponentialWithJitterBackoff(cap=0.4, base=0.05)
LEASE_IDS = 16
MENDING_STEPS = 64
FLUSHES = 2
"""How often a script may be gone although it was just loaded, before its text is sent with the call."""
_UNAVAILABLE = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError)


class BadStore(errors.VramgateError):
    """This server can never hold a ledger; the message says what to change."""

    code = "store_unavailable"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a script said: a status, a map, and binary strings."""

    status: str
    fields: Mapping[str, Any]
    blobs: tuple[bytes, ...]

    @property
    def now_ms(self) -> int:
        return int(self.fields["now"])


def pack(value: object) -> bytes:
    """msgpack as the server's cmsgpack reads it: strings and bytes alike as raw."""
    packed: bytes = msgpack.packb(value, use_bin_type=False)
    return packed


def _packed(args: Mapping[str, Any]) -> bytes:
    return pack({field: value for field, value in args.items() if value is not None})


def unpack(packed: bytes) -> Any:
    """What cmsgpack or `pack` wrote; text that was cut in the middle of a character is repaired."""
    return msgpack.unpackb(packed, raw=False, unicode_errors="replace", strict_map_key=False)


def script_settings(settings: Settings) -> Mapping[str, float]:
    """The numbers that the scripts work by, in ms and bytes, in the order in which base.lua names them."""
    clocks, limits, keep, placement = settings.clocks, settings.limits, settings.retention, settings.placement
    return {
        "session_ms": round(clocks.session_s * 1000),
        "beat_ms": round(clocks.beat_s * 1000),
        "abandon_grace_ms": round(clocks.abandon_grace_s * 1000),
        "queue_jobs": limits.queue_jobs,
        "queue_bytes": limits.queue_bytes,
        "model_jobs": limits.model_jobs,
        "model_bytes": limits.model_bytes,
        "tenant_jobs": limits.tenant_jobs,
        "tenant_bytes": limits.tenant_bytes,
        "result_budget": limits.result_bytes,
        "key_ttl_ms": round(keep.key_ttl_s * 1000),
        "result_ttl_ms": round(keep.result_ttl_s * 1000),
        "delivered_ttl_ms": round(keep.delivered_ttl_s * 1000),
        "dead_letter_ttl_ms": round(keep.dead_letter_ttl_s * 1000),
        "tombstone_ttl_ms": round(keep.tombstone_ttl_s * 1000),
        "known_ttl_ms": round(keep.known_ttl_s * 1000),
        "packs": int(placement.policy == "pack"),
        "boost_ms": round(placement.boost_s * 1000),
        "max_passed": placement.max_passed,
        "max_passing_ms": round(placement.max_passing_s * 1000),
        "longest_run_ms": round(clocks.run_timeout_s * 1000),
    }


def _packed_settings(settings: Settings) -> bytes:
    numbers = script_settings(settings).values()
    return struct.pack(f"<{len(numbers)}d", *numbers)


class Store:
    """A pool's ledger. Calls raise errors.StoreUnavailable while the server is silent or full."""

    def __init__(self, settings: Settings, *, max_connections: int | None = None) -> None:
        self.settings = settings
        self.pool = settings.pool
        self.keys = Keys(settings.pool)
        # One half for scripts, the other for plain commands.
        connections = max(2, (max_connections or settings.redis.max_connections) // 2)
        timeout_s = settings.redis.command_timeout_s
        self.redis = self._client(connections, timeout_s=timeout_s)
        self._scripts = ScriptLine(self._client(connections, timeout_s=None), timeout_s=timeout_s)
        self._script_settings = _packed_settings(settings)
        self._run_id: str | None = None
        self._recovering = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._loads = 0
        self._is_checked = False

    @classmethod
    async def connect(cls, settings: Settings, *, max_connections: int | None = None) -> Self:
        """A store whose server was reached and found fit. Raises BadStore or errors.StoreUnavailable in one
        line.
        """
        store = cls(settings, max_connections=max_connections)
        try:
            await store.check()
        except BaseException:
            await store.close()
            raise
        return store

    def _client(self, max_connections: int, *, timeout_s: float | None) -> aioredis.Redis:
        settings = self.settings.redis
        pool = aioredis.BlockingConnectionPool.from_url(
            self.settings.redis_url,
            max_connections=max_connections,
            timeout=settings.command_timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=settings.connect_timeout_s,
            health_check_interval=15,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
            protocol=2,
            redis_connect_func=self._on_connect,
            **({} if self.settings.redis_url.startswith("unix:") else {"socket_keepalive": True}),
        )
        return aioredis.Redis(connection_pool=pool)

    def blocking_line(self, block_s: float) -> BlockingLine:
        """A connection for commands that wait in the server for up to `block_s`; it waits longer itself."""
        timeout_s = block_s + self.settings.redis.command_timeout_s + 3.0
        return BlockingLine(self._client(1, timeout_s=None), timeout_s=timeout_s)

    async def _on_connect(self, connection: Connection) -> None:
        """Compare the server's run id on each new connection: another server may stand behind the name."""
        await connection.on_connect()
        await connection.send_command("INFO", "server")
        info = await connection.read_response()
        text = info.decode() if isinstance(info, bytes) else str(info)
        run_id = next(
            (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("run_id:")), "?"
        )
        if run_id == self._run_id:
            return
        self._is_checked = False
        if self._run_id is not None:
            # Before anything else is asked of it: what this server lost must not be granted upon.
            await connection.send_command("HKEYS", self.keys.meta)
            try:
                self._refuse_other_layouts(await connection.read_response())
            except BadStore:
                await connection.disconnect()
                raise
            recover = (scripts.load("recover").text, 1, self.keys.meta, pack({"run_id": run_id}))
            await connection.send_command("EVAL", *recover, self.script_settings("recover"))
            await connection.read_response()
            log_event(logger, "ledger_changed_server", run_id=run_id)
        self._run_id = run_id

    async def check(self) -> None:
        """Reach the server, test that it can hold a ledger, load the scripts, audit once after a change of
        server.
        """
        await self.guarded(self.redis.ping)
        if not self._is_checked:
            await self._check_server()

    async def _check_server(self) -> None:
        async with self._recovering:
            if self._is_checked:
                return
            run_id = self._run_id
            await self.guarded(self._test_features)
            self._refuse_other_layouts(await self.guarded(self.redis.hkeys, self.keys.meta))
            await self.guarded(self._load_scripts)
            recover = {"run_id": run_id or "?"}
            answer = await self._guard(lambda: self._call("recover", recover, (), ()))
            self._is_checked = self._run_id == run_id
            if answer.fields["changed"]:
                log_event(logger, "ledger_recovered", incarnation=answer.fields["incarnation"], run_id=run_id)

    async def _test_features(self) -> None:
        info = await self.redis.info("memory")
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise BadStore(
                f"the server at {self.where} evicts keys (maxmemory-policy {policy}) and would lose leases; "
                "set maxmemory-policy noeviction"
            )
        try:
            await self.redis.eval("return #cmsgpack.pack({1})", 0)
        except ResponseError as error:
            raise BadStore(
                f"the server at {self.where} cannot run our scripts ({error}); use Valkey 8+ or Redis 6.2+"
            ) from None

    def _refuse_other_layouts(self, meta: Iterable[bytes]) -> None:
        if others := other_layouts(meta):
            raise BadStore(
                f"pool {self.pool} at {self.where} was written by another release (its records are of "
                f"layout {', '.join(others)}, not {LAYOUT}); serve it with that release until it is empty, "
                "then delete its keys, or use another pool (VRAMGATE_POOL)"
            )

    @property
    def where(self) -> str:
        """The server's address without its password."""
        return without_password(self.settings.redis_url)

    def script_settings(self, name: str) -> bytes:
        """What the operation `name` takes as its second argument."""
        return self._script_settings + name.encode() + b"\0"

    async def _reload_scripts(self, loads: int) -> None:
        """Once for all who met NOSCRIPT at the same time. loads: as counted before the call that failed."""
        async with self._loading:
            if self._loads == loads:
                await to_its_end(self._load_scripts())
                self._loads += 1

    async def _load_scripts(self) -> None:
        async with self.redis.pipeline(transaction=False) as pipe:
            for text in {scripts.load(name).text for name in scripts.names()}:
                pipe.script_load(text)
            await pipe.execute()

    async def _guard(self, command: Callable[[], Any]) -> Any:
        try:
            return await command()
        except MaxConnectionsError:
            raise errors.StoreUnavailable(
                "all connections to the ledger are in use; try again", retry_after_s=1
            ) from None
        except OutOfMemoryError:
            raise errors.StoreUnavailable(
                f"the ledger at {self.where} is full (maxmemory reached); running jobs go on", retry_after_s=5
            ) from None
        except (*_UNAVAILABLE, OSError) as error:
            raise errors.StoreUnavailable(
                f"the ledger at {self.where} does not answer: {error}", retry_after_s=1
            ) from error
        except ResponseError as error:
            if "OOM command not allowed" in str(error):
                raise errors.StoreUnavailable(
                    f"the ledger at {self.where} is full (maxmemory reached); running jobs go on",
                    retry_after_s=5,
                ) from None
            raise
        except RedisError as error:
            raise errors.StoreUnavailable(f"the ledger at {self.where}: {error}", retry_after_s=1) from error

    async def guarded(self, command: Callable[..., Any], *args: Any) -> Any:
        """One plain command, with the errors of `run`."""
        return await self._guard(lambda: to_its_end(command(*args)))

    async def wait_for(self, line: BlockingLine, *command: bytes | str | float) -> Any:
        """A command that waits in the server, with the errors of `run`. A cancel ends its connection."""
        return await self._guard(lambda: line.ask(*command))

    async def run(
        self,
        name: str,
        args: Mapping[str, Any] | bytes,
        *,
        keys: Sequence[str] = (),
        blobs: Sequence[bytes] = (),
        is_idempotent: bool = True,
    ) -> Reply:
        """Run lua/<name>.lua. args: no None inside lists; bytes are packed already.

        Raises errors.StoreUnavailable, errors.Internal for a script's own fault.
        """
        if not self._is_checked:
            await self.check()
        retries = RETRIES if is_idempotent else 0
        try:
            reply: Reply = await self._guard(lambda: self._call_again(retries, name, args, keys, blobs))
        except ResponseError as error:
            log_event(logger, "script_failed", level=logging.ERROR, script=name, error=str(error))
            await self._mend()
            raise errors.Internal(f"the ledger's operation {name} failed: {error}") from error
        if not self._is_checked:
            await self._check_server()
        return reply

    async def _call_again(
        self,
        retries: int,
        name: str,
        args: Mapping[str, Any] | bytes,
        keys: Sequence[str],
        blobs: Sequence[bytes],
    ) -> Reply:
        """`_call`, and after a failure of the connection up to `retries` times more."""
        failures = 0
        while True:
            try:
                return await self._call(name, args, keys, blobs)
            except _UNAVAILABLE:
                failures += 1
                if failures > retries:
                    raise
                await asyncio.sleep(BACKOFF.compute(failures))

    async def _mend(self) -> None:
        """What a script left behind that failed half-way is put right before anybody builds on it; where that
        takes long, the gateways' beats go on.
        """
        audit = functools.partial(self._call, "audit", keys=(), blobs=())
        try:
            reply = await self._guard(lambda: audit({"cards": []}))
            for _ in range(MENDING_STEPS):
                if not reply.fields["more"]:
                    return
                reply = await self._guard(lambda: audit({"go_on": 1}))
        except ResponseError as error:
            log_event(logger, "audit_failed", level=logging.ERROR, error=str(error))

    async def _call(
        self, name: str, args: Mapping[str, Any] | bytes, keys: Sequence[str], blobs: Sequence[bytes]
    ) -> Reply:
        script = scripts.load(name)
        all_keys = (self.keys.meta, *keys)
        lease_ids = os.urandom(16 * LEASE_IDS).hex() if script.needs_lease_ids else ""
        given = args if isinstance(args, bytes) else _packed(args)
        argv: tuple[bytes | str, ...] = (*all_keys, given, self.script_settings(name), lease_ids, *blobs)
        for _ in range(FLUSHES):
            loads = self._loads
            try:
                raw = await self._scripts.evalsha(script.sha, len(all_keys), argv)
                break
            except NoScriptError:
                await self._reload_scripts(loads)
        else:
            raw = await to_its_end(self.redis.eval(script.text, len(all_keys), *argv))
        reply = Reply(raw[0].decode(), unpack(raw[1]), tuple(raw[2:]))
        if mended := reply.fields.get("mended"):
            log_event(logger, "ledger_mended", level=logging.ERROR, **mended)
        return reply

    async def close(self) -> None:
        await self._scripts.close()
        await self.redis.aclose()
        await self.redis.connection_pool.disconnect()
