"""A certificate authority for tests: roles by SPIFFE name, as `cert-manager` would issue them."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rootward.wire.tls import Certificates

DAY = datetime.timedelta(days=1)


def spiffe(role: str) -> str:
    return f"spiffe://cluster.local/ns/llm/sa/{role}"


class Authority:
    """Signs certificates and writes them into a folder."""

    def __init__(self, folder: Path, name: str = "authority"):
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        self._certificate = (
            x509.CertificateBuilder(
                self._name, self._name, self._key.public_key(), x509.random_serial_number(), now - DAY, now + DAY
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, role: str, *, expired: bool = False) -> Certificates:
        """A certificate for 127.0.0.1 and localhost in the name of a role. Issued again, it overwrites the files."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        names = [
            x509.UniformResourceIdentifier(spiffe(role)),
            x509.DNSName("localhost"),
            x509.DNSName(f"{role}.llm.svc"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
        until = now - DAY / 2 if expired else now + DAY
        certificate = (
            x509.CertificateBuilder(
                self._name, subject, key.public_key(), x509.random_serial_number(), now - DAY, until
            )
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = Certificates(self._folder / f"{role}.pem", self._folder / f"{role}.key", self.file)
        files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files
