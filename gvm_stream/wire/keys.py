"""CURVE keys in a folder: one list of public keys, the same on every host, and a secret file for each process.

`public.keys` says who may join: a line "ROLE NAME KEY" for every member. `ROLE.secret` is the secret key of the
process of that role on this host. Keys are Curve25519 in Z85, 40 characters (ZeroMQ RFC 26 and 32).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import zmq
from zmq.utils import z85

from gvm_stream.errors import ConfigError
from gvm_stream.wire.messages import Role

Member = Literal["allocator", "learner", "producer", "observer"]
Server = Literal["allocator", "learner"]
"""Who listens: the allocator, and the learner with its weights. There is one of each."""

MEMBERS: tuple[Member, ...] = get_args(Member)
CLIENTS: dict[Server, tuple[Role, ...]] = {"allocator": get_args(Role), "learner": ("producer",)}
"""Who may connect to whom: weights are for producers."""
PUBLIC = "public.keys"

_HEADER = "# Who may join: role, name, public key. Changed by `gvm-stream keys add` and `gvm-stream keys revoke`.\n"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_LENGTH = 40


class Entry(NamedTuple):
    role: Member
    name: str
    key: str
    """Public key, Z85."""


class KeyPair(NamedTuple):
    public: bytes
    secret: bytes


def fingerprint(public: bytes) -> str:
    """What people compare and logs show of a public key: 16 hexadecimal digits."""
    return hashlib.blake2b(public, digest_size=8).hexdigest()


def secret_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.secret"


def load_pair(folder: Path, role: Member) -> KeyPair:
    """The keys of this process. Raises ConfigError if the file is missing, malformed or readable by others."""
    path = secret_path(folder, role)
    secret = _read(path, forbidden=0o077).strip()
    if not _is_key(secret):
        raise ConfigError(f"key file {path} must hold one secret key of {_KEY_LENGTH} characters")
    return KeyPair(zmq.curve_public(secret.encode()), secret.encode())


def load_entries(folder: Path) -> tuple[Entry, ...]:
    """Everybody who may join. Raises ConfigError if the list is missing, malformed or writable by others."""
    path = folder / PUBLIC
    entries: list[Entry] = []
    for number, line in enumerate(_read(path, forbidden=0o022).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        role, name, key = (*line.split(), "", "", "")[:3]
        if len(line.split()) != 3 or role not in MEMBERS or not _NAME.fullmatch(name) or not _is_key(key):
            raise ConfigError(f"line {number} of {path} must be ROLE NAME KEY, with a role of {', '.join(MEMBERS)}")
        if any(name == other.name or key == other.key for other in entries):
            raise ConfigError(f"line {number} of {path}: the name {name} or its key is there twice")
        entries.append(Entry(role, name, key))
    roles = [entry.role for entry in entries]
    if roles.count("allocator") != 1 or roles.count("learner") > 1:
        raise ConfigError(f"{path} must hold one allocator and at most one learner")
    return tuple(entries)


def server_key(folder: Path, server: Server) -> bytes:
    """Public key of whoever listens. Raises ConfigError if the list does not have it."""
    for entry in load_entries(folder):
        if entry.role == server:
            return entry.key.encode()
    raise ConfigError(f"{folder / PUBLIC} holds no {server}; gvm-stream keys add makes a key for one")


def create_keys(folder: Path) -> tuple[Entry, ...]:
    """Make `folder` with a key for each role, whole or not at all. Raises ConfigError if there is something already."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as parent:
            made = Path(parent) / "keys"
            made.mkdir(mode=0o700)
            entries = tuple(Entry(role, role, _new_secret(secret_path(made, role))) for role in MEMBERS)
            _write_entries(made, entries)
            made.rename(folder)  # refused by the system if there is anything but an empty folder
    except OSError as error:
        raise ConfigError(f"keys cannot be created in {folder}: {error.strerror}; nothing is overwritten") from error
    return entries


def add_key(folder: Path, role: Role, name: str) -> Entry:
    """A key for one more member, its secret in NAME.secret. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a key: letters, digits, dots, dashes and underscores, at most 64")
    entries = load_entries(folder)
    taken = next((entry for entry in entries if entry.name == name), None)
    if taken is not None:
        raise ConfigError(f"{folder / PUBLIC} has a {taken.role} named {name} already; choose another name")
    if role == "learner" and any(entry.role == role for entry in entries):
        raise ConfigError(f"{folder / PUBLIC} has a learner already, and there is one in a run; revoke it first")
    path = secret_path(folder, name)
    try:
        entry = Entry(role, name, _new_secret(path))
        try:
            _write_entries(folder, (*entries, entry))
        except OSError:
            path.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"key {name} cannot be added in {folder}: {error.strerror}") from error
    return entry


def revoke_key(folder: Path, name: str) -> Entry:
    """Take a member off the list, and its secret file, if that is here. Raises ConfigError."""
    entries = load_entries(folder)
    gone = next((entry for entry in entries if entry.name == name), None)
    if gone is None:
        names = ", ".join(entry.name for entry in entries)
        raise ConfigError(f"{folder / PUBLIC} has nobody named {name}; there are {names}")
    if gone.role == "allocator":
        raise ConfigError(f"{name} is the allocator, whom everybody joins; create new keys in another folder instead")
    try:
        _write_entries(folder, [entry for entry in entries if entry is not gone])
        secret_path(folder, name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"key {name} cannot be revoked in {folder}: {error.strerror}") from error
    return gone


def _is_key(text: str) -> bool:
    try:
        return len(text) == _KEY_LENGTH and len(z85.decode(text)) == 32
    except (KeyError, ValueError, OverflowError):
        return False


def _read(path: Path, forbidden: int) -> str:
    """The text of a file that nobody else has permission `forbidden` for, or can put another in the place of."""
    try:
        mode, folder_mode = path.stat().st_mode, path.parent.stat().st_mode
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        raise ConfigError(f"key file {path} does not exist; gvm-stream keys create makes one") from None
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"key file {path} holds something else than keys") from None
    if mode & forbidden:
        what = "read" if forbidden & 0o044 else "changed"
        raise ConfigError(
            f"key file {path} can be {what} by others (mode {stat.S_IMODE(mode):o}): run chmod go-rwx {path}"
        )
    if folder_mode & 0o022 and not folder_mode & stat.S_ISVTX:
        raise ConfigError(
            f"key folder {path.parent} can be changed by others (mode {stat.S_IMODE(folder_mode):o}): run chmod go-w "
            f"{path.parent}"
        )
    return text


def _new_secret(path: Path) -> str:
    """Write a new secret key to a new file; the public key."""
    public, secret = zmq.curve_keypair()
    _write_new(path, secret.decode() + "\n")
    return public.decode()


def _write_entries(folder: Path, entries: tuple[Entry, ...] | list[Entry]) -> None:
    new = folder / f".{PUBLIC}.{os.getpid()}.new"
    _write_new(new, _HEADER + "".join(f"{' '.join(entry)}\n" for entry in entries))
    try:
        new.replace(folder / PUBLIC)
    except OSError:
        new.unlink()
        raise


def _write_new(path: Path, text: str) -> None:
    """A file for its owner alone, whole or not at all; FileExistsError if it is there."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise
