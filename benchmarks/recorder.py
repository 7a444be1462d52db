"""What `agentrl record` costs beside the plain engine: time and CPU a turn, memory a conversation, bytes a token.

    agentrl bench recorder [--conversations 16] [--turns 6] [--tokens 48] [--rounds 3]

One embedded engine with the tiny coder. Conversations go on side by side, each as many turns of at most so many tokens
by OpenAI's chat completions: first at the engine itself, then at a recorder before it, by turns. A turn's time is what
its client waits; CPU is that of the recorder's process. Memory is the growth of the recorder's resident set from the
first conversation to many that wait for their next request, and that sleep. Prints the tables of recorder.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import trio

MODEL = "agentrl/tiny-coder"
START_S = 120.0
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Played(NamedTuple):
    """Seconds that each turn took, tokens of each turn."""

    seconds: list[float]
    tokens: list[int]


@contextmanager
def running(*arguments: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A command of agentrl that prints its URL, until the block ends."""
    argv = [sys.executable, "-c", "from agentrl.cli.main import main; main()", *arguments]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(line.strip() for line in process.stdout if line.startswith("http://"))
            yield process, url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_S)


def cpu_s(process: subprocess.Popen[str]) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_bytes(process: subprocess.Popen[str]) -> int:
    """Bytes of memory that a process has now."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * PAGE


async def converse(client: httpx.AsyncClient, number: int, turns: int, tokens: int, played: Played) -> None:
    """Play one conversation."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Conversation {number}, turn {turn}: what is {number} + {turn}?"})
        began = time.perf_counter()
        body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 1.0}
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
        played.seconds.append(time.perf_counter() - began)
        played.tokens.append(answer["usage"]["completion_tokens"])
        message = answer["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"] or ""})


async def play(url: str, first: int, conversations: int, turns: int, tokens: int) -> Played:
    """Play conversations side by side."""
    played = Played([], [])
    limits = httpx.Limits(max_connections=conversations)
    options: dict[str, Any] = {"base_url": url, "timeout": 600, "trust_env": False, "limits": limits}
    async with httpx.AsyncClient(**options) as client, trio.open_nursery() as nursery:
        for number in range(first, first + conversations):
            nursery.start_soon(converse, client, number, turns, tokens, played)
    return played


def on_disk(folder: Path) -> tuple[int, int]:
    """Bytes of a folder's store once its journal is folded in, and the tokens in it."""
    with sqlite3.connect(folder / "store.sqlite") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (tokens,) = connection.execute("SELECT SUM(n_tokens) FROM turns").fetchone()
    return (folder / "store.sqlite").stat().st_size, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waiting", type=int, default=500, help="conversations of which the memory is measured")
    options = parser.parse_args()
    shape = options.conversations, options.turns, options.tokens
    plain, recorded, cpu_per_turn = list[Played](), list[Played](), list[float]()
    with tempfile.TemporaryDirectory() as temporary, running("serve", MODEL, "--no-key", "--port", "0") as (_, engine):
        folder = Path(temporary) / "recorded"
        arguments = ("record", "--engine", engine, "--model", MODEL, "--out", str(folder), "--port", "0")
        with running(*arguments) as (recorder, url):
            trio.run(play, engine, 0, 1, 1, 8)
            trio.run(play, url, 0, 1, 1, 8)
            first = 1
            for _ in range(options.rounds):
                plain.append(trio.run(play, engine, first, *shape))
                used = cpu_s(recorder)
                recorded.append(trio.run(play, url, first, *shape))
                cpu_per_turn.append((cpu_s(recorder) - used) / len(recorded[-1].seconds))
                first += options.conversations
        size, tokens = on_disk(folder)
        memory_folder = Path(temporary) / "many"
        with running(*arguments[:6], str(memory_folder), *arguments[7:]) as (recorder, url):
            trio.run(play, url, 0, 8, 1, 4)
            before = resident_bytes(recorder)
            for place in range(8, 8 + options.waiting, 50):
                trio.run(play, url, place, min(50, 8 + options.waiting - place), 1, 4)
            per_conversation = (resident_bytes(recorder) - before) / options.waiting
    print("| a turn | ms at the median | ms a token | CPU of the recorder, ms |\n|---|---|---|---|")
    for name, rounds, cpu in (("plain engine", plain, None), ("recorded", recorded, cpu_per_turn)):
        turn_ms = statistics.median(1e3 * statistics.median(each.seconds) for each in rounds)
        token_ms = statistics.median(1e3 * sum(each.seconds) / sum(each.tokens) for each in rounds)
        cpu_ms = "" if cpu is None else f"{1e3 * statistics.median(cpu):.1f}"
        print(f"| {name} | {turn_ms:.0f} | {token_ms:.2f} | {cpu_ms} |")
    print(f"\n{size / tokens:.0f} bytes a token on disk ({tokens} tokens, {size} bytes)")
    print(f"{per_conversation / 1024:.0f} KiB of memory a conversation ({options.waiting} of one turn)")


if __name__ == "__main__":
    main()
