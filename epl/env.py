"""The only global state of EPL."""


UNKNOWN = object()


class Env:
    """Everything that outlives one call: configuration, cluster, strategies, graphs, ranks.

    `Env.get()` returns the same object for the whole life of the process;
    `epl.init` and `epl.shutdown` reset its content.
    """

    _instance = None

    def __init__(self):
        self.clear()

    @classmethod
    def get(cls):
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def clear(self):
        """Forget everything but the ranks' connection, which lives until `epl.shutdown`."""
        from epl.config import Config
        from epl.strategies.context import StrategyContext

        self.initialized = False
        self.config = Config()
        self.cluster = None
        self.strategy_context = StrategyContext()
        self.epl_graphs = []
        self.parallel_information = {}
        self.deals_files = False
        """Whether `io.slicing` has given this worker a share of some files."""
        self.pipelined = False
        """Whether stages of one replica have run in several processes: then a program of one rank alone can't hold them."""

    whole_models = False
    """True while this rank alone runs whole models, whatever their stages: exports."""

    building_store = False
    """True while EPL makes a graph and session of its own."""

    backend = None
    """The connected `epl.runtime.backend.Backend` of a job with several ranks, else None."""

    control = None
    """The open `epl.runtime.control.ControlChannel` of a job with several ranks, else None."""

    adapters = None
    """The installed TensorFlow adapters (`epl.runtime.adapters.Adapters`), else None."""

    training_sessions = 0
    """Monitored sessions that several ranks have trained in, in this process."""

    exit_hooks = None
    """The `epl.runtime.exits.ExitHooks` of a connected job, else None."""

    horovod = None
    """The `epl.runtime.backend.Backend` once it has started. It stays so until the process ends: MPI can't be started twice, and Gloo
    finds stale addresses."""

    recorder = UNKNOWN
    """The `epl.profiler.timeline` that records the training steps, None, or `UNKNOWN` until `EPL_TIMELINE` was looked at."""
