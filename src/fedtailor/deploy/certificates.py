"""Who is who: an authority of the deployment's own, the server's certificate, a key for each site.

TLS tells the sites that the server is the one they mean; the keys tell the server the same of them.
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

_LOCAL = ("localhost", "127.0.0.1", "::1")  # how Flower's own programs reach the server there
_YEARS = {"authority": 10, "server": 3}


def make(deployment: Deployment, *, force: bool = False) -> list[Path]:
    """Make what is missing, or with ``force`` everything anew; the files that were made.

    Raises:
        InputError: what is there doesn't go together.
    """
    made: list[Path] = []
    key_path, path = deployment.certificate("ca.key"), deployment.certificate("ca.crt")
    anew = force or not path.exists()
    if anew and key_path.exists() and not force:
        raise InputError(f"{path} is missing beside its key; restore it, or --force")
    if anew:
        made += _authority(key_path, path)
    server_key, server = deployment.certificate("server.key"), deployment.certificate("server.crt")
    if anew or not server.exists() or not server_key.exists():
        if not key_path.exists():
            raise InputError(f"{key_path} is missing; without it there is no new certificate")
        made += _server(deployment, server_key, server)
    elif not _names(deployment) <= _named(server):
        raise InputError(
            f"{server} is not for {deployment.host}, the address in deploy.toml; remove it, and "
            "the same command makes a new one"
        )
    for site in deployment.sites:
        key = deployment.key(site.name)
        if force or not (key.exists() or key.with_suffix(".pub").exists()):  # a site may keep it
            made += _site(key)
    return made


def _authority(key_path: Path, path: Path) -> list[Path]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedtailor deployment")
    certificate = (
        _begun(name, name, key.public_key(), _YEARS["authority"])
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write_private(key_path, _pem(key))
    path.write_bytes(certificate.public_bytes(Encoding.PEM))
    return [key_path, path]


def _server(deployment: Deployment, key_path: Path, path: Path) -> list[Path]:
    authority = x509.load_pem_x509_certificate(deployment.certificate("ca.crt").read_bytes())
    signing = load_pem_private_key(deployment.certificate("ca.key").read_bytes(), None)
    if not isinstance(signing, ec.EllipticCurvePrivateKey):
        raise InputError(f"{deployment.certificate('ca.key')} is no elliptic-curve key")
    key = ec.generate_private_key(ec.SECP384R1())
    names = x509.SubjectAlternativeName([_general(name) for name in sorted(_names(deployment))])
    by_authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    certificate = (
        _begun(_name(deployment.host), authority.subject, key.public_key(), _YEARS["server"])
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
        .add_extension(by_authority, critical=False)
        .sign(signing, hashes.SHA384())
    )
    _write_private(key_path, _pem(key))
    path.write_bytes(certificate.public_bytes(Encoding.PEM))
    return [key_path, path]


def _site(path: Path) -> list[Path]:
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write_private(path, private)
    path.with_suffix(".pub").write_bytes(public)
    return [path, path.with_suffix(".pub")]


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, years: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
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


def _names(deployment: Deployment) -> set[str]:
    return {deployment.host, *_LOCAL}


def _named(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    numbers = map(str, found.get_values_for_type(x509.IPAddress))
    return {*found.get_values_for_type(x509.DNSName), *numbers}


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_private(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
