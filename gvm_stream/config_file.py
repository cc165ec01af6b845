"""From a TOML file and dotted overrides to a `Config`, with errors that say key, value, expectation and place."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from gvm_stream.config import Config
from gvm_stream.errors import ConfigError

AGREED = (
    "model.path",
    "model.dtype",
    "sampling.temperature",
    "sampling.max_tokens",
    "run.steps",
    "verifier.kind",
    "verifier.weights",
    "verifier.answer_marker",
    "verifier.function",
    "verifier.numeric",
    "verifier.math",
    "verifier.patterns",
    "verifier.overlong",
    "allocation.max_lag",
)
"""Keys whose values must be the same in every process of a run; the allocator checks them when a peer joins."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path` (TOML, or the config.json of a run) and apply `overrides`: "section.key=value", the value as in TOML
    or a bare text.

    Relative paths of data and model are meant relative to the file, where they exist there. Raises ConfigError.
    """
    try:
        text = path.read_text(encoding="utf-8")
        raw = msgspec.json.decode(text, type=dict[str, Any]) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except IsADirectoryError:
        raise ConfigError(f"configuration file {path} is a folder, expected a TOML file") from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be understood: {error}") from error
    for override in overrides:
        apply_override(raw, override)
    config = parse_config(raw, str(path))
    return _resolve_paths(config, path.parent)


def parse_config(raw: dict[str, Any], source: str) -> Config:
    """Check and convert a parsed file; `source` names it in errors."""
    for key, known in _unknown_keys(raw, Config, ""):
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5) or difflib.get_close_matches(
            key.rpartition(".")[2], [k.rpartition(".")[2] for k in known], n=1, cutoff=0.5
        )
        hint = f'did you mean "{nearest[0]}"?' if nearest else f"there are {', '.join(known)}"
        raise ConfigError(f'unknown key "{key}" in {source}; {hint}')
    for key, value in _not_finite(raw, ""):
        raise ConfigError(f"{key} = {value} in {source}: expected a finite number")
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(error, raw, source)) from None


def agreed_values(config: Config) -> dict[str, str]:
    """Values of `AGREED`, as text."""
    built = msgspec.to_builtins(config)
    values = {}
    for key in AGREED:
        section, name = key.split(".")
        values[key] = str(built[section][name])
    # Hosts may keep the same model in different folders.
    values["model.path"] = Path(config.model.path).name
    return values


def written(config: Config) -> bytes:
    """The content of config.json."""
    return msgspec.json.format(msgspec.json.encode(config))


def documented(config: Config) -> str:
    """The configuration as TOML, every key with its meaning."""
    lines: list[str] = []
    _document(config, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _document(section: Any, name: str, lines: list[str]) -> None:  # noqa: ANN401
    hints = get_type_hints(type(section), include_extras=True)
    nested: list[tuple[str, Any]] = []
    if name:
        lines += ["", f"[{name}]"]
    for field in msgspec.structs.fields(type(section)):
        value = getattr(section, field.name)
        if isinstance(value, msgspec.Struct):
            nested.append((f"{name}.{field.name}".lstrip("."), value))
            continue
        (meta,) = getattr(hints[field.name], "__metadata__", (None,))
        lines.append(f"# {meta.description}" if meta is not None and meta.description else "#")
        lines.append(f"{field.name} = {_toml(value)}")
    for key, value in nested:
        _document(value, key, lines)


def _toml(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")  # legal in JSON, not in TOML


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set "section.key=value" in a parsed file. Raises ConfigError."""
    key, equals, text = override.partition("=")
    key = key.removeprefix("--")
    if not equals or "." not in key:
        raise ConfigError(f"override {override!r} must look like --section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, name = key.split(".")
    table = raw
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f'override {override!r}: "{section}" is not a section')
    table[name] = value


def _unknown_keys(raw: Any, struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, list[str]]]:  # noqa: ANN401
    if not isinstance(raw, dict):
        return
    hints = get_type_hints(struct)
    for key, value in raw.items():
        if key not in hints:
            yield prefix + key, [prefix + name for name in hints]
        elif isinstance(hints[key], type) and issubclass(hints[key], msgspec.Struct):
            yield from _unknown_keys(value, hints[key], f"{prefix}{key}.")


def _not_finite(raw: Any, key: str) -> Iterator[tuple[str, float]]:  # noqa: ANN401
    """Numbers that TOML has, but no bound, no JSON (the config.json of a run) and no formula can deal with."""
    if isinstance(raw, float) and not math.isfinite(raw):
        yield key, raw
    elif isinstance(raw, dict):
        for name, value in raw.items():
            yield from _not_finite(value, f"{key}.{name}".lstrip("."))
    elif isinstance(raw, list):
        for i, value in enumerate(raw):
            yield from _not_finite(value, f"{key}[{i}]")


def _sentence(error: msgspec.ValidationError, raw: dict[str, Any], source: str) -> str:
    """msgspec says "Expected `int` >= 0 - at `$.allocation.max_lag`"; people want key, value and file."""
    text, _, where = str(error).partition(" - at `$")
    key = where.rstrip("`").lstrip(".")
    _, missing, name = text.partition(" missing required field ")
    if missing:
        return f"{key}.{name.strip('`')}".lstrip(".") + f" is missing in {source}: it has no default"
    if not key:
        return f"{source}: {text}"
    value: Any = raw
    hint: Any = Config
    for part in key.split("[")[0].split("."):
        value = value.get(part) if isinstance(value, dict) else value
        hint = get_type_hints(hint).get(part, hint)
    allowed = get_args(hint) if get_origin(hint) is Literal else ()
    expected = f"expected {' or '.join(_toml(a) for a in allowed)}" if allowed else text[0].lower() + text[1:]
    return f"{key} = {_toml(value)} in {source}: {expected}"


def _resolve_paths(config: Config, folder: Path) -> Config:
    """Absolute paths for what is found beside the file or here, so that a resumed run finds it from anywhere. Other
    values (hub names, mistakes) stay as they are."""

    def resolve(value: str) -> str:
        found = next((path for path in (folder / value, Path(value)) if value and path.exists()), None)
        return str(found.absolute()) if found else value

    replace = msgspec.structs.replace
    data = replace(config.data, train=resolve(config.data.train), heldout=resolve(config.data.heldout))
    stream = replace(config.stream, keys=resolve(config.stream.keys))
    model = replace(config.model, path=resolve(config.model.path))
    return replace(config, data=data, model=model, stream=stream)
