"""Start ranks, follow them, report what failed, leave no process behind. The parent side: imports no torch.

The flow of one launch:

1. `forkserver` starts the fork server once per process: a Python that has imported torch and forks on request.
2. `supervisor.launch` opens a session with it and runs attempts until one succeeds or none is left (`launcher_loop`).
3. An `attempt` gets this node's number and the store's address from the `rendezvous` (its store agent, forked too,
   hosts the ranks' store; with several nodes it gathers them: `nodes`), then the `group` forks each rank. Until then
   a notice of `watches` says now and then what is being waited for.
4. A `rank` sets its environment and runs the user's target as Python itself would. It sends events (one socket),
   output (`output`: pipes or a terminal for the console's rank, a file for the others) and, when an exception ends it,
   an error record (`error_file`).
5. The attempt's event loop (`launcher_loop`) waits for exits, events, output, signals and `watches`. When a rank
   fails, `phalanx.diagnosis` finds the guilty one, the others are stopped, and `failure` writes the report.
   If lost ranks are replaced, `phalanx.recovery` decides about the rank instead, and `membership` about nodes.
6. When the supervisor has ended for any reason, the fork server kills what is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.launch.failure import FailureReport
    from phalanx.launch.forkserver.client import prestart
    from phalanx.launch.output import PlainConsole, RankConsole
    from phalanx.launch.spec import CallTarget, LaunchResult, LaunchSpec, ModuleTarget, ScriptTarget, check_endpoint
    from phalanx.launch.supervisor import launch

_NAMES = {
    ".failure": "FailureReport",
    ".forkserver.client": "prestart",
    ".output": "PlainConsole RankConsole",
    ".spec": "CallTarget LaunchResult LaunchSpec ModuleTarget ScriptTarget check_endpoint",
    ".supervisor": "launch",
}
__getattr__ = lazy_names(__name__, _NAMES)

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
    "launch",
    "prestart",
]
