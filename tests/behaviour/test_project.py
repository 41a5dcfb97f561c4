"""What holds for the repository as a whole: metadata, commands, links, and rules about its text and code."""

import ast
import json
import pathlib
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote

import pytest

from epl.cli import doctor
from epl.cli.main import COMMANDS, main
from epl.version import VERSION

ROOT = pathlib.Path(__file__).resolve().parents[2]
GENERATED = {".git", "build", "dist", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "__pycache__"}
MOST_LINES = 500

# Written in pieces, so that this file does not contain them.
FORBIDDEN = {
    "the host of a package registry": re.compile("(pypi|python" + "hosted|debian|npmjs)" + r"\.(org|com|io)"),
    "an absolute path of one machine": re.compile(r"(?<![\w.~$}-])/" + "(root|work|home" + r")(?![\w-])"),
}

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_BUILTINS = {"eval", "exec"}
UNSAFE_NAMES = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "builtins.eval", "builtins.exec"}
UNSAFE_NAMES |= {"yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all"}
UNSAFE = [
    "import pickle",
    "import numpy, marshal",
    "from pickle import loads",
    "eval(text)",
    "run = exec",
    "import os\nos.system('ls')",
    "from os import system",
    "subprocess.run(command, shell=True)",
    "subprocess.Popen(command, shell=options.shell)",
    "numpy.load(path, allow_pickle=True)",
    "yaml.load(text)",
    "yaml.load(text, Loader=yaml.FullLoader)",
    "yaml.load(text, yaml.Loader)",
    "yaml.unsafe_load(text)",
    "from yaml import load",
]
SAFE = [
    "ast.literal_eval(text)",
    "session.eval(tensor)",
    "subprocess.run(command, shell=False)",
    "yaml.safe_load(text)",
    "yaml.load(text, Loader=yaml.SafeLoader)",
    "import os\nos.path.join(system, 'a')",
]


def project_files():
    """The files that belong to the project: what git would track, else everything but generated folders."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") and (ROOT / ".git").exists():
        names = subprocess.check_output(command, cwd=ROOT).decode().split("\0")
        found = [ROOT / name for name in names if name]
    else:
        found = [path for path in ROOT.rglob("*") if not GENERATED & set(path.relative_to(ROOT).parts)]
    return sorted(path for path in found if path.is_file())


def read(path):
    """The text of a file, or None if it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def name(path):
    return path.relative_to(ROOT).as_posix()


FILES = project_files()
PYTHON_FILES = [path for path in FILES if path.suffix == ".py"]
PAGES = [path for path in FILES if path.suffix == ".md"]


