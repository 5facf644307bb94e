"""Keys, masks and signatures, of the package cryptography's primitives.

X25519 for what two clients agree on, HKDF with SHA-256 for keys from it, ChaCha20 for masks,
ChaCha20-Poly1305 for shares on their way, Ed25519 for signatures. Keys and secrets are hexadecimal
texts. What is derived is bound to the round's name by the ``purpose``; each key encrypts or masks
once, so that nonces are 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from ...errors import InputError

SECRET = 31  # bytes: a number below the prime of the shares
_NONCE = bytes(12)


class ProtocolError(InputError):
    """The other side breaks the protocol, and nothing is told to it."""


def derived(secret: bytes, purpose: str) -> bytes:
    """32 bytes for one purpose."""
    return HKDF(SHA256(), 32, salt=None, info=purpose.encode()).derive(secret)


def private_key(secret: str) -> X25519PrivateKey:
    """The private key that a secret stands for."""
    return X25519PrivateKey.from_private_bytes(derived(bytes.fromhex(secret), "fedtailor X25519"))


def public_key(secret: str) -> str:
    """The public key of a secret."""
    return private_key(secret).public_key().public_bytes_raw().hex()


def agreed(key: X25519PrivateKey, other: str) -> bytes:
    """32 bytes that the owners of ``key`` and of the public key ``other`` have in common."""
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    except ValueError as error:
        raise ProtocolError("a public key of secure aggregation is none") from error


def add_masks(
    values: NDArray[np.uint32], plus: Iterable[str], minus: Iterable[str]
) -> NDArray[np.uint32]:
    """``values`` with the masks of some seeds added and of others taken off, modulo 2^32."""
    masked, zeros = values.copy(), bytes(values.nbytes)
    for seeds, change in ((plus, np.add), (minus, np.subtract)):
        for seed in seeds:
            encryptor = Cipher(ChaCha20(bytes.fromhex(seed), bytes(16)), None).encryptor()
            change(masked, np.frombuffer(encryptor.update(zeros), "<u4"), out=masked)
    return masked


def sealed(key: bytes, text: bytes) -> bytes:
    """What the owner of ``key`` alone can read and change."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, None)


def opened(key: bytes, text: bytes) -> bytes:
    """The text of `sealed`. Raises ProtocolError where it was changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, text, None)
    except InvalidTag as error:
        raise ProtocolError("a share was changed on its way") from error


@lru_cache(1 << 14)  # a place with several clients checks once
def is_signed(key: bytes, text: str, signature: str) -> bool:
    """Whether the owner of the Ed25519 ``key`` has signed ``text``."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(bytes.fromhex(signature), text.encode())
    except (InvalidSignature, ValueError):
        return False
    return True
