"""All the links of one worker: native inside its island, wire between islands, shaped where the cluster is emulated."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import torch

from atoll.cluster.network import Network
from atoll.errors import WorkplaceError
from atoll.runtime.keys import Bundle
from atoll.runtime.liveness import Timeouts
from atoll.runtime.transport.native import DIRECT_BYTES, Native
from atoll.runtime.transport.router import Router
from atoll.runtime.transport.shaped import Buckets, Shaped
from atoll.runtime.transport.wire import Wire
from atoll.runtime.world import Channel, Stop

__all__ = ["Links", "listening_place"]


def listening_place(network: Network, worker: str, head: str) -> str | None:
    """Where a worker listens: "host:port", or None for one that others cannot dial.

    Emulated: any free port of the loopback interface. Else the machine's address; its workers take the port and those
    after it in the order of the document, on the head's machine beginning one higher (the head has the first).
    """
    if network.cluster.emulation is not None:
        return "127.0.0.1:0"
    machine = network.worker(worker).machine
    address = network.machines[machine].address
    if address is None:
        return None
    own = [name for name, other in network.workers.items() if other.machine == machine]
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + own.index(worker) + (machine == head)}"


class Links:
    """``channel`` is what the engine uses; ``connect`` once everybody's address is known, ``close`` at the end.

    ``workers``: those of the run. ``head``: the head's machine. ``buckets``: path of the shared file of an emulated
    cluster, else None. ``largest_message_bytes``: payload of the largest message to expect; twice that is refused.
    """

    def __init__(self, name: str, workers: Sequence[str], network: Network, head: str, bundle: Bundle, stop: Stop,
                 times: Timeouts, *, buckets: str | os.PathLike[str] | None, largest_message_bytes: int,
                 device: torch.device) -> None:
        self._name, self._device = name, device
        max_message_bytes = 2 * largest_message_bytes + (1 << 20)  # room for headers and small things
        island = network.island(name)
        machines = {worker: network.worker(worker).machine for worker in workers}
        self._near = [worker for worker in workers if network.island(worker) == island]
        self._island = island
        place = listening_place(network, name, head)
        self._native: Native | None = None
        self._wire: Wire | None = None
        self.store_port = 0
        if len(self._near) > 1:
            self._native = Native(name, self._near, machines, stop, device=device, max_message_bytes=max_message_bytes,
                                  connect_ns=times.connect_ns,
                                  direct=device.type == "cpu" and buckets is None and largest_message_bytes <= DIRECT_BYTES)
            if self._near[0] == name:
                self.store_port = self._native.open_store()
        self.address: str | None = None
        if len(self._near) < len(workers):
            self._wire = Wire(name, bundle, machines, stop, bind=None if place is None else _everywhere(place, network),
                              max_message_bytes=max_message_bytes, keepalive_ns=times.silence_ns,
                              connect_ns=times.connect_ns)
        if place is not None:
            host, _, port = place.rpartition(":")
            self.address = f"{host}:{self._wire.port if self._wire is not None else port}"
        elif len(set(machines.values())) == 1:
            self.address = "127.0.0.1:0"  # nobody dials it; its host is where the island meets
        elif self.store_port:
            raise WorkplaceError(f"machine {machines[name]}: it is the first of island {island} and needs an address there; "
                                 "write machines: address: HOST:PORT in the cluster")
        inner: Channel = Router(name, self._near, self._native, self._wire)
        self._buckets = None if buckets is None else Buckets(buckets, network.capacity)
        self.channel: Channel = inner if self._buckets is None else Shaped(inner, name, self._buckets, network.path, stop)

    def connect(self, addresses: Mapping[str, str | None], stores: Mapping[str, str], cards: Mapping[str, str], *,
                sends_to: Collection[str], receives_from: Collection[str]) -> None:
        """Meet the peers. ``stores``: island -> "host:port"; ``cards``: worker -> mark of a CUDA device it has to itself.

        Raises ``WorkerLostError`` when one does not come in time.
        """
        if self._native is not None:
            near_cards = [cards.get(worker, "") for worker in self._near]
            self._native.connect(stores[self._island], nccl=all(near_cards) and len(set(near_cards)) == len(near_cards))
        if self._wire is not None:
            near = set(self._near)
            self._wire.connect(addresses, sends_to=[peer for peer in sends_to if peer not in near],
                               receives_from=[peer for peer in receives_from if peer not in near])

    def passed_bytes(self) -> dict[str, int]:
        """Bytes over each directed segment of an emulated cluster so far, by all workers."""
        return {} if self._buckets is None else self._buckets.passed_bytes()

    def close(self) -> None:
        self.channel.close()
        if self._buckets is not None:
            self._buckets.close()


def _everywhere(place: str, network: Network) -> str:
    """Listen on all interfaces of a real machine: its address may be one that a router forwards."""
    return place if network.cluster.emulation is not None else f"0.0.0.0:{place.rpartition(':')[2]}"
