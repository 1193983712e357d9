"""Small lessons in percent source, and a course folder to put them in."""

from __future__ import annotations

from pathlib import Path

LESSON = '''\
# %% [markdown]
# # 01 A small lesson
#
# What is two and two? Ten minutes, no hardware.

# %%
# @first-cell

# %% [markdown]
# ## Counting
#
# One cell, one number.

# %%
print("two and two:", 2 + 2)

# %%
x = 3
x * x

# %% tags=["nbval-ignore-output"]
import time

print(time.time())

# %% [markdown]
# ## Guess first

# %%
# @exercise guess points=1 minutes=2 kind=predict
### BEGIN SOLUTION
guess = 4
### END SOLUTION

# %% [markdown]
# ## Add

# %%
# @exercise add_two points=4 minutes=15
def add_two(number):
    """Return `number` plus two."""
    ### BEGIN SOLUTION
    answer_of_the_author = number + 2
    return answer_of_the_author
    ### END SOLUTION


def tried(function, number):
    try:
        return function(number)
    except NotImplementedError:
        return "not attempted"


result = tried(add_two, 2)

# %%
print("the answer", "is there" if result != "not attempted" else "is missing")

# %%
fields = {"a": 1, "b": 2}
fields

# %%
print(sorted(fields))

# %%
print(sum(fields.values()))

# %%
print(len(fields))

# %%
print("done")

# %%
total = 10

# %%
print("total", total)

# %% [markdown]
# ## Explain
#
# Why is the sum even?

# %% [markdown]
# <!-- @exercise why points=2 minutes=5 kind=explain -->
# <!-- BEGIN SOLUTION -->
# Two even numbers have an even sum.
# <!-- END SOLUTION -->
'''


def course(root: Path, **sources: str) -> Path:
    """Write one source per keyword (`_01_small=LESSON` gives 01_small.py) below `root` and return `root`."""
    folder = root / "notebooks" / "source"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sources.items():
        (folder / f"{name.lstrip('_')}.py").write_text(text, encoding="utf-8")
    return root


def line_of(text: str, source: str = LESSON) -> int:
    """Return the number of the line of `source` on which `text` starts for the first time."""
    return source[: source.index(text)].count("\n") + 1
