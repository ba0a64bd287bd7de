"""Hooks of mkdocs. The site has docs/ alone, so links to files beside it become plain text. Prose
that has to be read twice is a warning, which ends a strict build."""

import logging
import re
from os.path import normpath
from pathlib import PurePosixPath
from typing import Any

log = logging.getLogger("mkdocs.hooks.prose")
PLAINER = {
    r"as good as (never|at once|all)": "rarely, immediately or nearly all",
    r"by the command of that commit": "nothing: history is for commits",
    r"makes? way for people": "yields to interactive requests",
    r"other weights": "new weights",
    r"that which|those that which": "what, or the noun itself",
    r"what is asked (of|for)": "the request",
    r"what runs\b": "running requests",
    r"by so many": "the number",
    r"nobody asks": "unused",
}
"""Phrases, and what a reader of English expects instead."""
MAX_CELL = 200
UNREAD = ("decisions/", "configuration/")


def _check_prose(page: str, markdown: str) -> None:
    for number, line in enumerate(markdown.splitlines(), 1):
        for phrase, plainer in PLAINER.items():
            if found := re.search(phrase, line, re.IGNORECASE):
                log.warning("%s:%d: %r: say %s", page, number, found[0], plainer)
        for cell in re.split(r"(?<!\\)\|", line) if line.startswith("|") else ():
            if len(re.sub(r"\]\([^)]*\)", "]", cell).strip()) > MAX_CELL:
                log.warning("%s:%d: a cell of more than %d characters", page, number, MAX_CELL)


def on_post_page(output: str, *, page: Any, **_: Any) -> None:
    for found in re.finditer(
        r"<(?:script|link|img)\b[^>]* (?:src|href)=\"?(?:https?:)?//[^>]*", output
    ):
        log.warning("%s: %s: the site needs no network", page.file.src_uri, found[0])


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if not page.file.src_uri.startswith(UNREAD):
        _check_prose(page.file.src_uri, markdown)
    folder = PurePosixPath(page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        is_outside = normpath(folder / found[2]).startswith("..")
        return found[1] if is_outside else found[0]

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)#]*)[^)]*\)", link, markdown)
