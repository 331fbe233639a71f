"""Certificates that nobody trusts, and those of an authority that a test may trust."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

LIFE = timedelta(days=1)


def self_signed(path: Path) -> Path:
    """Of a server on loopback, signed by itself; with its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), _named("localhost")
    return _written(path, key, _server(name, key, "localhost", LIFE).issuer_name(name).sign(key, hashes.SHA256()))


class Authority:
    """Signs certificates of servers on loopback."""

    def __init__(self, path: Path, name: str = "an authority") -> None:
        """`path`: of its certificate, for those who are to trust it."""
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _named(name)
        made = _builder(self._name, self._key, LIFE).issuer_name(self._name)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.path = path
        path.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def certificate(self, path: Path, host: str = "localhost", life: timedelta = LIFE) -> Path:
        """With its key. `life`: from now; one below zero is over."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _server(_named("a server"), key, host, life).issuer_name(self._name)
        return _written(path, key, made.sign(self._key, hashes.SHA256()))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _builder(name: x509.Name, key: EllipticCurvePrivateKey, life: timedelta) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 3 * LIFE)
        .not_valid_after(now + life)
    )


def _server(name: x509.Name, key: EllipticCurvePrivateKey, host: str, life: timedelta) -> x509.CertificateBuilder:
    hosts = x509.SubjectAlternativeName([x509.DNSName(host)])
    return _builder(name, key, life).add_extension(hosts, critical=False)


def _written(path: Path, key: EllipticCurvePrivateKey, made: x509.Certificate) -> Path:
    plain = serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path
