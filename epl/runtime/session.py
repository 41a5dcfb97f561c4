"""The session of a rank: every distinct `run` is compiled once and run from then on."""

import contextlib
import dataclasses
import hashlib
import threading
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

from epl import compat
from epl.env import Env
from epl.ir.graph import Graph
from epl.ir.program import EACH, SAME, Program
from epl.passes.agree import GATE
from epl.passes.communicate import ended_program
from epl.passes.mirrors import with_mirrors
from epl.passes.rebatch import with_marked_iterators
from epl.passes.shard.hold import with_held
from epl.passes.sync import sync_program
from epl.planner.plan import FIRST, LAST, MIDDLE, WHOLE, Plan, Task
from epl.profiler.timeline.record import next_run
from epl.runtime import loss_scale
from epl.runtime.agreement import refuse_other_programs, refuse_other_writes
from epl.runtime.alarm import Alarm, is_watched, raise_for_another, tell_failure
from epl.runtime.calls import Call, Ready, feed_items, fetch_key, new_call
from epl.runtime.compiler import Executable, Signature, Traits, bind, compile_program
from epl.runtime.feeding import as_array, check, modes_of
from epl.runtime.graph_index import GraphIndex
from epl.runtime.job import check_started, connect_job
from epl.runtime.notes import Notes
from epl.runtime.own_feeds import ANCHORED, OWN, own_value
from epl.runtime.planning import make_plan, make_task
from epl.runtime.store import Store, local_config


