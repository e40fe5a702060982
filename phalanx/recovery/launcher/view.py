"""The view of the group that every launcher has: what the leader knows, so that any other one can take over.

The leader changes it and sends what has changed to all; the others apply the changes in their order. What a node knows
better itself, the state of its own processes, is not in it: it reports that when another node takes over (`Hello`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from phalanx.launch.membership import changed
from phalanx.recovery.messages import NodeView, ViewChange

_RECENT = 16
_NOBODY: Mapping[str, NodeView] = {}


def came_or_went(
    before: Mapping[str, NodeView], after: Mapping[str, NodeView], change: ViewChange
) -> Mapping[str, NodeView | None]:
    """Return the nodes that a change has added, and as None those that it has removed."""
    names = [*before, *change.nodes] if change.whole else change.nodes
    return {name: after.get(name) for name in names if (name in before) != (name in after)}


class GroupView:
    """Nodes with their ranks, the leader, the generation, and the failures that were survived."""

    def __init__(
        self, leader: str, nodes: Mapping[str, NodeView], *, term: int = 0, generation: int = 0, failures: int = 0
    ) -> None:
        self.leader, self.term = leader, term
        self.nodes = nodes
        self.generation, self.failures = generation, failures
        self.version = 0
        self.recent: list[ViewChange] = []
        """The last changes, for a leader that takes over and has missed some, and for nodes that have."""

    def change(self, nodes: Mapping[str, NodeView | None], *, generation: int, failures: int) -> ViewChange:
        """Change the view, and return the change for the other nodes; called by the leader."""
        change = ViewChange(self.version + 1, self.term, generation, failures, nodes)
        self.apply(change)
        return change

    def apply(self, change: ViewChange) -> bool:
        """Apply a change of the leader; return False if a later one is known already."""
        if change.version <= self.version:
            return False
        self.version, self.term = change.version, max(change.term, self.term)
        self.generation, self.failures = change.generation, change.failures
        self.nodes = changed(_NOBODY if change.whole else self.nodes, change.nodes)
        self.recent = [*self.recent[-_RECENT + 1 :], change]
        return True

    def since(self, version: int) -> list[ViewChange]:
        """Return the changes after a version, or the whole view if they are not all known any more."""
        missed = [change for change in self.recent if change.version > version]
        return missed if len(missed) == self.version - version else [self.whole()]

    def whole(self) -> ViewChange:
        """Return the whole view as a change, for a node that has come late."""
        return ViewChange(self.version, self.term, self.generation, self.failures, self.nodes, whole=True)

    @property
    def size(self) -> int:
        """The number of ranks in the present group."""
        return sum(node.ranks for node in self.nodes.values())

    def ranks_by_node(self) -> dict[str, range]:
        """Return which ranks of the present group each node runs: in the order of the start, then in that of names."""
        ranks, first = {}, 0
        for name in sorted(self.nodes) if self.generation else self.nodes:
            ranks[name] = range(first, first + self.nodes[name].ranks)
            first += self.nodes[name].ranks
        return ranks

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
