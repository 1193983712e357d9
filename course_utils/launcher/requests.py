"""Is this a call that can be carried out? A mistake gets one line that says what to change; nothing has started."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..errors import BadRequest, FrameworkMissing
from ..machine import Plan, gpus, plan
from .frameworks import KNOWN, Framework, Task, tasks_of
from .links import Link

MAX_RANKS = 64
DEFAULT_RANKS = 2
OPTIONS = frozenset(("nprocs", "framework", "backend", "timeout", "init", "roles", "link", "trace", "preload", "env"))
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """Ranks that can be started: every option has been looked at.

    `tasks` names each rank's role, `notes` says what was degraded, a `silent` run shows nothing, a `judged` one returns
    plain data, and messages of a `relayed` one pass through this process.
    """

    framework: Framework
    tasks: tuple[Task, ...]
    has_roles: bool
    plan: Plan
    notes: tuple[str, ...]
    timeout: float
    init: bool
    trace: bool
    link: Link | None
    preload: tuple[str, ...]
    environment: dict[str, str]
    state: bool = False
    judged: bool = False
    relayed: bool = False
    silent: bool = False

    @property
    def nprocs(self) -> int:
        """The number of ranks."""
        return len(self.tasks)


def understand(
    *,
    nprocs: int = DEFAULT_RANKS,
    framework: str = "torch",
    backend: str | None = None,
    timeout: float = 120.0,
    init: bool = True,
    roles: Any = None,
    link: Link | None = None,
    trace: bool = False,
    preload: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    state: bool = False,
    call: Call | None = None,
) -> Request:
    """Check every option of `launch` or `Ranks`, and the call itself; raises BadRequest with what to change."""
    if sys.platform == "win32":
        raise BadRequest("native Windows cannot run the course's ranks: use WSL2, where everything works as on Linux")
    if call is not None:
        check_call(*call, options=OPTIONS)
    if not isinstance(framework, str) or framework not in KNOWN:
        raise BadRequest(f"framework={framework!r} is unknown{_did_you_mean(framework, list(KNOWN))}")
    used = KNOWN[framework]
    for name, value in (("init", init), ("trace", trace), ("state", state)):
        if not isinstance(value, bool):
            raise BadRequest(f"{name}={value!r}: it takes True or False")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise BadRequest(f"timeout={timeout!r}: it takes the seconds to wait without progress, a positive number")
    if roles is not None and framework != "tensorflow":
        raise BadRequest("roles names the tasks of a TensorFlow cluster: it needs framework='tensorflow'")
    tasks = tasks_of(_check_nprocs(nprocs, roles), roles)
    if len(tasks) > MAX_RANKS:
        raise BadRequest(f"roles={roles!r} adds up to {len(tasks)} ranks; {MAX_RANKS} are the most")
    if link is not None and not isinstance(link, Link):
        raise BadRequest(f"link={link!r}: it takes a Link, such as Link(latency=1e-3, bandwidth=1e9)")
    for name, wanted in (("trace=True", trace), ("link", link is not None)):
        if wanted and used.opaque:
            raise BadRequest(f"{name} needs framework='torch': {used.opaque}")
    if backend is not None and framework != "torch":
        raise BadRequest(f"backend={backend!r} needs framework='torch'; {framework!r} has no backend to choose here")
    environment = _check_environment(env)
    if framework == "tensorflow" and "TF_CONFIG" in environment:
        raise BadRequest("env holds TF_CONFIG, which launch writes for each rank itself; change it inside the function")
    if not used.is_installed:
        raise FrameworkMissing(used.how_to_get)
    chosen = plan(len(tasks), backend)
    return Request(
        framework=used,
        tasks=tasks,
        has_roles=roles is not None,
        plan=chosen,
        notes=_notes(framework, chosen, tasks),
        timeout=float(timeout),
        init=init,
        trace=trace,
        link=link,
        preload=_check_preload(preload),
        environment=environment,
        state=state,
    )


def judged(request: Request, relayed: bool) -> Request:
    """The same ranks for an answer that counts: results come back as plain data, and nothing is shown.

    `relayed`: this process carries their messages. Otherwise they have all of gloo, traced, or what another framework
    brings, whose messages nobody sees. Raises BadRequest where those are to be relayed.
    """
    if relayed and request.framework.opaque:
        raise BadRequest(f"relayed=True: {request.framework.opaque}")
    traced = not relayed and not request.framework.opaque
    return dataclasses.replace(request, judged=True, relayed=relayed, trace=traced, silent=True)


def _check_nprocs(nprocs: Any, roles: Any) -> int:
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or not 1 <= nprocs <= MAX_RANKS:
        raise BadRequest(f"nprocs={nprocs!r}: it takes a whole number of ranks from 1 to {MAX_RANKS}")
    if nprocs != DEFAULT_RANKS and isinstance(roles, Mapping):
        total = sum(count for count in roles.values() if isinstance(count, int))
        if total != nprocs:
            raise BadRequest(f"nprocs={nprocs}, but roles={dict(roles)!r} adds up to {total}: leave nprocs out")
    return nprocs


def _notes(framework: str, chosen: Plan, tasks: tuple[Task, ...]) -> tuple[str, ...]:
    """What was degraded on this machine, in words."""
    if framework == "torch":
        return chosen.notes
    if framework == "tensorflow":
        workers = sum(task.role != "ps" for task in tasks)
        count = len(gpus())
        if 0 < count < workers:
            return (f"the CPU instead of GPUs: {workers} workers but {count} GPU{'s' * (count != 1)}",)
    return ()


def refuse_ambiguous(fn: Any, options_given: Collection[str]) -> None:
    """Raise BadRequest where an option that was given is also a parameter of the function: whose is it?"""
    both = sorted(_parameters_by_name(fn) & set(options_given))
    if both:
        raise BadRequest(
            f"{_name(fn)} has a parameter {both[0]!r}, and so has launch: rename the function's, "
            f"or bind it with functools.partial({_name(fn)}, {both[0]}=...)"
        )


def check_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Collection[str]) -> None:
    """Raise BadRequest unless every rank can call `fn(*args, **kwargs)`; `options` are names that launch takes."""
    if not callable(fn):
        raise BadRequest(f"launch needs a function to run, and got {fn!r}; write launch(my_function, nprocs=2)")
    plain = fn
    while isinstance(plain, functools.partial):
        plain = plain.func
    for one in (plain, vars(type(plain)).get("__call__")):
        if inspect.iscoroutinefunction(one):
            raise BadRequest(
                f"{_name(fn)} is an async function; launch a plain one that calls asyncio.run({_name(fn)}())"
            )
        if inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            raise BadRequest(
                f"{_name(fn)} is a generator: calling it runs none of its lines; launch a plain function that returns "
                f"a list, such as lambda: list({_name(fn)}())"
            )
    _check_arguments(fn, args, kwargs, options)


def _check_arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Collection[str]
) -> None:
    signature = _signature(fn)
    if signature is None:
        return
    by_name = _parameters_by_name(fn)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    unknown = [] if takes_any else [name for name in kwargs if name not in by_name]
    if unknown:
        hint = _did_you_mean(unknown[0], sorted({*by_name, *options}))
        raise BadRequest(f"neither launch nor {_name(fn)}{signature} takes {unknown[0]!r}{hint}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BadRequest(f"{_name(fn)}{signature} cannot be called with these arguments: {error}") from None


def _signature(fn: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # not callable, or a built-in function that does not tell
        return None


def _parameters_by_name(fn: Any) -> set[str]:
    signature = _signature(fn)
    parameters = signature.parameters.items() if signature else ()
    return {
        name
        for name, parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _check_preload(preload: Any) -> tuple[str, ...]:
    """Only installed modules may be held in memory by a server: one that the learner edits would go stale there."""
    if isinstance(preload, str) or not all(isinstance(name, str) for name in preload):
        raise BadRequest(f"preload={preload!r}: it takes a tuple of module names, such as ('torchvision',)")
    for name in preload:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            raise BadRequest(f"preload names {name!r}, and there is no such module here")
        origin = spec.origin or ""
        if "-packages" not in origin and not origin.startswith((sys.base_prefix, "built-in", "frozen")):
            raise BadRequest(f"preload names {name!r}, a module of your own: a preloaded one would not see your edits")
    return tuple(preload)


def _check_environment(env: Any) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping) or not all(isinstance(part, str) for item in env.items() for part in item):
        raise BadRequest(f"env={env!r}: it takes a dict of strings, such as {{'TORCH_DISTRIBUTED_DEBUG': 'DETAIL'}}")
    return dict(env)


def _did_you_mean(word: Any, known: Any) -> str:
    close = get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}" if known else ""


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__
