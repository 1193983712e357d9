"""What the launcher knows of each framework before any rank starts; what a rank does for it is in `in_<name>`.

This side never imports a framework: it runs in the kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ...errors import BadRequest
from .hosting import Task, Variables, loopback, meet_at_a_port, meet_at_a_rendezvous_server, meet_by_tf_config
from .inside import Inside

__all__ = ["KNOWN", "Framework", "Inside", "Task", "Variables", "inside_of", "loopback", "tasks_of"]

ROLES = ("chief", "worker", "ps")  # TensorFlow's kinds of tasks, in the order of ranks


@dataclass(frozen=True)
class Framework:
    """What a launch needs to know of one framework.

    `preload` is what its server imports, `package` what has to be installed for it, `how_to_get` a sentence; `opaque`
    says why messages cannot be seen one by one, where they cannot. `environment` is set before anything is imported.
    `host(tasks)` keeps up what ranks meet at, as long as they live, and gives each rank's variables. `waits` says what
    a rank is blocked in that stands in a function of the framework: (end of its file's name, function) -> words.
    `seconds_to_end` is how long a rank may take to heed SIGTERM.
    """

    name: str
    host: Callable[[tuple[Task, ...]], AbstractContextManager[Variables]]
    preload: tuple[str, ...] = ()
    package: str = ""
    how_to_get: str = ""
    opaque: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[tuple[str, str], str] = field(default_factory=dict)
    seconds_to_end: float = 2.0

    def wait_of(self, frames: Sequence[Sequence[Any]]) -> str | None:
        """What a rank with this stack ([file, line, function], outermost first) is blocked in, or None."""
        for file, _, function in frames:
            for (end, known), words in self.waits.items():
                if function == known and file.endswith(end):
                    return words
        return None

    @property
    def is_installed(self) -> bool:
        """Whether this Python has it; looked up, not imported."""
        return not self.package or importlib.util.find_spec(self.package) is not None


def inside_of(name: str) -> type[Inside]:
    """Import what a rank of this framework needs; called in ranks alone."""
    if name == "python":
        return Inside
    found: type[Inside] = importlib.import_module(f".in_{name}", __package__).Inside
    return found


_HOROVOD_FUNCTIONS = (
    "broadcast_parameters broadcast_optimizer_state broadcast_variables broadcast_object allgather_object"
)
_HOROVOD_OPERATIONS = (
    "allreduce allreduce_ _allreduce grouped_allreduce grouped_allreduce_ _grouped_allreduce allgather broadcast "
    "broadcast_ alltoall reducescatter join barrier synchronize"
)


def _horovod_waits(file: str, names: str) -> dict[tuple[str, str], str]:
    return {
        (f"horovod/{library}/{file}", name): name.strip("_")
        for library in ("torch", "tensorflow")
        for name in names.split()
    }


_WATCHING = "course_utils.launcher.watching"
_FOR_TENSORFLOW = {
    "TF_CPP_MIN_LOG_LEVEL": "3",  # what it says at its start and end; exceptions carry their own text
    "GRPC_VERBOSITY": "NONE",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # it reorders sums, and says so in every process
}
_IN_C = "moves its tensors in compiled code, where no message can be seen or held back"
KNOWN = {
    framework.name: framework
    for framework in (
        Framework(
            "torch",
            meet_at_a_port,
            preload=("torch", "torch.distributed", "numpy", _WATCHING),
            package="torch",
            how_to_get="framework='torch' needs PyTorch, which this Python does not have: pip install torch",
        ),
        Framework(
            "tensorflow",
            meet_by_tf_config,
            preload=("numpy", "tensorflow", "course_utils.launcher.frameworks.in_tensorflow"),
            package="tensorflow",
            how_to_get="framework='tensorflow' needs TensorFlow, which this Python does not have: "
            "pip install tensorflow tf-keras",
            opaque=f"TensorFlow {_IN_C}",
            environment=_FOR_TENSORFLOW,
            waits={
                ("eager/context.py", "ensure_initialized"): "the start of the other tasks in TF_CONFIG",
                ("training/server_lib.py", "join"): "Server.join, as servers do",
                ("coordinator/cluster_coordinator.py", "join"): "ClusterCoordinator.join",
                ("coordinator/cluster_coordinator.py", "fetch"): "ClusterCoordinator.fetch",
                ("coordinator/remote_value.py", "get"): "RemoteValue.get",
            },
            seconds_to_end=0.3,  # it catches SIGTERM as a notice of preemption, and stays
        ),
        Framework(
            "horovod",
            meet_at_a_rendezvous_server,
            preload=("torch", "numpy", "horovod.torch", "course_utils.launcher.frameworks.in_horovod"),
            package="horovod",
            how_to_get="framework='horovod' needs Horovod, which is not built here: "
            "run python -m course_utils.horovod_build once (some minutes)",
            opaque=f"Horovod {_IN_C}; HOROVOD_TIMELINE records its operations",
            environment=_FOR_TENSORFLOW,
            waits={
                ("horovod/torch/optimizer.py", "synchronize"): "DistributedOptimizer.synchronize",
                ("horovod/common/basics.py", "init"): "hvd.init, for the other ranks",
                **_horovod_waits("functions.py", _HOROVOD_FUNCTIONS),
                **_horovod_waits("mpi_ops.py", _HOROVOD_OPERATIONS),
            },
        ),
        Framework("python", meet_at_a_port, opaque="framework='python' sends nothing"),
    )
}


def tasks_of(nprocs: int, roles: Any) -> tuple[Task, ...]:
    """Name each rank's task; without roles all are workers.

    Raises BadRequest for roles that make no cluster.
    """
    if roles is None:
        return tuple(Task("worker", index) for index in range(nprocs))
    example = "such as {'chief': 1, 'worker': 2, 'ps': 1}"
    if not isinstance(roles, Mapping) or not roles:
        raise BadRequest(f"roles={roles!r}: it takes a dict of how many ranks have each role, {example}")
    for role, count in roles.items():
        if role not in ROLES:
            raise BadRequest(f"roles names {role!r}; TensorFlow's roles here are {', '.join(ROLES)}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise BadRequest(f"roles gives {role!r} {count!r} ranks: it takes a whole number of at least 1, {example}")
    if roles.get("chief", 1) != 1:
        raise BadRequest("a cluster has one chief at most")
    if "ps" in roles and not {"chief", "worker"} <= roles.keys():
        raise BadRequest(f"a parameter server needs a chief and workers: {example}")
    return tuple(Task(role, index) for role in ROLES for index in range(roles.get(role, 0)))
