"""What travels: functions and all they refer to by value, results back intact, and a plain word about what cannot go."""

from __future__ import annotations

import dataclasses
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_utils import launch, launcher
from course_utils.errors import AnswerNeeded, NotSendable, WorkerFailed

from .conftest import Notebook


def in_ranks(fn: Callable[..., Any], *args: Any, nprocs: int = 2, **options: Any) -> list[Any]:
    """Results of ranks that have no process group: enough where only the way there and back matters."""
    return launch(fn, *args, nprocs=nprocs, framework="python", **options).results


# ---- L22: what a notebook defines travels by value

CELLS: dict[str, tuple[list[str], Any]] = {
    "a class": (
        ["class Counter:\n    step = 3\n    def __init__(self, start):\n        self.n = start + self.step\n"],
        "Counter(4).n == 7",
    ),
    "super() and a base class in another cell": (
        [
            "class Base:\n    def __init__(self, n):\n        self.n = n\n    def double(self):\n        return 2 * self.n\n",
            "class Child(Base):\n    def __init__(self, n):\n        super().__init__(n + 1)\n    def double(self):\n"
            "        return super().double() + 1\n",
        ],
        "Child(4).double() == 11",
    ),
    "an abstract base and its child": (
        [
            "import abc\nclass Shape(abc.ABC):\n    @abc.abstractmethod\n    def area(self): ...\n",
            "class Square(Shape):\n    def area(self):\n        return 9\n",
        ],
        "Square().area() == 9 and issubclass(Square, Shape)",
    ),
    "a property, a class method, a static method": (
        [
            "class Box:\n    made = 5\n    @property\n    def a(self):\n        return 1\n    @classmethod\n    def b(cls):\n"
            "        return cls.made\n    @staticmethod\n    def c():\n        return 3\n"
        ],
        "(Box().a, Box.b(), Box.c()) == (1, 5, 3)",
    ),
    "a dataclass with a default factory": (
        [
            "from dataclasses import dataclass, field\n@dataclass\nclass Config:\n    rate: float\n"
            "    layers: list = field(default_factory=list)\n"
        ],
        "Config(0.5) == Config(rate=0.5, layers=[])",
    ),
    "a frozen dataclass with slots": (
        ["from dataclasses import dataclass\n@dataclass(frozen=True, slots=True)\nclass Point:\n    x: int\n"],
        "Point(3).x == 3 and len({Point(1), Point(1)}) == 1",
    ),
    "a named tuple": (
        ["from typing import NamedTuple\nclass Pair(NamedTuple):\n    a: int\n    b: int = 2\n"],
        "Pair(1) == (1, 2)",
    ),
    "an enum": (["import enum\nclass Colour(enum.Enum):\n    RED = 1\n"], "Colour(1) is Colour.RED"),
    "an exception": (["class NoData(Exception):\n    pass\n"], "issubclass(NoData, Exception)"),
    "a generic class": (
        ["from typing import Generic, TypeVar\nT = TypeVar('T')\nclass Stack(Generic[T]):\n    size = 2\n"],
        "Stack[int]().size == 2",
    ),
    "a class with a metaclass": (
        ["class Meta(type):\n    def __len__(cls):\n        return 4\nclass Sized(metaclass=Meta):\n    pass\n"],
        "len(Sized) == 4",
    ),
    "a callable object": (
        [
            "class Adder:\n    def __init__(self, n):\n        self.n = n\n    def __call__(self, m):\n        return self.n + m\n"
        ]
        + ["add = Adder(3)\n"],
        "add(4) == 7",
    ),
    "a lambda": (["square = lambda x: x * x\n"], "square(5) == 25"),
    "a closure that counts": (
        [
            "def make():\n    n = 0\n    def count():\n        nonlocal n\n        n += 1\n        return n\n"
            "    return count\n",
            "count = make()\ncount()\n",
        ],
        "count() > 1",
    ),
    "a closure over a recursive function": (
        [
            "def outer():\n    def depth(n):\n        return 0 if n == 0 else 1 + depth(n - 1)\n"
            "    return lambda n: depth(n)\n",
            "depth = outer()\n",
        ],
        "depth(5) == 5",
    ),
    "recursion": (["def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"], "fib(10) == 55"),
    "recursion that remembers": (
        ["import functools\n@functools.lru_cache\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"],
        "fib(50) == 12586269025",
    ),
    "recursion between cells": (
        [
            "def even(n):\n    return True if n == 0 else odd(n - 1)\n",
            "def odd(n):\n    return False if n == 0 else even(n - 1)\n",
        ],
        "even(10)",
    ),
    "a global defined in a later cell": (["def read():\n    return later\n", "later = [1, 2]\n"], "read() == [1, 2]"),
    "a global used only inside a comprehension": (
        ["factor = 3\n", "def scaled(xs):\n    return [x * factor for x in xs]\n"],
        "scaled([1, 2]) == [3, 6]",
    ),
    "a global used only in a nested function": (
        ["factor = 3\n", "def outer():\n    def inner():\n        return factor\n    return inner()\n"],
        "outer() == 3",
    ),
    "defaults": (["n = 3\ndef f(a, b=n, *, c=(n, 4)):\n    return a, b, c\n"], "f(1) == (1, 3, (3, 4))"),
    "attributes of a function": (["def f():\n    return f.calls\nf.calls = 7\n"], "f() == 7"),
    "a decorated function": (
        [
            "import functools\ndef twice(fn):\n    @functools.wraps(fn)\n    def both(*args):\n"
            "        return fn(*args), fn(*args)\n    return both\n",
            "@twice\ndef one(x):\n    return x\n",
        ],
        "one(3) == (3, 3)",
    ),
    "a partial": (["import functools\ndef f(a, b):\n    return a - b\ng = functools.partial(f, b=1)\n"], "g(3) == 2"),
    "a generator function": (["def numbers():\n    yield from range(3)\n"], "list(numbers()) == [0, 1, 2]"),
    "modules as globals": (
        ["import numpy as np\nimport os.path\nfrom math import sqrt as root\nfrom collections import *\n"],
        "np.arange(3).sum() == 3 and os.path.basename('a/b') == 'b' and root(9) == 3 and Counter('aa')['a'] == 2",
    ),
    "torch as a global": (
        ["import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"],
        "F.relu(torch.tensor([-1.0])).item() == 0 and nn.Linear(2, 1).out_features == 1",
    ),
    "a module of layers": (
        [
            "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))\n"
            "    def forward(self, x):\n        return self.layers(x)\nnet = Net()\n"
        ],
        "Net()(torch.ones(2, 3)).shape == (2, 1) and net(torch.ones(2, 3)).shape == (2, 1)",
    ),
    "an autograd function": (
        [
            "import torch\nclass Double(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
            "        return 2 * x\n    @staticmethod\n    def backward(ctx, g):\n        return 5 * g\n"
        ],
        "torch.autograd.grad(Double.apply(x := torch.ones(1, requires_grad=True)), x)[0].item() == 5",
    ),
    "a data set": (
        [
            "from torch.utils.data import Dataset, DataLoader\nclass Numbers(Dataset):\n    def __len__(self):\n"
            "        return 4\n    def __getitem__(self, i):\n        return i\n"
        ],
        "[b.tolist() for b in DataLoader(Numbers(), batch_size=2)] == [[0, 1], [2, 3]]",
    ),
    "a logger": (["import logging\nlog = logging.getLogger('lesson')\n"], "log.name == 'lesson'"),
    "type hints": (
        ["from __future__ import annotations\ndef f(x: Undefined) -> list[int]:\n    return [x]\n"],
        "f(1) == [1]",
    ),
    "a match statement": (
        ["def f(x):\n    match x:\n        case {'a': n}:\n            return n\n"],
        "f({'a': 3}) == 3",
    ),
    "print with its own defaults": (
        ["import functools\nshout = functools.partial(print, end='!', flush=True)\n"],
        "shout('hi') is None",
    ),
}


