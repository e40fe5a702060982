"""Errors that say only that another rank was lost: what torch, NCCL, Horovod and Phalanx report then."""

from __future__ import annotations

import os
import re
import socket
import traceback

from phalanx.errors import PhalanxError
from phalanx.host.processes import PACKAGE

_SOCKETS = os.path.dirname(socket.__file__)
"""The folder of socket.py and ssl.py, whose frames are innermost where a socket was called."""

# What gloo, NCCL, the TCP store and plain sockets report when the peer was lost.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|aborted|refused)( by peer)?|broken pipe|closed by remote"
    # gloo, to what uses a pair after another call on it has waited too long
    r"|application timeout caused pair closure|pair is not connected"
    r"|remote process (exited|has)|ncclRemoteError|NCCL communicator was aborted"
    r"|failed to recv, got 0 bytes|recvValue failed|sendBytes failed"
    r"|Horovod has been shut down|gloo.{0,40}connect"
    r"|socket (error|timeout|closed)|timed out waiting .{0,40}(recv|send|operation)|watchdog caught collective"
    # Phalanx's own collectives and parameter servers.
    r"|waited \d+ s in shared memory for|in shared memory$|exchange with rank \d+ broke off"
    r"|parameter server at \S+ has (not answered|been out of reach)|a rank was lost before the ranks could share",
    re.IGNORECASE,
)


def reports_lost_peer(text: str) -> bool:
    """Whether an error's message says only that another rank was lost."""
    return _LOST_PEER.search(text) is not None


# What gloo and Phalanx report where ranks call different collectives, or with other shapes; the store of the ranks,
# where one of them has not come to write what the others read.
_MISMATCH = re.compile(
    r"enforce fail at .{0,120}gloo|gloo::EnforceNotMet|preamble\.|ranks called different collectives"
    r"|ranks disagree on a collective|wait timeout after \d+ ?ms, keys",
    re.IGNORECASE,
)


def reports_mismatch(text: str) -> bool:
    """Whether an error's message says that ranks called different collectives, or shows it without saying so."""
    return _MISMATCH.search(text) is not None


def lost_peers(error: BaseException) -> bool:
    """Whether an error, or an error that led to it, says that other ranks were lost."""
    link: BaseException | None = error
    while link is not None:
        if reports_lost_peer(str(link)) and is_of_collectives(link):
            return True
        link = link.__cause__ or link.__context__
    return False


def is_of_collectives(error: BaseException) -> bool:
    """Whether torch or Phalanx raised an error. User code has connections, too: a database, a bucket, a tracker.

    torch's errors are RuntimeErrors; those of sockets count where this package has called the socket.
    """
    if isinstance(error, (RuntimeError, PhalanxError)):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    callers = [file for file in files if os.path.dirname(file) != _SOCKETS]
    return bool(callers) and callers[-1].startswith(PACKAGE)
