"""The deployment's certificate authority, the server's certificate, and a key for each site.

By the certificate the sites recognise the server; by the keys the server recognises the sites.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import InputError
from .folder import Deployment

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")  # for Flower's programs on the same machine
_ANEW = "or use --force to make all anew"
_YEARS = {"authority": 10, "server": 3}


def make(deployment: Deployment, *, force: bool = False) -> list[Path]:
    """Make the certificates and keys that are missing, or with ``force`` all; the new files."""
    new_files: list[Path] = []
    key_path, path = deployment.certificate("ca.key"), deployment.certificate("ca.crt")
    new_authority = force or not path.exists()
    if new_authority and key_path.exists() and not force:
        raise InputError(f"{path} is missing, but its key is there; restore the file, {_ANEW}")
    if new_authority:
        new_files += _make_authority(key_path, path)
    server_key, server = deployment.certificate("server.key"), deployment.certificate("server.crt")
    if new_authority or not server.exists() or not server_key.exists():
        if not key_path.exists():
            raise InputError(
                f"{key_path} is missing; without it no certificate can be made: restore the file, "
                f"{_ANEW}"
            )
        new_files += _make_server(deployment, server_key, server)
    elif not _server_names(deployment) <= _certified_names(server):
        raise InputError(
            f"{server} is not for {deployment.host}, the address in deploy.toml; remove it, and "
            "the same command makes a new one"
        )
    for site in deployment.sites:
        key = deployment.key(site.name)
        public_key = key.with_suffix(".pub")
        if force or not (key.exists() or public_key.exists()):  # the site may have the private one
            pair = ec.generate_private_key(ec.SECP384R1())
            private = pair.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
            public = pair.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            new_files += _write(key, private, public_key, public)
    return new_files


def _make_authority(key_path: Path, path: Path) -> list[Path]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedtailor deployment")
    certificate = (
        _new_certificate(name, name, key.public_key(), _YEARS["authority"])
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    return _write(key_path, _pem(key), path, certificate.public_bytes(Encoding.PEM))


def _make_server(deployment: Deployment, key_path: Path, path: Path) -> list[Path]:
    authority = x509.load_pem_x509_certificate(deployment.certificate("ca.crt").read_bytes())
    authority_key = load_pem_private_key(deployment.certificate("ca.key").read_bytes(), None)
    if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
        raise InputError(
            f"{deployment.certificate('ca.key')} is not an elliptic-curve key; restore the key "
            f"that fedtailor deploy certs made, {_ANEW}"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    general_names = [_general_name(name) for name in sorted(_server_names(deployment))]
    names = x509.SubjectAlternativeName(general_names)
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    subject, issuer = _name(deployment.host), authority.subject
    certificate = (
        _new_certificate(subject, issuer, key.public_key(), _YEARS["server"])
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    return _write(key_path, _pem(key), path, certificate.public_bytes(Encoding.PEM))


def _new_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, years: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # a site's clock may be slow
        .not_valid_after(now + timedelta(days=365 * years))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs, crl_sign=signs,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _server_names(deployment: Deployment) -> set[str]:
    return {deployment.host, *_LOCAL_NAMES}


def _certified_names(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return {*names.get_values_for_type(x509.DNSName), *addresses}


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(key_path: Path, private: bytes, path: Path, public: bytes) -> list[Path]:
    """Write a key that only the user can read, and what others get; return the two paths."""
    key_path.parent.mkdir(parents=True, exist_ok=True)
    key_path.unlink(missing_ok=True)
    with os.fdopen(os.open(key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
    path.write_bytes(public)
    return [key_path, path]
