"""The figures of messages say what the trace holds, and follow a chunk on its way."""

from __future__ import annotations

import pytest

from course_utils.launcher.tracing import Event, RankTrace, Trace
from course_utils.visuals import chunk_movement, message_rounds
from course_utils.visuals.messages import Message, messages_of


def trace_of(messages: list[tuple[int, int, int, int]], ranks: int) -> Trace:
    """A trace with these messages: (sender, receiver, round, bytes)."""
    traces = Trace()
    for rank in range(ranks):
        events = tuple(
            Event("send", peer, size, 0, number - 1.0, float(number), number)
            for sender, peer, number, size in messages
            if sender == rank
        )
        sent = sum(event.bytes for event in events)
        traces.append(RankTrace(len(events), 0, sent, 0, max((e.round or 0 for e in events), default=0), events))
    return traces


def ring(ranks: int, sizes: list[int]) -> Trace:
    """A ring all-reduce: in round k rank r passes on the chunk that began on rank r - k + 1."""
    messages = [
        (rank, (rank + 1) % ranks, number, sizes[(rank - number + 1) % ranks])
        for number in range(1, 2 * ranks - 1)
        for rank in range(ranks)
    ]
    return trace_of(messages, ranks)


STAR = trace_of([(1, 0, 1, 80), (2, 0, 1, 80), (0, 1, 2, 80), (0, 2, 2, 80)], 3)


def test_in_a_ring_each_journey_begins_on_its_rank_and_never_breaks() -> None:
    messages = messages_of(ring(4, [1000, 1000, 996, 996]))
    for start in range(4):
        journey = [message for message in messages if message.journey == start]
        assert [message.round for message in journey] == [1, 2, 3, 4, 5, 6]
        assert [message.sender for message in journey] == [(start + step) % 4 for step in range(6)]


def test_where_several_messages_meet_the_sum_is_nobodys_journey() -> None:
    assert messages_of(STAR) == [
        Message(1, 0, 1, 80, journey=1),
        Message(2, 0, 1, 80, journey=2),
        Message(0, 1, 2, 80, journey=None),
        Message(0, 2, 2, 80, journey=None),
    ]


def test_empty_messages_and_collectives_are_left_out() -> None:
    trace = trace_of([(0, 1, 1, 0), (1, 0, 1, 8)], 2)
    trace.append(RankTrace(0, 0, 0, 0, 0, (Event("all_reduce", None, 8, None, 0.0, 1.0, None),)))
    assert messages_of(trace) == [Message(1, 0, 1, 8, journey=1)]


def test_the_words_of_chunk_movement_tell_each_chunks_way() -> None:
    words = chunk_movement(ring(3, [8, 8, 8]), "A ring").words
    assert words.startswith("A ring: 12 messages between 3 ranks in 4 rounds.")
    assert "Chunk 2 goes over the ranks 2, 0, 1, 2, 0." in words


def test_one_arrow_is_drawn_for_each_message_at_its_round() -> None:
    (axes,) = chunk_movement(ring(4, [8] * 4)).figure.axes
    assert len(axes.patches) == 24
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "3", "4", "5", "6"]


def test_arrows_are_as_thick_as_messages_are_large() -> None:
    picture = message_rounds({"star": STAR, "ring": ring(4, [20] * 4)})
    star, ring_axes = picture.figure.axes
    assert star.patches[0].get_linewidth() > 2 * ring_axes.patches[0].get_linewidth()
    assert picture.words == (
        "star: 4 messages in 2 rounds, the largest 100% of the tensor. "
        "ring: 24 messages in 6 rounds, the largest 25% of the tensor."
    )


def test_a_run_without_messages_is_refused_with_what_to_look_at() -> None:
    with pytest.raises(ValueError, match="trace=True"):
        chunk_movement(trace_of([], 2))
    with pytest.raises(ValueError, match="trace=True"):
        message_rounds({"ring": ring(3, [8] * 3), "nothing": trace_of([], 3)})
