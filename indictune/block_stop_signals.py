"""Holds back the signals that ask a run to stop, until it listens (`signals.let_through`).

Scripts import it before all else, for this alone: their imports take seconds, in which a signal would end the process
without a word, and a launcher that dies would leave it behind. Ctrl-C is not held back: whoever types it looks on.
"""

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))

from indictune.exit_with_launcher import end_with_launcher  # noqa: E402, its SIGTERM is to be held back too

end_with_launcher()
