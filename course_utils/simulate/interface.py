"""torch.distributed as a simulated rank sees it: the same names, led to the simulated world while a run lasts.

Only threads that are simulated ranks are led there; whoever else calls torch.distributed meanwhile gets torch's own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .world import Rank, Stopped, here

_ONE_AT_A_TIME = threading.Lock()
_REDUCTIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
    dist.ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
}
_NOT_SIMULATED = (
    "init_process_group",
    "destroy_process_group",
    "new_group",
    "new_subgroups",
    "split_group",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
)


@contextmanager
def standing_in(functions: Iterable[Any]) -> Iterator[Callable[[Any], Any]]:
    """Lead torch.distributed's names to the simulated world, also where `functions` imported them by name.

    Gives a function that says what stands in for an object: itself, unless it is one of torch.distributed's.
    """
    if getattr(here, "rank", None) is not None:
        raise RuntimeError("a simulated rank cannot start a simulation of its own")
    with _ONE_AT_A_TIME:
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        stand_ins = {id(original): (original, stand_in) for original, stand_in in _stand_ins()}
        try:
            for namespace in _namespaces(functions):
                for name, value in list(namespace.items()):
                    if id(value) in stand_ins and value is stand_ins[id(value)][0]:
                        replaced.append((namespace, name, value))
                        namespace[name] = stand_ins[id(value)][1]
            yield lambda value: stand_ins[id(value)][1] if id(value) in stand_ins else value
        finally:
            for namespace, name, value in replaced:
                namespace[name] = value


def _stand_ins() -> Iterator[tuple[Any, Any]]:
    for name, simulated in _SIMULATED.items():
        yield getattr(dist, name), _led(name, getattr(dist, name), simulated)
    for name in _NOT_SIMULATED:
        if hasattr(dist, name):  # names differ between torch versions
            yield getattr(dist, name), _led(name, getattr(dist, name), _refusal(name))


def _led(name: str, original: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        rank: Rank | None = getattr(here, "rank", None)
        if rank is None:
            return original(*args, **kwargs)
        if rank.world.stopping:
            raise Stopped
        return simulated(rank, *args, **kwargs)

    stand_in.__name__ = stand_in.__qualname__ = name
    return stand_in


def _refusal(name: str) -> Callable[..., Any]:
    known = ", ".join(sorted(_SIMULATED))
    where = f"dist.{name} is not simulated; a function that needs it runs in launch(...). Simulated are: {known}"

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(where)

    return refuse


def _namespaces(functions: Iterable[Any]) -> list[dict[str, Any]]:
    """torch.distributed's own names, the notebook's, and those of each module that a function comes from."""
    found = [vars(dist), vars(sys.modules["__main__"])]
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        plain: Any = inspect.unwrap(function) if callable(function) else None
        if hasattr(plain, "__globals__"):
            found.append(plain.__globals__)
            enclosed = inspect.getclosurevars(plain).nonlocals.values()
            found += [one.__globals__ for one in enclosed if hasattr(one, "__globals__")]
    return list({id(namespace): namespace for namespace in found}.values())


# ---- who and how many


def _get_rank(rank: Rank, group: Any = None) -> int:
    _check_group(group)
    return rank.number


def _get_world_size(rank: Rank, group: Any = None) -> int:
    _check_group(group)
    return rank.world.nprocs


def _is_initialized(rank: Rank) -> bool:
    return True


def _get_backend(rank: Rank, group: Any = None) -> str:
    _check_group(group)
    return "simulated"


# ---- messages


def _isend(rank: Rank, tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
    plain = type(dst) is int and 0 <= dst < rank.world.nprocs and dst != rank.number and group is None
    peer = dst if plain else _peer(rank, "send", dst, group_dst, group)
    _check_tensor(tensor)
    if rank.world.watch:
        rank.world.look(rank)
    return rank.world.send(rank, tensor, peer, tag)


def _irecv(
    rank: Rank,
    tensor: Any,
    src: Any = None,
    group: Any = None,
    tag: int = 0,
    group_src: Any = None,
    waits: bool = False,
) -> Any:
    plain = type(src) is int and 0 <= src < rank.world.nprocs and src != rank.number and group is None
    peer = src if plain else _source(rank, src, group_src, group)
    _check_tensor(tensor)
    if rank.world.watch:
        rank.world.look(rank)
    return rank.world.receive(rank, tensor, peer, tag, waits)


def _send(rank: Rank, tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> None:
    _isend(rank, tensor, dst, group, tag, group_dst).complete()


def _recv(rank: Rank, tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> int:
    request = _irecv(rank, tensor, src, group, tag, group_src, waits=True)
    request.complete()
    source: int = request._source_rank()
    return source


class _Operation:
    """dist.P2POp in a simulated rank."""

    def __init__(
        self, op: Any, tensor: Any, peer: Any = None, group: Any = None, tag: int = 0, group_peer: Any = None
    ) -> None:
        self._name = getattr(op, "__name__", "")
        if self._name not in ("isend", "irecv"):
            raise ValueError(f"P2POp takes dist.isend or dist.irecv, and got {op!r}")
        _check_tensor(tensor)
        self._what = (tensor, peer, group, tag, group_peer)

    def start(self, rank: Rank) -> Any:
        """Start it, as one of a batch."""
        return _isend(rank, *self._what) if self._name == "isend" else _irecv(rank, *self._what)


def _p2p_op(rank: Rank, *args: Any, **kwargs: Any) -> _Operation:
    return _Operation(*args, **kwargs)


def _batch_isend_irecv(rank: Rank, p2p_op_list: list[_Operation]) -> list[Any]:
    if not p2p_op_list or not all(isinstance(one, _Operation) for one in p2p_op_list):
        raise ValueError(f"batch_isend_irecv takes a list of P2POp with at least one, and got {p2p_op_list!r}")
    return [one.start(rank) for one in p2p_op_list]


# ---- collectives


def _all_reduce(rank: Rank, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    if op not in _REDUCTIONS:
        raise NotImplementedError(f"all_reduce with {op!r} is not simulated; SUM, AVG, PRODUCT, MIN and MAX are")

    def settle(tensors: dict[int, torch.Tensor]) -> None:
        _check_alike("all_reduce", tensors)
        total = tensors[0].detach().clone()
        for number in range(1, len(tensors)):
            _REDUCTIONS[op](total, tensors[number].detach())
        if op == dist.ReduceOp.AVG:
            total.div_(len(tensors))
        for tensor in tensors.values():
            tensor.detach().copy_(total)

    return _join(rank, "all_reduce", tensor, group, async_op, settle)


def _broadcast(
    rank: Rank, tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None
) -> Any:
    source = src if src is not None else group_src
    if not isinstance(source, int) or not 0 <= source < rank.world.nprocs:
        raise ValueError(f"broadcast from rank {source}, and there are the ranks 0 to {rank.world.nprocs - 1}")

    def settle(tensors: dict[int, torch.Tensor]) -> None:
        _check_alike("broadcast", tensors)
        for number, tensor in tensors.items():
            if number != source:
                tensor.detach().copy_(tensors[source].detach())

    return _join(rank, "broadcast", tensor, group, async_op, settle)


def _all_gather(rank: Rank, tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    if len(tensor_list) != rank.world.nprocs:
        raise ValueError(
            f"all_gather needs a list of {rank.world.nprocs} tensors, one a rank: {len(tensor_list)} given"
        )

    def settle(brought: dict[int, tuple[list[torch.Tensor], torch.Tensor]]) -> None:
        for places, _ in brought.values():
            for source, place in enumerate(places):
                place.detach().copy_(brought[source][1].detach())

    return _join(rank, "all_gather", tensor, group, async_op, settle, (list(tensor_list), tensor))


def _barrier(rank: Rank, group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Any:
    return _join(rank, "barrier", None, group, async_op, lambda _: None)


def _join(
    rank: Rank, op: str, tensor: Any, group: Any, async_op: bool, settle: Callable[[Any], None], brought: Any = None
) -> Any:
    _check_group(group)
    if tensor is not None:
        _check_tensor(tensor)
    if rank.world.watch:
        rank.world.look(rank)
    size = tensor.nbytes if tensor is not None else 0
    request = rank.world.join(rank, op, tensor if brought is None else brought, size, settle)
    if async_op:
        return request
    request.complete()
    return None


# ---- what cannot be done says so in the rank that asks for it


def _source(rank: Rank, whole: Any, in_group: Any, group: Any) -> int | None:
    if whole is None and in_group is None:
        _check_group(group)
        return None  # whoever sends
    return _peer(rank, "recv", whole, in_group, group)


def _peer(rank: Rank, op: str, whole: Any, in_group: Any, group: Any) -> int:
    _check_group(group)
    peer = whole if whole is not None else in_group
    direction = "sends to" if op == "send" else "receives from"
    if not isinstance(peer, int) or not 0 <= peer < rank.world.nprocs:
        there = f"the ranks 0 to {rank.world.nprocs - 1}" if rank.world.nprocs > 1 else "rank 0 alone"
        raise ValueError(
            f"rank {rank.number} {direction} rank {peer}, and there {'are' if rank.world.nprocs > 1 else 'is'} {there}"
        )
    if peer == rank.number:
        raise ValueError(f"rank {rank.number} {direction} itself: a message needs two ranks")
    return peer


def _check_tensor(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"torch.distributed moves tensors, and got {type(tensor).__name__}")
    if not tensor.is_contiguous():
        raise RuntimeError("input tensor has to be contiguous")  # gloo's words


def _check_group(group: Any) -> None:
    if group is not None and group is not dist.group.WORLD:
        raise NotImplementedError("simulated ranks are all in one group: leave `group` out")


def _check_alike(op: str, tensors: dict[int, torch.Tensor]) -> None:
    first = tensors[0]
    for number in range(1, len(tensors)):
        if tensors[number].numel() != first.numel() or tensors[number].dtype is not first.dtype:
            raise ValueError(
                f"{op}: rank 0 brings {first.numel()} elements of {first.dtype}, and rank {number} "
                f"{tensors[number].numel()} of {tensors[number].dtype}"
            )


_SIMULATED: dict[str, Callable[..., Any]] = {
    "get_rank": _get_rank,
    "get_world_size": _get_world_size,
    "is_initialized": _is_initialized,
    "get_backend": _get_backend,
    "send": _send,
    "recv": _recv,
    "isend": _isend,
    "irecv": _irecv,
    "P2POp": _p2p_op,
    "batch_isend_irecv": _batch_isend_irecv,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "barrier": _barrier,
}
