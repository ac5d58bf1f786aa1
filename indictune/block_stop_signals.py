"""Importing this blocks the signals that ask a run to stop, until it listens (`stop_signals.let_through`).

Scripts import it first. Their imports take seconds, in which a signal would end the process without a message, and a
dying launcher would leave it behind. Ctrl-C is not blocked.
"""

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))

from indictune.exit_with_launcher import end_with_launcher  # noqa: E402, its SIGTERM is to be blocked too

end_with_launcher()
