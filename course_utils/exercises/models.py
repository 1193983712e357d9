"""What the checks of data-parallel training share: values for a network, and a comparison of what became of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

Arrays = Mapping[str, Any]  # name of a parameter or buffer -> numpy array


def generator(rng: random.Random) -> Any:
    """Return numpy's generator, seeded by the one that draws the cases."""
    import numpy as np

    return np.random.default_rng(rng.randrange(2**32))


def filled(make: Callable[[], Any], dtype: str, arrays: Arrays) -> Any:
    """Build a network and give its parameters and buffers the values there are, without touching the generators."""
    import torch

    with torch.random.fork_rng(devices=[]):
        network = make()
    network = network.to(getattr(torch, dtype))
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if name in arrays:
                tensor.copy_(torch.from_numpy(arrays[name].copy()))
    return network


def nearly(got: Any, wanted: Any, tolerance: Mapping[str, float]) -> bool:
    """Whether no number is off by more than `tolerance`, by dtype, of the largest one."""
    import numpy as np

    scale = max(1e-3, float(np.abs(wanted).max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        return bool(np.abs(got - wanted).max(initial=0.0) <= tolerance[str(got.dtype)] * scale)
