"""Is this a call that can be carried out? A mistake gets one line that says what to change; nothing has started."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..errors import BadRequest
from ..machine import Plan, plan
from .links import Link

MAX_RANKS = 64
FRAMEWORKS = ("torch", "python")
OPTIONS = frozenset(("nprocs", "framework", "backend", "timeout", "init", "roles", "link", "trace", "preload", "env"))
LATER = {"tensorflow": "lesson 08", "horovod": "lesson 09"}


@dataclass(frozen=True)
class Request:
    """A call that has been looked at and can be carried out."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nprocs: int
    framework: str
    plan: Plan
    timeout: float
    init: bool
    trace: bool
    link: Link | None
    preload: tuple[str, ...]
    environment: dict[str, str]
    judged: bool = False


def understand(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    nprocs: int,
    framework: str,
    backend: str | None,
    timeout: float,
    init: bool,
    roles: Any,
    link: Link | None,
    trace: bool,
    preload: tuple[str, ...],
    env: Mapping[str, str] | None,
) -> Request:
    """Check every part of a call to `launch`; raises BadRequest with what to change."""
    if sys.platform == "win32":
        raise BadRequest("native Windows cannot run the course's ranks: use WSL2, where everything works as on Linux")
    if not callable(fn):
        raise BadRequest(f"launch needs a function to run, and got {fn!r}; write launch(my_function, nprocs=2)")
    if inspect.iscoroutinefunction(fn):
        raise BadRequest(f"{_name(fn)} is an async function; launch a plain one that calls asyncio.run({_name(fn)}())")
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or not 1 <= nprocs <= MAX_RANKS:
        raise BadRequest(f"nprocs={nprocs!r}: it takes a whole number of ranks from 1 to {MAX_RANKS}")
    if framework in LATER:
        raise BadRequest(f"framework={framework!r} comes with {LATER[framework]}, which is not part of this release")
    if framework not in FRAMEWORKS:
        raise BadRequest(f"framework={framework!r} is unknown{_did_you_mean(framework, FRAMEWORKS)}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise BadRequest(f"timeout={timeout!r}: it takes the seconds to wait without progress, a positive number")
    for name, value in (("init", init), ("trace", trace)):
        if not isinstance(value, bool):
            raise BadRequest(f"{name}={value!r}: it takes True or False")
    if roles is not None:
        raise BadRequest("roles comes in a later release; leave it out")
    if link is not None and not isinstance(link, Link):
        raise BadRequest(f"link={link!r}: it takes a Link, such as Link(latency=1e-3, bandwidth=1e9)")
    if trace and framework != "torch":
        raise BadRequest("trace=True counts torch.distributed's messages: it needs framework='torch'")
    if link is not None and framework != "torch":
        raise BadRequest("link slows torch.distributed's messages down: it needs framework='torch'")
    if backend is not None and framework != "torch":
        raise BadRequest(f"backend={backend!r} needs framework='torch'; {framework!r} has no backend")
    _check_arguments(fn, args, kwargs)
    if framework == "torch" and importlib.util.find_spec("torch") is None:
        raise BadRequest("framework='torch' needs PyTorch, which this Python does not have: pip install torch")
    chosen = plan(nprocs, backend)
    return Request(
        fn=fn,
        args=args,
        kwargs=kwargs,
        nprocs=nprocs,
        framework=framework,
        plan=chosen,
        timeout=float(timeout),
        init=init and framework == "torch",
        trace=trace,
        link=link,
        preload=_check_preload(preload),
        environment=_check_environment(env),
    )


def refuse_ambiguous(fn: Any, options_given: Collection[str]) -> None:
    """Raise BadRequest where an option that was given is also a parameter of the function: whose is it?"""
    both = sorted(_parameters_by_name(fn) & set(options_given))
    if both:
        raise BadRequest(
            f"{_name(fn)} has a parameter {both[0]!r}, and so has launch: rename the function's, "
            f"or bind it with functools.partial({_name(fn)}, {both[0]}=...)"
        )


def _check_arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature = _signature(fn)
    if signature is None:
        return
    by_name = _parameters_by_name(fn)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    unknown = [] if takes_any else [name for name in kwargs if name not in by_name]
    if unknown:
        hint = _did_you_mean(unknown[0], sorted(by_name | OPTIONS))
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