class RankSession:
    """What runs behind a `tf.Session` of an annotated graph."""

    def __init__(self, graph: tf.Graph, config: Optional[tf.ConfigProto] = None):
        self.graph = graph
        annotated = Graph.of(graph, may_create=True)
        assert annotated is not None
        self.epl_graph = annotated
        self._index = GraphIndex(graph)
        self._plan: Optional[Plan] = None
        self._store: Optional[Store] = None
        self._config = config
        self._shares: Tuple[int, ...] = (1,)
        self._prepared: Optional[Tuple[Program, Program]] = None
        """The user's graph, and what it is for the passes."""
        self._calls: Dict[Any, Call] = {}
        self._position: Dict[Tuple[int, ...], int] = {}
        self._dirty: Dict[str, None] = {}
        self._synchronized = False
        self._last: Optional[Tuple[Call, Sequence[np.ndarray]]] = None
        self._thread = threading.local()
        self._agreed: Set[str] = set()
        self._alike: Dict[str, List[Signature]] = {}
        self._steps = 0
        self._notes = Notes()
        self._alarm: Optional[Alarm] = None
        # Compiling and bookkeeping are short; a step may last, and may wait for another
        # thread (a queue runner) whose own program must be compiled meanwhile.
        self._lock = threading.RLock()
        self._step_lock = threading.RLock()

    # The plan and the place to run.

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = make_plan(self.epl_graph)
            self._shares = self._plan.shares_of(Env.get().cluster.worker_index) or (1,)
            Env.get().pipelined |= self._plan.is_shared
        return self._plan

    def _task(self, part: str = WHOLE) -> Task:
        return make_task(self.epl_graph, self.plan, part)

    @property
    def _is_shared(self) -> bool:
        """Whether what one rank or replica writes outside training concerns others."""
        return self.plan.replicas > 1 or bool(self.plan.places)

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = Store(local_config(self._config))
        return self._store

    # Running.

    def run(self, fetches: Any, feed_dict: Optional[Dict[Any, Any]] = None, options: Any = None, run_metadata: Any = None) -> Any:
        """What `tf.Session.run` does, on all replicas."""
        names, values = feed_items(self.graph, feed_dict)
        call = self._call(fetches, names)
        arrays = [as_array(spec, value) for spec, value in zip(call.feeds, values)]
        results = self._execute(call, arrays, options, run_metadata)
        return call.mapper.build_results([None if position is None else results[position] for position in call.positions])

    def _execute(self, call: Call, arrays: Sequence[np.ndarray], options: Any, run_metadata: Any) -> List[Any]:
        traits = call.traits
        if not call.fetches:
            return []
        if not traits.parallel:
            ready = self._ready(call, WHOLE, arrays)
            if not ready.executable.collective:
                return self._run_ready(ready, arrays, options, run_metadata)
            # Stages in other processes take part in it, each for itself as far as replicas go.
            with self._step_lock:
                return self._run_ready(ready, arrays, options, run_metadata)
        with self._step_lock:
            ready = self._ready(call, self._part(traits), arrays)
            self._before(call, ready)
            self._last = (call, arrays) if ready.ended is not None else None
            results = self._run_ready(ready, arrays, options, run_metadata)
            if traits.trains and self.plan.runs_per_step > 1:
                self._position[traits.records] = (self._position.get(traits.records, 0) + 1) % self.plan.runs_per_step
            return results

    def _part(self, traits: Traits) -> str:
        """Which part of a step the next run of a training program is."""
        runs = self.plan.runs_per_step if traits.trains else 1
        position = self._position.get(traits.records, 0)
        return WHOLE if runs == 1 else FIRST if position == 0 else LAST if position == runs - 1 else MIDDLE

    def _run_ready(self, ready: Ready, arrays: Sequence[np.ndarray], options: Any, run_metadata: Any) -> List[Any]:
        traced = next_run(ready.executable, self.store, options, run_metadata)
        if traced is not None:
            with traced:
                return self._run_ready(ready, arrays, traced.options, traced.metadata)
        values = [arrays[i] if i >= 0 else own_value(i) for i in ready.order]
        call = ready.call
        keywords = {}
        wanted = options.SerializeToString(deterministic=True) if options is not None else b""
        if wanted:
            call = self._call_with(ready, options, wanted)
        if run_metadata is not None:
            keywords["run_metadata"] = run_metadata
        control = Env.get().control if ready.executable.collective else None
        if control is None:
            try:
                results = call(*values, **keywords)
            except tf.errors.OpError as error:
                self._raise(error, ready)
                raise
        else:
            self._steps += 1
            key = ready.executable.task.key
            control.raise_trouble("this rank was about to enter program %r, step %d" % (key, self._steps))
            with self._entered(key), self._watched(ready.executable) as rung:
                try:
                    results = call(*values, **keywords)
                except tf.errors.OpError as error:
                    if rung():
                        tell_failure(error, control)
                        raise
                    raise_for_another(error, control, "this rank was in program %r, step %d" % (key, self._steps))
                    self._raise(error, ready)
                    raise
        if ready.executable.decides:
            loss_scale.current().update(bool(results.pop()))
        if ready.executable.restores:
            self._position.clear()  # what an interrupted step has accumulated belongs to other weights
        if ready.executable.written and self._is_shared and not self._is_local:
            with self._lock:
                self._dirty.update(dict.fromkeys(ready.executable.written))
        return results

    def _call_with(self, ready: Ready, options: Any, key: bytes) -> Callable[..., List[Any]]:
        call = ready.with_options.get(key)
        if call is None:
            loaded = ready.loaded
            call = compat.raw_callable(self.store.session, list(loaded.feeds), list(loaded.fetches), list(loaded.targets), options)
            ready.with_options[key] = call
        return call

    def _raise(self, error: tf.errors.OpError, ready: Ready) -> None:
        """Turn an ended input of any rank into the same error on all ranks."""
        ended = isinstance(error, tf.errors.OutOfRangeError)
        if ended and ready.executable.task.parallel:
            self._notes.ended(own=True)
        if ready.ended is not None and ended:
            ready.ended(own_value(ANCHORED))
        elif GATE in (error.message or "") and isinstance(error, tf.errors.InvalidArgumentError):
            self._notes.ended(own=False)
            raise tf.errors.OutOfRangeError(None, None, "The input of another rank has ended; nothing of this step was applied") from error

    @property
    def _is_local(self) -> bool:
        return getattr(self._thread, "local", False)

    @contextlib.contextmanager
    def locally(self) -> Iterator[None]:
        """What this thread runs inside stays on the first local replica, and needs no other rank."""
        before = self._is_local
        self._thread.local = True
        try:
            yield
        finally:
            self._thread.local = before

    @property
    def ends_step(self) -> bool:
        """Whether the next run of the training op ends a step; with consecutive runs per step only the last one does."""
        runs = self.plan.runs_per_step
        return runs == 1 or runs - 1 in self._position.values()

    @property
    def has_trained(self) -> bool:
        """Whether a program that talks to other ranks was run."""
        return self._steps > 0

    def end_input(self) -> bool:
        """End the steps of the other ranks as if an input of this rank had ended.

        Ranks that are in the next step get `OutOfRangeError` there; those that call this
        too just go on. Returns False when the steps draw nothing, and so have no such end.
        """
        with self._step_lock:
            if self._last is None:
                return False
            call, arrays = self._last
            ready = self._ready(call, self._part(call.traits), arrays)
            control = Env.get().control
            if ready.ended is None or control is None:
                return False
            self._last = None
            self._steps += 1
            with self._entered(ready.executable.task.key):
                ready.ended(own_value(ANCHORED))
            return True

    @contextlib.contextmanager
    def _entered(self, program: str) -> Iterator[None]:
        """While it lasts, the other ranks see this one in a program."""
        control = Env.get().control
        if control is None:
            yield
            return
        control.enter(program, self._steps)
        try:
            yield
        finally:
            control.leave()

    @contextlib.contextmanager
    def _watched(self, executable: Executable) -> Iterator[Callable[[], bool]]:
        """While it lasts, a step that fails and waits for other ranks is ended; yields a function that says whether it was."""
        if self._alarm is None or not is_watched(executable):
            yield lambda: False
            return
        with self._alarm.watching(executable.task.key) as rung:
            yield rung

    # Before a parallel program.

    def _before(self, call: Call, ready: Ready) -> None:
        task = ready.executable.task
        if task.plan.ranks > 1:
            self._connect()
        if self._is_shared:
            used = ready.executable.variables
            if not self._synchronized:
                # The first time in any case: a rank may have left all initialisation to rank 0.
                self.synchronize()
            elif not used.isdisjoint(self._dirty):
                # Not what only an evaluation on this rank has written, its metrics for example.
                self.synchronize(used)
        self._agree(ready.executable, call.fetches)

    def _agree(self, executable: Executable, fetches: Sequence[str]) -> None:
        """Refuse a program that other ranks don't run; collective, once for each program."""
        key = executable.task.key
        if executable.collective and key not in self._agreed:
            refuse_other_programs(Env.get().control, executable, fetches)
            self._agreed.add(key)

    def _bound(self, program: Program) -> Program:
        """A program with the process sets of its groups; every rank asks for them in the same order."""
        return bind(program, {group: Env.get().backend.process_set(group) for group in program.groups})

    def _connect(self) -> None:
        if Env.get().control is None:
            connect_job(Env.get().config)

    def synchronize(self, among: Optional[FrozenSet[str]] = None) -> None:
        """Make all replicas equal to the first one of the job in what was written outside training.

        Args:
          among: the variables to look at; None for all.
        """
        with self._step_lock:
            variables = sorted(v for v in self._dirty if among is None or v in among)
            if self.plan.ranks > 1:
                self._connect()
                lists = [said["variables"] for said in Env.get().control.agree("synchronize", {"variables": variables})]
                if self.plan.places:
                    refuse_other_writes(lists)
                variables = lists[0]
            if variables:
                task = self._task()
                name = "sync" + hashlib.sha1("|".join(variables).encode()).hexdigest()[:10]
                program = self._bound(sync_program(self._whole(), variables, dataclasses.replace(task, key=name)))
                # Also who holds none of the variables enters: ranks are judged by how often they did.
                with self._entered("synchronize"):
                    if program.targets:
                        loaded = self.store.load(program, name)
                        self.store.callable_of(loaded)(*[own_value(ANCHORED) for _ in loaded.feeds])
            self._dirty = {v: None for v in self._dirty if among is not None and v not in among}
            self._synchronized = True

    # Compiling.

    def _whole(self) -> Program:
        """The user's graph, as it is divided among processes."""
        user = self._index.whole()
        if self._prepared is None or self._prepared[0] is not user:
            whole = with_marked_iterators(user, self.plan)
            if self.plan.places:
                whole = with_mirrors(whole)
            if self.plan.lanes > 1:
                whole = with_held(whole, self.plan, self._prepared[1].held if self._prepared else None)
            self._prepared = (user, whole)
        return self._prepared[1]

    def _ready(self, call: Call, part: str, arrays: Sequence[np.ndarray]) -> Ready:
        if call.traits.parallel:
            plan = self.plan
            parts = sum(self._shares) * (plan.batches_per_run if call.traits.trains else 1)
            modes = modes_of(call.feeds, arrays, parts)
        elif self.plan.is_shared:
            # What is fed where the first stage is holds for the whole replica; what is fed to a lane is its own.
            parts, modes = 1, tuple(EACH if array.ndim else SAME for array in arrays)
        else:
            parts, modes = 1, (SAME,) * len(call.feeds)
        for spec, array, mode in zip(call.feeds, arrays, modes):
            check(spec, array, mode, parts, self._shares if len(set(self._shares)) > 1 else ())
        ready = call.ready.get((part, modes))
        if ready is None:
            with self._lock:
                ready = call.ready.get((part, modes))
                if ready is None:
                    ready = self._compile(call, part, modes)
                    call.ready[part, modes] = ready
                    if call.traits.trains:
                        self._notes.training(self.plan, ready.executable.draws, arrays, modes, parts)
                        self._notes.precision(ready.executable.program, self.plan)
        return ready

    def _compile(self, call: Call, part: str, modes: Tuple[str, ...]) -> Ready:
        whole = self._whole()
        signature = Signature(call.fetches, tuple(s.name for s in call.feeds), modes)
        if self.plan.ranks > 1 and (call.traits.parallel or self.plan.is_shared):
            check_started(Env.get().cluster)
            self._connect()
        executable = compile_program(whole, signature, call.traits, self.plan, self._task(part), numbered=lambda key: self._numbered(key, signature))
        task = executable.task
        if executable.program.groups:
            self._agree(executable, call.fetches)
            executable = executable._replace(program=self._bound(executable.program))
        if self._alarm is None and is_watched(executable):
            self._alarm = Alarm(self.store, lambda: Env.get().backend.end_collectives(), lambda text: Env.get().control.fail(text))
        loaded = self.store.load(executable.program, task.key)
        user = {s.name: i for i, s in enumerate(call.feeds)}
        user.update(OWN)
        order = tuple(user["%s:%d" % f.ref] for f in executable.program.feeds)
        ended = None
        if executable.collective and executable.draws:
            last = self.store.load(ended_program(task.key, executable.program), "ended" + task.key)
            ended = self.store.callable_of(last)
        return Ready(executable, loaded, self.store.callable_of(loaded), order, ended, {})

    def _numbered(self, key: str, signature: Signature) -> str:
        """Programs of one shape (two optimizers with other rates) are told apart by the order of their first runs."""
        known = self._alike.setdefault(key, [])
        if signature not in known:
            known.append(signature)
        number = known.index(signature)
        return "%s_%d" % (key, number) if number else key

    def programs(self) -> Iterator[Program]:
        """The programs compiled so far."""
        for call in list(self._calls.values()):
            for ready in list(call.ready.values()):
                yield ready.executable.program

    # Calls of the user.

    def _call(self, fetches: Any, feeds: Tuple[str, ...]) -> Call:
        local = self._is_local or not self.epl_graph.need_parallel
        key = (fetch_key(fetches), feeds, local)
        call = self._calls.get(key)
        if call is None:
            with self._lock:
                call = self._calls.get(key)
                if call is None:
                    call = new_call(self.graph, self._index, fetches, feeds, local)
                    self._calls[key] = call
        return call

    def make_callable(self, fetches: Any, feed_list: Optional[Sequence[Any]] = None, accept_options: bool = False) -> Callable[..., Any]:
        """What `tf.Session.make_callable` does."""
        feeds = list(feed_list or [])

        def run(*values: Any, **keywords: Any) -> Any:
            if len(values) != len(feeds):
                raise TypeError("The callable takes %d feed values, got %d" % (len(feeds), len(values)))
            options = keywords.pop("options", None)
            metadata = keywords.pop("run_metadata", None)
            if keywords or (not accept_options and (options is not None or metadata is not None)):
                raise TypeError("The callable takes no such argument; make it with accept_options=True for options and run_metadata")
            return self.run(fetches, dict(zip(feeds, values)), options, metadata)

        self._call(fetches, feed_items(self.graph, {f: None for f in feeds})[0])
        return run

    def close(self) -> None:
        """Free the programs and their state."""
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        if self._store is not None:
            self._store.close()
            self._store = None
        self._calls.clear()
