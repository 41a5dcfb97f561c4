"""`epl plan`: what EPL would do with a script, without ranks and without training.

    epl plan train.py --batch_size 32
    epl plan --workers 4 --devices_per_worker 2 --why dense/MatMul train.py

The script runs in this process until its first run of a graph with gradients, or to its
end. What it prints goes to stderr.
"""

import argparse
import contextlib
import difflib
import functools
import json
import os
import runpy
import sys
import traceback
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from epl.cli.sharding import describe_sharding, sharding_text
from epl.errors import EplError

USAGE_EXIT_CODE = 2
_WHY = "--why"
_SHOWN_REPLICAS = 4


class Planned(BaseException):
    """Ends the script once its plan is known; no `except Exception` of the user's holds it up."""


class UsageError(Exception):
    """The command line asks for something that is not there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "epl plan [options] SCRIPT [arguments of the script] [--why NODE]"
    parser.add_argument(_WHY, metavar="NODE", action="append", default=[], help="say why a node is in its taskgraph; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--workers", metavar="N", type=int, help="plan for N processes, whatever this machine is")
    parser.add_argument("--devices_per_worker", "--devices-per-worker", metavar="K", type=int, help="plan for K devices in each process")
    parser.add_argument("script", metavar="SCRIPT", help="the Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments; --why may stand among them, up to --")


def run(args: argparse.Namespace) -> int:
    arguments, nodes = own_arguments(args.arguments)
    try:
        for name, value in (("--workers", args.workers), ("--devices_per_worker", args.devices_per_worker)):
            if value is not None and value < 1:
                raise UsageError("%s %d: expected a number from 1" % (name, value))
        if not os.path.isfile(args.script):
            raise UsageError("there is no script %s" % args.script)
        report = plan_script(args.script, arguments, args.why + nodes, args.workers, args.devices_per_worker)
    except UsageError as error:
        print("epl plan: %s" % error, file=sys.stderr)
        return USAGE_EXIT_CODE
    except EplError as error:
        print("epl plan: %s: %s" % (type(error).__name__, error), file=sys.stderr)
        return 1
    if report is None:
        return 1
    print(json.dumps(report, indent=1) if args.json else text(report))
    return 0


def own_arguments(arguments: Sequence[str]) -> Tuple[List[str], List[str]]:
    """The script's arguments, and the nodes of each `--why` among them; what follows `--` is the script's."""
    rest: List[str] = []
    nodes: List[str] = []
    left = list(arguments)
    while left:
        token = left.pop(0)
        if token == "--":
            return rest + left, nodes
        if token == _WHY and left:
            nodes.append(left.pop(0))
        elif token.startswith(_WHY + "="):
            nodes.append(token[len(_WHY) + 1 :])
        else:
            rest.append(token)
    return rest, nodes


# Running the script.


def plan_script(
    script: str, arguments: Sequence[str], nodes: Sequence[str], workers: Optional[int] = None, devices: Optional[int] = None
) -> Optional[Dict[str, Any]]:
    """Run a script until its plan is known; None when it fails or has no graph of EPL, which is told on stderr.

    Raises:
      UsageError: there is no such node.
      EplError: the program can't be planned.
    """
    found: List[Any] = []

    def stop(graph: Any) -> None:
        # Now: the script may leave a `with` of its cluster, or call `epl.shutdown`, on its way out.
        try:
            found.append(describe(graph, nodes))
        except (UsageError, EplError) as error:
            found.append(error)
        raise Planned

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with _plan_only(stop, workers, devices), contextlib.redirect_stdout(sys.stderr):
        failed = _run_script(script, arguments)
        if not found and not failed:
            _at_end(stop)
    if not found:
        return None
    if isinstance(found[0], Exception):
        raise found[0]
    return dict({"script": script}, **found[0])


def _run_script(script: str, arguments: Sequence[str]) -> bool:
    """Whether the script failed by itself."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script] + list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except Planned:
        return False
    except SystemExit as error:
        if error.code not in (None, 0):
            print("epl plan: %s ended with %r before its first training run" % (script, error.code), file=sys.stderr)
            return True
    except Exception:  # pylint: disable=broad-except
        traceback.print_exc()
        print("epl plan: %s failed before its first training run" % script, file=sys.stderr)
        return True
    finally:
        sys.argv, sys.path[:] = argv, path
    return False


def _at_end(stop: Callable[[Any], None]) -> None:
    """The plan of a script that runs no training program: of its last graph with gradients, else of its last one."""
    from epl.env import Env

    graphs = Env.get().epl_graphs
    chosen = [g for g in graphs if g.losses] or graphs
    if not chosen:
        print("epl plan: the script ended, and there is no graph of EPL. It must call epl.init() before it builds its model", file=sys.stderr)
        return
    with contextlib.suppress(Planned):
        stop(chosen[-1].tf_graph)


