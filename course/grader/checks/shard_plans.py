"""The grader of balance_shards: coverage, pieces, load against the best possible, one plan on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from grader.checks.talk import Salted
from grader.exercise import Attempt, Mistake

SEE = "Tensors over several servers"
Plan = list[list[tuple[str, int, int]]]
Sizes = Mapping[str, tuple[int, int]]
"""Elements and bytes per element of each tensor, by name."""


def rank_plan(module: ModuleType, cases: Sequence[tuple[Sizes, int, int]]) -> list[list[Any]]:
    """Return for each case the plan, that for another order of the mapping, and that for names with other hashes."""
    types = {2: torch.float16, 4: torch.float32, 8: torch.float64}
    found = []
    for sizes, servers, largest in cases:
        plans = []
        for order, Salted.reverse in ((1, False), (-1, False), (1, True)):
            tensors = {
                Salted(name): torch.empty(count, dtype=types[width], device="meta")
                for name, (count, width) in list(sizes.items())[::order]
            }
            plans.append(plain(module.balance_shards(tensors, servers, largest)))
        found.append(plans)
    return found


def plain(plan: Any) -> Any:
    """Return a plan with plain strings and tuples, and anything else as it is."""
    if isinstance(plan, str):
        return str(plan)
    if isinstance(plan, tuple):
        return tuple(plain(part) for part in plan)
    return [plain(part) for part in plan] if isinstance(plan, list) else plan


def check_types(plan: Any) -> None:
    """Raise unless a plan is a list of lists of (name, first element, end)."""
    if not isinstance(plan, list) or any(not isinstance(server, list) for server in plan):
        raise Mistake(f"balance_shards returned {plan!r:.80}; it should return one list of pieces per server", SEE)
    for piece in (piece for server in plan for piece in server):
        if not isinstance(piece, tuple) or [type(part) for part in piece] != [str, int, int]:
            raise Mistake(f"a piece of the plan is {piece!r:.80}; it should be (name, first element, end)", SEE)


def cases_of(attempt: Attempt) -> list[tuple[Sizes, int, int]]:
    """Return tensors of many kinds: random, with a large one to cut, equal ones, fewer than servers, mixed types."""
    dice = attempt.random
    plain, more = ({f"layer{number}": (dice.randint(5, 60), 4) for number in range(count)} for count in (9, 10))
    large = {
        "embedding": (dice.randint(300, 400), 4),
        **{f"norm{number}": (dice.randint(8, 40), 4) for number in range(5)},
    }
    equal = dict.fromkeys(dice.sample("abcdefgh", 7), (20, 4))
    few = {"one": (10, 4), "two": (7, 4)}
    mixed = {"half": (90, 2), "double0": (30, 8), "double1": (29, 8), "double2": (28, 8)}
    tall = {f"w{number}": (count, 4) for number, count in enumerate((90, 22, 22, 22, 22))}
    rising = {f"v{number}": (count, 4) for number, count in enumerate((20, 20, 40))}
    ragged = {"ragged": (10, 4), "other": (3, 8)}
    return [
        (plain, 3, 10_000), (more, 4, 10_000), (large, 3, 400), (equal, 2, 10_000), (few, 4, 10_000),
        (mixed, 2, 10_000), (tall, 2, 10_000), (rising, 2, 10_000), (ragged, 2, 14),
    ]  # fmt: skip


def grade_shards(attempt: Attempt) -> None:
    """Check each case."""
    cases = cases_of(attempt)
    found = attempt.call(rank_plan, cases)
    for (sizes, servers, largest), plans in zip(cases, found, strict=True):
        plan = plans[0]
        for each in plans:
            check_types(each)
        check_pieces(plan, sizes, servers, largest)
    bad = [index for index, case in enumerate(cases) if ratio(found[index][0], case[0], case[1]) > 4 / 3]
    if bad:
        check_rule(cases, [plans[0] for plans in found], bad[0])
        raise Mistake(why_load(found[bad[0]][0], *cases[bad[0]][:2]), SEE)
    for (sizes, _, _), plans in zip(cases, found, strict=True):
        first, reordered, rehashed = ([sorted(server) for server in plan] for plan in plans)
        if first != rehashed:
            raise Mistake(
                f"the tensors {list(sizes)} gave another plan in another process: hash() of a string, and with it the "
                "order of a set, differs from process to process. Sort by size and, for equal sizes, by name",
                SEE,
            )
        if first != reordered:
            raise Mistake(
                f"the tensors {list(sizes)} gave another plan when the mapping listed them in another order: the ranks "
                "would look for a tensor on different servers. Sort by size and, for equal sizes, by name",
                SEE,
            )


def pieces_of(count: int, width: int, largest: int) -> list[int]:
    """Return the sizes of the pieces of one tensor, in elements."""
    number = 1
    while -(-count // number) * width > largest:
        number += 1
    return [count // number + (part < count % number) for part in range(number)]


def check_pieces(plan: Plan, sizes: Sizes, servers: int, largest: int) -> None:
    """Raise unless every element lies in exactly one piece, and pieces have the right sizes."""
    if len(plan) != servers:
        raise Mistake(
            f"the plan has {len(plan)} lists for {servers} servers: a server without pieces has an empty list", SEE
        )
    for name, (count, width) in sizes.items():
        mine = sorted((start, end) for server in plan for piece, start, end in server if piece == name)
        if not mine:
            raise Mistake(f"tensor {name} ({count} elements) is on no server", SEE)
        place = 0
        for start, end in mine:
            if start > place:
                raise Mistake(f"elements {place} to {start - 1} of {name} are on no server: its pieces are {mine}", SEE)
            if start < place:
                raise Mistake(f"element {start} of {name} is in two pieces: its pieces are {mine}, ends excluded", SEE)
            place = end
        if place != count:
            more = f"elements {place} to {count - 1} are on no server" if place < count else f"it has {count} elements"
            raise Mistake(f"the pieces of {name} are {mine}: {more}", SEE)
        lengths = sorted(end - start for start, end in mine)
        right = sorted(pieces_of(count, width, largest))
        if lengths != right:
            text = f"{name} has {count * width} bytes, and its pieces have {lengths} elements of {width} bytes"
            if lengths[-1] * width > largest:
                raise Mistake(f"{text}: a piece may have at most {largest} bytes, so cut it into {right}", SEE)
            if len(lengths) > len(right):
                raise Mistake(f"{text}: {len(right)} pieces of at most {largest} bytes are enough", SEE)
            raise Mistake(f"{text}: the sizes should differ by at most one element, as in {right}", SEE)


def loads_of(plan: Plan, sizes: Sizes, bytes_too: bool = True) -> list[int]:
    """Return the load of each server, in bytes or in elements."""
    return [sum((end - start) * (sizes[name][1] if bytes_too else 1) for name, start, end in server) for server in plan]


def best_load(pieces: Sequence[int], servers: int) -> int:
    """Return the smallest possible largest load: try all distributions, largest piece first, and stop early."""
    ordered = sorted(pieces, reverse=True)
    lower = max(-(-sum(ordered) // servers), ordered[0])
    best = sum(ordered)

    def place(index: int, loads: list[int]) -> None:
        nonlocal best
        if best == lower or max(loads) >= best:
            return
        if index == len(ordered):
            best = max(loads)
            return
        for server in range(servers):
            if loads[server] not in loads[:server]:  # servers of equal load are alike
                loads[server] += ordered[index]
                place(index + 1, loads)
                loads[server] -= ordered[index]

    place(0, [0] * servers)
    return best


def all_pieces(sizes: Sizes, largest: int) -> list[tuple[int, int, str, int]]:
    """Return (bytes, elements, name, number) of each piece, in the order of the mapping."""
    found = []
    for name, (count, width) in sizes.items():
        for number, length in enumerate(pieces_of(count, width, largest)):
            found.append((length * width, length, name, number))
    return found


def wrong_loads(pieces: list[tuple[int, int, str, int]], servers: int, rule: str) -> list[int]:
    """Return the loads, largest first, that a wrong rule gives."""
    order = sorted(pieces, reverse=True) if rule == "sorted turns" else pieces
    if rule == "elements":
        order = sorted(pieces, key=lambda piece: -piece[1])
    loads, counts = [0] * servers, [0] * servers
    for turn, piece in enumerate(order):
        server = turn % servers if "turns" in rule else counts.index(min(counts))
        loads[server] += piece[0]
        counts[server] += piece[1] if rule == "elements" else piece[0]
    return sorted(loads, reverse=True)


NAMES = {
    "turns": "as if the servers took turns (round robin): large tensors can meet on one server. Give each piece to the "
    "server with the smallest load",
    "sorted turns": "as if the servers took turns (round robin) after sorting, or as if the smallest piece was placed "
    "first (both give the same loads). Place the largest first, each on the server with the smallest load",
    "as they come": "as if the pieces were placed as they come: a large one at the end has no good place left. Sort by "
    "bytes, largest first",
    "elements": "as if elements were counted: load is in bytes, numel * element_size",
}


def check_rule(cases: Sequence[tuple[Sizes, int, int]], plans: Sequence[Plan], shown: int) -> None:
    """Raise if the loads are those of a well-known wrong rule in all cases; show one case."""
    loads = [sorted(loads_of(plan, sizes), reverse=True) for (sizes, _, _), plan in zip(cases, plans, strict=True)]
    pieces = [all_pieces(sizes, largest) for sizes, _, largest in cases]
    uncut = [index for index, (sizes, _, _) in enumerate(cases) if len(pieces[index]) == len(sizes)]
    for rule, text in NAMES.items():
        if all(loads[index] == wrong_loads(pieces[index], cases[index][1], rule) for index in uncut):
            sizes = [piece[0] for piece in pieces[shown]]
            raise Mistake(f"the loads are {loads[shown]} bytes for pieces of {sizes}, {text}", SEE)


def piece_bytes(plan: Plan, sizes: Sizes) -> list[int]:
    """Return the bytes of all pieces, largest first."""
    return sorted(((end - start) * sizes[name][1] for server in plan for name, start, end in server), reverse=True)


def ratio(plan: Plan, sizes: Sizes, servers: int) -> float:
    """Return the largest load over the smallest possible one."""
    return max(loads_of(plan, sizes)) / best_load(piece_bytes(plan, sizes), servers)


def why_load(plan: Plan, sizes: Sizes, servers: int) -> str:
    """Say how far the loads are from the best ones."""
    loads, pieces = loads_of(plan, sizes), piece_bytes(plan, sizes)
    empty = [server for server, load in enumerate(loads) if not load]
    idle = f"; server {empty[0]} has nothing" if empty and len(pieces) >= servers else ""
    return (
        f"the loads are {loads} bytes for pieces of {pieces}; {best_load(pieces, servers)} would be possible, and at "
        f"most 4/3 of it is allowed{idle}. Place the largest pieces first, each on the server with the smallest load"
    )
