"""Inside a torch rank: the process group, and what is seen of its messages."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..links import Link, Port
from ..watching import TRACED_BACKEND, Watch
from . import inside as base


class Inside(base.Inside):
    """A rank of a torch.distributed process group."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        port = Port(Link(**task["link"]), task["rank"], task["folder_of_run"]) if task["link"] else None
        self._watch = Watch(task["trace"], port)

    def install(self) -> None:
        self._watch.install()
        if self.task["relayed"]:
            from ..relayed import register

            register(self._watch, f"{self.task['folder_of_run']}/relay")

    def begin(self) -> dict[str, Any]:
        return self._join() if self.task["init"] else super().begin()

    def next_call(self, epoch: float) -> None:
        self._watch.next_call(epoch)

    def progress(self) -> int:
        return self._watch.progress()

    def waits_in(self, thread: int) -> str | None:
        return self._watch.waits_in(thread)

    def events(self) -> list[dict[str, Any]]:
        return self._watch.events()

    def _join(self) -> dict[str, Any]:
        """Initialise torch.distributed from the environment variables, as torchrun's workers do."""
        task = self.task
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG"):  # torch reads it at import, which is long past in a forked rank
            dist.set_debug_level_from_env()
        backend, notes = task["backend"], []
        if "nccl" in backend and not (dist.is_nccl_available() and torch.cuda.device_count() >= task["nprocs"]):
            count = torch.cuda.device_count()
            notes.append(
                f"gloo instead of NCCL: torch sees {count} usable GPU{'s' * (count != 1)} for {task['nprocs']} ranks"
            )
            backend = "gloo"
        if "nccl" in backend:
            torch.cuda.set_device(task["rank"])
        used = backend
        if task["relayed"]:
            from ..relayed import BACKEND

            backend = used = BACKEND
        elif task["trace"] or task["link"]:
            if "nccl" in backend:
                why = "a traced run counts messages" if task["trace"] else "an emulated link holds messages back"
                notes.append(f"gloo instead of NCCL: {why} on the CPU")
            backend, used = TRACED_BACKEND, "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=task["group_timeout"]))
        if backend != used:  # what learners' code asks the group for is what carries its messages
            groups = dist.distributed_c10d._world.pg_map
            groups.update({group: (used, store) for group, (_, store) in groups.items()})
        return {"backend": used, "notes": notes}