@pytest.mark.parametrize("what", list(CELLS))
def test_L22_what_cells_define_works_in_ranks(what: str, notebook: Notebook) -> None:
    cells, holds = CELLS[what]
    for source in cells:
        notebook.run(source)
    notebook.run(f"def worker():\n    return bool({holds})\n")
    assert notebook["worker"]() is True
    assert in_ranks(notebook["worker"]) == [True, True]


def test_L22_the_same_with_fresh_interpreters(notebook: Notebook, fresh_interpreters: None) -> None:
    for cells, _ in CELLS.values():
        for source in cells:
            notebook.run(source)
    notebook.run(
        "from collections import Counter\nclass Counted(Counter):\n    pass\nworker = lambda: (Counted('aa')['a'], Box.b())\n"
    )
    assert in_ranks(notebook["worker"]) == [(2, 5), (2, 5)]


def test_L22_what_comes_back_is_of_the_notebooks_own_classes(notebook: Notebook, each_way: str) -> None:
    notebook.run(
        """
import enum
from dataclasses import dataclass

@dataclass
class Point:
    x: int

class Colour(enum.Enum):
    RED = 1

class Base:
    pass

class Child(Base):
    pass

def worker(start):
    return Point(start.x + 1), Colour.RED, Child()

start = Point(3)
"""
    )
    for point, colour, child in in_ranks(notebook["worker"], notebook["start"]):
        assert isinstance(point, notebook["Point"])
        assert point == notebook["Point"](4)
        assert colour is notebook["Colour"].RED
        assert isinstance(child, notebook["Base"])


