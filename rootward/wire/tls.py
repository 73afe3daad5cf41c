"""TLS on both ends of a hop, from PEM files that may be renewed while the process runs.

A role has one certificate, with which it serves and with which it calls. Servers read the files on every handshake; callers when they
open a channel, and `Certificates.watch` reports when to open another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from rootward.errors import ConfigurationError
from rootward.file_watch import WatchedFiles


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: our certificate chain and its key, and the authority that signs our peers'."""

    certificate: Path
    key: Path
    authority: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(chain, key, authority). ConfigurationError if one cannot be read."""
        return (
            read_pem("tls_certificate", self.certificate),
            read_pem("tls_key", self.key),
            read_pem("tls_authority", self.authority),
        )

    def watch(self) -> WatchedFiles:
        """Reports when one of them has been renewed."""
        return WatchedFiles(self.certificate, self.key, self.authority)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS of a client. server_name: the name in the certificates of the servers, where it differs from the address."""

    certificates: Certificates
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS of a server. mutual: callers need a certificate of the authority; peers: with one of these names (empty: any)."""

    certificates: Certificates
    mutual: bool = True
    peers: tuple[str, ...] = ()


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """For a listening port."""
    watched = tls.certificates.watch()

    def configuration() -> grpc.ServerCertificateConfiguration:
        chain, key, authority = tls.certificates.read()
        return grpc.ssl_server_certificate_configuration([(key, chain)], authority if tls.mutual else None)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        if not watched.changed():
            return None
        try:
            return configuration()
        except ConfigurationError:
            return None  # in the middle of being replaced: the old ones serve this handshake, the next one looks again

    # the stubs do not know that None means: as before
    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, tls.mutual)  # type: ignore[arg-type]


def read_pem(field: str, path: Path) -> bytes:
    """The content of a PEM file. ConfigurationError, naming the field, if it cannot be read or is something else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{field}: {str(path)!r} cannot be read ({error.strerror}); name a PEM file") from None
    if b"-----BEGIN " not in content:
        raise ConfigurationError(f"{field}: {str(path)!r} is not a PEM file; convert it with openssl")
    return content
