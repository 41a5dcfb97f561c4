"""Typed errors. Every message names what is wrong, what was expected and what to do."""


class EplError(Exception):
    """Base class of all errors that EPL raises."""


class ConfigError(EplError, ValueError):
    """A configuration key, type or value is wrong, or an argument of an op."""


class AnnotationError(EplError, RuntimeError):
    """A strategy scope is used in a way that has no meaning (nesting, bad device count)."""


class ClusterError(EplError, RuntimeError):
    """The description of hosts, workers or devices is wrong or does not fit the program."""


class PlanError(EplError, ValueError):
    """A plan does not fit the model, the cluster or itself, or none can be made."""


class ProgramError(EplError, RuntimeError):
    """The program can't be distributed so that it trains what the plain script trains."""


class FeedError(EplError, ValueError):
    """A fed value does not fit its placeholder, or can't be divided over the replicas."""


class FetchError(EplError, TypeError):
    """A fetch is not part of the graph or has no value in this layout."""


class PassError(EplError, RuntimeError):
    """A rewriting pass broke its contract; a bug in EPL, not in the user's program."""


class BackendError(EplError, RuntimeError):
    """The communication backend (MPI, Horovod) is missing, broken or could not start."""


class DivergenceError(EplError, RuntimeError):
    """The ranks do not run the same thing: other graph, plan, configuration or fetches."""


class RankFailedError(EplError, RuntimeError):
    """Another rank failed, died or left while this one needed it."""


class StallError(EplError, RuntimeError):
    """Nothing moved for longer than `cluster.stall_timeout`."""


class CheckpointError(EplError, RuntimeError):
    """A checkpoint can't be written, read or matched with the program."""
