"""`epl-launch`: start the ranks of a job, on this machine or, once per machine, on several.

    epl-launch --num_workers 2 --gpu_per_worker 1 train.py --batch_size 32
    epl-launch --num_workers 8 --machine_list 10.0.0.1:8000,10.0.0.2:8000 --machine_rank 0 train.sh

The ranks are plain child processes that find each other through Horovod's own
rendezvous server, held by this process. `horovodrun` would do the same but builds
shell command lines out of the whole environment, knows no per-rank GPUs or logs and
ends with a traceback of its own; `mpirun` is not on every machine and refuses to run
as root.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence

from epl.cli.supervise import Command, environment_text, run_commands
from epl.cluster.hosts import check_address, check_distinct
from epl.cluster.tf_config import parse_tf_config
from epl.errors import BackendError, ClusterError, EplError
from epl.runtime import network
from epl.runtime.gloo import GLOO_TIMEOUT_SECONDS, GlooStore, assign_slots, slot_environment

USAGE_EXIT_CODE = 2

_RANK_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MV2_COMM_WORLD_", "MPI_LOCAL")
_RANK_VARIABLES = (
    "HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME HOROVOD_CONTROLLER "
    "HOROVOD_CPU_OPERATIONS HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT TF_CONFIG"
).split()
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class Options(NamedTuple):
    """The command line, checked."""

    num_workers: int
    """Ranks of this machine."""

    gpu_per_worker: int
    machines: List[str]
    """Address of each machine; empty for one machine."""

    machine_rank: int
    log_dir: Optional[str]
    task_label: str
    debug: bool
    config: Optional[str]
    command: List[str]


class UsageError(Exception):
    """The command line asks for something impossible."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError("%s (epl-launch --help shows the options)" % message)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options of a command line. Raises UsageError."""
    parser = _Parser(prog="epl-launch", description="Start the ranks of a distributed job.", allow_abbrev=False)
    parser.add_argument("--num_workers", "--num-workers", default="1", metavar="N", help="processes on this machine")
    parser.add_argument("--gpu_per_worker", "--gpu-per-worker", default="1", metavar="K", help="GPUs (or virtual CPU devices) of each process")
    parser.add_argument("--machine_list", "--machine-list", default="", metavar="IP:PORT,...", help="all machines; run the command on each of them")
    parser.add_argument("--machine_rank", "--machine-rank", metavar="R", help="place of this machine in --machine_list")
    parser.add_argument("--log_dir", "--log-dir", metavar="DIR", help="write DIR/<label>_<rank>.log too")
    parser.add_argument("--task_label", "--task-label", default="rank", metavar="LABEL", help="first part of the names of log files")
    parser.add_argument("--config", metavar="FILE", help="YAML file with the configuration of EPL")
    parser.add_argument("--debug", action="store_true", help="show the command and the variables of each process")
    parser.add_argument("script", metavar="SCRIPT", help=".py, .sh or any executable")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    args = parser.parse_args(_plain_debug_flag(argv))
    machines = [_machine(entry) for entry in args.machine_list.split(",")] if args.machine_list.strip() else []
    if not args.task_label or os.sep in args.task_label:
        raise UsageError("--task_label %r can't be part of a file name" % args.task_label)
    if args.config is not None and not os.path.isfile(args.config):
        raise UsageError("--config %s: there is no such file" % args.config)
    return Options(
        num_workers=_number(args.num_workers, "--num_workers", 1),
        gpu_per_worker=_number(args.gpu_per_worker, "--gpu_per_worker", 0),
        machines=machines,
        machine_rank=_machine_rank(args.machine_rank, machines),
        log_dir=args.log_dir,
        task_label=args.task_label,
        debug=args.debug,
        config=os.path.abspath(args.config) if args.config else None,
        command=script_command(args.script, environ) + list(args.arguments),
    )


