"""Seals: proof that a record is complete, and of its author.

A seal is the hash of the record's JSON with an empty seal, and, if the trainer has a key, a space
and the signature of those bytes. A reader always checks the hash; with a trusted key configured it
also refuses records without a signature of that key.

    ETUDE_SIGNING_KEY   for the trainer: a file with a private ed25519 key (PEM)
    ETUDE_TRUSTED_KEY   for readers: the public key, 64 hex digits

Shards are named by their hash in sealed records, so everything that is read is covered. Keys need
the package `cryptography` (`pip install etude[signing]`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from blake3 import blake3

from etude.core.errors import EtudeError
from etude.store.codec import to_json

PRIVATE, TRUSTED = "ETUDE_SIGNING_KEY", "ETUDE_TRUSTED_KEY"


class Sealed(Protocol):
    @property
    def seal(self) -> str: ...


R = TypeVar("R", bound=Sealed)


class Corrupt(EtudeError):
    """An object does not match its name, its seal or the manifest."""


class Untrusted(Corrupt):
    """A record that the trusted key did not sign."""


class Signer:
    """Seals records; without a key, with their hash alone."""

    def __init__(self, sign: Callable[[bytes], bytes] | None = None) -> None:
        self._sign = sign

    def __call__(self, record: R) -> R:
        data = _unsealed(record)
        words = [blake3(data).hexdigest(), *([self._sign(data).hex()] if self._sign else [])]
        return dataclasses.replace(record, seal=" ".join(words))  # type: ignore[type-var]


class Trust:
    """Checks seals; without a key, their hash alone."""

    def __init__(self, public: bytes | None = None) -> None:
        self._public = public

    def check(self, record: Sealed, where: str) -> None:
        data = _unsealed(record)
        hash, _, signature = record.seal.partition(" ")
        if blake3(data).hexdigest() != hash:
            raise Corrupt(
                f"{where} is damaged: it does not match its seal; restore it from a backup"
            )
        if self._public is None:
            return
        ed25519, invalid = _cryptography()
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(self._public).verify(
                bytes.fromhex(signature), data
            )
        except (invalid, ValueError) as e:
            raise Untrusted(
                f"{where} is not signed with the key in {TRUSTED}, so it is not used. Check who "
                f"writes to this store, or start the trainer with {PRIVATE}"
            ) from e


def signer_from_environment() -> Signer:
    if not (path := os.environ.get(PRIVATE)):
        return Signer()
    ed25519, _ = _cryptography()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(Path(path).read_bytes(), None)
    except (OSError, ValueError, TypeError) as e:
        raise EtudeError(f"{PRIVATE}: cannot read a private key from {path}: {e}") from e
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise EtudeError(
            f"{PRIVATE}: {path} is not an ed25519 key; make one with `openssl genpkey "
            f"-algorithm ed25519`"
        )
    return Signer(key.sign)


def trust_from_environment() -> Trust:
    if not (text := os.environ.get(TRUSTED)):
        return Trust()
    try:
        public = bytes.fromhex(text)
    except ValueError:
        public = b""
    if len(public) != 32:
        raise EtudeError(
            f"{TRUSTED} must be the 64 hex digits of a public ed25519 key, not {text!r}"
        )
    return Trust(public)


def _unsealed(record: Sealed) -> bytes:
    return to_json(dataclasses.replace(record, seal=""))  # type: ignore[type-var]


def _cryptography() -> tuple[Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as e:
        raise EtudeError(
            "signing needs the package cryptography: pip install 'etude[signing]'"
        ) from e
    return ed25519, InvalidSignature