def test_L22_isinstance_holds_in_the_rank_for_what_was_sent(notebook: Notebook) -> None:
    notebook.run(
        """
class Model:
    pass

class Bigger(Model):
    pass

def worker(model, models):
    return isinstance(model, Model), type(model) is Bigger, all(isinstance(each, Model) for each in models)
"""
    )
    bigger = notebook["Bigger"]
    assert in_ranks(notebook["worker"], bigger(), [bigger(), notebook["Model"]()]) == [(True, True, True)] * 2


def test_L22_a_cell_that_was_run_again_replaces_what_it_defined(notebook: Notebook) -> None:
    notebook.run("def helper():\n    return 'old'\nclass C:\n    value = 'old'\n")
    notebook.run("def worker():\n    return helper(), C.value\n")
    assert in_ranks(notebook["worker"]) == [("old", "old")] * 2
    notebook.run("def helper():\n    return 'new'\nclass C:\n    value = 'new'\n")
    assert in_ranks(notebook["worker"]) == [("new", "new")] * 2


def test_L22_globals_that_a_rank_changes_stay_its_own(notebook: Notebook) -> None:
    notebook.run("import os\nseen = []\ntotal = 0\n")
    notebook.run(
        "def worker():\n    global total\n    total += 1 + int(os.environ['RANK'])\n    seen.append(total)\n    return total, seen\n"
    )
    for _ in range(2):
        assert in_ranks(notebook["worker"]) == [(1, [1]), (2, [2])]
    assert notebook["seen"] == []
    assert notebook["total"] == 0


MULTIPLIES = """
class Multiplies:
    factor = 3
    def __init__(self, by):
        self.by = by
    def __call__(self, n):
        return self.by * n
    def method(self, n):
        return self.by * n + 1
    @classmethod
    def of_the_class(cls, n):
        return cls.factor * n
    @staticmethod
    def static(n):
        return n + 1
"""


