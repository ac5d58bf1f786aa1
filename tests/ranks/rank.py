"""What a launcher starts in place of a script: `rank.py [--local_rank=N] SCRIPT FLAGS...`; see forking.py."""

import os
import signal
import sys

sys.path[0] = os.getcwd()

from tests.ranks.forking import SOCKET, Fork  # noqa: E402

words = sys.argv[1:]
if words[0].startswith("--local_rank"):  # DeepSpeed's launcher gives it first
    words[:2] = words[1::-1]
fork = Fork(os.environ[SOCKET], words, dict(os.environ), [0, 1, 2], None)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(fork.pid, number))
code = fork.wait()
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
