"""A cluster without nodes: etcd and kube-apiserver, and an administrator's certificate.

etcd does not wait for its disk, which other programs use as well: the subject is the path of a change, not the disk.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from .bed import Bed
from .pki import Pki
from .process import Process, Trouble, wait_for

_PORT, _STORE, _PEER = 6443, 2379, 2380
# kube-apiserver makes its own roles and priorities first, and other programs use the machine too.
_READY = 120


@dataclass
class Cluster:
    """Starts it in the cloud's network namespace."""

    bed: Bed
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def pki(self) -> Pki:
        return self.bed.pki

    @property
    def url(self) -> str:
        return f"https://{self.bed.cloud}:{_PORT}"

    @property
    def admin(self) -> list[str]:
        """Returns the arguments by which the load is an administrator."""
        return ["--cert", str(self.pki.chain("admin")), "--key", str(self.pki.key("admin"))]

    def start(self) -> None:
        pki, bed = self.pki, self.bed
        pki.authority()
        pki.leaf("apiserver", "serverAuth", f"DNS:kubernetes.default.svc,IP:{bed.cloud}")
        pki.leaf("admin", "clientAuth", "DNS:admin", "/O=system:masters/CN=admin")
        pki.leaf("accounts", "clientAuth", "DNS:accounts")
        folder = bed.scratch / "etcd"
        self.processes["etcd"] = bed.spawn(
            "etcd",
            [bed.tools.path("etcd"), f"--data-dir={folder}", "--unsafe-no-fsync", "--log-level=error",
             f"--listen-client-urls=http://127.0.0.1:{_STORE}", f"--advertise-client-urls=http://127.0.0.1:{_STORE}",
             f"--listen-peer-urls=http://127.0.0.1:{_PEER}"],
            "cloud",
        )  # fmt: skip
        self.processes["apiserver"] = bed.spawn("kube-apiserver", self._api(), "cloud")
        wait_for("kube-apiserver is ready", self._ready, self.processes.values(), _READY)

    def kubeconfig(self) -> Path:
        """Returns the administrator's kubeconfig."""
        pki = self.pki
        return self.bed.write(
            "readers/kubeconfig",
            _KUBECONFIG.format(url=self.url, ca=pki.ca, certificate=pki.chain("admin"), key=pki.key("admin")),
        )

    def _api(self) -> list[str]:
        pki, cloud = self.pki, self.bed.cloud
        return [
            self.bed.tools.path("kube-apiserver"), f"--etcd-servers=http://127.0.0.1:{_STORE}",
            f"--bind-address={cloud}", f"--advertise-address={cloud}", f"--secure-port={_PORT}",
            "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki.key('accounts')}",
            f"--service-account-signing-key-file={pki.key('accounts')}",
            f"--tls-cert-file={pki.chain('apiserver')}", f"--tls-private-key-file={pki.key('apiserver')}",
            f"--client-ca-file={pki.ca}",
        ]  # fmt: skip

    def _ready(self) -> bool:
        asked = [self.bed.tools.path("curl"), "-sSf", "--max-time", "5", "-o", "/dev/null", "--cacert", str(self.pki.ca),
                 *self.admin, f"{self.url}/readyz"]  # fmt: skip
        try:
            return subprocess.run(asked, capture_output=True, timeout=10, check=False).returncode == 0
        except subprocess.TimeoutExpired as error:
            raise Trouble("curl does not end") from error


_KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: bench
clusters: [{{ name: bench, cluster: {{ server: "{url}", certificate-authority: {ca} }} }}]
users: [{{ name: bench, user: {{ client-certificate: {certificate}, client-key: {key} }} }}]
contexts: [{{ name: bench, context: {{ cluster: bench, user: bench }} }}]
"""
