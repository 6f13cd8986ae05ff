"""Mutual TLS of JAX's coordination service: certificates that a job's key determines.

All processes derive the same certificate authority and the same certificate from the key, so that
nothing has to be distributed, and nobody without the key gets a connection.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinfer.loader.config.source_errors import SourceError
from jinfer.parallel.distributed.rendezvous import KEY

_URI = "spiffe://jinfer/"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256


@contextmanager
def mutual_tls() -> Iterator[dict[str, Any]]:
    """Arguments of `jax.distributed.initialize`, whose files exist in the block; {} without a key.

    Raises:
        SourceError: the package that makes certificates is missing.
    """
    key = os.environ.get(KEY, "")
    if not key:
        yield {}
        return
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise SourceError(
            f"{KEY} needs the package cryptography: pip install cryptography"
        ) from None
    authority, own = _private_key(key, "authority"), _private_key(key, "process")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files = {
        "mtls_cert_file": _certificate(own, authority, is_authority=False).public_bytes(pem),
        "mtls_key_file": own.private_bytes(pem, pkcs8, serialization.NoEncryption()),
        "mtls_ca_file": _certificate(authority, authority, is_authority=True).public_bytes(pem),
    }
    with tempfile.TemporaryDirectory(prefix="jinfer-job-") as folder:  # for this user alone
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        yield {name: str(Path(folder) / name) for name in files} | {"mtls_peer_uri_prefix": _URI}


def _private_key(key: str, purpose: str) -> Any:
    """A private key on the curve P-256 that the job's key determines."""
    from cryptography.hazmat.primitives.asymmetric import ec

    salt = f"jinfer {purpose}".encode()
    digest = hashlib.scrypt(key.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=48)
    return ec.derive_private_key(int.from_bytes(digest) % (_ORDER - 1) + 1, ec.SECP256R1())


def _certificate(key: Any, signer: Any, *, is_authority: bool) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    def name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    builder = (
        x509.CertificateBuilder()
        .subject_name(name("jinfer authority" if is_authority else "jinfer process"))
        .issuer_name(name("jinfer authority"))
        .public_key(key.public_key())
        .serial_number(1 if is_authority else 2)
        .not_valid_before(datetime.datetime(2020, 1, 1))  # clocks of hosts differ
        .not_valid_after(datetime.datetime(2120, 1, 1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if not is_authority:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{_URI}process")])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, hashes.SHA256())
