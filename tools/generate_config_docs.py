"""Write the tables of configuration keys into docs/{en,zh}/api/config.md.

The text around the markers is written by hand. `--check` changes nothing and exits
with 1 when a file is stale.
"""

import argparse
import pathlib
import sys
from typing import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epl.config import schema  # noqa: E402 (needs the path above)

BEGIN = "<!-- begin: written by tools/generate_config_docs.py from epl/config_sections.py -->"
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


def render(text: str, language: str) -> str:
    """The page with fresh tables between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page(language)}: the markers are missing; the page needs the lines\n{BEGIN}\n{END}")
    return f"{before}{BEGIN}\n\n{tables(language)}\n{END}{after}"


def main(check: bool) -> int:
    stale = []
    for language in HEADERS:
        path = page(language)
        text = path.read_text(encoding="utf-8")
        fresh = render(text, language)
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
