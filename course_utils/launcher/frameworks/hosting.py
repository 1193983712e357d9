"""What the kernel keeps up for the ranks of a run, as long as they live, so that they can meet."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...errors import LaunchError
from ...machine import devices

Variables = Callable[[int], dict[str, str]]  # rank -> environment variables


@dataclass(frozen=True)
class Task:
    """One rank's place in its cluster: its role and its number among those of the same role."""

    role: str
    index: int


@contextlib.contextmanager
def meet_at_a_port(tasks: tuple[Task, ...]) -> Iterator[Variables]:
    with reserved_ports(1) as (port,):
        yield lambda rank: {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # a host name may not resolve


@contextlib.contextmanager
def meet_by_tf_config(tasks: tuple[Task, ...]) -> Iterator[Variables]:
    """TF_CONFIG with a reserved port a task.

    Where each worker can have a GPU of its own, it sees that one alone; a lone worker sees them all.
    """
    workers = [rank for rank, task in enumerate(tasks) if task.role != "ps"]
    gpus = [device for device, _ in devices()]
    own = dict(zip(workers, gpus, strict=False)) if len(gpus) >= len(workers) else {}
    if gpus and len(workers) == 1:
        own = {workers[0]: ",".join(gpus)}
    with reserved_ports(len(tasks)) as ports:
        cluster: dict[str, list[str]] = {}
        for task, port in zip(tasks, ports, strict=True):
            cluster.setdefault(task.role, []).append(f"127.0.0.1:{port}")

        def variables(rank: int) -> dict[str, str]:
            place = {"type": tasks[rank].role, "index": tasks[rank].index}
            return {
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": place}),
                "CUDA_VISIBLE_DEVICES": own.get(rank, "-1"),
            }

        yield variables


@contextlib.contextmanager
def meet_at_a_rendezvous_server(tasks: tuple[Task, ...]) -> Iterator[Variables]:
    """What horovodrun does for its workers, for the ranks of one machine."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    size = len(tasks)
    places = get_host_assignments(parse_hosts(f"localhost:{size}"), size)
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(2):  # horovod.torch and horovod.tensorflow each meet on their own
            server = stack.enter_context(RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, verbose=0))
            server.daemon_threads = True  # a rank that stands still in its request holds nobody up
            server.init(places)
            serving = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            serving.start()
            stack.callback(serving.join)
            stack.callback(server.shutdown)
            ports.append(server.server_port)
        yield lambda rank: {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(ports[0]),
            "COURSE_SECOND_RENDEZVOUS_PORT": str(ports[1]),
            "HOROVOD_GLOO_IFACE": loopback(),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "600",  # a rank may be slow to start on a busy machine
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": str(size),
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
        }


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Free ports that stay ours: bound here without listening, so that ranks alone can share them (SO_REUSEADDR)."""
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", 0))
            except OSError as error:
                raise LaunchError(f"there is no free port on this machine: {error}") from None
            held.append(one.getsockname()[1])
        yield held


def loopback() -> str:
    """The name of the network interface that never leaves this machine."""
    return "lo" if os.uname().sysname == "Linux" else "lo0"
