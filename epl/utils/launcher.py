"""`python -m epl.utils.launcher`: the same as the command `epl-launch`."""

import sys

from epl.cli.launch import main

if __name__ == "__main__":
    sys.exit(main())
