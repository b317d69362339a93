# SPDX-License-Identifier: Apache-2.0
"""The keys of a server for other hosts. Knowing the public key allows a client to connect; others get no answer."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from transfer_queue.errors import ConfigError

_KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """A pair of CURVE keys, in the alphabet of Z85."""

    public: str
    secret: str = field(repr=False)


def make_keys() -> ServerKeys:
    """Make a new pair."""
    import zmq

    public, secret = zmq.curve_keypair()
    return ServerKeys(public.decode(), secret.decode())


def write_keys(path: str | Path, keys: ServerKeys | None = None) -> ServerKeys:
    """Write a pair, a new one by default, to a new file that only this user can read.

    Raises:
        FileExistsError: there is a file already, and its keys may be in use.
    """
    keys = keys or make_keys()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"public": keys.public, "secret": keys.secret}, file)
    return keys


def read_keys(path: str | Path) -> ServerKeys:
    """Read both keys, for a server. Raises ConfigError if they are missing, or other users can read them."""
    return ServerKeys(_key(path, "public"), _key(path, "secret"))


def read_public_key(path: str | Path) -> str:
    """Read the key that a client needs; its file may lack the secret. Raises ConfigError: see ``read_keys``."""
    return _key(path, "public")


def _key(path: str | Path, name: str) -> str:
    try:
        with open(path) as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the keys in {path}: {error}.") from error
    if mode & 0o077:
        raise ConfigError(f"other users can read the keys in {path} (mode {mode:o}): chmod 600, and make new ones.")
    key = found.get(name) if isinstance(found, dict) else None
    if not isinstance(key, str) or len(key) != _KEY_CHARACTERS:
        raise ConfigError(f"there is no {name} key in {path}.")
    return key
