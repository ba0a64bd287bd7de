"""A hook of mkdocs: the site has docs/ alone, so links to files beside it become plain text."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\[([^\]]+)\]\(\.\./(?!benchmarks|decisions)[^)]*\)", r"\1", markdown)
