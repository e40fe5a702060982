"""Graders of the topology exercises: the order of a ring, and an all-reduce that spares the links between hosts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from grader.checks.talk import Salted, check_waited, run_explained
from grader.exercise import Attempt, Mistake
from grader.ranks import Answer

SEE_ORDER = "A ring that follows the links"
SEE_HOSTS = "Inside the host first"


def links(order: Sequence[int], speed: Sequence[Sequence[float]]) -> list[float]:
    """Return the speeds of the links of a ring, the closing one last."""
    return [speed[order[place]][order[(place + 1) % len(order)]] for place in range(len(order))]


def rank_order(module: ModuleType, matrices: Sequence[list[list[int]]]) -> list[object]:
    """Ask for the ring of each matrix, twice: the second answer must be the first."""
    found: list[object] = []
    for matrix in matrices:
        given = [list(row) for row in matrix]
        found.append((module.ring_order(given), module.ring_order(given), given == matrix))
    return found


def matrices_of(attempt: Attempt) -> list[list[list[int]]]:
    """Return links of different kinds: random, one-way slow, hosts with two ranks each, all equal, two ranks, one."""
    dice = attempt.random
    whole = [[[dice.randint(1, 40) for _ in range(size)] for _ in range(size)] for size in (4, 5, 5, 6)]
    names = dice.choice(([0, 1, 2, 0, 1, 2], [0, 1, 0, 2, 1, 2], [0, 1, 2, 1, 0, 2]))  # no host's ranks are neighbours
    hosts = [[40 if names[a] == names[b] else 5 for b in range(6)] for a in range(6)]
    return [*whole, trap(dice.randint(20, 30)), lure(40), lure(200), hosts, [[7] * 4] * 4, [[0, 3], [4, 0]], [[0]]]


def trap(fast: int) -> list[list[int]]:
    """Return links on which taking the fastest next link leads to a slow closing link."""
    slow, good = 1, fast - 5
    matrix = [[good] * 4 for _ in range(4)]
    matrix[0][1] = matrix[1][2] = matrix[2][3] = fast
    matrix[3][0] = slow
    return matrix


RULES = {
    "the closing link, from the last rank back to rank 0, is not counted": lambda ring, speed: (
        min(links(ring, speed)[:-1], default=0),
        sum(links(ring, speed)[:-1]),
    ),
    "the links are read against the direction of the messages (speed[a][b]: from a to b)": lambda ring, speed: (
        min(links(ring[::-1], speed)),
        sum(links(ring[::-1], speed)),
    ),
    "the sum of the links is made as large as possible, but the slowest link holds up every step": lambda ring, speed: (
        sum(links(ring, speed)),
        min(links(ring, speed)),
    ),
    "the fastest link is made as fast as possible, but the slowest one holds up every step": lambda ring, speed: (
        max(links(ring, speed)),
        sum(links(ring, speed)),
    ),
    "the numbers are taken for times; they are speeds, and more is better": lambda ring, speed: (
        -max(links(ring, speed)),
        -sum(links(ring, speed)),
    ),
    "the ranks stand in the ring as they are numbered, whatever the links": lambda ring, speed: 0,
}
"""Wrong rules for the best ring: the one with the largest value, the first of equal ones."""


def lure(fast: int) -> list[list[int]]:
    """Return links on which the fastest one, 0 to 1, leads to a slow one: 1 reaches only 0 at speed."""
    matrix = [[35] * 4 for _ in range(4)]
    matrix[0][1] = fast
    matrix[1][2] = matrix[1][3] = 1
    return matrix


def rings_of(size: int) -> list[list[int]]:
    """Return all rings that start at rank 0, in order."""
    return [[0, *rest] for rest in itertools.permutations(range(1, size))]


def greedy_ring(speed: Sequence[Sequence[float]]) -> list[int]:
    """Return the ring in which each rank goes on to the fastest link that is left."""
    order = [0]
    while len(order) < len(speed):
        left = [rank for rank in range(len(speed)) if rank not in order]
        order.append(max(left, key=lambda rank: speed[order[-1]][rank]))
    return order


def grade_order(attempt: Attempt) -> None:
    """Compare with all rings, and with what wrong rules would choose."""
    matrices = matrices_of(attempt)
    found = attempt.call(rank_order, matrices)
    for matrix, (order, again, untouched) in zip(matrices, found, strict=True):
        if not untouched:
            raise Mistake("ring_order changed the matrix of speeds: all callers read the same one, work on a copy")
        check_shape(order, len(matrix))
        if order != again:
            raise Mistake(
                f"the same matrix gave {order} and then {again}: ranks that compute different rings wait for each "
                "other, so nothing may be left to chance"
            )
    if [greedy_ring(matrix) for matrix in matrices] == [order for order, _, _ in found]:
        raise Mistake(
            "for all matrices of speeds the result is as if each rank took the fastest link that is left: what remains "
            "for the last links can be slow. Compare whole rings",
            see=SEE_ORDER,
        )
    for name, rule in RULES.items():
        chosen = [max(rings_of(len(matrix)), key=lambda ring, m=matrix: rule(ring, m)) for matrix in matrices]
        if chosen == [order for order, _, _ in found]:
            raise Mistake(f"for all matrices of speeds the result is as if {name}", see=SEE_ORDER)
    for matrix, (order, _, _) in zip(matrices, found, strict=True):
        check_best(order, matrix)


def check_shape(order: object, size: int) -> None:
    """Raise unless it is a list with each rank once, rank 0 first."""
    if not isinstance(order, list) or any(type(rank) is not int for rank in order):
        raise Mistake(f"for {size} ranks ring_order returned {order!r:.80}; it should return a list of ranks (int)")
    if sorted(order) != list(range(size)):
        raise Mistake(f"for {size} ranks the ring is {order}: each of the ranks 0 to {size - 1} must be in it once")
    if order[0] != 0:
        raise Mistake(f"the ring {order} does not start with rank 0: a ring has no beginning, so all agree on rank 0")


def check_best(order: list[int], matrix: list[list[int]]) -> None:
    """Raise unless the ring is the best one; say which rule it misses."""
    rings = rings_of(len(matrix))
    slowest = max(min(links(ring, matrix)) for ring in rings)
    best_rings = [ring for ring in rings if min(links(ring, matrix)) == slowest]
    total = max(sum(links(ring, matrix)) for ring in best_rings)
    best = next(ring for ring in best_rings if sum(links(ring, matrix)) == total)
    mine = links(order, matrix)
    if order == best:
        return
    text = f"for the speeds {matrix} the ring {order} has the links {mine}"
    if min(mine) < slowest:
        raise Mistake(f"{text}; the slowest is {min(mine)}, while {best} has no link below {slowest}", see=SEE_ORDER)
    if sum(mine) < total:
        raise Mistake(
            f"{text}: no ring has a faster slowest link, but {best} has the larger sum of links ({total}, not "
            f"{sum(mine)}): it keeps ranks of one host together",
            see=SEE_ORDER,
        )
    raise Mistake(
        f"{text}; {best} is as good and comes first in the order of the lists. Without this rule ranks could choose "
        "different rings",
        see=SEE_ORDER,
    )


# --- hierarchical all-reduce ------------------------------------------------------------------------------------------

LAYOUTS = (
    (("a", "b", "a", "b"), ("a", "b", "b", "a")),
    (("b", "a", "a", "a"), ("a", "a", "b", "a"), ("a", "a", "a", "b")),
    (("a", "b", "a", "c"), ("c", "b", "b", "a"), ("b", "a", "c", "a")),
)
"""Two hosts of two ranks, one of three and one of one, three hosts; one layout of each kind is used."""


def whole_numbers(seed: int, rank: int, size: int) -> Tensor:
    """Return whole numbers of one rank."""
    return torch.randint(1, 5000, (size,), generator=torch.Generator().manual_seed(seed + rank)).float()


def rank_hierarchical(module: ModuleType, rank: int, world: int, seed: int, size: int, hosts: Sequence[str]) -> Tensor:
    """All-reduce one tensor; the names of the hosts have other hashes on odd ranks."""
    tensor = whole_numbers(seed, rank, size)
    Salted.reverse = rank % 2 == 1
    module.hierarchical_all_reduce(tensor, [Salted(host) for host in hosts])
    return tensor


def grade_hierarchical(attempt: Attempt) -> None:
    """Check the sum, then who sent how much over which link, on three layouts of hosts."""
    for hosts in map(attempt.random.choice, LAYOUTS):
        size, seed = attempt.random.randint(40, 90), attempt.seed()
        agree = (
            f"The hosts are {list(hosts)}: all ranks must agree on the leaders and their order (that of a set, or by "
            "hash(), differs between processes), and each send needs its receive"
        )
        answers = run_explained(
            attempt, rank_hierarchical, 4, (seed, size, hosts), waits=agree, sizes=agree, see=SEE_HOSTS
        )
        parts = [whole_numbers(seed, rank, size) for rank in range(4)]
        for answer in answers:
            check_total(answer, parts, hosts)
        check_links(answers, 4 * size, hosts)


def check_total(answer: Answer, parts: Sequence[Tensor], hosts: Sequence[str]) -> None:
    """Raise unless the tensor is the sum over all ranks."""
    found, rank = answer.value, answer.rank
    if torch.equal(found, sum(parts)):
        return
    text = f"hosts {list(hosts)}: on rank {rank} the result is"
    if torch.equal(found, parts[rank]):
        raise Mistake(f"{text} its own tensor, unchanged: the total must come back to every rank", see=SEE_HOSTS)
    for counts in itertools.product(range(5), repeat=4):
        if torch.equal(found, sum(count * part for count, part in zip(counts, parts, strict=True))):
            members = [other for other in range(4) if hosts[other] == hosts[rank]]
            if [other for other in range(4) if counts[other]] == members and max(counts) == 1:
                raise Mistake(f"{text} the sum over its own host alone: the leaders must sum among themselves, and "
                              "hand the total to their members", see=SEE_HOSTS)  # fmt: skip
            names = " + ".join(f"{count} x rank {other}" for other, count in enumerate(counts) if count)
            raise Mistake(f"{text} {names or 'zeros'}; it should be the sum over all ranks, each once", see=SEE_HOSTS)
    if torch.allclose(found * 4, sum(parts)):
        raise Mistake(f"{text} the mean; it should be the sum")
    raise Mistake(
        f"{text} {found.tolist()[:4]}...; it should be {sum(parts).tolist()[:4]}...: all "
        "ranks must agree on the leaders and their order; that of a set, or by hash(), differs between processes",
        see=SEE_HOSTS,
    )


def check_links(answers: Sequence[Answer], size: int, hosts: Sequence[str]) -> None:
    """Raise if too many bytes, or more than one rank per host, cross from host to host, or none travel at all."""
    for answer in answers:
        if answer.sent < size:
            raise Mistake(
                f"hosts {list(hosts)}: rank {answer.rank} sent {answer.sent} bytes in {answer.messages} messages; its "
                f"tensor has {size}, and the other ranks need all of it. Only send, recv, isend, irecv carry it here",
                see=SEE_HOSTS,
            )
    check_waited(answers)
    crossing = [
        (answer.rank, call)
        for answer in answers
        for call in answer.calls
        if call.is_send and hosts[call.peer or 0] != hosts[answer.rank]
    ]
    count = len(set(hosts))
    for host in sorted(set(hosts)):
        speakers = {rank for rank, _ in crossing if hosts[rank] == host}
        speakers |= {call.peer for _, call in crossing if call.peer is not None and hosts[call.peer] == host}
        if len(speakers) > 1:
            raise Mistake(
                f"hosts {list(hosts)}: ranks {sorted(speakers)} of host {host} all exchange with other hosts; only one "
                "rank per host, its leader, should",
                see=SEE_HOSTS,
            )
    total = sum(call.bytes for _, call in crossing)
    if total > 2 * (count - 1) * size:
        raise Mistake(
            f"hosts {list(hosts)}: {total} bytes travelled between hosts for a tensor of {size} bytes; at most "
            f"2 x (hosts - 1) x {size} = {2 * (count - 1) * size}: let the leaders sum in a ring, or over one leader",
            see=SEE_HOSTS,
        )
