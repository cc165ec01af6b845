"""What users name by import path: "module:name"."""

from __future__ import annotations

import importlib
import os
import sys


class NotImportable(Exception):
    """What the import of the user's code said."""


def import_path(path: str) -> object:
    """The object at `module:name` (or `module:name.attribute`); the current folder comes after the import path. Raises
    NotImportable, whatever the user's code raised."""
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: object = importlib.import_module(module)
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except Exception as error:  # importing runs the user's code
        raise NotImportable(f"{type(error).__name__}: {error}") from error
    return found
