"""Reads the settings from flags, environment and file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from coordinator.config.checks import check_settings
from coordinator.config.groups import (
    AdminSettings,
    AuthSettings,
    CircuitSettings,
    EtcdSettings,
    LogSettings,
    NoticeSettings,
    ReconcilerSettings,
    ServerSettings,
    SessionSettings,
    Settings,
    StorageSettings,
)
from coordinator.errors import ConfigError

__all__ = ["load_settings"]

_PREFIX: Final = "LEASEKEEPER_"


class _Sources(BaseSettings):
    """Reads and types the groups; what comes out is plain dataclasses."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid")
    toml_path: ClassVar[Path | None] = None

    server: ServerSettings = field(default_factory=ServerSettings)
    etcd: EtcdSettings = field(default_factory=EtcdSettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)
    storage: StorageSettings = field(default_factory=StorageSettings)
    reconciler: ReconcilerSettings = field(default_factory=ReconcilerSettings)
    circuits: CircuitSettings = field(default_factory=CircuitSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    log: LogSettings = field(default_factory=LogSettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, file: no dotenv, no secrets folder."""
        sources = [init_settings, env_settings]
        if cls.toml_path is not None:
            sources.append(TomlConfigSettingsSource(settings_cls, cls.toml_path))
        return tuple(sources)


def load_settings(path: Path | None = None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """Read, type and check all settings.

    Args:
        path: the TOML file, None for none.
        flags: group to settings that were given on the command line.

    Raises:
        ConfigError: what is wrong, by the names of the settings.
    """
    _refuse_unknown_variables()
    if path is not None and not path.is_file():
        raise ConfigError(f"the settings file {path} does not exist")
    sources = type("_Sources", (_Sources,), {"toml_path": path})
    try:
        read = sources(**{group: dict(values) for group, values in (flags or {}).items()})
    except ValidationError as error:
        lines = [f"{_place(line['loc'])}: {_words(line)}" for line in error.errors()]
        raise ConfigError("; ".join(lines)) from error
    except (SettingsError, ValueError) as error:
        raise ConfigError(f"the settings cannot be read: {error}") from error
    settings = Settings(**{part.name: getattr(read, part.name) for part in fields(Settings)})
    check_settings(settings)
    return settings


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def _words(line: Any) -> str:
    if line["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        return "there is no such setting"
    return f"{line['msg']} (is {line['input']!r})"


def _refuse_unknown_variables() -> None:
    groups = {part.name for part in fields(Settings)}
    for name in os.environ:
        if name.startswith(_PREFIX) and "__" in name:
            group = name.removeprefix(_PREFIX).partition("__")[0].lower()
            if group not in groups:
                raise ConfigError(f"{name}: there is no group {group!r}; groups are {sorted(groups)}")
