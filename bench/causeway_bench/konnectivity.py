"""Konnectivity in http-connect mode: mutual TLS for clients and for the agent, the same P-256 keys, log level 0."""

from __future__ import annotations

from dataclasses import dataclass

from .bed import Bed
from .causeway import answers
from .contestant import Connect, Contestant, fresh_name
from .process import listens, wait_for


@dataclass(frozen=True)
class Server:
    """Ports of a proxy-server: for clients, and for agents."""

    clients: int
    agents: int


@dataclass
class Konnectivity(Contestant):
    """proxy-server and proxy-agent."""

    needs = ("konnectivity-server", "konnectivity-agent")

    def start(self, bed: Bed, app: int) -> None:
        server = self.start_server(bed, "front")
        self.start_agent(bed, server.agents)
        self.connect = self.connect_by(bed, server.clients, app)

    def start_server(self, bed: Bed, role: str, count: int = 1) -> Server:
        """Starts one of `count` proxy-servers."""
        pki = bed.pki
        front, agents, server_admin, server_health = (bed.port() for _ in range(4))
        command = [
            bed.tools.path("konnectivity-server"), "-v=0", "--mode=http-connect", f"--server-count={count}",
            f"--server-id={role}", "--server-bind-address=127.0.0.1", f"--server-port={front}",
            f"--server-cert={pki.chain('server')}", f"--server-key={pki.key('server')}", f"--server-ca-cert={pki.ca}",
            f"--agent-bind-address={bed.cloud}", f"--agent-port={agents}",
            f"--cluster-cert={pki.chain('server')}", f"--cluster-key={pki.key('server')}",
            f"--cluster-ca-cert={pki.ca}",
            "--admin-bind-address=127.0.0.1", f"--admin-port={server_admin}",
            "--health-bind-address=127.0.0.1", f"--health-port={server_health}",
        ]  # fmt: skip
        server = bed.spawn(fresh_name("konnectivity-server"), command, "cloud")
        self.processes[role] = server
        bed.configurations["konnectivity/server"] = quoted(command, bed)
        wait_for("Konnectivity's server listens", lambda: listens(front) and listens(agents, bed.cloud), [server])
        return Server(front, agents)

    def start_agent(self, bed: Bed, agents: int) -> int:
        """Starts the agent; returns the port of its metrics once it has a connection."""
        pki = bed.pki
        admin, health = bed.port(), bed.port()
        # Several servers are found behind one address, so the agent connects until it knows all of them.
        command = [
            bed.tools.path("konnectivity-agent"), "-v=0", f"--proxy-server-host={bed.cloud}",
            f"--proxy-server-port={agents}", f"--ca-cert={pki.ca}",
            f"--agent-cert={pki.chain('client')}", f"--agent-key={pki.key('client')}", "--agent-id=edge-1",
            "--admin-bind-address=127.0.0.1", f"--admin-server-port={admin}", f"--health-server-port={health}",
        ]  # fmt: skip
        agent = bed.spawn(fresh_name("konnectivity-agent"), command, "rest")
        self.processes["edge"] = agent
        bed.configurations["konnectivity/agent"] = quoted(command, bed)
        with bed.at("rest"):
            wait_for("Konnectivity's agent is connected", lambda: answers(health, "/readyz"), self.processes.values())
        return admin

    def connect_by(self, bed: Bed, port: int, app: int) -> Connect:
        """Returns the way of clients by a port of loopback."""
        pki = bed.pki
        return Connect(port, pki.ca, f"localhost:{app}", certificate=pki.chain("client"), key=pki.key("client"))


def quoted(command: list[str], bed: Bed) -> str:
    """A command line for the results, without the machine's folders."""
    program, *words = command
    return " \\\n  ".join([program.rsplit("/", 1)[-1], *words]).replace(str(bed.scratch), "$SCRATCH")
