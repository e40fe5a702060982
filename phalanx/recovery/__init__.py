"""Lost ranks and nodes: the others keep their processes, and go on with replacements or with fewer.

`launcher/` decides which processes are ranks: `control` finds out what happens, `node` and `group` say what follows
(by `policy`), and every launcher has the same `view` of the group. `ranks/` is a rank's side: it leaves its group,
keeps the state, and joins the next group. Neither side imports the other: they exchange `messages`.

Other rooms use the names of this page alone (`phalanx.features`); each is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.recovery.launcher.control import ElasticControl
    from phalanx.recovery.launcher.requests import request_ranks
    from phalanx.recovery.ranks.survivor import Survivor, run_recovering

_NAMES = {
    ".launcher.control": "ElasticControl",
    ".launcher.requests": "request_ranks",
    ".ranks.survivor": "Survivor run_recovering",
}
__getattr__ = lazy_names(__name__, _NAMES)

__all__ = ["ElasticControl", "Survivor", "request_ranks", "run_recovering"]