def _plain_debug_flag(argv: Sequence[str]) -> List[str]:
    """Turn `--debug=True` and `--debug True` into `--debug`, and the false ones into nothing. Leaves the script's arguments alone."""
    result: List[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("-"):
            return result + [token] + tokens
        name, equals, value = token.partition("=")
        if name == "--debug":
            if not equals and tokens and tokens[0].lower() in _YES + _NO:
                value = tokens.pop(0)
            if value and value.lower() not in _YES + _NO:
                raise UsageError("--debug=%s: expected True or False" % value)
            result += [] if value.lower() in _NO else ["--debug"]
        else:
            result.append(token)
            if not equals and tokens and token not in ("-h", "--help"):
                result.append(tokens.pop(0))
    return result


def _number(text: str, name: str, minimum: int) -> int:
    if not re.match(r"^[0-9]+$", text.strip()) or int(text) < minimum:
        raise UsageError("%s %s: expected a whole number from %d" % (name, text, minimum))
    return int(text)


def _machine(entry: str) -> str:
    host, port = network.split_address(entry.strip())
    if port is None or not host or not 0 < port < 65536:
        raise UsageError("--machine_list has the entry %r; expected an address with a port, such as 10.0.0.1:8000" % entry)
    try:
        return check_address(entry, "--machine_list")
    except ClusterError as error:
        raise UsageError(str(error)) from None


def _machine_rank(text: Optional[str], machines: Sequence[str]) -> int:
    """The given place, or the one whose address is of this machine. Raises UsageError."""
    if text is not None:
        rank = _number(text, "--machine_rank", 0)
        if rank >= max(1, len(machines)):
            raise UsageError("--machine_rank %d: --machine_list has %d machines; expected 0 to %d" % (rank, len(machines), max(0, len(machines) - 1)))
        return rank
    if len(machines) < 2:
        return 0
    own = {one.address for one in network.local_interfaces()}
    here = [index for index, machine in enumerate(machines) if network.split_address(machine)[0] in own]
    if len(here) != 1:
        raise UsageError(
            "--machine_rank is missing: %s of --machine_list is an address of this machine (%s)"
            % ("more than one entry" if here else "none", network.describe_interfaces())
        )
    return here[0]


def script_command(script: str, environ: Mapping[str, str]) -> List[str]:
    """How to run a script. Raises UsageError when it is missing or can't be run."""
    if os.path.isfile(script):
        if script.endswith(".py"):
            return [sys.executable, script]
        if script.endswith(".sh"):
            return ["bash", script]
        if os.access(script, os.X_OK):
            return [os.path.abspath(script)]
        raise UsageError("%s is no .py or .sh file and is not executable" % script)
    found = None if os.sep in script else shutil.which(script, path=environ.get("PATH"))
    if found is None:
        raise UsageError("there is no script %s (looked in %s%s)" % (script, os.getcwd(), "" if os.sep in script else " and in PATH"))
    return [found]


def visible_gpus(environ: Mapping[str, str]) -> List[str]:
    """The GPUs that may be used: those of CUDA_VISIBLE_DEVICES, else all of the machine."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        gpus = []
        for one in chosen.split(","):
            if not one.strip() or one.strip().startswith("-"):
                break  # CUDA ignores what follows an invalid number
            gpus.append(one.strip())
        return gpus
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        return []
    try:
        listed = subprocess.run([tool, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    count = len(re.findall(rb"^GPU [0-9]+:", listed, re.MULTILINE))
    return [str(index) for index in range(count)]


def device_variables(options: Options, index: int, gpus: Sequence[str], environ: Mapping[str, str]) -> Dict[str, str]:
    """The devices of one process of this machine: its consecutive GPUs, or virtual CPU devices. Raises UsageError."""
    count = options.gpu_per_worker
    variables: Dict[str, str] = {}
    if gpus:
        if options.num_workers * count > len(gpus):
            raise UsageError(
                "--num_workers %d x --gpu_per_worker %d is %d GPUs, but there are %d (%s)"
                % (options.num_workers, count, options.num_workers * count, len(gpus), ", ".join(gpus))
            )
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * count : (index + 1) * count])
    if (count > 1 or (not gpus and count)) and not environ.get("EPL_CLUSTER_DEVICES_PER_WORKER"):
        variables["EPL_CLUSTER_DEVICES_PER_WORKER"] = str(count)
    return variables


def base_environment(options: Options, environ: Mapping[str, str]) -> Dict[str, str]:
    """What all processes get: this environment without the traces of other launchers."""
    several = options.num_workers > 1 or options.machines
    result = {}
    for name, value in environ.items():
        if not several or not (name.startswith(_RANK_PREFIXES) or name in _RANK_VARIABLES):
            result[name] = value
    result.setdefault("PYTHONUNBUFFERED", "1")  # else the lines of the ranks come late and out of order
    result.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")  # for scripts that start Horovod before EPL does
    result.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(GLOO_TIMEOUT_SECONDS))
    if options.config:
        result["EPL_CONFIG"] = options.config
    if sys.prefix != sys.base_prefix:
        # `python` in a shell script means the interpreter of this virtual environment.
        result["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", os.defpath)])
    return result


def job_hosts(options: Options) -> List[str]:
    """The addresses of all ranks on several machines: the processes of a machine have neighbouring ports. Raises UsageError."""
    hosts = []
    for machine in options.machines:
        host, port = network.split_address(machine)
        hosts += ["%s:%d" % (host, (port or 0) + index) for index in range(options.num_workers)]
    try:
        check_distinct(hosts, ["rank %d" % rank for rank in range(len(hosts))])
    except ClusterError as error:
        raise UsageError(
            "--machine_list: %s. The %d processes of a machine take as many ports from the given one on" % (error, options.num_workers)
        ) from None
    return hosts


def build_commands(options: Options, environ: Mapping[str, str], store: Optional[GlooStore]) -> List[Command]:
    """The processes of this machine. Raises UsageError."""
    gpus = visible_gpus(environ)
    base = base_environment(options, environ)
    hosts = job_hosts(options)
    slots = assign_slots(["localhost"] * options.num_workers)
    loopback = network.loopback_interface()
    commands = []
    for index in range(options.num_workers):
        variables = device_variables(options, index, gpus, environ)
        rank = options.machine_rank * options.num_workers + index if hosts else index
        if len(hosts) > 1:
            variables["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}})
        elif store is not None:
            variables.update(slot_environment(slots[index], "127.0.0.1", store.port, loopback.name if loopback else None))
            if environ.get("HOROVOD_GLOO_IFACE"):
                variables["HOROVOD_GLOO_IFACE"] = environ["HOROVOD_GLOO_IFACE"]
        log = os.path.join(options.log_dir, "%s_%d.log" % (options.task_label, rank)) if options.log_dir else None
        commands.append(Command(rank, options.command, dict(base, **variables), log))
    return commands


def check(options: Options, environ: Mapping[str, str]) -> None:
    """Refuse what can't work before anything is started. Raises UsageError."""
    total = options.num_workers * max(1, len(options.machines))
    if total > 1 and importlib.util.find_spec("horovod") is None:
        raise UsageError("%d ranks need Horovod, which is not installed; install it with: pip install 'pyepl[horovod]'" % total)
    if options.num_workers > 1 and not options.machines:
        try:
            member = parse_tf_config(environ.get("TF_CONFIG"))
        except ClusterError:
            member = None
        if member is not None and len(member.hosts) > 1:
            raise UsageError(
                "TF_CONFIG describes a job of %d machines, and --num_workers is %d: give --machine_list with the addresses of the machines, or "
                "unset TF_CONFIG for a job on this machine alone" % (len(member.hosts), options.num_workers)
            )
    if options.log_dir:
        try:
            os.makedirs(options.log_dir, exist_ok=True)
        except OSError as error:
            raise UsageError("--log_dir %s: %s" % (options.log_dir, error.strerror)) from None


def launch(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command line; the exit code. Raises UsageError."""
    options = parse(argv, environ)
    check(options, environ)
    store: Optional[GlooStore] = None
    if options.num_workers > 1 and not options.machines:
        try:
            store = GlooStore("127.0.0.1", 0, assign_slots(["localhost"] * options.num_workers))
        except (BackendError, OSError) as error:
            raise UsageError(str(error)) from None
    try:
        commands = build_commands(options, environ, store)
        if options.debug:
            for command in commands:
                text = "%s %s" % (environment_text(command.environment, environ), " ".join(command.arguments))
                sys.stderr.write("epl-launch: [%d] %s\n" % (command.rank, text))
        if store is not None:
            store.start()
        return run_commands(commands)
    except OSError as error:
        raise UsageError("can't run %s: %s" % (" ".join(options.command), error)) from None
    finally:
        if store is not None:
            store.stop()


def main(argv: Optional[Sequence[str]] = None, environ: Optional[Mapping[str, Any]] = None) -> int:
    """The command `epl-launch`."""
    try:
        return launch(sys.argv[1:] if argv is None else argv, os.environ if environ is None else environ)
    except (UsageError, EplError) as error:
        sys.stderr.write("epl-launch: %s\n" % error)
        return USAGE_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
