"""Start ranks, follow them, report what failed, leave no process behind. The parent side: imports no torch.

The flow of one launch:

1. `warm` has (or starts) the *fork server* (`zygote`): a Python that has imported torch and waits to be forked.
2. `supervisor.launch` opens a session with it and runs one `attempt` after another, as `policy` decides.
3. An attempt gets its place in the group from the `meeting` (the `store_agent`, forked too, hosts the ranks' store;
   with several nodes it gathers them: `nodes`), then has each rank forked by the `group`. Until then the `prelude`
   reports now and then what is being waited for.
4. A `rank` takes on its environment and runs the user's `target` the way Python itself would. Upwards it sends events
   (one socket), output (`output`: pipes or a terminal for the console's rank, a file for the others) and, when an
   exception ends it, a `record`.
5. The attempt's event loop (`follower`) waits for exits, events, output, signals and timers. When a rank fails,
   `evidence` and `blame` find the guilty one, the others are stopped, and `report` writes the message. `start_watch`
   names a rank that never joins.
6. Whatever happens to the supervisor, the fork server sees it go and kills what is left.
"""

from __future__ import annotations

from phalanx.host.gpus import count_gpus
from phalanx.launch.failure import FailureReport
from phalanx.launch.forkserver.client import prestart
from phalanx.launch.output import PlainConsole, RankConsole
from phalanx.launch.spec import CallTarget, LaunchResult, LaunchSpec, ModuleTarget, ScriptTarget, check_endpoint
from phalanx.launch.supervisor import launch

__all__ = [
    "CallTarget",
    "FailureReport",
    "LaunchResult",
    "LaunchSpec",
    "ModuleTarget",
    "PlainConsole",
    "RankConsole",
    "ScriptTarget",
    "check_endpoint",
    "count_gpus",
    "launch",
    "prestart",
]
