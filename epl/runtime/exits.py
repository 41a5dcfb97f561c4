"""How the end of this process is told to the other ranks.

An uncaught exception or `sys.exit(1)` must end the job at once, with its text on the
other ranks; a normal end says goodbye and waits for the others. Installed and removed
by `epl.runtime.job`.
"""

import atexit
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, Callable, Optional, Tuple, Type

from epl.errors import EplError
from epl.runtime.control import ControlChannel
from epl.runtime.speak import say
from epl.runtime.watchdog import PEER_FAILED_EXIT_CODE, Watchdog, exit_hard_at_the_end, flush_stdio, linger

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CAUSE_SECONDS = 3.0
"""How long a rank whose Horovod broke waits to hear which rank broke it."""


class ExitHooks:
    """The hooks of one job in `sys`, `threading` and `atexit`."""

    def __init__(self, control: ControlChannel, watchdog: Watchdog, leave: Callable[[], None], forget_horovod: Callable[[], None]):
        """Args:
        control: the open channel.
        watchdog: reports trouble to the user.
        leave: leaves the job in good order.
        forget_horovod: takes Horovod's own exit handler away.
        """
        self._control = control
        self._watchdog = watchdog
        self._leave = leave
        self._forget_horovod = forget_horovod
        self._pid = os.getpid()
        self._raised = False
        self._exit_call: Optional[Tuple[Any, Any]] = None
        self._previous_hook = sys.excepthook
        self._previous_exit = sys.exit
        self._previous_thread_hook = getattr(threading, "excepthook", None)

    def install(self) -> None:
        sys.excepthook = self._uncaught
        sys.exit = self._sys_exit  # type: ignore[assignment]
        if self._previous_thread_hook is not None:  # Python 3.8 and newer
            threading.excepthook = self._uncaught_in_thread
        # Runs before Horovod's own handler, which was registered earlier.
        atexit.register(self._at_exit)

    def remove(self) -> None:
        """Restore what was there, unless somebody has put a hook on top of ours since."""
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._previous_hook
        if sys.exit == self._sys_exit:
            sys.exit = self._previous_exit
        if self._previous_thread_hook is not None and threading.excepthook == self._uncaught_in_thread:
            threading.excepthook = self._previous_thread_hook
        atexit.unregister(self._at_exit)

    def _elsewhere(self) -> bool:
        """Whether this is a forked child, which is no rank."""
        return os.getpid() != self._pid

    def _uncaught(self, kind: Type[BaseException], value: BaseException, trace: Optional[TracebackType]) -> None:
        if self._elsewhere():
            self._previous_hook(kind, value, trace)
            return
        self._raised = True
        echo = _comes_from_horovod(value)
        if self._control.trouble is None:
            if not echo:
                say(self._control.rank, "an uncaught exception ends this rank and with it the job:")
            self._control.fail("".join(traceback.format_exception(kind, value, trace)), follows=echo)
        self._forget_horovod()
        trouble = self._control.wait_for_trouble(_CAUSE_SECONDS) if echo else self._control.trouble
        if trouble is None or self._control.caused(trouble) or not echo:
            self._previous_hook(kind, value, trace)
        else:
            # A wall of frames that ends in "Horovod has been shut down" would only hide the cause.
            self._watchdog.report(trouble)
            say(self._control.rank, "the call that was blocked has ended with %s%s" % (kind.__name__, _script_line(trace)))
            if self._previous_hook is not sys.__excepthook__:
                self._previous_hook(kind, value, trace)
        if trouble is not None and not self._control.caused(trouble):
            if not self._control.raised:
                self._watchdog.report(trouble)  # else the exception itself has told it
            self._control.raised = True  # from here on it is on its way out
            raise SystemExit(PEER_FAILED_EXIT_CODE)

    def _uncaught_in_thread(self, args: Any) -> None:
        """A thread's exception does not end a Python process. It fails this rank only if that thread runs the programs."""
        assert self._previous_thread_hook is not None
        if not self._elsewhere() and args.exc_type is not SystemExit:
            text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
            name = args.thread.name if args.thread is not None else "?"
            text = "In the thread %r:\n%s" % (name, text)
            if self._control.runs_programs_here() and self._control.trouble is None:
                self._control.fail(text, follows=_comes_from_horovod(args.exc_value))
            else:
                self._control.note(text)
        self._previous_thread_hook(args)

    def _sys_exit(self, status: Any = None) -> None:
        """`sys.exit`, remembering what was asked for: an exit handler is not told the exit code."""
        if not self._elsewhere() and threading.current_thread() is threading.main_thread():
            # Valid only if nothing follows: a script may catch the SystemExit and go on.
            self._exit_call = (status, self._control.place)
        self._previous_exit(status)

    def exit_status(self) -> Any:
        """What the script ends with, as far as `sys.exit` tells; None for success."""
        if self._exit_call is None or self._exit_call[1] is not self._control.place:
            return None
        return self._exit_call[0]

    def _at_exit(self) -> None:
        if self._elsewhere():
            return
        failed = self._control.trouble is not None or self._control.failed_here
        status = self.exit_status()
        if self._raised or status not in (None, 0, False):
            if not failed:
                self._control.fail("sys.exit(%r)" % (status,))
            self._forget_horovod()
            linger(self._control)
            exit_hard_at_the_end(1)
            return
        if not failed:
            try:
                self._leave()
                return
            except EplError:
                pass
        # The script itself has ended well, so the interpreter would report success.
        trouble = self._control.trouble
        if trouble is not None:
            self._watchdog.report(trouble)
        linger(self._control)
        flush_stdio()
        os._exit(PEER_FAILED_EXIT_CODE if trouble is not None and not self._control.caused(trouble) else 1)


def _comes_from_horovod(error: Optional[BaseException]) -> bool:
    """Whether an exception is likely the echo of another rank's failure in Horovod."""
    for _ in range(8):
        if error is None:
            break
        if "horovod" in ("%s %s" % (type(error).__name__, error)).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _script_line(trace: Optional[TracebackType]) -> str:
    """Where the user's script was: its innermost line, as " (file, line)"."""
    frames = [frame for frame in traceback.extract_tb(trace) if "site-packages" not in frame.filename and not frame.filename.startswith(_OWN)]
    return " (%s, line %s)" % (frames[-1].filename, frames[-1].lineno) if frames else ""
