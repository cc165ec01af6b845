"""`gvm-stream keys create | add | revoke | list`: who may join a run. Heavy imports happen inside the commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

WHERE = (
    ("learner", "the learner's host"),
    ("producer", "every producer's host"),
    ("observer", "where people run gvm-stream status or top"),
)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `gvm-stream keys`."""
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace, list[str]], int], text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("folder", type=Path, metavar="DIR", help="folder with the keys")
        verb.set_defaults(command=command)
        return verb

    add("create", _create, "make a folder with keys for allocator, learner, producers and observers")
    verb = add("add", _add, "make a key for one more member, for example the producers of another site")
    verb.add_argument("role", choices=[role for role, _ in WHERE])
    verb.add_argument("name", help="name of the key")
    verb = add("revoke", _revoke, "take a member off the list")
    verb.add_argument("name", help="name of the key")
    verb = add("list", _list, "who may join, with the fingerprints that logs show")
    verb.add_argument("--json", action="store_true", help="print one JSON object")


def _create(options: argparse.Namespace, overrides: list[str]) -> int:
    from gvm_stream.wire.keys import PUBLIC, create_keys

    folder: Path = options.folder
    create_keys(folder)
    hosts = "".join(f"  {place}:\n    scp -p {folder}/{{{PUBLIC},{role}.secret}} HOST:KEYS/\n" for role, place in WHERE)
    _say(
        f"{folder} is ready. It stays on the allocator's host, whose configuration says\n"
        f'  stream.keys = "{folder}"\n'
        "Copy to the other hosts, into the folder that is their stream.keys (ssh HOST mkdir -pm 700 KEYS):\n"
        f"{hosts}"
        "Whoever has a .secret file can join: once its host has it, delete it here, unless that process runs here, too."
    )
    return 0


def _add(options: argparse.Namespace, overrides: list[str]) -> int:
    from gvm_stream.wire.keys import PUBLIC, add_key, secret_path

    folder: Path = options.folder
    add_key(folder, options.role, options.name)
    _say(
        f"{options.role} {options.name} may join. Copy to its host:\n"
        f"  scp -p {folder}/{PUBLIC} HOST:KEYS/\n"
        f"  scp -p {secret_path(folder, options.name)} HOST:KEYS/{options.role}.secret\n"
        f"{_again(folder)}"
    )
    return 0


def _revoke(options: argparse.Namespace, overrides: list[str]) -> int:
    from gvm_stream.wire.keys import revoke_key

    gone = revoke_key(options.folder, options.name)
    _say(f"{gone.role} {gone.name} may not join any more, and is not heard if it has joined.\n{_again(options.folder)}")
    return 0


def _list(options: argparse.Namespace, overrides: list[str]) -> int:
    from gvm_stream.wire.keys import fingerprint, load_entries, secret_path

    members = [
        {
            "role": entry.role,
            "name": entry.name,
            "fingerprint": fingerprint(entry.key.encode()),
            "public_key": entry.key,
            "secret_here": secret_path(options.folder, entry.name).exists(),
        }
        for entry in load_entries(options.folder)
    ]
    if options.json:
        _say(json.dumps({"members": members}))
        return 0
    for member in members:
        here = "secret here" if member["secret_here"] else ""
        _say(f"{member['role']:<10} {member['name']:<20} {member['fingerprint']}  {here}".rstrip())
    return 0


def _again(folder: Path) -> str:
    from gvm_stream.wire.keys import PUBLIC

    return (
        f"A running allocator reads {folder / PUBLIC} again by itself. If the learner is on another host and serves\n"
        "weights (stream.weights_address, stream.nccl_address), copy the file there again: it is read again there, too."
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
