"""`epl version`: print the version of EPL."""

import argparse

from epl.version import VERSION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # no arguments


def run(args: argparse.Namespace) -> int:
    del args
    print(VERSION)
    return 0