def python(*arguments, **options):
    return subprocess.run([sys.executable] + list(arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def copy_of_project(folder):
    for path in FILES:
        if path.suffix in (".py", ".md", ".in", ".toml", ".yaml") or path.name in ("LICENSE", "MANIFEST.in"):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return folder


class TestMetadata:
    def test_version_needs_no_import_of_the_package(self):
        done = python("-W", "ignore", "-X", "importtime", "setup.py", "--version", cwd=ROOT)
        assert done.returncode == 0, done.stdout
        assert done.stdout.splitlines()[-1] == VERSION
        assert "tensorflow" not in done.stdout

    def test_egg_info(self, tmp_path):
        project = copy_of_project(tmp_path / "project")
        done = python("-W", "ignore", "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), cwd=project)
        assert done.returncode == 0, done.stdout
        info = tmp_path / "pyepl.egg-info"
        assert set((info / "entry_points.txt").read_text().split("\n")) >= {"epl = epl.cli.main:main", "epl-launch = epl.cli.launch:main"}
        metadata = (info / "PKG-INFO").read_text()
        for line in ("Name: pyepl", "Version: " + VERSION, "Provides-Extra: horovod", "Provides-Extra: dev"):
            assert line in metadata.splitlines()
        supported = re.search(r"^Requires-Python: (.*)$", metadata, re.MULTILINE).group(1)
        assert set(supported.split(",")) == {">=3.7", "<3.12"}
        always = (info / "requires.txt").read_text().split("[")[0]
        assert "numpy" in always
        assert "tensorflow" not in always
        sources = (info / "SOURCES.txt").read_text().splitlines()
        assert "requirements/base.in" in sources  # setup.py reads it
        assert "epl/cli/main.py" in sources
        assert "epl/cluster/hardware/catalogue.yaml" in sources

    def test_every_folder_with_code_is_a_package(self):
        folders = {path.parent for path in PYTHON_FILES if name(path).startswith("epl/")}
        assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


class TestCommand:
    def test_version(self, capsys):
        assert main(["version"]) == 0
        assert capsys.readouterr().out == VERSION + "\n"

    def test_help_names_every_command(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            main(["--help"])
        assert exit_.value.code == 0
        output = capsys.readouterr().out
        assert [command for command in COMMANDS if command not in output] == []

    def test_unknown_command(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            main(["dance"])
        assert exit_.value.code == 2
        assert "invalid choice: 'dance'" in capsys.readouterr().err

    def test_doctor_is_content_here(self):
        done = python("-m", "epl.cli.main", "doctor", cwd=ROOT)
        assert done.returncode == 0, done.stdout
        assert "everything that EPL needs is there" in done.stdout

    @pytest.mark.parametrize(
        "variables, expected",
        [
            ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE"),
            ({"TF_CONFIG": "{"}, "TF_CONFIG"),
            ({"EPL_ZERO_LEVL": "v0"}, "EPL_ZERO_LEVEL"),
            ({"EPL_CONFIG": "no/such/file.yaml"}, "no/such/file.yaml"),
        ],
    )
    def test_doctor_finds_what_is_broken(self, variables, expected, monkeypatch, capsys):
        monkeypatch.setattr(doctor, "CHECKS", (doctor.check_ranks, doctor.check_config))
        for name_, value in variables.items():
            monkeypatch.setenv(name_, value)
        assert main(["doctor"]) == 1
        output = capsys.readouterr().out
        assert "BROKEN" in output and expected in output
        assert "1 of 2 checks failed" in output

    def test_doctor_reports_what_can_not_be_imported(self, monkeypatch, capsys):
        monkeypatch.setattr(doctor, "CHECKS", (doctor.check_tensorflow, doctor.check_horovod))
        monkeypatch.setattr(doctor, "PROBE_TENSORFLOW", "raise ImportError('libsomething.so is missing')")
        monkeypatch.setattr(doctor, "PROBE_HOROVOD", "import os; os.abort()")
        monkeypatch.setattr(doctor, "_is_there", lambda module: True)
        assert main(["doctor", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert [finding["state"] for finding in found] == ["BROKEN", "BROKEN"]
        assert "libsomething.so is missing" in found[0]["found"]
        assert "code -6" in found[1]["found"]

    def test_doctor_on_missing_horovod(self, monkeypatch, capsys):
        monkeypatch.setattr(doctor, "CHECKS", (doctor.check_horovod,))
        monkeypatch.setattr(doctor, "_is_there", lambda module: module != "horovod")
        assert main(["doctor"]) == 0
        assert "note    Horovod      missing" in capsys.readouterr().out
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        assert main(["doctor"]) == 1
        assert "this process is one of 2" in capsys.readouterr().out


class TestDocumentation:
    @pytest.mark.parametrize("page", PAGES, ids=name)
    def test_relative_links_lead_somewhere(self, page):
        text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
        links = re.findall(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)|<img[^>]*src=\"([^\"]+)\"", text)
        broken = []
        for link in (first or second for first, second in links):
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            path = (page.parent / target) if target else page
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(read(path))):
                broken.append(link)
        assert broken == []

    @pytest.mark.parametrize("page", PAGES, ids=name)
    def test_make_commands_exist(self, page):
        targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
        code = re.findall(r"`{3}.*?`{3}|`[^`\n]+`", read(page), re.DOTALL)
        named = {word for text in code for word in re.findall(r"(?:^|[`\n(])\s*make (?:-s )?([a-z-]+)", text)}
        assert named - targets == set()

    def test_readmes_name_the_two_commands(self):
        for page in ("README.md", "README_cn.md"):
            text = read(ROOT / page)
            assert "make train" in text and "make test" in text

    @pytest.mark.parametrize("page", PAGES, ids=name)
    def test_python_in_pages_parses(self, page):
        for code in re.findall(r"```python\n(.*?)```", read(page), re.DOTALL):
            ast.parse(code)


class TestText:
    @pytest.mark.parametrize("what", FORBIDDEN)
    def test_nothing_names(self, what):
        found = []
        for path in FILES:
            for number, line in enumerate((read(path) or "").splitlines(), 1):
                if FORBIDDEN[what].search(line):
                    found.append("%s:%d: %s" % (name(path), number, line.strip()[:120]))
        assert found == []


class TestCode:
    @pytest.mark.parametrize("path", PYTHON_FILES, ids=name)
    def test_file(self, path):
        text = read(path)
        assert text.count("\n") < MOST_LINES, "split this file"
        tree = ast.parse(text, feature_version=(3, 7))
        if not re.match(r"epl/compat\w*\.py$", name(path)):
            assert private_tensorflow_imports(tree) == [], "private TensorFlow symbols belong into epl/compat*.py"


class TestSafety:
    """Nothing that comes from a peer, a file or the environment is run as code."""

    @pytest.mark.parametrize("path", [path for path in PYTHON_FILES if name(path).startswith("epl/")], ids=name)
    def test_no_module_runs_what_it_is_given(self, path):
        assert unsafe_uses(ast.parse(read(path))) == []

    @pytest.mark.parametrize("code", UNSAFE)
    def test_the_check_finds(self, code):
        assert len(unsafe_uses(ast.parse(code))) == 1

    @pytest.mark.parametrize("code", SAFE)
    def test_the_check_passes(self, code):
        assert unsafe_uses(ast.parse(code)) == []


def unsafe_uses(tree):
    """What could run code that is data: ["line 3: eval", ...]."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = ["%s.%s" % (node.module, alias.name) for alias in node.names]
            found += [(node, one) for one in names if one.split(".")[0] in UNSAFE_MODULES or one in UNSAFE_NAMES | {"yaml.load", "yaml.load_all"}]
        elif isinstance(node, ast.Call):
            found += [(node, one) for one in unsafe_arguments(node)]
        elif dotted(node) in UNSAFE_NAMES | UNSAFE_BUILTINS:
            found.append((node, dotted(node)))
    return ["line %d: %s" % (node.lineno, what) for node, what in found]


def unsafe_arguments(call):
    """What is wrong with the arguments of a call."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    for keyword in ("shell", "allow_pickle"):
        if keyword in keywords and getattr(keywords[keyword], "value", None) is not False:
            yield "%s=..." % keyword
    if dotted(call.func) in ("yaml.load", "yaml.load_all"):
        loader = keywords.get("Loader", call.args[1] if len(call.args) > 1 else None)
        if dotted(loader) not in ("yaml.SafeLoader", "yaml.CSafeLoader"):
            yield "yaml.load without a safe loader"


def dotted(node):
    """The name that an expression is, such as "os.path.join"; nothing for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and dotted(node.value):
        return "%s.%s" % (dotted(node.value), node.attr)
    return ""


def anchors(text):
    """The anchors of a page's headings, as the usual renderers make them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def private_tensorflow_imports(tree):
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module + "." + alias.name for alias in node.names]
    return [module for module in found if re.match(r"tensorflow\.python(\.|$)", module)]
