"""Lines of EPL itself on stderr."""

import sys


def say(rank: int, text: str) -> None:
    """Write "epl: rank R: text" to stderr at once, every line with the prefix.

    One write per call, so that the lines of several ranks on one terminal do not mix.
    """
    prefix = "epl: rank %d: " % rank
    try:
        sys.stderr.write("".join("%s%s\n" % (prefix, line) for line in text.splitlines()))
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed or gone: there is nobody left to tell
