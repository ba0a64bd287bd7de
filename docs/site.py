"""A hook of mkdocs: the site has docs/ alone, so links to files beside it become plain text."""

import re
from os.path import normpath
from pathlib import PurePosixPath
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = PurePosixPath(page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        is_outside = normpath(folder / found[2]).startswith("..")
        return found[1] if is_outside else found[0]

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)#]*)[^)]*\)", link, markdown)
