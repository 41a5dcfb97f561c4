"""Prepare the development environment and print its interpreter.

Standard library only: this runs before anything is installed. The environment
lives outside the clone, in a folder named after a hash of the lock file, the
Python version and the Horovod version, so that it is built once per machine.
Horovod's wheel is kept in a folder of its own: a change of another pin does not
rebuild it.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
HOROVOD = "horovod==0.28.1"
SUPPORTED = ((3, 11), (3, 10), (3, 9), (3, 8))


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(command, log, env=None):
    """Run a command with its output in `log`; show the log's end when it fails."""
    with open(log, "ab") as out:
        out.write(("$ %s\n" % " ".join(map(str, command))).encode())
        out.flush()
        code = subprocess.call([str(c) for c in command], stdout=out, stderr=out, env=env)
    if code:
        tail = pathlib.Path(log).read_text(errors="replace").splitlines()[-30:]
        say("\n".join(tail))
        raise SystemExit("environment: '%s' failed with exit code %d; the whole log is %s" % (" ".join(map(str, command)), code, log))


def find_python():
    """The newest supported interpreter: $EPL_PYTHON, this one, or one on PATH."""
    asked = os.environ.get("EPL_PYTHON")
    if asked:
        return asked
    if sys.version_info[:2] in SUPPORTED:
        return sys.executable
    for major, minor in SUPPORTED:
        path = shutil.which("python%d.%d" % (major, minor))
        if path and subprocess.call([path, "-c", "import ssl"], stderr=subprocess.DEVNULL) == 0:
            return path
    raise SystemExit("environment: no Python 3.8 to 3.11 found on PATH (this is %s); set EPL_PYTHON to one" % sys.version.split()[0])


def system_packages(log, packages):
    """Install Debian packages; only possible as root."""
    names = " ".join(packages)
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise SystemExit("environment: missing on this machine: %s. Install them (as root: apt-get install %s) and run again" % (names, names))
    say("environment: installing the distribution's packages %s" % names)
    run(["apt-get", "update"], log)
    run(["apt-get", "install", "-y", "--no-install-recommends"] + list(packages), log, dict(os.environ, DEBIAN_FRONTEND="noninteractive"))


def make_venv(python, folder, log):
    ok = subprocess.call([python, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL) == 0
    if not ok:
        version = subprocess.check_output([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True).strip()
        system_packages(log, ["python%s-venv" % version])
    run([python, "-m", "venv", "--clear", folder], log)


def horovod_wheel(python, bin_dir, key, cache, log):
    """Build (once) and return the wheel of Horovod for this Python and TensorFlow."""
    store = cache / "wheels" / key
    found = sorted(store.glob("horovod-*.whl"))
    if found:
        return found[0]
    if not (shutil.which("g++") and shutil.which("make")):
        system_packages(log, ["g++", "make"])
    say("environment: building %s (two to four minutes, once per machine)" % HOROVOD)
    store.mkdir(parents=True, exist_ok=True)
    env = dict(os.environ)
    env.update(
        PATH="%s:%s" % (bin_dir, env["PATH"]),
        HOROVOD_WITH_TENSORFLOW="1",
        HOROVOD_WITH_MPI="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITHOUT_PYTORCH="1",
        HOROVOD_WITHOUT_MXNET="1",
        MAKEFLAGS="-j%d" % (os.cpu_count() or 1),
    )
    building = store / "building"
    run([python, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", building, HOROVOD], log, env)
    wheel = next(building.glob("horovod-*.whl"))
    final = store / wheel.name
    os.replace(wheel, final)
    shutil.rmtree(building, ignore_errors=True)
    return final


@contextlib.contextmanager
def locked(path):
    """Only one process prepares the environment; others wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def prepare(horovod=True):
    python = find_python()
    version = subprocess.check_output([python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"], text=True).strip()
    digest = hashlib.sha256(LOCK.read_bytes() + HOROVOD.encode() + version.encode()).hexdigest()[:16]
    default = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "epl"
    cache = pathlib.Path(os.environ.get("EPL_ENV_CACHE") or default)
    name = "%s-%s%s" % (version, digest, "" if horovod else "-local")
    folder, log = cache / name, cache / (name + ".log")
    ready = folder / "ready"
    interpreter = folder / "bin" / "python"
    if ready.exists():
        return interpreter
    with locked(cache / (name + ".lock")):
        if ready.exists():
            return interpreter
        start = time.time()
        say("environment: preparing %s with %s" % (folder, python))
        log.write_text("")
        make_venv(python, folder, log)
        pip = [interpreter, "-m", "pip", "install", "--quiet", "--no-deps"]
        lines = LOCK.read_text().splitlines()
        build = [x for x in lines if x.split("==")[0] in ("setuptools", "wheel")]
        run(pip + build, log)
        run(pip + ["-r", LOCK], log)
        if horovod:
            ask = "from importlib.metadata import version; print(version('tensorflow-cpu'))"
            tensorflow = subprocess.check_output([str(interpreter), "-c", ask], text=True).strip()
            key = "%s-tf%s-%s" % (version, tensorflow, HOROVOD.replace("==", "-"))
            run(pip + [horovod_wheel(interpreter, folder / "bin", key, cache, log)], log)
        ready.write_text("")
        say("environment: ready after %.0f s" % (time.time() - start))
    return interpreter


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-horovod", action="store_true", help="leave out MPI and Horovod (one process, several local devices)")
    print(prepare(horovod=not parser.parse_args().without_horovod))
