"""Keys on disk and the command that makes them: what lets a process in is whole, private, and never overwritten."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import zmq

from gvm_stream.cli import main
from gvm_stream.errors import ConfigError
from gvm_stream.wire.keys import (
    MEMBERS,
    PUBLIC,
    add_key,
    create_keys,
    fingerprint,
    load_entries,
    load_pair,
    revoke_key,
    secret_path,
    server_key,
)
from gvm_stream.wire.messages import Role


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    create_keys(folder)
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_created_keys_are_for_their_owner_alone_and_belong_together(keys: Path) -> None:
    assert mode(keys) == 0o700
    assert {path.name: mode(path) for path in keys.iterdir()} == {
        PUBLIC: 0o600,
        **{f"{role}.secret": 0o600 for role in MEMBERS},
    }
    entries = load_entries(keys)
    assert [(entry.role, entry.name) for entry in entries] == [(role, role) for role in MEMBERS]
    for entry in entries:
        pair = load_pair(keys, entry.role)
        assert pair.public == entry.key.encode() == zmq.curve_public(pair.secret)
    assert len({entry.key for entry in entries}) == len(MEMBERS)
    assert server_key(keys, "learner") == load_pair(keys, "learner").public


def test_the_list_gives_no_secret_away(keys: Path) -> None:
    text = (keys / PUBLIC).read_text()
    assert not any(load_pair(keys, role).secret.decode() in text for role in MEMBERS)


def test_nothing_is_overwritten_and_nothing_is_left_behind(keys: Path) -> None:
    before = {path: path.read_bytes() for path in keys.iterdir()}
    with pytest.raises(ConfigError, match=r"keys cannot be created in .*keys: .*; nothing is overwritten"):
        create_keys(keys)
    assert {path: path.read_bytes() for path in keys.iterdir()} == before
    assert list(keys.parent.iterdir()) == [keys]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created"):
        create_keys(tmp_path / "file" / "keys")


def test_members_are_added_and_revoked_by_name(keys: Path) -> None:
    site = add_key(keys, "producer", "site-b")
    assert load_entries(keys)[-1] == site
    assert mode(secret_path(keys, "site-b")) == 0o600
    with pytest.raises(ConfigError, match="has a producer named site-b already"):
        add_key(keys, "observer", "site-b")
    assert revoke_key(keys, "site-b") == site
    assert site not in load_entries(keys)
    assert not secret_path(keys, "site-b").exists()
    assert add_key(keys, "producer", "site-b").key != site.key


@pytest.mark.parametrize(
    ("role", "name", "part"),
    [
        ("producer", "../x", "is no name for a key"),
        ("producer", "", "is no name for a key"),
        ("learner", "second", "has a learner already"),
    ],
)
def test_who_cannot_be_added(keys: Path, role: Role, name: str, part: str) -> None:
    before = sorted(keys.iterdir())
    with pytest.raises(ConfigError, match=part):
        add_key(keys, role, name)
    assert sorted(keys.iterdir()) == before


def test_who_cannot_be_revoked(keys: Path) -> None:
    with pytest.raises(ConfigError, match="has nobody named x; there are allocator, learner, producer, observer"):
        revoke_key(keys, "x")
    with pytest.raises(ConfigError, match="is the allocator"):
        revoke_key(keys, "allocator")


def test_an_add_that_fails_leaves_nothing_behind(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=r"site cannot be added in .*: No space left on device"):
        add_key(keys, "producer", "site")
    assert sorted(path.name for path in keys.iterdir()) == sorted([PUBLIC, *(f"{role}.secret" for role in MEMBERS)])


@pytest.mark.parametrize("permissions", [0o640, 0o604, 0o620])
def test_a_secret_that_others_can_read_is_not_used(keys: Path, permissions: int) -> None:
    path = secret_path(keys, "learner")
    path.chmod(permissions)
    with pytest.raises(ConfigError, match=rf"{path} can be read by others \(mode {permissions:o}\): run chmod"):
        load_pair(keys, "learner")


def test_a_list_that_others_can_read_is_fine_one_they_can_change_is_not(keys: Path) -> None:
    (keys / PUBLIC).chmod(0o644)
    assert load_entries(keys)
    (keys / PUBLIC).chmod(0o664)
    with pytest.raises(ConfigError, match=r"can be changed by others \(mode 664\)"):
        load_entries(keys)
    (keys / PUBLIC).chmod(0o600)
    keys.chmod(0o777)
    with pytest.raises(ConfigError, match=f"key folder {keys} can be changed by others"):
        load_pair(keys, "producer")


@pytest.mark.parametrize("content", [b"", b"short\n", b"x" * 41, b"\xff" * 40, b"~" * 40, b"%" * 39 + b"\x00"])
def test_a_malformed_secret_is_one_sentence(keys: Path, content: bytes) -> None:
    secret_path(keys, "producer").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^key file .*producer\.secret .*key"):
        load_pair(keys, "producer")


def test_missing_files_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"producer\.secret does not exist; gvm-stream keys create"):
        load_pair(tmp_path, "producer")
    with pytest.raises(ConfigError, match=r"public\.keys does not exist"):
        load_entries(tmp_path)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("boss me {key}", "ROLE NAME KEY"),
        ("producer me", "ROLE NAME KEY"),
        ("producer me {key} more", "ROLE NAME KEY"),
        ("producer me short", "ROLE NAME KEY"),
        ("producer producer {key}", "there twice"),
        ("producer me {taken}", "there twice"),
        ("allocator second {key}", "one allocator and at most one learner"),
    ],
)
def test_a_line_that_is_wrong_is_named(keys: Path, line: str, part: str) -> None:
    public, _ = zmq.curve_keypair()
    taken = load_entries(keys)[0].key
    with (keys / PUBLIC).open("a") as file:
        file.write(line.format(key=public.decode(), taken=taken) + "\n")
    with pytest.raises(ConfigError, match=part):
        load_entries(keys)


def test_half_a_list_is_no_list(keys: Path) -> None:
    """As copying leaves one for a moment."""
    text = (keys / PUBLIC).read_text()
    for end in (0, text.index("allocator allocator"), len(text) - 10):
        (keys / PUBLIC).write_text(text[:end])
        with pytest.raises(ConfigError):
            load_entries(keys)


# --- the command ---


def test_create_says_what_goes_to_which_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "create", str(tmp_path / "keys")]) == 0
    said = capsys.readouterr().out
    for role in MEMBERS[1:]:
        assert f"{PUBLIC},{role}.secret" in said
    assert f'stream.keys = "{tmp_path / "keys"}"' in said
    assert not any(load_pair(tmp_path / "keys", role).secret.decode() in said for role in MEMBERS)
    assert main(["keys", "create", str(tmp_path / "keys")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_list_shows_who_may_join(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret_path(keys, "observer").unlink()
    assert main(["keys", "list", str(keys), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["role"], one["name"], one["secret_here"]) for one in listed["members"]] == [
        (role, role, role != "observer") for role in MEMBERS
    ]
    assert main(["keys", "list", str(keys)]) == 0
    text = capsys.readouterr().out
    for entry in load_entries(keys):
        assert fingerprint(entry.key.encode()) in text


def test_add_and_revoke(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", str(keys), "producer", "site-b"]) == 0
    assert "producer.secret" in capsys.readouterr().out
    assert main(["keys", "revoke", str(keys), "site-b"]) == 0
    assert "site-b" in capsys.readouterr().out
    assert main(["keys", "revoke", str(keys), "site-b"]) == 2
    assert main(["keys", "add", str(keys), "allocator", "x"]) == 2
