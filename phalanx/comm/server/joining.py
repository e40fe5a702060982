"""Parameters out of the pieces that shards hold, and back into them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.server.bundle import VALUE, Bundle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx.comm.server.placement import Placement


def join_pieces(placement: Placement, bundles: Sequence[Bundle]) -> dict[str, dict[str, Any]]:
    """Put the rows of each parameter together again; what has no rows (a count of steps) is that of the first piece."""
    rows: dict[str, dict[str, list[tuple[int, torch.Tensor]]]] = defaultdict(lambda: defaultdict(list))
    joined: dict[str, dict[str, Any]] = defaultdict(dict)
    for pieces, bundle in zip(placement.shards, bundles, strict=True):
        for (index, key), value in {**bundle.tensors, **bundle.plain}.items():
            piece = pieces[index]
            if isinstance(value, torch.Tensor) and tuple(value.shape) == piece.shape and piece.shape:
                rows[piece.name][key].append((piece.start, value))
            elif piece.start == 0:
                joined[piece.name][key] = value
    for name, keys in rows.items():
        for key, parts in keys.items():
            ordered = [value for _, value in sorted(parts, key=lambda part: part[0])]
            joined[name][key] = ordered[0] if len(ordered) == 1 else torch.cat(ordered)
    return dict(joined)


def split_pieces(placement: Placement, state: Mapping[str, Mapping[str, Any]]) -> list[Bundle]:
    """Cut each parameter's values and states into pieces, by shard: what `join_pieces` does, backwards."""
    bundles = []
    for pieces in placement.shards:
        bundle = Bundle()
        for index, piece in enumerate(pieces):
            whole = state[piece.name][VALUE].shape
            for key, value in state[piece.name].items():
                if not isinstance(value, torch.Tensor):
                    bundle.plain[index, key] = value
                elif value.shape == whole and piece.shape:
                    bundle.tensors[index, key] = value.detach()[piece.start : piece.stop].cpu().contiguous()
                else:
                    bundle.tensors[index, key] = value.detach().cpu().contiguous()
        bundles.append(bundle)
    return bundles
