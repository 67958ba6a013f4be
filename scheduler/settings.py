"""Every setting of vramgate: name, default, bound and help in one place.

Precedence: flags over environment (`VRAMGATE_A__B`) over `vramgate.toml` over these defaults. What is said of
an unknown key or a bad value is `scheduler.misconfiguration`'s.
`docs/configuration.md` is generated from this module.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from redis.asyncio.connection import parse_url

from scheduler.expectation import expected
from scheduler.misconfiguration import explain, known_keys, nearest
from vramgate.errors import VramgateError
from vramgate.quantities import Seconds, Size

DEFAULT_FILE = Path("vramgate.toml")
ENV_PREFIX = "VRAMGATE_"
CONFIG_ENV = "VRAMGATE_CONFIG"
INTERNAL_ENV = ("VRAMGATE_SIM", "VRAMGATE_TEST_", "VRAMGATE_INTERNAL_", CONFIG_ENV)


class ConfigError(VramgateError):
    """The configuration cannot be used; one line says which key, the bound and the value."""

    code = "invalid_input"


class Section(BaseModel):
    """A table of the configuration file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_number_by_chance(cls, value: Any, info: ValidationInfo) -> Any:
        """To pydantic `true` is a 1 wherever a number is wanted."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError(f"expected {expected(field)}, got {value}")
        return value


class RedisSettings(Section):
    connect_timeout_s: Seconds = Field(2.0, gt=0, le=60, description="Time to connect to the server")
    command_timeout_s: Seconds = Field(2.0, gt=0, le=60, description="Time for one command to be answered")
    max_connections: int = Field(
        32, ge=2, le=4096, description="Connections per process; callers wait for a free one"
    )
    data_dir: Path = Field(
        Path(".vramgate"), description="Where `up` keeps its server's data and its own files"
    )


class ClockSettings(Section):
    max_wait_s: Seconds = Field(
        30.0, gt=0, le=86400, description="Default time a job may wait for a card, per attempt"
    )
    run_timeout_s: Seconds = Field(
        60.0, gt=0, le=86400, description="Default time a run may take, per attempt"
    )
    total_timeout_s: Seconds = Field(
        100.0, gt=0, le=604800, description="Default time from submit to answer; never reset"
    )
    abandon_grace_s: Seconds = Field(
        30.0,
        ge=0,
        le=3600,
        description="How long a job with a key keeps its place after its last client left",
    )
    session_s: Seconds = Field(
        10.0, ge=1, le=300, description="Silence after which an agent or gateway counts as lost"
    )
    beat_s: Seconds = Field(
        2.0, gt=0, le=60, description="Interval of heartbeats; at most a third of session_s"
    )

    @model_validator(mode="after")
    def _beat_fits(self) -> ClockSettings:
        if self.beat_s * 3 > self.session_s:
            raise ValueError(f"beat_s is {self.beat_s}, above a third of session_s ({self.session_s})")
        return self


class LimitSettings(Section):
    queue_jobs: int = Field(10_000, ge=1, description="Waiting jobs per pool")
    queue_bytes: Size = Field(2**30, ge=1, description="Payload bytes of live jobs per pool")
    model_jobs: int = Field(10_000, ge=1, description="Waiting jobs per model")
    model_bytes: Size = Field(2**30, ge=1, description="Payload bytes of live jobs per model")
    tenant_jobs: int = Field(10_000, ge=1, description="Waiting jobs per tenant")
    tenant_bytes: Size = Field(2**30, ge=1, description="Payload bytes of live jobs per tenant")
    body_bytes: Size = Field(32 * 2**20, ge=1024, le=512 * 2**20, description="Largest request body")
    output_bytes: Size = Field(32 * 2**20, ge=1024, le=512 * 2**20, description="Largest output of a job")
    nesting: int = Field(64, ge=4, le=256, description="Deepest nesting of a request body")
    values: int = Field(
        2_000_000,
        ge=1000,
        le=100_000_000,
        description="Most values in a request body, elements of arrays included; a name counts as 4",
    )
    result_bytes: Size = Field(2**30, ge=2**20, description="Stored results per pool; the oldest go first")


class RetentionSettings(Section):
    key_ttl_s: Seconds = Field(86_400.0, ge=60, description="How long an idempotency key is remembered")
    result_ttl_s: Seconds = Field(
        3600.0, ge=1, description="How long a stored result can be fetched or replayed"
    )
    delivered_ttl_s: Seconds = Field(
        60.0, ge=1, description="How long a result without a key lives after its job ended"
    )
    dead_letter_ttl_s: Seconds = Field(604_800.0, ge=60, description="How long failed jobs are kept")
    tombstone_ttl_s: Seconds = Field(60.0, ge=1, description="How long an abandoned submit is refused")
    known_ttl_s: Seconds = Field(
        604_800.0, ge=60, description="How long a model or card is known after its last session"
    )


class PlacementSettings(Section):
    policy: Literal["spread", "pack"] = Field(
        "spread", description="`spread`: most grantable bytes; `pack`: least that fits"
    )
    boost_s: Seconds = Field(2.0, ge=0, le=3600, description="Head start of one step of priority")
    max_passed: int = Field(
        16, ge=0, le=10_000, description="Times that a waiting head may be passed by smaller jobs"
    )
    max_passing_s: Seconds = Field(
        10.0, ge=0, le=3600, description="Time after which a waiting head is passed no more"
    )


class GatewaySettings(Section):
    host: str = Field(
        "127.0.0.1", description="Address to listen on; without keys only a loopback one, unless insecure"
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on")
    workers: int = Field(1, ge=1, le=64, description="Worker processes per gateway")
    insecure: bool = Field(False, description="Serve other addresses than loopback without keys")
    drain_s: Seconds = Field(
        5.0, ge=0, le=300, description="After SIGTERM: keep listening and say draining for so long"
    )
    grace_s: Seconds = Field(
        30.0, ge=0, le=3600, description="After SIGTERM: finish what waits within so long"
    )
    heartbeat_s: Seconds = Field(15.0, gt=0, le=300, description="Interval of comments on event streams")


class AgentSettings(Section):
    headroom: Size | None = Field(
        None, ge=0, description="Bytes never granted; default the larger of 5 % and 512 MiB"
    )
    context: Size = Field(
        650 * 2**20, ge=0, description="Assumed cost of a CUDA context until it was measured"
    )
    cancel_grace_s: Seconds = Field(
        5.0, ge=0, le=600, description="Time for a model to notice that its batch is cancelled"
    )
    drain_s: Seconds = Field(
        30.0, ge=0, le=3600, description="After SIGTERM: finish running jobs within so long"
    )
    watchdog_s: Seconds = Field(
        30.0,
        ge=5,
        le=3600,
        description="A child that hears nothing, or idly says nothing, for so long is ended",
    )
    load_timeout_s: Seconds = Field(600.0, ge=1, le=86400, description="Longest load of a model")
    nvml_timeout_s: Seconds = Field(3.0, gt=0, le=60, description="Longest wait for a memory reading")
    release_timeout_s: Seconds = Field(
        30.0, gt=0, le=600, description="Memory of a killed child back, or cordoned"
    )


class ModelSettings(Section):
    entrypoint: Annotated[
        str,
        Field(
            pattern=r"^[^:]+:[A-Za-z_]\w*$",
            description="`module:Class` or `path/file.py:Class`",
            examples=["module:Class", "path/file.py:Class"],
        ),
    ]
    cards: Literal["all"] | list[str] = Field(
        "all",
        description='`"all"`, or a list of ids and of names such as `"myhost:0"`',
        examples=['"all"', 'a list such as ["GPU-7a41e0c2-...", "myhost:0"]'],
    )
    concurrency: int | None = Field(
        None, ge=1, le=1024, description="At most so many jobs at once; default: what memory allows"
    )
    version: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Default: a hash of the file"
    )


class Settings(BaseSettings):
    """The whole configuration of one process."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    pool: str = Field("default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="The scheduling domain")
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="redis, rediss, unix; the ledger's server")
    redis: RedisSettings = RedisSettings()
    clocks: ClockSettings = ClockSettings()
    limits: LimitSettings = LimitSettings()
    retention: RetentionSettings = RetentionSettings()
    placement: PlacementSettings = PlacementSettings()
    gateway: GatewaySettings = GatewaySettings()
    agent: AgentSettings = AgentSettings()
    models: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")], ModelSettings] = Field(
        default_factory=dict
    )

    @field_validator("redis_url")
    @classmethod
    def _is_a_url_of_redis(cls, url: str) -> str:
        try:
            parse_url(url)
        except ValueError:
            raise ValueError(
                "expected redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix://PATH, got "
                f"{without_password(url)!r}"
            ) from None
        return url

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _TomlSource(settings_cls)


