"""docker-compose.yml and deploy/Dockerfile, read as Compose and Docker would, without either of them."""

from __future__ import annotations

import ipaddress
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from scheduler.settings import AgentSettings, GatewaySettings, Settings, load_settings
from tests.deploy.nginx import CONFIGURATION, GATEWAYS, REPOSITORY
from vramgate.cli.main import app

COMPOSE = REPOSITORY / "docker-compose.yml"
DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"

Service = dict[str, Any]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded = yaml.safe_load(COMPOSE.read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def services(document: dict[str, Any]) -> dict[str, Service]:
    found: dict[str, Service] = document["services"]
    return found


def gateways_of(services: dict[str, Service]) -> dict[str, Service]:
    return {name: service for name, service in services.items() if name.startswith("gateway-")}


def agents_of(services: dict[str, Service]) -> dict[str, Service]:
    return {name: service for name, service in services.items() if name.startswith("agent")}


def seconds(text: str) -> float:
    """A duration as this file writes it: 45s, 2m."""
    match = re.fullmatch(r"(\d+)(s|m)", text)
    assert match is not None, text
    return float(match[1]) * {"s": 1, "m": 60}[match[2]]


def option(service: Service, name: str) -> str:
    command: list[str] = service["command"]
    return command[command.index(name) + 1]


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_file_is_valid_compose(tmp_path: Path) -> None:
    """The Compose specification's own schema takes the file, and refuses it with one word misspelt."""
    taken = validate(COMPOSE)
    assert taken.returncode == 0, taken.stdout + taken.stderr
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(COMPOSE.read_text().replace("stop_grace_period:", "stop_grace_time:"))
    refused = validate(broken)
    assert refused.returncode == 1
    assert "stop_grace_time" in refused.stdout


def test_the_ledger_forgets_nothing(services: dict[str, Service]) -> None:
    """The server evicts nothing, writes every job to disk, and keeps its data in a named volume."""
    redis = services["redis"]
    assert option(redis, "--maxmemory-policy") == "noeviction"
    assert option(redis, "--appendonly") == "yes"
    assert redis["volumes"] == ["ledger:/data"]
    assert "ports" not in redis


def test_the_ledger_has_room_for_what_the_limits_allow(services: dict[str, Service]) -> None:
    """maxmemory holds the payloads and the results that the defaults admit, with a third of it to spare."""
    limits = Settings.model_fields["limits"].default
    size = re.fullmatch(r"(\d+)gb", option(services["redis"], "--maxmemory"))
    assert size is not None
    assert int(size[1]) * 2**30 >= 1.5 * (limits.queue_bytes + limits.result_bytes)


def test_services_are_given_the_time_that_their_drain_takes(services: dict[str, Service]) -> None:
    """Grace periods exceed the settings' drains and nginx's longest request: Docker kills nobody at work."""
    gateway, agent, clocks = GatewaySettings(), AgentSettings(), Settings.model_fields["clocks"].default
    for service in gateways_of(services).values():
        assert seconds(service["stop_grace_period"]) > gateway.drain_s + gateway.grace_s
    for service in agents_of(services).values():
        assert seconds(service["stop_grace_period"]) > agent.drain_s
    nginx = services["nginx"]
    assert nginx["stop_signal"] == "SIGQUIT"
    assert seconds(nginx["stop_grace_period"]) > clocks.total_timeout_s + 10


def test_nginx_and_compose_mean_the_same_gateways(
    document: dict[str, Any], services: dict[str, Service]
) -> None:
    """The upstream of deploy/nginx.conf is exactly the gateways' fixed addresses, all in its subnet."""
    fixed = {
        f"{service['networks']['front']['ipv4_address']}:{service['environment']['VRAMGATE_GATEWAY__PORT']}"
        for service in gateways_of(services).values()
    }
    upstream = set(re.findall(r"^ +server (\S+:\d+) ", CONFIGURATION.read_text(), re.MULTILINE))
    assert fixed == upstream == set(GATEWAYS)
    subnet = ipaddress.ip_network(document["networks"]["front"]["ipam"]["config"][0]["subnet"])
    assert all(ipaddress.ip_address(address.split(":")[0]) in subnet for address in fixed)
    published = services["nginx"]["ports"][0]
    assert f"listen {published.rsplit(':', 1)[-1]};" in CONFIGURATION.read_text()


def test_without_keys_only_loopback_is_published(services: dict[str, Service]) -> None:
    """Gateways are told to serve without keys, so the one published port is nginx's, on loopback."""
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:${GATEWAY_PORT:-8000}:8080"]


def test_every_setting_in_the_environment_exists(
    services: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each service's environment is read by the settings without an error, and means what it says."""
    for service in [*gateways_of(services).values(), *agents_of(services).values()]:
        with monkeypatch.context() as patch:
            for name, value in service["environment"].items():
                patch.setenv(name, value)
            settings = load_settings()
        assert settings.redis_url == "redis://redis:6379/0"
        if "VRAMGATE_GATEWAY__HOST" in service["environment"]:
            assert settings.gateway.insecure
            assert (settings.gateway.host, settings.gateway.port) == ("0.0.0.0", 8000)


def test_one_agent_service_has_all_cards_and_one_has_none(services: dict[str, Service]) -> None:
    """`gpu` and `sim` start one agent service each: with every NVIDIA card of the host, and with none."""
    agents = agents_of(services)
    assert {name: agent["profiles"] for name, agent in agents.items()} == {
        "agent": ["gpu"],
        "agent-sim": ["sim"],
    }
    devices = agents["agent"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert "deploy" not in agents["agent-sim"]
    for agent in agents.values():
        assert "--all" in agent["command"]
    assert option(agents["agent-sim"], "--simulate") == "2x24GiB"


def test_an_agent_writes_where_it_may(services: dict[str, Service]) -> None:
    """Models are mounted read-only; agents start in the image's home, where simulated cards keep their files,
    and cards keep their names when a container is made anew."""
    for agent in agents_of(services).values():
        assert [volume.endswith(":ro") for volume in agent["volumes"]] == [True]
        assert "working_dir" not in agent
        assert agent["hostname"]
    assert DOCKERFILE.read_text().count("WORKDIR /home/vramgate") == 2


def test_mounted_files_exist(services: dict[str, Service]) -> None:
    """Docker makes an empty folder out of a bind mount whose source is missing; here none is."""
    sources = [
        str(volume).split(":")[0] for service in services.values() for volume in service.get("volumes", [])
    ]
    mounts = [REPOSITORY / source for source in sources if source.startswith("./")]
    assert mounts
    assert [str(path) for path in mounts if not path.exists()] == []
    for agent in agents_of(services).values():
        folder = REPOSITORY / str(agent["volumes"][0]).split(":")[0]
        assert (folder / Path(option(agent, "--config")).name).is_file()


def test_commands_are_ones_that_we_have(services: dict[str, Service]) -> None:
    """The command line of each service of ours parses, with the options that it uses."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    for service in [*gateways_of(services).values(), *agents_of(services).values()]:
        program, name, *arguments = [
            word.replace("/models", str(REPOSITORY / "examples")) for word in service["command"]
        ]
        assert program == "vramgate"
        group.commands[name].make_context(name, arguments)


def test_built_stages_exist(services: dict[str, Service]) -> None:
    """Each build names a stage of the Dockerfile, and DEVICE a variant of torch that it has."""
    text = DOCKERFILE.read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    arguments = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    builds = [service["build"] for service in services.values() if "build" in service]
    assert len(builds) == 4
    for build in builds:
        assert REPOSITORY / build["dockerfile"] == DOCKERFILE
        assert build["target"] in stages
        assert set(build.get("args", {})) <= arguments
        assert f"torch-{build.get('args', {}).get('DEVICE', 'gpu')}" in stages


def test_the_image_holds_what_the_wheel_holds() -> None:
    """What is copied to the build exists, passes the ignore file, and is what pyproject.toml packs."""
    copied: list[str] = []
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE):
        copied.extend(sources.split())
    ignore = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert set(copied) == allowed
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packed) == {name for name in copied if (REPOSITORY / name).is_dir()}


def test_services_run_without_root() -> None:
    """Both images end as a user of their own, as a number: an orchestrator can see that it is not root."""
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)
    for name in ("gateway", "agent"):
        stage = next(part for part in stages if part.splitlines()[0].endswith(f"AS {name}"))
        assert re.findall(r"^USER (\S+)$", stage, re.MULTILINE) == ["10001"]
