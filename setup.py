"""Build and install EPL: `pip install .`, `pip install .[horovod]`, `pip install .[dev]`.

TensorFlow is no hard requirement. It exists as `tensorflow`, `tensorflow-cpu` and builds
of vendors; a requirement can name only one of them and pip would install it beside the
one that is there. `pip install .[tensorflow]` or `.[tensorflow-cpu]` chooses one.
"""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).resolve().parent
TENSORFLOW = ">=2.12,<2.16"


def read(*parts):
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def version():
    return re.search(r'^VERSION = "([^"]+)"$', read("epl", "version.py"), re.MULTILINE).group(1)


def requirements(name, leave_out=()):
    """The lines of requirements/<name>.in without comments, includes and the packages in `leave_out`."""
    lines = [line.split("#")[0].strip() for line in read("requirements", name + ".in").splitlines()]
    lines = [line for line in lines if line and not line.startswith("-")]
    return [line for line in lines if re.match(r"[\w.-]+", line).group(0) not in leave_out]


setup(
    name="pyepl",
    version=version(),
    description="Easy Parallel Library: a single-device TensorFlow script becomes a distributed one",
    long_description=read("README.md"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["epl", "epl.*"]),
    include_package_data=True,
    python_requires=">=3.7,<3.12",
    install_requires=requirements("base", leave_out=("tensorflow-cpu",)),
    extras_require={
        "tensorflow": ["tensorflow" + TENSORFLOW],
        "tensorflow-cpu": ["tensorflow-cpu" + TENSORFLOW],
        "horovod": ["horovod==0.28.1"],
        "dev": requirements("dev"),
    },
    entry_points={
        "console_scripts": [
            "epl = epl.cli.main:main",
            "epl-launch = epl.cli.launch:main",
        ]
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
)
