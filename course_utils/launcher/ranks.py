"""`Ranks`: the same processes and the same process group over several calls, for lessons that measure."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from ..errors import LaunchError
from .links import Link
from .requests import check_call, understand
from .run import Run, run_of
from .sending import pack
from .session import Session


class Ranks:
    """Ranks that stay between calls: `with Ranks(4) as ranks: ranks.run(fn)`.

    The options are those of `launch`. Every call gets its function by value, as a launch does, and unless it asks for
    state begins with fresh seeds; what an earlier call left in the process (the process group, imported modules,
    warmed caches) is there.

    With `state=True` every function is called as `fn(state, *args, **kwargs)`: `state` is a namespace of that rank,
    empty at first, that lives as long as the ranks do. Random numbers then go on where the last call left them.

    A failure, a timeout or an interrupt of a call ends the ranks; leaving the `with` block, `close()` or the end of
    the notebook ends them as well.

    Example:
        >>> with Ranks(2) as ranks:
        ...     [ranks.run(lambda: dist.get_rank()).results for _ in range(2)]
        [[0, 1], [0, 1]]
    """

    def __init__(
        self,
        nprocs: int = 2,
        *,
        framework: str = "torch",
        backend: str | None = None,
        timeout: float = 120.0,
        init: bool = True,
        roles: Mapping[str, int] | None = None,
        link: Link | None = None,
        trace: bool = False,
        preload: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        state: bool = False,
    ) -> None:
        self._request = understand(
            nprocs=nprocs,
            framework=framework,
            backend=backend,
            timeout=timeout,
            init=init,
            roles=roles,
            link=link,
            trace=trace,
            preload=preload,
            env=env,
            state=state,
        )
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._session = Session(self._request)
        self._finalizer = weakref.finalize(self, _close_if_mine, self._session, self._owner)

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Have every rank call `fn(*args, **kwargs)`; return what each of them returned.

        Raises what `launch` raises, and LaunchError where these ranks have ended or are busy with another call.
        """
        given = (None, *args) if self._request.state else args
        check_call(fn, given, kwargs, options=frozenset())
        payload = pack(fn, args, kwargs)
        if os.getpid() != self._owner:
            raise LaunchError("these ranks belong to the process that made them: make new ones here with Ranks(...)")
        if not self._lock.acquire(blocking=False):
            raise LaunchError("these ranks are busy with a call from another thread; one call at a time")
        try:
            if not self._session.is_open:
                raise LaunchError("these ranks have ended: make new ones with Ranks(...)")
            return run_of(self._request, self._session.call(payload))
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the ranks; a second time does nothing."""
        self._finalizer()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        how = "ready" if self._session.is_open else "ended"
        return f"<Ranks: {self._request.nprocs} over {self._request.framework.name}, {how}>"


def _close_if_mine(session: Session, owner: int) -> None:
    if os.getpid() == owner and session.is_open:
        session.dismiss()
