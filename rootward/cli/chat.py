"""`rootward chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from rootward.cli.options import (
    DEFAULT_URL,
    ApiKey,
    Model,
    NoSpeculation,
    Seed,
    Stop,
    Temperature,
    Timeout,
    TopP,
    Url,
)
from rootward.cli.output import key_values, legend, print_delta, stats_table
from rootward.client import Client, GenerationResult, RequestOptions, SamplingParams
from rootward.errors import APIConnectionError, APIStatusError, StreamInterruptedError

COMMANDS = {
    "/stats": "counts and times of the last answer",
    "/reset": "start a new conversation",
    "/undo": "take the last question and its answer back",
    "/help": "these lines",
    "/quit": "leave; so does Ctrl-D",
}


class Conversation:
    """Messages of a conversation. All its turns have one session id, so that they are routed to the verifier that holds their KV."""

    def __init__(self, client: Client, system: str, options: RequestOptions):
        self._client = client
        self._options: RequestOptions = {**options, "session_id": uuid.uuid4().hex}
        self._opening = [{"role": "system", "content": system}] if system else []
        self.last: GenerationResult | None = None
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._opening)

    def undo(self) -> None:
        """Remove the last turn."""
        questions = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        del self.messages[questions[-1] if questions else len(self.messages) :]

    def answer(self, text: str, console: Console) -> None:
        """Stream the answer to `text`. Ctrl-C ends it; the part that has arrived stays in the conversation."""
        self.messages.append({"role": "user", "content": text})
        options: RequestOptions = {**self._options, "messages": self.messages}
        stream = self._client.stream(**options)
        try:
            with stream:
                for delta in stream:
                    print_delta(console, delta)
        except KeyboardInterrupt:
            pass
        except BaseException:
            self.messages.pop()
            raise
        finally:
            console.file.write("\n")
        self.last = stream.get_final_result()
        self.messages.append({"role": "assistant", "content": self.last.text})


def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    system: Annotated[str, typer.Option(help="System message before the conversation.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens of an answer. (default: the rest of the context)")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    no_speculation: NoSpeculation = False,
    model: Model = "",
    timeout: Timeout = 600.0,
) -> None:
    """Talk to the model: accepted draft tokens in green, bonus tokens in yellow. /help lists the commands.

    Ctrl-C ends an answer, Ctrl-D the conversation. Lines may also come from a pipe; then a lost connection ends it.
    """
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, stop=tuple(stop or ())
    )
    console = Console()
    notes = Console(stderr=True)
    if console.is_terminal:
        notes.print(legend(), " · /help")
    with Client(url, api_key=api_key or None, timeout=timeout) as client:
        talk = Conversation(client, system, {"sampling": sampling, "speculation": not no_speculation, "model": model})
        for line in _lines(console):
            if line.startswith("/"):
                if not _command(line, talk, notes):
                    return
                continue
            try:
                talk.answer(line, console)
            except APIStatusError as error:  # a refusal does not end the conversation
                notes.print(str(error), style="red", markup=False)
            except (APIConnectionError, StreamInterruptedError) as error:
                if not sys.stdin.isatty():  # nobody is there who would ask again
                    raise
                notes.print(f"{error}; the question is taken back, ask it again", style="red", markup=False)


def _lines(console: Console) -> Iterator[str]:
    """Lines of the user, until the end of input."""
    prompt = "› " if console.is_terminal else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.file.write("\n")
            continue
        if line:
            yield line


def _command(line: str, talk: Conversation, notes: Console) -> bool:
    """Run a command. Returns False to leave."""
    match line:
        case "/stats":
            notes.print(stats_table(talk.last) if talk.last is not None else "nothing was answered yet")
        case "/reset":
            talk.reset()
        case "/undo":
            talk.undo()
        case "/help":
            notes.print(key_values(COMMANDS))
        case "/quit":
            return False
        case _:
            notes.print(f"{line}: unknown; /help lists the commands", markup=False, emoji=False)
    return True
