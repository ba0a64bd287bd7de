"""The chat template of the model that is served: from messages to the prompt they stand for.

Owns the process that renders, and ends it when a chat takes too long; the next chat gets a new one.
Knows what variables a template expects, and no tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import srm
from srm.engine.errors import CheckpointError, InvalidRequest
from srm.server.schema.conversation import Conversation, names_in
from srm.server.text.template_process import Answer, TemplateFailed, receive, send

RENDER_S = 5.0
"""Seconds a template may take for one chat."""
_START_S = 60.0
"""Seconds its process may take to start, on a machine that is busy."""
_ROOT = Path(srm.__file__).resolve().parents[1]
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ")
"""The environment variables that the process gets; others may hold API keys."""


class ChatTemplate:
    """One template, and the process in which it runs."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], render_s: float = RENDER_S
    ) -> None:
        """Starts the process. Raises CheckpointError for an invalid template."""
        self.source = source
        self._special_tokens = special_tokens
        self.render_s = render_s
        """Seconds that a chat may take."""
        self._names = names_in(source)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat template")
        """One thread, so one chat at a time has the process; it waits instead of the event loop."""
        try:
            self._start()
        except TemplateFailed as error:
            self.close()
            raise CheckpointError(f"the chat template is not one: {error}") from None

    async def render(self, chat: Conversation) -> str:
        """Return the prompt. Raises InvalidRequest with the template's objection."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._rendered, chat)

    def _rendered(self, chat: Conversation) -> str:
        messages = chat.for_template(self._names)
        marker = ""
        if chat.continue_final_message:
            # Templates trim and close the last message, each in its way: what comes before a word
            # that nobody knows is what the model is to continue.
            marker = f"continue-{secrets.token_hex(16)}"
            messages[-1]["content"] += marker
        variables: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **chat.chat_template_kwargs,
            "messages": messages,
            "add_generation_prompt": chat.adds_generation_prompt,
        }
        try:
            text = self._render(variables)
        except TemplateFailed as error:
            raise InvalidRequest(f"the chat template: {error}", "messages") from None
        return _before(marker, text) if marker else text

    def close(self) -> None:
        """End the process, whatever it does."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._end(self._process)

    def _render(self, variables: dict[str, Any]) -> str:
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._ask(variables, self.render_s)

    def _start(self) -> None:
        if self._process is not None:
            self._end(self._process)
        self._process = subprocess.Popen(
            # -P: a folder named as ours where we are started is not ours
            [sys.executable, "-P", "-m", "srm.server.text.template_process", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for us
            env={
                "PYTHONPATH": str(_ROOT),
                **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            },
        )
        self._ask(self.source, _START_S)

    def _ask(self, message: object, within_s: float) -> str:
        """Return its answer; kill the process after `within_s` seconds. Raises TemplateFailed."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        took_too_long = threading.Event()

        def stop() -> None:
            took_too_long.set()
            process.kill()

        timer = threading.Timer(within_s, stop)
        timer.start()
        try:
            send(process.stdin, message)
            reply = receive(process.stdout)
        except BrokenPipeError:
            reply = None
        finally:
            timer.cancel()
        if reply is None:
            self._end(process)
            raise TemplateFailed(
                f"it takes longer than {within_s:g} s" if took_too_long.is_set() else "it failed"
            )
        answer = msgspec.json.decode(reply, type=Answer)
        if answer.error is not None:
            raise TemplateFailed(answer.error)
        return answer.text

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # what it never read
                    stream.close()


def _before(marker: str, text: str) -> str:
    """The text up to where the marker shows that the last message ends."""
    end = text.rfind(marker)
    if end < 0:
        raise InvalidRequest(
            "continue_final_message = true: the chat template does not show the last message as it "
            "is, so there is nothing to continue",
            "continue_final_message",
        )
    return text[:end]