@pytest.mark.parametrize(
    ("what", "given", "expected"),
    [
        ("lambda n: n - 1", 5, 4),
        ("abs", -5, 5),
        ("Multiplies(2)", 5, 10),
        ("Multiplies(2).method", 5, 11),
        ("Multiplies.of_the_class", 5, 15),
        ("Multiplies(2).of_the_class", 5, 15),
        ("Multiplies.static", 5, 6),
        ("functools.partial(pow, 2)", 5, 32),
        ("functools.partial(Multiplies(2).method)", 5, 11),
        ("'kernel'.count", "e", 2),
        ("[1, 2, 2].index", 2, 1),
        ("math.sqrt", 4, 2),
        ("numpy.sqrt", 4, 2),
        ("str", 5, "5"),
        ("os.path.basename", "a/b", "b"),
        ("operator.itemgetter(1)", (5, 6), 6),
    ],
)
def test_L22_whatever_can_be_called_can_be_launched(what: str, given: Any, expected: Any, notebook: Notebook) -> None:
    notebook.run("import functools, math, numpy, operator, os" + MULTIPLIES + f"fn = {what}\n")
    assert in_ranks(notebook["fn"], given) == [expected] * 2


def test_L22_a_class_can_be_launched_and_its_instances_come_back(notebook: Notebook) -> None:
    notebook.run("class Worker:\n    def __init__(self, n):\n        self.n = n\n")
    assert [worker.n for worker in in_ranks(notebook["Worker"], 3)] == [3, 3]


def test_L22_a_model_can_be_launched() -> None:
    model = torch.nn.Linear(3, 2)
    for result in launch(model, torch.ones(3)).results:
        assert torch.equal(result, model(torch.ones(3)))


def test_arguments_and_keywords_reach_the_function() -> None:
    def worker(first: int, *rest: int, key: str, **more: int) -> Any:
        return first, rest, key, more

    assert in_ranks(worker, 1, 2, 3, key="k", extra=4) == [(1, (2, 3), "k", {"extra": 4})] * 2


# ---- L10 and L27: results


def values_to_return() -> dict[str, Callable[[], Any]]:
    """Values whose bytes must come back as they were."""
    return {
        "a large tensor": lambda: torch.arange(4_000_000, dtype=torch.float64),
        "a scalar tensor": lambda: torch.tensor(3.5),
        "an empty tensor": lambda: torch.empty(0, 3),
        "bfloat16": lambda: torch.arange(10, dtype=torch.bfloat16),
        "bool": lambda: torch.tensor([True, False]),
        "complex": lambda: torch.tensor([1 + 2j]),
        "a view": lambda: torch.arange(100).reshape(10, 10)[2:5, ::3],
        "transposed": lambda: torch.arange(6).reshape(2, 3).t(),
        "shared memory": lambda: torch.arange(1000).share_memory_(),
        "with gradient": lambda: torch.ones(3, requires_grad=True),
        "computed with gradient": lambda: torch.ones(3, requires_grad=True) * 2,
        "an array": lambda: np.arange(2_000_000, dtype=np.int32),
        "an array of dates": lambda: np.array(["2026-01-01"], dtype="datetime64[D]"),
        "an array that shares a tensor": lambda: torch.arange(1000).numpy(),
        "bytes": lambda: bytes(range(256)) * 10_000,
    }


@pytest.mark.parametrize("what", list(values_to_return()))
def test_L10_what_a_rank_returns_comes_back_intact(what: str) -> None:
    make = values_to_return()[what]
    expected = make()
    for result in launch(lambda: make(), init=False).results:
        assert type(result) is type(expected)
        if isinstance(expected, torch.Tensor):
            assert (result.dtype, result.shape, result.requires_grad) == (
                expected.dtype,
                expected.shape,
                expected.requires_grad,
            )
            assert torch.equal(result, expected)
        elif isinstance(expected, np.ndarray):
            assert result.dtype == expected.dtype
            assert np.array_equal(result, expected)
        else:
            assert result == expected


def test_L10_parameters_and_models_come_back(each_way: str) -> None:
    def worker() -> Any:
        torch.manual_seed(3)
        model = torch.nn.Linear(3, 2)
        return model, model.state_dict(), torch.nn.Parameter(torch.ones(2))

    torch.manual_seed(3)
    expected = torch.nn.Linear(3, 2)
    for model, state, parameter in launch(worker).results:
        assert torch.equal(model.weight, expected.weight)
        assert torch.equal(state["bias"], expected.bias)
        assert isinstance(parameter, torch.nn.Parameter)


