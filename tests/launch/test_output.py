"""What torch's and nccl's C++ code print around a hang goes to the rank's log; the console shows the rest."""

from __future__ import annotations

import os

import pytest
from ranks import RecordingConsole

from phalanx.launch.output import OutputPump, RankLog, log_path

WATCHDOG = """\
[rank0]:[E1120 10:11:12.131415161 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=15000) ran for 15028 milliseconds
[rank0]:[E1120 10:11:12.131515161 ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected \
by watchdog at work sequence id: 8 PG status: last enqueued work: 8, last completed work: 7
[rank0]:[E1120 10:11:12.131615161 ProcessGroupNCCL.cpp:740] Stack trace of the failed collective:
#0 all_reduce from /usr/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:3004
#1 <module> from /home/me/train.py:9

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: timeout
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:692 (most recent call \
first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f in /usr/lib/libc10.so)
frame #1: <unknown function> + 0x1e5 (0x7f in /usr/lib/libstdc++.so.6)

[rank0]:[E1118 23:12:20.817643675 ProcessGroupNCCL.cpp:612] [Rank 0] Collective WorkNCCL(SeqNum=38, OpType=ALLREDUCE, \
NumelIn=1, NumelOut=1, Timeout(ms)=600000) raised the following async exception: NCCL error in: \
ProcessGroupNCCL.cpp:2770
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer localhost<51690>
Exception raised from checkForNCCLErrorsInternal at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2770 \
(most recent call first):
[W1120 10:11:12.131415161 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3, addr=[localhost]:4)
  File "/home/me/train[rank1]:[E1118 23:12:20.817956786 ProcessGroupNCCL.cpp:750] [Rank 1] Some NCCL operations failed
host:123:456 [0] misc/socket.cc:881 NCCL WARN socketProgress: Connection closed by remote peer
"""
OWN = """\
epoch 1

loss 0.5 from train.py:9
frame 7 of the video
Last error: 0.2
frame #8: two persons
#1 loss from train.py:9
host:123:456 [0] NCCL INFO Bootstrap: Using lo:127.0.0.1<0>
[W1120 10:11:12.131415161 CPUAllocator.cpp:245] Memory block is unknown to the allocator
"""


@pytest.mark.parametrize("parts", [1, 7])
def test_lines_of_libraries_are_in_the_log_and_not_on_the_console(tmp_path, parts):
    console = RecordingConsole()
    log = RankLog(tmp_path, 0, console.notice)
    pump = OutputPump(0, "r0", log, console, err=True)
    text = (WATCHDOG + OWN + WATCHDOG + "the end\n").encode()
    for part in range(parts):
        size = -(-len(text) // parts)
        os.write(pump.write_end, text[part * size : (part + 1) * size])
        pump.pump()
    pump.close_write_end()
    pump.close()
    log.close()
    assert [line for _, line in console.lines] == [*OWN.splitlines(), "the end"]
    assert log_path(tmp_path, 0).read_bytes() == text
