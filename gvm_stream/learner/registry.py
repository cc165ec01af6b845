"""Advantages and losses by name, and those of other people by `module:Class`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from gvm_stream.user_code import NotImportable, import_path

T = TypeVar("T", bound=msgspec.Struct)
C = TypeVar("C", bound=type[msgspec.Struct])


class Registry(Generic[T]):
    """Structs whose fields are hyper-parameters, all derived from `base`; `key` is what they are chosen by."""

    def __init__(self, key: str, base: type[T], elsewhere: Mapping[str, str]) -> None:
        """`elsewhere`: names from the literature of what is configured otherwise -> how."""
        self._key = key
        self._base = base
        self._elsewhere = elsewhere
        self.classes: dict[str, type[T]] = {}
        """By name."""

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator. Raises ValueError if the name is taken."""

        def add(cls: C) -> C:
            if name in self.classes:
                raise ValueError(f"{self._key} {name!r} is registered already")
            self.classes[name] = self._checked(cls, name)
            return cls

        return add

    def make(self, name: str, options: dict[str, Any]) -> T:
        """The one called `name`, or at the import path `module:Class`, with these hyper-parameters; what is left out
        has its default. Raises ValueError for an unknown name, a path that cannot be imported, a bad option."""
        if ":" in name:
            found = self._imported(name)
        elif name in self.classes:
            found = self.classes[name]
        elif name in self._elsewhere:
            raise ValueError(f'{self._key} = "{name}" is unknown: {self._elsewhere[name]}')
        else:
            known = ", ".join(sorted(self.classes))
            raise ValueError(f'{self._key} = "{name}" is unknown; there are {known}, or your own as "module:Class"')
        try:
            return msgspec.convert(options, found)
        except msgspec.ValidationError as error:
            text, _, where = str(error).partition(" - at `$")
            fields = ", ".join(found.__struct_fields__) or "no options"
            raise ValueError(f'{self._key}_options{where.rstrip("`")}: {text}; "{name}" has {fields}') from error

    def _imported(self, path: str) -> type[T]:
        try:
            found = import_path(path)
        except NotImportable as error:
            raise ValueError(f'{self._key} = "{path}" cannot be imported: {error}') from error
        return self._checked(found, path)

    def _checked(self, found: object, name: str) -> type[T]:
        if not isinstance(found, type) or not issubclass(found, self._base):
            raise ValueError(f'{self._key} = "{name}" must be a subclass of {self._base.__name__}, got {found!r}')
        return found