def test_L10_a_huge_argument_and_a_huge_result() -> None:
    data = np.random.default_rng(0).integers(0, 255, 100_000_000, dtype=np.uint8)
    first, second = in_ranks(lambda array: array[::-1].copy(), data)
    assert np.array_equal(first, data[::-1])
    assert np.array_equal(second, data[::-1])


def test_L27_a_model_trained_in_ranks_comes_back_and_the_notebooks_own_is_unchanged(each_way: str) -> None:
    model = torch.nn.Linear(4, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def worker() -> Any:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
            optimizer.step()
        return model.state_dict()

    one, other = launch(worker).results
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert torch.equal(one[name], other[name])
        assert not torch.equal(one[name], before[name])


def test_results_are_in_the_order_of_the_ranks() -> None:
    def worker() -> int:
        rank = int(os.environ["RANK"])
        time.sleep((4 - rank) * 0.03)
        return rank

    run = launch(worker, nprocs=5, framework="python")
    assert run.results == [0, 1, 2, 3, 4]
    assert len(run.seconds) == 5
    assert run.seconds[0] > run.seconds[3] > 0


# ---- L12: what cannot be sent is refused before anything starts


class LooksLikeOnAGPU(torch.Tensor):
    """A stand-in for a CUDA tensor, where there is no GPU."""

    is_cuda = True


def unsendable() -> dict[str, Callable[[], Any]]:
    """Objects that belong to one process."""

    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None:
        pass

    class Mapped:
        def __new__(cls) -> Any:
            import mmap

            return mmap.mmap(-1, 100)

    return {
        "Lock": threading.Lock,
        "RLock": threading.RLock,
        "Condition": threading.Condition,
        "Event": threading.Event,
        "Semaphore": lambda: threading.Semaphore(2),
        "local": threading.local,
        "Thread": lambda: threading.Thread(target=print),
        "generator": generator,
        "coroutine": coroutine,
        "open text file": lambda: open(os.devnull),
        "open text file to write": lambda: open(os.devnull, "w"),
        "open binary file": lambda: open(os.devnull, "rb"),
        "raw file": lambda: open(os.devnull, "rb", buffering=0),
        "temporary file": tempfile.NamedTemporaryFile,
        "socket": socket.socket,
        "process": lambda: subprocess.Popen(["true"]),
        "memory map": Mapped,
        "frame": sys._getframe,
        "tensor on a GPU": lambda: torch.ones(2).as_subclass(LooksLikeOnAGPU),
        "store": lambda: dist.HashStore(),
        "database": lambda: __import__("sqlite3").connect(":memory:"),
        "queue": lambda: __import__("queue").Queue(),
        "pool": lambda: __import__("concurrent.futures").futures.ThreadPoolExecutor(),
        "selector": lambda: __import__("selectors").DefaultSelector(),
    }


def put_away(value: Any) -> None:
    """Close what a test opened, so that nothing is left to the collector."""
    if isinstance(value, subprocess.Popen):
        value.wait()
    elif hasattr(value, "shutdown") and not isinstance(value, socket.socket):
        value.shutdown()
    elif hasattr(value, "close"):
        value.close()


@pytest.mark.parametrize("what", list(unsendable()))
def test_L12_the_variable_is_named(what: str) -> None:
    resource = unsendable()[what]()

    def worker() -> Any:
        return resource

    try:
        with pytest.raises(NotSendable) as caught:
            launch(worker, framework="python")
        assert caught.value.variable.startswith("resource")
        assert str(caught.value).startswith(caught.value.variable)
        assert caught.value.type_name in str(caught.value)
        assert "\n" not in str(caught.value)
    finally:
        put_away(resource)


def test_L12_a_process_group_of_the_notebook(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        with pytest.raises(NotSendable, match="group") as caught:
            launch(lambda: group)
        assert caught.value.variable == "group"
        assert launch(lambda: dist.get_world_size()).results == [2, 2]
    finally:
        dist.destroy_process_group()


def ways_to_hold() -> dict[str, tuple[str, str]]:
    """Cells that leave a function `worker` which holds a lock, and what the error must call the lock."""
    return {
        "a global": ("guard = Lock()\ndef worker():\n    return guard\n", "guard"),
        "a closure": ("def make():\n    guard = Lock()\n    return lambda: guard\nworker = make()\n", "guard"),
        "another cell's function": (
            "guard = Lock()\ndef helper():\n    return guard\ndef worker():\n    return helper()\n",
            "guard",
        ),
        "a function three calls away": (
            "guard = Lock()\ndef a():\n    return guard\ndef b():\n    return a()\nworker = lambda: b()\n",
            "guard",
        ),
        "a nested function": (
            "guard = Lock()\ndef worker():\n    def inner():\n        return guard\n    return inner()\n",
            "guard",
        ),
        "a comprehension": ("guard = Lock()\ndef worker():\n    return [guard for _ in range(2)]\n", "guard"),
        "a dict": ("config = {'rate': 1, 'guard': Lock()}\ndef worker():\n    return config\n", "config['guard']"),
        "a key of a dict": ("config = {Lock(): 1}\ndef worker():\n    return config\n", "config"),
        "a list": ("things = [1, [2, Lock()]]\ndef worker():\n    return things\n", "things[1][1]"),
        "a tuple": ("things = (1, Lock())\ndef worker():\n    return things\n", "things[1]"),
        "a set": ("things = {Lock()}\ndef worker():\n    return things\n", "things"),
        "a deque": (
            "from collections import deque\nthings = deque([1, Lock()])\ndef worker():\n    return things\n",
            "things",
        ),
        "an ordered dict": (
            "from collections import OrderedDict\nconfig = OrderedDict(guard=Lock())\ndef worker():\n    return config\n",
            "config['guard']",
        ),
        "a default dict": (
            "from collections import defaultdict\nconfig = defaultdict(list)\nconfig['guard'] = Lock()\n"
            "def worker():\n    return config\n",
            "config",
        ),
        "a namespace": (
            "from types import SimpleNamespace\nconfig = SimpleNamespace(guard=Lock())\ndef worker():\n    return config\n",
            "config.guard",
        ),
        "a dataclass": (
            "from dataclasses import dataclass\n@dataclass\nclass Config:\n    guard: object\nconfig = Config(Lock())\n"
            "def worker():\n    return config\n",
            "config.guard",
        ),
        "a dataclass with slots": (
            "from dataclasses import dataclass\n@dataclass(slots=True)\nclass Config:\n    guard: object\n"
            "config = Config(Lock())\ndef worker():\n    return config\n",
            "config.guard",
        ),
        "an attribute": (
            "class Trainer:\n    def __init__(self):\n        self.guard = Lock()\ntrainer = Trainer()\n"
            "def worker():\n    return trainer\n",
            "trainer.guard",
        ),
        "self of a method": (
            "class Trainer:\n    def __init__(self):\n        self.guard = Lock()\n    def run(self):\n        return 1\n"
            "worker = Trainer().run\n",
            "run's self.guard",
        ),
        "a callable object": (
            "class Trainer:\n    def __init__(self):\n        self.guard = Lock()\n    def __call__(self):\n        return 1\n"
            "worker = Trainer()\n",
            "Trainer.guard",
        ),
        "a class": ("class Trainer:\n    guard = Lock()\ndef worker():\n    return Trainer\n", "Trainer.guard"),
        "a base class": (
            "class Base:\n    guard = Lock()\nclass Trainer(Base):\n    pass\ndef worker():\n    return Trainer()\n",
            "Base.guard",
        ),
        "a method of a class": (
            "guard = Lock()\nclass Trainer:\n    def run(self):\n        return guard\ndef worker():\n    return Trainer()\n",
            "guard",
        ),
        "a default": ("def worker(guard=Lock()):\n    return guard\n", "a default of worker"),
        "a keyword's default": ("def worker(*, guard=Lock()):\n    return guard\n", "the default of guard in worker"),
        "an attribute of a function": ("def worker():\n    return worker\nworker.guard = Lock()\n", "worker.guard"),
        "a partial": (
            "import functools\ndef work(a, guard):\n    return a\nworker = functools.partial(work, 1, guard=Lock())\n",
            "argument guard",
        ),
        "a decorator": (
            "import functools\ndef guarded(fn):\n    guard = Lock()\n    @functools.wraps(fn)\n    def inner():\n"
            "        with guard:\n            return fn()\n    return inner\n@guarded\ndef worker():\n    return 1\n",
            "guard",
        ),
        "a model": (
            "from torch import nn\nmodel = nn.Linear(2, 1)\nmodel.guard = Lock()\ndef worker():\n    return model\n",
            "model.guard",
        ),
        "a layer of a model": (
            "from torch import nn\nmodel = nn.Sequential(nn.Linear(2, 1))\nmodel[0].guard = Lock()\n"
            "def worker():\n    return model\n",
            "guard",
        ),
        "a hook of a model": (
            "from torch import nn\nguard = Lock()\nmodel = nn.Linear(2, 1)\n"
            "model.register_forward_hook(lambda *_: guard and None)\ndef worker():\n    return model\n",
            "guard",
        ),
        "an array of objects": (
            "import numpy\nthings = numpy.array([Lock(), 1], dtype=object)\ndef worker():\n    return things\n",
            "things",
        ),
    }


@pytest.mark.parametrize("where", list(ways_to_hold()))
def test_L12_the_way_to_it_is_shown_wherever_it_is_held(where: str, notebook: Notebook) -> None:
    source, called = ways_to_hold()[where]
    notebook.run("from threading import Lock\n" + source)
    with pytest.raises(NotSendable) as caught:
        launch(notebook["worker"], framework="python")
    assert called in caught.value.variable
    assert "lock" in str(caught.value)


@pytest.mark.parametrize("where", list(ways_to_hold()))
def test_L12_also_where_a_pickler_would_carry_it_without_complaint(where: str, notebook: Notebook) -> None:
    source, called = ways_to_hold()[where]
    with open(os.devnull) as file:
        notebook.variables["Lock"] = lambda: file
        notebook.run(source)
        with pytest.raises(NotSendable) as caught:
            launch(notebook["worker"], framework="python")
    assert called in caught.value.variable
    assert "open" in str(caught.value)


@pytest.mark.parametrize(("given", "called"), [((1,), "argument 2"), ((), "argument guard")])
def test_L12_an_argument_is_named_by_its_place_or_keyword(given: tuple[int, ...], called: str) -> None:
    with pytest.raises(NotSendable) as caught:
        if given:
            launch(lambda a, guard: a, *given, threading.Lock(), framework="python")
        else:
            launch(lambda a, guard: a, 1, guard=threading.Lock(), framework="python")
    assert caught.value.variable == called


def test_L12_nothing_is_started() -> None:
    launcher.shutdown()
    guard = threading.Lock()
    for framework in ("torch", "python"):
        with pytest.raises(NotSendable):
            launch(lambda: guard, framework=framework)
        assert launcher.server_pid(framework) is None


def test_L12_what_is_only_near_the_function_stays_behind(notebook: Notebook) -> None:
    notebook.run(
        "import threading\nguard = threading.Lock()\ndef other():\n    return guard\ndef worker():\n    return 5\n"
    )
    assert in_ranks(notebook["worker"]) == [5, 5]


def test_L12_text_and_bytes_in_memory_can_be_sent(notebook: Notebook) -> None:
    notebook.run(
        "import io\ntext = io.StringIO('abc')\nraw = io.BytesIO(b'abc')\ndef worker():\n    return text.read(), raw.read()\n"
    )
    assert in_ranks(notebook["worker"]) == [("abc", b"abc")] * 2


def test_L12_structures_that_contain_themselves_can_be_sent(notebook: Notebook) -> None:
    notebook.run("loop = [1]\nloop.append(loop)\nclass Node:\n    pass\nnode = Node()\nnode.me = node\n")
    notebook.run("def worker():\n    return loop[1] is loop, node.me is node\n")
    assert in_ranks(notebook["worker"]) == [(True, True)] * 2


def test_L12_large_plain_data_is_looked_through_quickly() -> None:
    numbers = list(range(1_000_000))
    words = {str(number): [number] for number in range(100_000)}
    in_ranks(abs, 1)
    start = time.monotonic()
    assert in_ranks(lambda: (len(numbers), len(words))) == [(1_000_000, 100_000)] * 2
    assert time.monotonic() - start < 20


def test_an_answer_that_is_missing_refuses_to_travel() -> None:
    class Missing:
        def __refuse_launch__(self) -> None:
            raise AnswerNeeded("ring")

    answers = {"ring": Missing()}
    with pytest.raises(AnswerNeeded, match="ring"):
        launch(lambda: answers, framework="python")


# ---- L23: a user's own modules are read anew by every rank


@pytest.fixture
def folder_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("lesson_helpers"):
            del sys.modules[name]


def write_at(path: Path, text: str, moment: float | None = None) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    if moment is not None:
        os.utime(path, (moment, moment))


def test_L23_an_edited_module_is_seen(folder_of_modules: Path, each_way: str) -> None:
    module = folder_of_modules / "lesson_helpers.py"
    write_at(module, "def answer():\n    return 'first version'\n")

    def worker() -> str:
        import lesson_helpers  # type: ignore[import-not-found]

        return str(lesson_helpers.answer())

    assert in_ranks(worker) == ["first version"] * 2
    write_at(module, "def answer():\n    return 'second, longer version'\n")
    assert in_ranks(worker) == ["second, longer version"] * 2


def test_L23_an_edit_of_the_same_size_in_the_same_second_is_seen(folder_of_modules: Path, each_way: str) -> None:
    module = folder_of_modules / "lesson_helpers.py"
    moment = 1_700_000_000.0

    def worker() -> int:
        import lesson_helpers

        return int(lesson_helpers.answer())

    for number in (1, 2, 3):
        write_at(module, f"def answer():\n    return {number}\n", moment + number / 10)
        assert in_ranks(worker) == [number] * 2


def test_L23_the_same_for_a_package_and_for_what_the_notebook_has_imported(folder_of_modules: Path) -> None:
    write_at(folder_of_modules / "lesson_helpers" / "__init__.py", "")
    inner = folder_of_modules / "lesson_helpers" / "inner.py"
    moment = 1_700_000_000.0
    write_at(inner, "VALUE = 1\ndef answer():\n    return VALUE\n", moment)
    inner_module = importlib.import_module("lesson_helpers.inner")
    answer = inner_module.answer

    def worker() -> Any:
        return inner_module.answer(), answer()

    assert in_ranks(worker) == [(1, 1)] * 2
    write_at(inner, "VALUE = 2\ndef answer():\n    return VALUE\n", moment)
    assert in_ranks(worker) == [(2, 2)] * 2
    assert in_ranks(answer) == [2, 2]


def test_L23_a_module_that_appears_between_launches_is_found(folder_of_modules: Path) -> None:
    def worker() -> Any:
        import lesson_helpers_later  # type: ignore[import-not-found]

        return lesson_helpers_later.VALUE

    with pytest.raises(WorkerFailed, match="lesson_helpers_later"):
        in_ranks(worker)
    write_at(folder_of_modules / "lesson_helpers_later.py", "VALUE = 4\n")
    assert in_ranks(worker) == [4, 4]


def test_L23_a_class_of_a_users_module_comes_back_as_that_class(folder_of_modules: Path) -> None:
    write_at(
        folder_of_modules / "lesson_helpers_kinds.py",
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n",
    )
    kinds = importlib.import_module("lesson_helpers_kinds")

    def worker() -> Any:
        return kinds.Point(3)

    assert in_ranks(worker) == [kinds.Point(3)] * 2


def test_dataclasses_of_libraries_come_back() -> None:
    @dataclasses.dataclass
    class Local:
        value: int

    assert in_ranks(lambda: Local(3)) == [Local(3), Local(3)]