@contextlib.contextmanager
def _plan_only(stop: Callable[[Any], None], workers: Optional[int], devices: Optional[int]) -> Iterator[None]:
    """Meanwhile the first run of a graph with gradients calls `stop`, and no other process is looked for."""
    import epl.setup
    from epl.env import Env
    from epl.runtime import job
    from epl.runtime.adapters import Patches
    from epl.runtime.session import RankSession

    def running(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run_or_stop(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.epl_graph.losses:
                stop(self.graph)
            return original(self, *args, **kwargs)

        return run_or_stop

    def cluster(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            if devices is not None:
                Env.get().config.cluster.devices_per_worker = devices
            if workers is not None:
                kwargs = dict(kwargs, worker_hosts=["localhost:%d" % (k + 1) for k in range(workers)])
            return _imagined(original, devices or 0)(*args, **kwargs)

        return make

    patches = Patches()
    patches.replace(RankSession, "run", running)
    patches.replace(RankSession, "make_callable", running)
    patches.replace(job, "connect_job", lambda original: lambda config: (None, _Alone()))
    patches.replace(epl.setup, "Cluster", cluster)
    try:
        yield
    finally:
        patches.undo()
        epl.setup.shutdown()


def _imagined(cluster: Any, devices: int) -> Any:
    """The class of a cluster that has as many GPUs as are asked for, where this machine has GPUs at all."""

    class Imagined(cluster):
        def available_gpus(self) -> List[str]:
            real = super().available_gpus()
            return real + ["/planned:GPU:%d" % k for k in range(len(real), devices)] if real else []

    return Imagined


class _Alone:
    """Stands for the control channel: the other ranks agree with this one, the chief."""

    def decide(self, topic: str, value: Any = None) -> Any:
        return value

    def agree(self, topic: str, value: Any) -> List[Any]:
        from epl.env import Env

        return [value] * Env.get().cluster.worker_num


# The plan as plain data.


def describe(graph: Any, nodes: Sequence[str] = ()) -> Dict[str, Any]:
    """The plan of an annotated `tf.Graph`.

    Raises:
      UsageError: there is no such node.
      EplError: the program can't be planned.
    """
    from epl.env import Env
    from epl.errors import ProgramError
    from epl.ir.graph import Graph
    from epl.passes.assign import check_cuttable
    from epl.passes.mirrors import with_mirrors
    from epl.runtime.graph_index import GraphIndex
    from epl.runtime.planning import make_plan

    annotated = Graph.of(graph, may_create=True)
    assert annotated is not None
    if not annotated.taskgraphs:
        annotated.lay_out()
    whole = GraphIndex(graph).whole()
    names = {asked: _node(whole, asked) for asked in nodes}
    plan = make_plan(annotated)
    report = {
        "ranks": plan.ranks,
        "devices_per_rank": Env.get().cluster.gpu_num_per_worker,
        "replicas": plan.replicas,
        "micro_batches": plan.micro_batches,
    }
    divided = with_mirrors(whole) if plan.places else whole
    report.update(_by_taskgraph(annotated, divided))
    report["refused"] = None
    report["why"] = {}
    if whole.assignment is None:
        only = "Node '%s' belongs to taskgraph 0: the graph has no other"
        report["why"] = {asked: only % name for asked, name in names.items()}
        return report
    assert divided.assignment is not None
    if plan.lanes > 1:
        report["sharding"] = describe_sharding(whole, plan)
    report["why"] = {asked: _why(whole, divided, name) for asked, name in names.items()}
    try:
        if plan.lanes == 1:
            check_cuttable(whole, whole.assignment)
    except ProgramError as error:
        report["refused"] = str(error)
    return report


def _why(whole: Any, divided: Any, name: str) -> str:
    from epl.passes.assign import explain

    text = explain(whole, whole.assignment, name)
    if whole.assignment[name].taskgraph is not None and divided.assignment[name].taskgraph is None:
        text += ". As only constants go into it, every process keeps its own"
    return text


def _node(whole: Any, asked: str) -> str:
    name = asked.lstrip("^").partition(":")[0]
    if name not in whole.nodes:
        near = difflib.get_close_matches(name, whole.nodes, n=3)
        near += [other for other in whole.nodes if other.endswith("/" + name) and other not in near][: 3 - len(near)]
        raise UsageError("the graph has no node %r%s" % (asked, "; nearest: " + ", ".join("'%s'" % n for n in near) if near else ""))
    return name


def _by_taskgraph(annotated: Any, whole: Any) -> Dict[str, Any]:
    from epl.ir import op_table
    from epl.ir.program import APPLY, BACKWARD, FORWARD
    from epl.passes.classify import Classify
    from epl.planner.plan import Plan, Task

    where = {n: 0 if whole.assignment is None else whole.assignment[n].taskgraph for n in whole.nodes}
    training = _training(whole)
    phases = {n.name: n.phase for n in Classify()(training, Task(Plan(), parallel=False)).nodes.values()}
    rows: Dict[Optional[int], Dict[str, Any]] = {}
    for index in [t.index for t in annotated.taskgraphs] + [None]:
        counts = {key: 0 for key in ("forward", "backward", "update")}
        rows[index] = {"nodes": counts, "variables": [], "bytes": 0}
    labels = {FORWARD: "forward", BACKWARD: "backward", APPLY: "update"}
    for name, phase in phases.items():
        rows[where[name]]["nodes"][labels[phase]] += 1
    for node in whole.nodes.values():
        if node.op in op_table.VARIABLES:
            row = rows[where[node.name]]
            row["variables"].append(node.name)
            row["bytes"] += _bytes(node)
    taskgraphs = []
    for taskgraph in annotated.taskgraphs:
        device = taskgraph.virtual_device
        devices = [[device.get_device(r, k) for k in range(device.num_devices(r))] for r in range(device.num_replicas)]
        strategy = None if taskgraph.strategy is None else repr(taskgraph.strategy)
        taskgraphs.append(dict({"index": taskgraph.index, "strategy": strategy, "devices": devices}, **rows[taskgraph.index]))
    crossing = _crossing(whole, training, where, {name: labels[phase] for name, phase in phases.items()})
    return {"taskgraphs": taskgraphs, "everywhere": rows[None], "crossing": crossing}


def _training(whole: Any) -> Any:
    """The part of a graph that a training run needs; all of it when nothing is trained."""
    from epl.ir import op_table
    from epl.passes.assign import after_gradients

    updates = [name for name in after_gradients(whole) if op_table.writes(whole, whole.nodes[name])]
    kept = whole.ancestors(updates) if updates else whole.nodes
    return whole.replace(nodes={name: node for name, node in whole.nodes.items() if name in kept})


def _crossing(whole: Any, training: Any, where: Dict[str, Any], phases: Dict[str, str]) -> List[Dict[str, Any]]:
    """The tensors that a training run needs in another taskgraph than their own."""
    import tensorflow.compat.v1 as tf

    from epl.ir import op_table

    found: Dict[Any, Dict[str, Any]] = {}
    for node in training.nodes.values():
        for ref in node.inputs:
            source, target = where[ref[0]], where[node.name]
            if source is None or target is None or source == target or (ref, target) in found:
                continue
            if op_table.is_handle(whole.nodes[ref[0]], ref[1], whole):
                continue  # it can't cross: `check_cuttable` says so
            shape = whole.shape_of(ref)
            found[ref, target] = {
                "tensor": "%s:%d" % ref,
                "dtype": tf.as_dtype(op_table.dtype_of(whole, *ref)).name,
                "shape": None if shape is None else list(shape),
                "from": source,
                "to": target,
                "phase": phases[ref[0]],
            }
    return list(found.values())


def _bytes(node: Any) -> int:
    """The size of a variable; 0 where its shape is not known."""
    import tensorflow.compat.v1 as tf

    shape = tf.TensorShape(node.attr("shape").shape)
    return shape.num_elements() * tf.as_dtype(node.attr("dtype").type).size if shape.is_fully_defined() else 0


# The plan as text.


def text(report: Dict[str, Any]) -> str:
    lines = ["plan of %s" % report["script"], ""]
    for key in ("ranks", "devices_per_rank", "replicas", "micro_batches"):
        lines.append("%-18s%d" % (key.replace("_", " "), report[key]))
    lines += ["", "nodes of a training run, and variables:"]
    lines += ["%-12s%9s%9s%9s%11s%12s" % ("taskgraph", "forward", "backward", "update", "variables", "bytes")]
    rows = [(str(row["index"]), row) for row in report["taskgraphs"]] + [("everywhere", report["everywhere"])]
    for label, row in rows:
        counts = row["nodes"]
        numbers = (label, counts["forward"], counts["backward"], counts["update"], len(row["variables"]), row["bytes"])
        lines.append("%-12s%9d%9d%9d%11d%12d" % numbers)
    lines.append("")
    for row in report["taskgraphs"]:
        shown = ["replica %d on %s" % (k, ", ".join(devices)) for k, devices in enumerate(row["devices"][:_SHOWN_REPLICAS])]
        more = len(row["devices"]) - len(shown)
        lines.append("taskgraph %d: %s" % (row["index"], row["strategy"] or "not annotated"))
        lines += ["  " + one for one in shown] + (["  and %d more" % more] if more else [])
    crossing = report["crossing"]
    if len(report["taskgraphs"]) > 1:
        lines += ["", "tensors that cross: %d" % len(crossing)]
        for item in crossing:
            shape = "?" if item["shape"] is None else ", ".join("?" if d is None else str(d) for d in item["shape"])
            lines.append("  %d -> %d  %-9s %s %s [%s]" % (item["from"], item["to"], item["phase"], item["tensor"], item["dtype"], shape))
    if "sharding" in report:
        lines += sharding_text(report["sharding"])
    if report["refused"]:
        lines += ["", "can't be spread over processes: " + report["refused"]]
    for why in report["why"].values():
        lines += ["", why]
    return "\n".join(lines)
