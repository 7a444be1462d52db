"""Certificates of a made-up authority, as `docker` wants them: `ca.pem`, `cert.pem` and `key.pem` in a folder."""

from __future__ import annotations

import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_YEAR = datetime.timedelta(days=365)


class Authority:
    def __init__(self, name: str) -> None:
        self._name, self._key = _name(name), ec.generate_private_key(ec.SECP256R1())
        whole = x509.KeyUsage(False, False, False, False, False, key_cert_sign=True, crl_sign=True, **_NO_CIPHERS)
        self.certificate = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(whole, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, folder: Path, address: str = "") -> None:
        """Write a key, its certificate (of a server with `address`), and this authority's into a folder."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(address or "client"), self._name, key)
        if address:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))]), False)
            use = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
        else:
            use = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH])
        signed = builder.add_extension(use, critical=False).sign(self._key, hashes.SHA256())
        pem = serialization.Encoding.PEM
        form, bare = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (folder / "ca.pem").write_bytes(self.certificate.public_bytes(pem))
        (folder / "cert.pem").write_bytes(signed.public_bytes(pem))
        (folder / "key.pem").write_bytes(key.private_bytes(pem, form, bare))


_NO_CIPHERS = {"encipher_only": False, "decipher_only": False}


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _YEAR)
        .not_valid_after(now + _YEAR)
    )
