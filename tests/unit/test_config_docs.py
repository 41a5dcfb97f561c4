"""The pages about the configuration agree with the code and are complete."""

import importlib.util
import pathlib
import re

import pytest

from epl.config import Config, schema
from epl.config_sections import SECTIONS

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("clean_environment")
HARDWARE = pathlib.Path("docs", "en", "hardware.md")
KEYS = [key for section in schema() for key in section.keys]


def page(language, root=ROOT):
    return root / "docs" / language / "api" / "config.md"


@pytest.fixture
def tool():
    """The generator as a module: a process of its own would import TensorFlow each time."""
    spec = importlib.util.spec_from_file_location("generate_config_docs", ROOT / "tools" / "generate_config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copied(tool, tmp_path, monkeypatch):
    """A folder with copies of the pages, on which the generator works."""
    for language in ("en", "zh"):
        page(language, tmp_path).parent.mkdir(parents=True)
        page(language, tmp_path).write_text(page(language).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / HARDWARE).write_text((ROOT / HARDWARE).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    return tmp_path


def test_pages_are_not_stale(tool, capsys):
    assert tool.main(check=True) == 0, capsys.readouterr().out


def test_check_reports_a_stale_page_and_changes_nothing(tool, copied, capsys):
    stale = page("zh").read_text(encoding="utf-8").replace("`pipeline.num_stages` | int", "`pipeline.num_stages` | str")
    page("zh", copied).write_text(stale, encoding="utf-8")
    assert tool.main(check=True) == 1
    assert capsys.readouterr().out == "stale; run tools/generate_config_docs.py: docs/zh/api/config.md\n"
    assert page("zh", copied).read_text(encoding="utf-8") == stale
    assert tool.main(check=False) == 0
    assert capsys.readouterr().out == "written: docs/zh/api/config.md\n"
    assert page("zh", copied).read_text(encoding="utf-8") == page("zh").read_text(encoding="utf-8")


def test_page_without_markers_is_refused(tool, copied):
    page("en", copied).write_text("# Configuration\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="docs/en/api/config.md: the markers are missing"):
        tool.main(check=False)


def test_check_reports_a_stale_table_of_devices(tool, copied, capsys):
    fresh = (copied / HARDWARE).read_text(encoding="utf-8")
    (copied / HARDWARE).write_text(fresh.replace("| `T4` | 8.1 |", "| `T4` | 8.2 |"), encoding="utf-8")
    assert tool.main(check=True) == 1
    assert capsys.readouterr().out == "stale; run tools/generate_config_docs.py: docs/en/hardware.md\n"
    assert tool.main(check=False) == 0
    assert (copied / HARDWARE).read_text(encoding="utf-8") == fresh


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("path", sorted(Config().to_dict()))
def test_every_key_has_a_row(language, path):
    rows = [line for line in page(language).read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{path}` |")]
    assert len(rows) == 1


@pytest.mark.parametrize("key", KEYS, ids=[key.path for key in KEYS])
def test_every_key_is_described_in_both_languages(key):
    assert len(key.english) > 60 and key.english.endswith(".")
    assert len(key.chinese) > 25 and key.chinese.endswith("。")
    assert re.search("[\u4e00-\u9fff]", key.chinese)
    for choice in key.choices:
        assert not choice or f"`{choice}`" in key.english and f"`{choice}`" in key.chinese, choice
    assert ("Ranks may differ" in key.english) == ("各进程的取值可以不同" in key.chinese) == key.per_rank
    # Both texts speak of the same other keys.
    mentioned = [set(re.findall(r"`(\w+\.\w+)`", text)) for text in (key.english, key.chinese)]
    assert mentioned[0] == mentioned[1]


def test_keys_named_in_texts_exist():
    names = {section._name for section in SECTIONS}
    for language in ("en", "zh"):
        found = re.findall(r"`(\w+)\.(\w+)`", page(language).read_text(encoding="utf-8"))
        unknown = {f"{section}.{key}" for section, key in found if section in names} - set(Config().to_dict())
        assert not unknown


@pytest.mark.parametrize("language", ["en", "zh"])
def test_yaml_example_is_valid(language, monkeypatch, tmp_path):
    text = page(language).read_text(encoding="utf-8")
    example = tmp_path / "example.yaml"
    example.write_text(re.search("```yaml\n(.*?)```", text, re.S).group(1), encoding="utf-8")
    monkeypatch.setenv("EPL_CONFIG", str(example))
    config = Config()
    assert (config.pipeline.num_micro_batch, config.communication.max_splits, config.gradient_checkpoint.type) == (8, 3, "auto")
