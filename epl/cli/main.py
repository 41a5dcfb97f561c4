"""The command `epl`. Each subcommand is a module of its own, loaded when it is asked for.

A subcommand module has `add_arguments(parser)` and `run(args) -> int`, the exit code.
To add one, write the module and enter it in `COMMANDS`.
"""

import argparse
import importlib
import sys
from typing import Dict, NamedTuple, Optional, Sequence


class Command(NamedTuple):
    module: str
    help: str


COMMANDS: Dict[str, Command] = {
    "version": Command("epl.cli.version", "print the version of EPL"),
    "plan": Command("epl.cli.plan", "show what EPL would do with a script: taskgraphs, devices, what crosses between them"),
    "report": Command("epl.cli.report", "compare the measured timeline of training steps with the schedule's"),
    "doctor": Command("epl.cli.doctor", "check this machine: Python, TensorFlow, Horovod, MPI, devices, ranks"),
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="epl", description="Easy Parallel Library: tools around distributed training.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = arguments[0] if arguments else None
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, description=command.help)
        if name == named:  # the modules of the others stay unloaded
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
