"""The Chinese README says what the English one says, as far as code, sections and names can tell."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text):
    """The language and the lines of each code block: code without its comments, file names without descriptions."""
    described = {"": r"(?<=\S) {2,}"}  # the file tree has no language
    for language, lines in BLOCK.findall(text):
        yield language, [re.split(described.get(language, r" {2,}#"), line)[0] for line in lines.splitlines()]


def sections(text):
    return re.findall(r"^## ", BLOCK.sub("", text), re.MULTILINE)


def spans(text):
    """What stands between single backticks outside of code blocks."""
    return {span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))}


def test_code_blocks_are_the_same_but_for_comments_and_descriptions():
    english, chinese = list(blocks(ENGLISH)), list(blocks(CHINESE))
    assert {language for language, _ in english} == {"", "bash", "python"}
    assert chinese == english


def test_there_are_as_many_sections():
    assert len(sections(CHINESE)) == len(sections(ENGLISH)) > 0


def test_the_same_names_stand_in_inline_code():
    assert spans(CHINESE) == spans(ENGLISH)
