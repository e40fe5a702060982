"""The secret that the processes of a job share, with which ranks sign what they exchange (`signed_store`).

The launcher draws one for the ranks of one node and sets it in their environment; a job of several nodes gets it from
`phalanx submit`, or from the user.
"""

from __future__ import annotations

VARIABLE = "PHALANX_JOB_SECRET"
"""The environment variable that holds the secret of a job."""
