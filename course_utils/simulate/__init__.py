"""Ranks in one process: a function written against torch.distributed, round by round, in up to 1,000 ranks.

`run` takes the call, `interface` stands in for torch.distributed inside a rank, `world` hands the turn from rank to
rank and carries their messages, `record` keeps what was sent, `steps` shows it round by round, `timing` says how long
it would take over a link. `costs` holds the closed formulas of the same algorithms, and fits their two constants to
measured times.
"""

from .costs import Cost, Fit, fit_alpha_beta, halving_doubling_cost, naive_cost, ring_cost, tree_cost
from .record import Message, Messages
from .run import SimulatedRun, run_simulated
from .steps import Step, Steps
from .timing import Schedule

__all__ = [
    "Cost",
    "Fit",
    "Message",
    "Messages",
    "Schedule",
    "SimulatedRun",
    "Step",
    "Steps",
    "fit_alpha_beta",
    "halving_doubling_cost",
    "naive_cost",
    "ring_cost",
    "run_simulated",
    "tree_cost",
]
