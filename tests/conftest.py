"""For all tests."""

import signal

# In the background of a script, SIGINT is ignored, and every command that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
