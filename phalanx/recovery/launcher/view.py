"""The view of the group that every launcher has: what the leader knows, so that any other one can take over.

The leader changes it and sends what has changed to all; the others apply the changes in their order. What a node knows
better itself, the state of its own processes, is not in it: it reports that when another node takes over (`Hello`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from phalanx.recovery.messages import NodeView, ViewChange


class GroupView:
    """Nodes with their ranks, the leader, the generation, and the failures that were survived."""

    def __init__(self, leader: str, nodes: Mapping[str, NodeView], *, generation: int = 0, failures: int = 0) -> None:
        self.leader = leader
        self.nodes = dict(nodes)
        self.generation, self.failures = generation, failures
        self.version = 0

    def change(self, nodes: Mapping[str, NodeView | None], *, generation: int, failures: int) -> ViewChange:
        """Change the view, and return the change for the other nodes; called by the leader."""
        change = ViewChange(self.version + 1, generation, failures, nodes)
        self.apply(change)
        return change

    def apply(self, change: ViewChange) -> bool:
        """Apply a change of the leader; return False if a later one is known already."""
        if change.version <= self.version:
            return False
        self.version, self.generation, self.failures = change.version, change.generation, change.failures
        if change.whole:
            self.nodes.clear()
        for name, node in change.nodes.items():
            if node is None:
                self.nodes.pop(name, None)
            else:
                self.nodes[name] = node
        return True

    def whole(self) -> ViewChange:
        """Return the whole view as a change, for a node that has come late, and after another node took over."""
        self.version += 1
        return ViewChange(self.version, self.generation, self.failures, dict(self.nodes), whole=True)

    @property
    def size(self) -> int:
        """The number of ranks in the present group."""
        return sum(node.ranks for node in self.nodes.values())

    def ranks_by_node(self) -> dict[str, range]:
        """Return which ranks of the present group each node runs: in the order of the start, then in that of names."""
        found, first = {}, 0
        for name in sorted(self.nodes) if self.generation else self.nodes:
            found[name] = range(first, first + self.nodes[name].ranks)
            first += self.nodes[name].ranks
        return found

    def with_ranks(self, counts: Mapping[str, int]) -> dict[str, NodeView | None]:
        """Return the nodes whose number of ranks differs from `counts`, with the new number."""
        return {
            name: dataclasses.replace(node, ranks=counts.get(name, 0))
            for name, node in self.nodes.items()
            if node.ranks != counts.get(name, 0)
        }

    def without(self, names: Iterable[str]) -> dict[str, NodeView | None]:
        """Return a change that removes nodes."""
        return dict.fromkeys(name for name in names if name in self.nodes)
