"""Everything on one box: a server for the ledger, gateways and agents as processes, started and ended in
order.

Owns which processes there are, their order, and what they are told. Does not own a process's life
(`service_process`, `scheduler.embedded`), nor what is said to the user before and after (`up`, `demo`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from scheduler import inventory
from scheduler.embedded import EmbeddedServer, ServerError
from scheduler.settings import Settings, load_settings
from scheduler.store import Store
from scheduler.views import CardView, with_reason
from vramgate.cli import background, upfile
from vramgate.cli.exits import Failure
from vramgate.cli.preflight import (
    check_door,
    check_entrypoints,
    check_ports,
    check_simulation,
    lock_directory,
)
from vramgate.cli.service_process import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Say, ServiceProcess
from vramgate.cli.services import agent_command, gateway_command
from vramgate.cli.target import Target, open_store
from vramgate.errors import VramgateError
from vramgate.pids import start_of

GATEWAY_START_S = 60.0
CARDS_START_S = 120.0
LOCAL_DRAIN_S = 0.5
"""Nobody balances load before a box of one's own, so a gateway need not say for long that it is draining."""

_POLL_S = 0.1
_WATCH_S = 0.5
_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start. `redis`: a server that runs already; None for the one that the configuration names, or
    for one of our own where it names none. `is_alone`: one of our own whatever is configured.
    """

    config: Path | None
    simulate: str | None
    gateways: int = 1
    workers: int | None = None
    host: str | None = None
    port: int | None = None
    redis: str | None = None
    pool: str | None = None
    insecure: bool = False
    is_alone: bool = False


class Stack:
    """The processes of one box. `start` returns when the gateways answer and the cards are known; then
    `urls` and `settings` say how to reach them."""

    def __init__(self, plan: Plan, *, say: Say) -> None:
        self._plan = plan
        self._say = say
        self.settings = _settings_of(plan, redis_url=plan.redis)
        self.data_dir = Path.cwd() / self.settings.redis.data_dir
        is_named = plan.redis is not None or "redis_url" in self.settings.model_fields_set
        self._has_server = plan.is_alone or not is_named
        self._server = EmbeddedServer()
        self._server_watch: asyncio.Task[None] | None = None
        self._gateways: list[ServiceProcess] = []
        self._agents: list[ServiceProcess] = []
        self._lock: int | None = None
        self.hurry = asyncio.Event()
        self._is_stopping = False
        first = self.settings.gateway.port if plan.port is None else plan.port
        self._ports = [first + index for index in range(plan.gateways)]

    @property
    def urls(self) -> tuple[str, ...]:
        host = self.settings.gateway.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "") else f"[{host}]" if ":" in host else host
        return tuple(f"http://{shown}:{port}" for port in self._ports)

    @property
    def server_pid(self) -> int | None:
        return self._server.pid

    @property
    def agent_pids(self) -> tuple[int, ...]:
        return tuple(agent.pid for agent in self._agents if agent.pid is not None)

    async def start(self) -> None:
        """Server, gateways, agents. Raises Failure or ServerError in one line; `stop` must be called either
        way.
        """
        check_door(self.settings)
        check_ports(self.settings.gateway.host, self._ports)
        check_entrypoints(self.settings, self._plan.config)
        check_simulation(self._plan.simulate)
        self._lock = lock_directory(self.data_dir)
        if self._has_server:
            await self._start_server()
        else:
            async with open_store(Target(self.settings, "from --redis or the configuration")):
                pass  # a ledger that does not answer, or that evicts, is told before anything is started
        upfile.write(self.data_dir, self._running())
        self._say(f"logs     {self.settings.redis.data_dir / 'logs'}")
        # Side by side: loading models takes long, and an agent that cannot start shall not wait to say so.
        starting = [
            asyncio.create_task(self._start_gateways(), name="start gateways"),
            asyncio.create_task(self._start_agents(), name="start agents"),
        ]
        try:
            await asyncio.gather(*starting)
        finally:
            await background.end(*starting)

    async def stop(self) -> None:
        """Gateways first, so that nothing new is accepted; then agents; the server last. Nothing is left
        running.
        """
        self._is_stopping = True
        await asyncio.gather(*(gateway.stop(self.hurry) for gateway in self._gateways))
        await asyncio.gather(*(agent.stop(self.hurry) for agent in self._agents))
        if self._server_watch is not None:
            await background.end(self._server_watch)
        await self._server.stop()
        if self._lock is not None:
            upfile.remove(self.data_dir)
            os.close(self._lock)
            self._lock = None

    def kill(self) -> None:
        """SIGKILL every service at once. The server is bound to this process: it ends, flushed, after it."""
        self._is_stopping = True
        for service in (*self._gateways, *self._agents):
            service.kill()

    async def _start_server(self) -> None:
        await self._server.start(self.data_dir / "server")
        self.settings = _settings_of(self._plan, redis_url=self._server.url)
        self._say(
            f"ledger   {self._server.url}  (data in {self.settings.redis.data_dir}, pid {self._server.pid})"
        )
        self._server_watch = asyncio.create_task(self._keep_server(), name="watch the ledger's server")

    async def _keep_server(self) -> None:
        """Start the server again, on its port and over its data, whenever it ends."""
        backoff_s, port = FIRST_BACKOFF_S, self._server.port
        while not self._is_stopping:
            status = await self._server.wait()
            if self._is_stopping:
                return
            self._say(
                f"the ledger's server ended with status {status}, starting again: {self._server.last_words()}"
            )
            while not self._is_stopping:
                try:
                    await self._server.start(self.data_dir / "server", port)
                    break
                except ServerError as error:
                    self._say(f"{error.detail}; trying again in {backoff_s:.3g} s")
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(LONGEST_BACKOFF_S, backoff_s * 2)
            self._say(f"the ledger's server runs again (pid {self._server.pid})")

    async def _start_gateways(self) -> None:
        plan, settings = self._plan, self.settings
        drains = settings.gateway.drain_s if "drain_s" in settings.gateway.model_fields_set else LOCAL_DRAIN_S
        for port in self._ports:
            command = gateway_command(
                settings,
                config=plan.config,
                host=plan.host,
                port=port,
                workers=plan.workers,
                insecure=plan.insecure,
            )
            command += ["--drain", f"{drains}s"]
            gateway = ServiceProcess(
                f"gateway on port {port}",
                command,
                log=self.data_dir / "logs" / f"gateway-{port}.log",
                say=self._say,
                stop_timeout_s=drains + settings.gateway.grace_s + _MARGIN_S,
            )
            self._gateways.append(gateway)
            await gateway.start()
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:
            for gateway, url in zip(self._gateways, self.urls, strict=True):
                await _until_serving(http, gateway, url)
                gateway.keep_running()
                self._say(f"gateway  {url}")

    async def _start_agents(self) -> None:
        agent = ServiceProcess(
            "the agents",
            agent_command(self.settings, config=self._plan.config, simulate=self._plan.simulate),
            log=self.data_dir / "logs" / "agents.log",
            say=self._say,
            stop_timeout_s=self.settings.agent.drain_s + _MARGIN_S,
            environment=_shared_cores(self._plan.simulate),
        )
        self._agents.append(agent)
        await agent.start()
        store = await Store.connect(self.settings, max_connections=2)
        try:
            async with asyncio.timeout(CARDS_START_S):
                # A card of an earlier `up` is known until its session ends, but it is not of this agent.
                while not any(card.session_left_ms > 0 for card in await inventory.cards(store)):
                    agent.refuse_end()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise Failure(f"no card registered within {CARDS_START_S:.0f} s: {agent.last_words()}") from None
        finally:
            await store.close()
        agent.keep_running()

    def _running(self) -> upfile.Running:
        return upfile.Running(
            pid=os.getpid(),
            started=start_of(os.getpid()) or 0,
            redis_url=self.settings.redis_url,
            pool=self.settings.pool,
            gateways=self.urls,
            simulate=self._plan.simulate,
        )


def _settings_of(plan: Plan, *, redis_url: str | None) -> Settings:
    door = {"host": plan.host, "insecure": True if plan.insecure else None}
    return load_settings(plan.config, redis_url=redis_url, pool=plan.pool, gateway=door)


def _shared_cores(simulate: str | None) -> dict[str, str]:
    """Simulated cards compute on this host's cores. Each gets its share: torch takes all of them for each
    process, and threads that wait for each other by spinning make a batch several times slower."""
    cards = (simulate or "").lower().partition("x")[0].strip()
    if not cards.isdecimal() or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // max(1, int(cards))))}


async def _until_serving(http: httpx.AsyncClient, gateway: ServiceProcess, url: str) -> None:
    try:
        async with asyncio.timeout(GATEWAY_START_S):
            while True:
                gateway.refuse_end()
                # Before it listens it may be a stranger that answers on its port.
                if gateway.has_said("gateway_listens") and await _is_serving(http, url):
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise Failure(
            f"{gateway.name} did not answer within {GATEWAY_START_S:.0f} s: {gateway.last_words()}"
        ) from None


async def _is_serving(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/readyz", params={"scope": "gateway"})).status_code == 200
    except httpx.RequestError:
        return False


async def watch_cards(settings: Settings, say: Say, stopped: asyncio.Event) -> None:
    """Say each change of a card's state and of its models, once. Runs until `stopped` is set or it is
    cancelled.
    """
    said: Mapping[str, str] = {}
    log = settings.redis.data_dir / "logs" / "agents.log"
    store = Store(settings, max_connections=2)
    try:
        while not stopped.is_set():
            with contextlib.suppress(VramgateError):
                cards = await inventory.cards(store)
                lines = {card.id: card_line(card) for card in cards}
                if is_of_no_use(cards):
                    lines[""] = f"nothing can be served: no model is ready on any card; see {log}"
                for name, line in lines.items():
                    if said.get(name) != line:
                        say(line)
                said = lines
            await asyncio.sleep(_WATCH_S)
    finally:
        await store.close()


def is_of_no_use(cards: Sequence[CardView]) -> bool:
    """Whether cards are up that have tried their models, and none of these is ready anywhere."""
    models = [model for card in cards for model in card.models]
    return any(card.state == "ready" for card in cards) and bool(models) and not any(m.ready for m in models)


def card_line(card: CardView) -> str:
    """A card in one line: its name, state, and its models with the reason why one is not ready."""
    models = [
        model.name if model.ready else f"{model.name} (not ready: {model.reason or 'loading'})"
        for model in card.models
    ]
    state = with_reason(card.state, card.reason)
    return f"card     {card.name}  {card.id}  {card.product}  {state}  models: {', '.join(models) or 'none'}"
