"""What graders of messages between ranks share: runs whose failures are explained in terms of the exercise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grader.exercise import Attempt, Mistake
from grader.ranks import Answer

COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name in (
        *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
        *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_gather_object"),
        *("all_reduce_coalesced", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier"),
    )
)
SIZES = (
    "This is often a message of another size than the tensor that receives it, for which gloo ends the process: "
    "compare what one rank sends with what the other expects at that moment"
)


def run_explained(
    attempt: Attempt,
    function: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...],
    *,
    waits: str,
    sizes: str = SIZES,
    timeout: float = 6.0,
    errors: Mapping[str, str] | None = None,
    see: str = "",
) -> list[Answer]:
    """Run ranks. Where one waits for another for ever, add `waits`; where a message did not fit, add `sizes`.

    A run that is too long because a rank computes or sleeps gets no advice on messages. errors: a part of an error's
    text, and what to add to a message that contains it.
    """
    try:
        return attempt.run(function, ranks=ranks, args=args, timeout=timeout)
    except Mistake as mistake:
        text = str(mistake)
        stands_still = text.startswith(("deadlock", "not finished")) and " waits in " in text
        added = waits if stands_still else sizes if "SIGABRT" in text else ""
        added = next((more for part, more in (errors or {}).items() if part in text), added)
        if not added:
            raise
        raise Mistake(f"{text.rstrip('.')}. {added}", see=see) from None


def check_waited(answers: Sequence[Answer]) -> None:
    """Raise for a message that was started and never waited for."""
    for answer in answers:
        for call in answer.calls:
            if call.end is None and call.line:
                raise Mistake(
                    f"rank {answer.rank} never waits for the {call.kind} of line {call.line}: its bytes may still be "
                    "on their way when the tensor is used again. Keep the work that it returns and call work.wait()",
                    see="Two cures for the deadlock",
                )


def check_peers(answers: Sequence[Answer], ring: Sequence[int]) -> None:
    """Raise unless all messages went to the next rank of the ring."""
    for answer in answers:
        following = ring[(ring.index(answer.rank) + 1) % len(ring)]
        for call in answer.calls:
            if call.is_send and call.peer != following:
                raise Mistake(
                    f"rank {answer.rank} sends to rank {call.peer} (line {call.line}); in the ring {list(ring)} it "
                    f"sends only to the next rank, {following}. Use `neighbours(ring)` for both directions"
                )


def check_wire(answers: Sequence[Answer], messages: int, total: int) -> None:
    """Raise unless there were at most `messages` messages per rank, all waited for, and `total` bytes in all."""
    for answer in answers:
        if answer.messages > messages:
            raise Mistake(
                f"rank {answer.rank} sent {answer.messages} messages; {messages} are enough: one chunk per step"
            )
    sent = sum(answer.sent for answer in answers)
    if sent != total:
        raise Mistake(
            f"the ranks sent {sent} bytes in all; with one chunk per step it is {total}: "
            f"look at what you send, {'too much' if sent > total else 'too little'} travels"
        )
    check_waited(answers)


class Salted(str):
    """A string whose hash differs between processes, as that of a str does unless the processes were forked.

    With `reverse`, sets of such strings are read in the opposite order. Example: {"a", "b"} is read as a, b in a
    process without it and as b, a in one with it. Equal strings of one process have equal hashes, so mappings work.
    """

    reverse = False

    def __hash__(self) -> int:
        number = int.from_bytes(self.encode(), "big")
        return -number if Salted.reverse else number


class Late(Mistake):
    """A mistake that was seen in times, which a busy machine can stretch."""


STRETCHES = (1.0, 3.0, 9.0)


def repeat_if_late(check: Callable[[float], None]) -> None:
    """Call a check; if it finds times too long, call it again with longer pauses.

    A busy machine adds the same to short and to long pauses: only an answer that is late each time is wrong.
    """
    for stretch in STRETCHES:
        try:
            return check(stretch)
        except Late:
            if stretch == STRETCHES[-1]:
                raise
    return None
