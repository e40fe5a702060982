"""Start ranks, follow them, report what failed, leave no process behind. The parent side: imports no torch.

The flow of one launch:

1. `forkserver` starts the fork server once per process: a Python that has imported torch and forks on request.
2. `supervisor.launch` opens a session with it and runs attempts until one succeeds or none is left (`follower`).
3. An `attempt` gets this node's number and the store's address from the `rendezvous` (its store agent, forked too,
   hosts the ranks' store; with several nodes it gathers them: `nodes`), then the `group` forks each rank. Until then
   `startup_watch` reports now and then what is being waited for.
4. A `rank` sets its environment and runs the user's `target` as Python itself would. It sends events (one socket),
   output (`output`: pipes or a terminal for the console's rank, a file for the others) and, when an exception ends it,
   an error record (`error_file`).
5. The attempt's event loop (`follower`) waits for exits, events, output, signals and timers. When a rank fails,
   `diagnosis` finds the guilty one, the others are stopped, and `failure` writes the report. `startup_watch` names a
   rank that never joins.
6. When the supervisor has ended for any reason, the fork server kills what is left.
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
