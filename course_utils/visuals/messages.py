"""Figures of the messages of a traced run: who sent how much to whom, in which round, and which chunk it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..launcher.tracing import RankTrace
from .picture import COLOURS, FAINT, INK, PAPER, Picture, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Message:
    """One message of a trace; `journey` numbers the chunk that it carries on, None where several flow together."""

    sender: int
    receiver: int
    round: int
    bytes: int
    journey: int | None = None


def messages_of(trace: Sequence[RankTrace]) -> list[Message]:
    """Return the messages of a traced run in the order of rounds, each with the journey that it continues.

    A message continues the one that its sender received in the round before, if there was exactly one of about its
    size; otherwise it begins a journey (in round 1), or carries something new.
    """
    sent = sorted(
        (event.round, rank, event.peer, event.bytes)
        for rank, told in enumerate(trace)
        for event in told.events
        if event.op == "send" and event.round is not None and event.peer is not None and event.bytes
    )
    found: list[Message] = []
    slack = max((size for *_, size in sent), default=0) * 0.02 + 8  # chunks of one tensor differ by one element
    for number, rank, peer, size in sent:
        before = [m for m in found if m.receiver == rank and m.round == number - 1 and abs(m.bytes - size) <= slack]
        if number == 1:
            journey: int | None = rank
        else:
            journey = before[0].journey if len(before) == 1 else None
        found.append(Message(rank, peer, number, size, journey))
    return found


def chunk_movement(trace: Sequence[RankTrace], title: str = "") -> Picture:
    """Draw the chunks of a traced ring on their way: a row for each rank, a column for each round, an arrow a message.

    A colour is one chunk, numbered by the rank where its journey begins. `trace` is `run.trace` of a launch with
    trace=True. Raises ValueError for a run without messages.

    Example: `chunk_movement(launch(ring, tensor, nprocs=4, trace=True).trace)`.
    """
    messages = _some(messages_of(trace))
    rounds = max(message.round for message in messages)
    figure, (axes,) = canvas(max(5.0, 1.25 * rounds + 1.6), 0.62 * len(trace) + 1.5)
    _draw(axes, messages, len(trace))
    axes.set_title(title, fontsize=11, loc="left")
    told = sorted({message.journey for message in messages if message.journey is not None})
    counted = f"{_count(len(messages), 'message')} between {len(trace)} ranks in {_count(rounds, 'round')}."
    words = [f"{title}:" if title else "", counted, *(_journey_in_words(messages, journey) for journey in told)]
    return Picture(figure, " ".join(words).strip())


def message_rounds(traces: Mapping[str, Sequence[RankTrace]]) -> Picture:
    """Draw several traced runs side by side: a row for each rank, a column for each round, an arrow a message.

    Arrows are as thick as messages are large, relative to the largest of all runs. Raises ValueError for a run without
    messages.

    Example: `message_rounds({"naive": naive.trace, "ring": ring.trace})`.
    """
    runs = {name: _some(messages_of(trace)) for name, trace in traces.items()}
    largest = max(message.bytes for messages in runs.values() for message in messages)
    ranks = max(len(trace) for trace in traces.values())
    figure, row = canvas(2.9 * len(runs) + 0.4, 0.55 * ranks + 1.4, columns=len(runs))
    words = []
    for axes, (name, messages) in zip(row, runs.items(), strict=True):
        _draw(axes, messages, len(traces[name]), largest, coloured=False)
        axes.set_title(name, fontsize=11, loc="left")
        rounds = max(message.round for message in messages)
        share = max(message.bytes for message in messages) / largest
        counted = f"{_count(len(messages), 'message')} in {_count(rounds, 'round')}"
        words.append(f"{name}: {counted}, the largest {share:.0%} of the tensor.")
    return Picture(figure, " ".join(words))


def _some(messages: list[Message]) -> list[Message]:
    if not messages:
        raise ValueError("there are no messages to draw: was the run made with trace=True, and on two ranks or more?")
    return messages


def _draw(
    axes: Axes, messages: Iterable[Message], ranks: int, largest: int | None = None, coloured: bool = True
) -> None:
    """Arrows from round to round; without `largest` all are equally thick and carry their chunk's number."""
    from matplotlib.patches import FancyArrowPatch

    rounds = max(message.round for message in messages)
    for rank in range(ranks):
        axes.axhline(rank, color=FAINT, linewidth=1, zorder=0)
    for message in messages:
        known = coloured and message.journey is not None
        colour = COLOURS[(message.journey or 0) % len(COLOURS)] if known else COLOURS[0] if not coloured else INK
        width = 1.8 if largest is None else 0.7 + 4.3 * message.bytes / largest
        start, end = (message.round - 0.94, message.sender), (message.round - 0.06, message.receiver)
        arrow = FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9 + 1.6 * width,
            color=colour,
            linewidth=width,
            shrinkA=0,
            shrinkB=0,
            joinstyle="miter",
            zorder=2,
        )
        axes.add_patch(arrow)
        if known and largest is None:
            at = 0.27 if abs(end[1] - start[1]) <= 1 else 0.12  # near the sender, where arrows have not crossed yet
            axes.text(
                start[0] + at * (end[0] - start[0]),
                start[1] + at * (end[1] - start[1]),
                str(message.journey),
                color=colour,
                fontsize=9,
                fontweight="bold",
                ha="center",
                va="center",
                bbox={"boxstyle": "round,pad=0.12", "facecolor": PAPER, "edgecolor": "none"},
                zorder=3,
            )
    axes.set(xlim=(0, rounds), ylim=(ranks - 0.6, -0.4), yticks=range(ranks), xlabel="round")
    axes.set_xticks([number + 0.5 for number in range(rounds)], [str(number + 1) for number in range(rounds)])
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(length=0)


def _journey_in_words(messages: Sequence[Message], journey: int) -> str:
    steps = [message for message in messages if message.journey == journey]
    path = [steps[0].sender, *(message.receiver for message in steps)]
    return f"Chunk {journey} goes over the ranks {', '.join(map(str, path))}."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
