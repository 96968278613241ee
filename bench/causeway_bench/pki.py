"""One CA with P-256 keys, the kind that Causeway issues, for all contestants without their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .process import run


@dataclass(frozen=True)
class Pki:
    """Paths of the files. `server` is for localhost, `client` for all that have to show a certificate."""

    openssl: str
    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def chain(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}-key.pem"

    def bundle(self, name: str) -> Path:
        """Certificate and key in one file, as HAProxy requires them."""
        return self.folder / f"{name}-bundle.pem"

    @property
    def server_pkcs12(self) -> Path:
        """The same for rathole; the password is `bench`."""
        return self.folder / "server.p12"

    def make(self, cloud: str) -> None:
        self.authority()
        self.leaf("server", "serverAuth", f"DNS:localhost,IP:127.0.0.1,IP:{cloud}")
        self.leaf("client", "clientAuth", "DNS:client")
        for name in ("server", "client"):
            self.bundle(name).write_text(self.chain(name).read_text() + self.key(name).read_text())
        run([self.openssl, "pkcs12", "-export", "-in", str(self.chain("server")), "-inkey",
             str(self.key("server")), "-passout", "pass:bench", "-out", str(self.server_pkcs12)])  # fmt: skip

    def authority(self) -> None:
        """Makes the CA."""
        self.folder.mkdir(parents=True)
        self._key("ca")
        run([self.openssl, "req", "-x509", "-new", "-key", str(self.key("ca")), "-subj", "/CN=bench CA",
             "-days", "30", "-addext", "keyUsage=critical,keyCertSign,cRLSign", "-out", str(self.ca)])  # fmt: skip

    def _key(self, name: str) -> None:
        run([self.openssl, "ecparam", "-genkey", "-noout", "-name", "prime256v1", "-out", str(self.key(name))])

    def leaf(self, name: str, usage: str, names: str, subject: str = "") -> None:
        """Makes a key, and its certificate signed by the CA."""
        self._key(name)
        request = self.folder / f"{name}.csr"
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(
            f"subjectAltName={names}\nextendedKeyUsage={usage}\nkeyUsage=critical,digitalSignature\n"
            "basicConstraints=critical,CA:FALSE\n"
        )
        run([self.openssl, "req", "-new", "-key", str(self.key(name)), "-subj", subject or f"/CN={name}",
             "-out", str(request)])  # fmt: skip
        run([self.openssl, "x509", "-req", "-in", str(request), "-CA", str(self.ca), "-CAkey", str(self.key("ca")),
             "-CAcreateserial", "-days", "30", "-extfile", str(extensions), "-out", str(self.chain(name))])  # fmt: skip