class _TomlSource(PydanticBaseSettingsSource):
    """The configuration file that `load_settings` has read."""

    current: Mapping[str, Any] = {}

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self.current.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(self.current)


def config_file(given: Path | None = None) -> Path:
    """The configuration file: the one given, else that of VRAMGATE_CONFIG, else vramgate.toml here."""
    return given or Path(os.environ.get(CONFIG_ENV) or DEFAULT_FILE)


def model_directories(given: Path | None = None) -> tuple[Path, ...]:
    """Where entry points are looked up: beside the configuration file, then in the working directory."""
    return tuple(dict.fromkeys((config_file(given).resolve().parent, Path.cwd())))


def load_settings(config: Path | None = None, **overrides: Any) -> Settings:
    """Read flags (`overrides`, nested dicts allowed, None means not given), environment and file. Raises
    ConfigError in one line.
    """
    path = config_file(config)
    if not path.is_file() and (config is not None or os.environ.get(CONFIG_ENV)):
        raise ConfigError(f"configuration file {path} does not exist")
    try:
        _TomlSource.current = tomllib.loads(path.read_text()) if path.is_file() else {}
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    _refuse_unknown_env()
    try:
        return Settings(**_given(overrides))
    except ValidationError as error:
        raise ConfigError(explain(error, path, Settings)) from None
    finally:
        _TomlSource.current = {}


