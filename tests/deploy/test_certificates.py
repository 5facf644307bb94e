"""Certificates and keys: what they say, who may read them, and that none is lost."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedtailor.cli import main
from fedtailor.deploy.certificates import make
from fedtailor.deploy.folder import Deployment, open_folder
from fedtailor.errors import InputError
from tests.deploy.test_folder import made


def opened(tmp_path: Path) -> Deployment:
    return open_folder(made(tmp_path))


def test_the_server_is_named_and_vouched_for(tmp_path: Path) -> None:
    deployment = opened(tmp_path)
    make(deployment)
    read = [
        x509.load_pem_x509_certificate(deployment.certificate(name).read_bytes())
        for name in ("server.crt", "ca.crt")
    ]
    server, authority = read
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fed.example.org", "localhost"}
    assert "127.0.0.1" in map(str, names.get_values_for_type(x509.IPAddress))
    constraints = [c.extensions.get_extension_for_class(x509.BasicConstraints).value for c in read]
    assert [c.ca for c in constraints] == [False, True]
    trusting = ssl.create_default_context(cafile=str(deployment.certificate("ca.crt")))
    assert trusting.get_ca_certs()
    pair = [str(deployment.certificate(name)) for name in ("server.crt", "server.key")]
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*pair)


def test_every_site_has_a_key_of_its_own(tmp_path: Path) -> None:
    deployment = opened(tmp_path)
    make(deployment)
    publics = set()
    for site in deployment.sites:
        path = deployment.key(site.name)
        private = load_ssh_private_key(path.read_bytes(), None)
        public = load_ssh_public_key(path.with_suffix(".pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public
        publics.add(path.with_suffix(".pub").read_text())
    assert len(publics) == 3


def test_what_is_secret_is_the_owners_alone(tmp_path: Path) -> None:
    deployment = opened(tmp_path)
    for path in make(deployment):
        secret = path.suffix in (".key", "")
        assert path.stat().st_mode & 0o777 == 0o600 or not secret


def test_nothing_is_made_twice_unless_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path)
    files = {path: path.read_bytes() for path in make(open_folder(folder))}
    assert main(["deploy", "certs", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "nothing is missing" in told
    assert "site b needs: deploy.toml experiment.toml certs/ca.crt keys/b" in told
    assert all(path.read_bytes() == content for path, content in files.items())
    with (folder / "deploy.toml").open("a") as file:
        file.write('[[sites]]\nname = "d"\n')
    experiment = folder / "experiment.toml"
    experiment.write_text(experiment.read_text().replace("clients = 5", "clients = 6"))
    assert {path.name for path in make(open_folder(folder))} == {"d", "d.pub"}
    assert all(path.read_bytes() == content for path, content in files.items())
    make(open_folder(folder), force=True)
    assert all(path.read_bytes() != content for path, content in files.items())


def test_a_server_that_has_moved_needs_another_certificate(tmp_path: Path) -> None:
    folder = made(tmp_path)
    make(open_folder(folder))
    path = folder / "deploy.toml"
    path.write_text(path.read_text().replace("fed.example.org", "10.1.2.3"))
    with pytest.raises(InputError, match=r"server.crt is not for 10.1.2.3, the address in"):
        make(open_folder(folder))
    (folder / "certs/server.crt").unlink()
    assert [found.name for found in make(open_folder(folder))] == ["server.key", "server.crt"]
    (folder / "certs/server.crt").unlink()
    (folder / "certs/ca.key").unlink()
    with pytest.raises(InputError, match=r"ca.key is missing; without it"):
        make(open_folder(folder))
