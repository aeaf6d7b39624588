"""Keys for one run: an authority made on the spot, and one bundle (key, certificate, authority) for each machine.

Whoever holds a bundle may take part as a worker of that machine, and nobody else may. The authority's own key is never
written: after ``make_run_keys`` returns, no further bundle can be made for the run. A bundle is a PEM file of mode
0600; lines before the first block say in plain text whom it is for and where the head listens, so that a machine needs
only its bundle to take part.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable
from pathlib import Path

from atoll.errors import ClusterError, WorkplaceError
from atoll.records import Record

__all__ = ["Bundle", "bundle_path", "make_run_keys", "read_bundle"]

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.\-]{0,61}[A-Za-z0-9])?$")
_VALID = datetime.timedelta(days=60)
_SKEW = datetime.timedelta(days=2)  # a machine whose clock is off by a day may still take part
_PEM_KEY = re.compile(r"-----BEGIN PRIVATE KEY-----.*?-----END PRIVATE KEY-----\n?", re.S)
_PEM_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.S)


class Bundle(Record):
    """What one machine needs to take part: PEM texts, and the plain facts in front of them.

    ``machine``: whose bundle it is. ``head``, ``head_address``: the machine that keeps the run, and its "host:port"
    (empty when it was not known when the keys were made).
    """

    machine: str
    head: str
    head_address: str
    key: bytes
    certificate: bytes
    authority: bytes


def bundle_path(folder: str | os.PathLike[str], machine: str) -> Path:
    """Where ``make_run_keys`` puts the bundle of ``machine``."""
    return Path(folder) / f"{machine}.pem"


def make_run_keys(folder: str | os.PathLike[str], machines: Iterable[str], *, head: str = "",
                  head_address: str = "") -> dict[str, Path]:
    """Write one bundle for each machine into ``folder`` and return their paths.

    EC P-256, the machine's name as subject alternative name; valid from two days ago (clock skew) for sixty days.
    Raises ``ClusterError`` for a name that cannot stand in a certificate, ``WorkplaceError`` when the folder cannot be
    written.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "atoll run")])

    def certify(name: x509.Name, key: ec.EllipticCurvePublicKey, extensions: Iterable[tuple[x509.ExtensionType, bool]]
                ) -> bytes:
        builder = (x509.CertificateBuilder().subject_name(name).issuer_name(authority_name).public_key(key)
                   .serial_number(x509.random_serial_number()).not_valid_before(now - _SKEW).not_valid_after(now + _VALID))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority = certify(authority_name, authority_key.public_key(),
                        [(x509.BasicConstraints(ca=True, path_length=0), True)])
    paths = {}
    for machine in machines:
        if not _NAME.match(machine):
            raise ClusterError(f"machine {machine!r}: a name that stands in a certificate has 1-63 letters, digits, "
                               "'-', '_' or '.', and begins and ends with a letter or digit; rename it in the cluster")
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = certify(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, machine)]), key.public_key(), [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.SubjectAlternativeName([x509.DNSName(machine)]), False)])
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                    serialization.NoEncryption())
        facts = f"Machine: {machine}\nHead: {head}\nHead-Address: {head_address}\n\n".encode()
        paths[machine] = bundle_path(folder, machine)
        _write_private(paths[machine], facts + private + certificate + authority)
    return paths


def _write_private(path: Path, data: bytes) -> None:
    """Mode 0600 from the first byte on; a half-written bundle never carries the final name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise WorkplaceError(f"{path}: the run's keys cannot be written: {error.strerror}; "
                             "choose a run folder that can be written") from None


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Read what ``make_run_keys`` wrote. Raises ``WorkplaceError`` when it is missing, not a bundle, or open to others."""
    try:
        mode = os.stat(path).st_mode
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkplaceError(f"{path}: the key bundle cannot be read: {getattr(error, 'strerror', error)}; copy it from the "
                             "head's run folder (keys/MACHINE.pem)") from None
    if os.name == "posix" and mode & 0o077:
        raise WorkplaceError(f"{path}: the key bundle can be read by others (mode {mode & 0o777:o}); run: chmod 600 {path}")
    key, certificates = _PEM_KEY.search(text), _PEM_CERTIFICATE.findall(text)
    facts = dict(re.findall(r"^(Machine|Head|Head-Address): ?(.*)$", text, re.M))
    if key is None or len(certificates) != 2 or "Machine" not in facts:
        raise WorkplaceError(f"{path}: not a key bundle of Atoll (found {'a' if key else 'no'} key and {len(certificates)} "
                             "certificates, expected one key, its certificate and the run's authority)")
    return Bundle(machine=facts["Machine"], head=facts.get("Head", ""), head_address=facts.get("Head-Address", ""),
                  key=key.group().encode(), certificate=certificates[0].encode(), authority=certificates[1].encode())