def _given(overrides: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = {
        name: _given(value) if isinstance(value, Mapping) else value
        for name, value in overrides.items()
        if value is not None
    }
    return {name: value for name, value in cleaned.items() if value != {}}


def _refuse_unknown_env() -> None:
    known = list(known_keys(Settings))
    keys = {ENV_PREFIX + key.upper().replace(".", "__") for key in known}
    sections = {ENV_PREFIX + key.split(".")[0].upper() for key in known}
    for name, value in os.environ.items():
        if not name.startswith(ENV_PREFIX) or name.startswith(INTERNAL_ENV):
            continue
        if name in keys or name.startswith(ENV_PREFIX + "MODELS__"):
            continue
        if name in sections:
            _refuse_half_a_table(name, value)
            continue
        word = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        raise ConfigError(f"environment variable {name} is no setting of vramgate{nearest(Settings, word)}")


def _refuse_half_a_table(name: str, value: str) -> None:
    """A whole table may be given as a JSON object; what is none would be told in another library's words."""
    try:
        is_table = isinstance(json.loads(value), dict)
    except ValueError:
        is_table = False
    if not is_table:
        raise ConfigError(
            f"environment variable {name}: expected a JSON object; a single key of it is {name}__KEY"
        )


def without_password(url: str) -> str:
    """The address of a ledger as it may be shown."""
    scheme, separator, rest = str(url).partition("://")
    return f"{scheme}{separator}{rest.rsplit('@', 1)[-1]}"
