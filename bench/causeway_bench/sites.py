"""The cloud and sites of nodes: a network namespace each, and a separate link from each site to the cloud.

The kernel counts the traffic of the links, with all headers; no metrics of the programs are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .bed import Bed
from .contestant import fresh_name
from .namespace import inside, namespaces
from .process import Trouble, run

_CLOUD = "10.207.114.1"
_LINK = "road0"


@dataclass(frozen=True)
class Places:
    """A bed in the cloud, and one at each site: its `rest` is there."""

    cloud: Bed
    sites: list[Bed]

    def crossed(self) -> int:
        """Returns the bytes that have passed between sites and cloud, in both directions."""
        return sum(_counted(site) for site in self.sites)


@contextmanager
def places(bed: Bed, count: int) -> Iterator[Places]:
    """Inside the block this thread is in the cloud."""
    own = f"causeway-bench-{os.getpid()}"
    cloud, sites = f"{own}-cloud", [f"{own}-site-{number + 1}" for number in range(count)]
    scratch = bed.scratch / fresh_name("sites")
    scratch.mkdir()
    beds = [
        replace(bed, scratch=scratch, cloud=_CLOUD, namespaces={"cloud": cloud, "rest": rest}, apps={}, _processes=[])
        for rest in (cloud, *sites)
    ]
    with namespaces(cloud, *sites):
        run(["ip", "-n", cloud, "address", "add", f"{_CLOUD}/32", "dev", "lo"])
        for number, site in enumerate(sites):
            _lay(cloud, site, number)
        with inside(cloud):
            yield Places(beds[0], beds[1:])


def _lay(cloud: str, site: str, number: int) -> None:
    # Packets of the size that real links have: of larger ones, which stay whole between two namespaces, the headers count
    # once.
    near, whole = f"site{number + 1}", ["gso_max_segs", "1"]
    run(["ip", "-n", cloud, "link", "add", near, *whole, "type", "veth", "peer", "name", _LINK, "netns", site, *whole])
    for name, link, address in ((cloud, near, 1), (site, _LINK, 2)):
        # No traffic of the kernel's own.
        run(["ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv6.conf.{link}.disable_ipv6=1"])
        run(["ip", "-n", name, "address", "add", f"10.207.{115 + number}.{address}/30", "dev", link])
        run(["ip", "-n", name, "link", "set", link, "up"])
    run(["ip", "-n", site, "route", "add", "default", "via", f"10.207.{115 + number}.1"])


def _counted(site: Bed) -> int:
    with site.at("rest"):
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == _LINK:
                fields = counters.split()
                return int(fields[0]) + int(fields[8])
    raise Trouble(f"there is no {_LINK}")
