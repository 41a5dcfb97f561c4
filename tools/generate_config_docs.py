"""Write the tables of configuration keys into docs/{en,zh}/api/config.md, and that of devices into docs/en/hardware.md.

The text around the markers is written by hand. `--check` changes nothing and exits
with 1 when a file is stale.
"""

import argparse
import pathlib
import sys
from typing import Iterator, Sequence, Tuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epl.cluster.hardware.catalogue import catalogue_table  # noqa: E402 (needs the path above)
from epl.config import schema  # noqa: E402

BEGIN = "<!-- begin: written by tools/generate_config_docs.py from epl/config_sections.py -->"
BEGIN_HARDWARE = "<!-- begin: written by tools/generate_config_docs.py from epl/cluster/hardware/catalogue.yaml -->"
END = "<!-- end -->"

HEADERS = {
    "en": ("Key", "Type", "Values", "Default", "Meaning"),
    "zh": ("配置项", "类型", "取值", "默认值", "说明"),
}


def page(language: str) -> pathlib.Path:
    return ROOT / "docs" / language / "api" / "config.md"


def literal(value: object) -> str:
    """A value as it is written in a script."""
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value!r}`"


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables(language: str) -> str:
    """One heading and table per section."""
    header = HEADERS[language]
    lines = []
    for section in schema():
        lines += [f"### {section.name}", "", section.english if language == "en" else section.chinese, ""]
        lines += [row(header), row(["---"] * len(header))]
        for key in section.keys:
            text = key.english if language == "en" else key.chinese
            cells = [f"`{key.path}`", key.type_name, key.values, literal(key.default), text]
            lines.append(row([cell.replace("|", "\\|") for cell in cells]))
        lines.append("")
    return "\n".join(lines)


def sections() -> Iterator[Tuple[pathlib.Path, str, str]]:
    """What is written: the page, the line before it, the text."""
    for language in HEADERS:
        yield page(language), BEGIN, tables(language)
    yield ROOT / "docs" / "en" / "hardware.md", BEGIN_HARDWARE, catalogue_table()


def render(path: pathlib.Path, text: str, begin: str, fresh: str) -> str:
    """The page with a fresh text between its markers."""
    before, found, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise SystemExit(f"{path}: the markers are missing; the page needs the lines\n{begin}\n{END}")
    return f"{before}{begin}\n\n{fresh}\n{END}{after}"


def main(check: bool) -> int:
    stale = []
    for path, begin, section in sections():
        text = path.read_text(encoding="utf-8")
        fresh = render(path, text, begin, section)
        if fresh == text:
            continue
        if not check:
            path.write_text(fresh, encoding="utf-8")
        stale.append(str(path.relative_to(ROOT)))
    if stale:
        print(f"{'stale; run tools/generate_config_docs.py' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a page is stale")
    sys.exit(main(parser.parse_args().check))
