"""Konnectivity in http-connect mode: mutual TLS for clients and for the agent, the same P-256 keys, log level 0."""

from __future__ import annotations

from dataclasses import dataclass

from .bed import Bed
from .causeway import answers
from .contestant import Connect, Contestant, fresh_name
from .process import listens, wait_for


@dataclass
class Konnectivity(Contestant):
    """proxy-server and proxy-agent."""

    needs = ("konnectivity-server", "konnectivity-agent")

    def start(self, bed: Bed, app: int) -> None:
        pki = bed.pki
        front, agents, server_admin, server_health = (bed.port() for _ in range(4))
        start = fresh_name("konnectivity")
        command = [
            bed.tools.path("konnectivity-server"), "-v=0", "--mode=http-connect", "--server-count=1",
            "--server-bind-address=127.0.0.1", f"--server-port={front}",
            f"--server-cert={pki.chain('server')}", f"--server-key={pki.key('server')}", f"--server-ca-cert={pki.ca}",
            f"--agent-bind-address={bed.cloud}", f"--agent-port={agents}",
            f"--cluster-cert={pki.chain('server')}", f"--cluster-key={pki.key('server')}",
            f"--cluster-ca-cert={pki.ca}",
            "--admin-bind-address=127.0.0.1", f"--admin-port={server_admin}",
            "--health-bind-address=127.0.0.1", f"--health-port={server_health}",
        ]  # fmt: skip
        server = bed.spawn(f"{start}-server", command, "cloud")
        self.processes["front"] = server
        bed.configurations["konnectivity/server"] = quoted(command, bed)
        wait_for("Konnectivity's server listens", lambda: listens(front) and listens(agents, bed.cloud), [server])

        admin, health = bed.port(), bed.port()
        command = [
            bed.tools.path("konnectivity-agent"), "-v=0", f"--proxy-server-host={bed.cloud}",
            f"--proxy-server-port={agents}", f"--ca-cert={pki.ca}",
            f"--agent-cert={pki.chain('client')}", f"--agent-key={pki.key('client')}", "--agent-id=edge-1",
            "--admin-bind-address=127.0.0.1", f"--admin-server-port={admin}", f"--health-server-port={health}",
        ]  # fmt: skip
        agent = bed.spawn(f"{start}-agent", command, "rest")
        self.processes["edge"] = agent
        bed.configurations["konnectivity/agent"] = quoted(command, bed)
        with bed.at("rest"):
            wait_for("Konnectivity's agent is connected", lambda: answers(health, "/readyz"), [server, agent])
        self.connect = Connect(front, pki.ca, f"localhost:{app}", certificate=pki.chain("client"), key=pki.key("client"))


def quoted(command: list[str], bed: Bed) -> str:
    """A command line for the results, without the machine's folders."""
    program, *words = command
    return " \\\n  ".join([program.rsplit("/", 1)[-1], *words]).replace(str(bed.scratch), "$SCRATCH")
