"""Conformance: how a command is run, bounded, and reported."""

from __future__ import annotations

import functools
import hashlib
import os

import trio

from agentrl.errors import SandboxPathError
from agentrl.protocols import Limits, Sandbox
from agentrl.testing.sandbox.case import GUARD_S, Bench, Case, case, output, py, sh

_ALL_BYTES = bytes(range(256))

CASES: list[Case] = []
promise = functools.partial(case, CASES, "conformance")


# --- commands: output and status -------------------------------------------------------------------------------------


@promise()
async def _(bench: Bench) -> None:
    """stdout and stderr are kept apart, byte for byte"""
    async with bench.box() as box:
        result = await sh(box, "printf out; printf err >&2")
        assert (result.exit_code, result.stdout, result.stderr) == (0, b"out", b"err"), result


@promise()
async def _(bench: Bench) -> None:
    """exit codes 0, 1 and 255 arrive as they are"""
    async with bench.box() as box:
        for exit_code in (0, 1, 255):
            assert (await sh(box, f"exit {exit_code}")).exit_code == exit_code


@promise()
async def _(bench: Bench) -> None:
    """a command killed by signal n has exit code 128 + n and is no timeout"""
    async with bench.box() as box:
        result = await sh(box, "kill -KILL $$")
        assert (result.exit_code, result.timed_out) == (137, False), result


@promise()
async def _(bench: Bench) -> None:
    """a missing program is exit code 127, a result"""
    async with bench.box() as box:
        result = await box.exec(["no-such-program"])
        assert result.exit_code == 127 and not result.timed_out, result


@promise()
async def _(bench: Bench) -> None:
    """a file that is not executable is exit code 126, a result"""
    async with bench.box(files={"plain.txt": b"text"}) as box:
        assert (await box.exec(["./plain.txt"])).exit_code == 126


@promise()
async def _(bench: Bench) -> None:
    """an empty command is exit code 126, a result"""
    async with bench.box() as box:
        assert (await box.exec([])).exit_code == 126
        assert (await box.exec([""])).exit_code == 126


@promise()
async def _(bench: Bench) -> None:
    """an argument with a NUL byte or a lone surrogate is exit code 126, a result"""
    async with bench.box() as box:
        assert (await box.exec(["echo", "a\0b"])).exit_code == 126
        assert (await box.exec(["echo", "\ud800"])).exit_code == 126


@promise()
async def _(bench: Bench) -> None:
    """an argument of two megabytes is exit code 126, a result"""
    async with bench.box() as box:
        assert (await box.exec(["echo", "x" * (2 << 20)])).exit_code == 126


@promise()
async def _(bench: Bench) -> None:
    """a command of a hundred thousand arguments is exit code 126, a result; one of five thousand runs"""
    async with bench.box() as box:
        assert (await box.exec(["echo", *["x"] * 100_000])).exit_code == 126
        assert (await box.exec(["echo", *["x"] * 5_000])).stdout == b"x " * 4_999 + b"x\n"


@promise()
async def _(bench: Bench) -> None:
    """arguments arrive exactly: spaces, quotes, newlines, unicode, empty, leading dashes"""
    arguments = ["a b", "'\"$HOME`id`", "line\nbreak", "äß→🙂", "", "--flag", "-n", "*"]
    async with bench.box() as box:
        result = await py(box, "import sys; print(ascii(sys.argv[1:]))", *arguments)
        assert result.stdout.decode().strip() == ascii(arguments), result


@promise()
async def _(bench: Bench) -> None:
    """output that is not UTF-8 survives, all 256 byte values"""
    async with bench.box() as box:
        result = await py(box, "import sys; sys.stdout.buffer.write(bytes(range(256)))")
        assert result.stdout == _ALL_BYTES, result


@promise()
async def _(bench: Bench) -> None:
    """the time a command took is measured"""
    async with bench.box() as box:
        assert 0.2 <= (await sh(box, "sleep 0.2")).duration_s < 20


# --- commands: input, environment, folder ----------------------------------------------------------------------------


@promise()
async def _(bench: Bench) -> None:
    """stdin arrives, all 256 byte values, and ends"""
    async with bench.box() as box:
        assert (await box.exec(["cat"], stdin=_ALL_BYTES)).stdout == _ALL_BYTES


@promise()
async def _(bench: Bench) -> None:
    """a megabyte of stdin passes while the command writes as it reads"""
    input_bytes = os.urandom(1 << 20)
    async with bench.box() as box:
        result = await box.exec(["sha256sum"], stdin=input_bytes)
        assert result.stdout.split()[0].decode() == hashlib.sha256(input_bytes).hexdigest()


@promise()
async def _(bench: Bench) -> None:
    """without stdin a reader sees the end at once"""
    async with bench.box() as box:
        result = await box.exec(["cat"])
        assert (result.exit_code, result.stdout, result.timed_out) == (0, b"", False), result


@promise()
async def _(bench: Bench) -> None:
    """a command that does not read its megabyte of stdin is no failure"""
    async with bench.box() as box:
        assert (await box.exec(["true"], stdin=b"x" * (1 << 20))).exit_code == 0


@promise()
async def _(bench: Bench) -> None:
    """variables of the spec and of the call are set, the call's win"""
    async with bench.box(env={"A": "spec", "B": "spec"}) as box:
        result = await sh(box, 'printf "%s %s %s" "$A" "$B" "$C"', env={"B": "call ä", "C": "x=y"})
        assert result.stdout.decode() == "spec call ä x=y", result


@promise()
async def _(bench: Bench) -> None:
    """variables of one call do not stay for the next"""
    async with bench.box() as box:
        await sh(box, "export A=1", env={"A": "1"})
        assert await output(box, 'printf "%s" "${A-unset}"') == "unset"


@promise()
async def _(bench: Bench) -> None:
    """a variable's name with '=' or a NUL byte is exit code 126, a result"""
    async with bench.box() as box:
        assert (await box.exec(["true"], env={"A=B": "x"})).exit_code == 126
        assert (await box.exec(["true"], env={"A": "x\0y"})).exit_code == 126


@promise()
async def _(bench: Bench) -> None:
    """HOME is a folder that can be written, and python3 is in the PATH"""
    async with bench.box() as box:
        assert await output(box, 'touch "$HOME/x" && python3 -c "print(1)"') == "1\n"


@promise()
async def _(bench: Bench) -> None:
    """a command starts in the work folder"""
    async with bench.box(files={"here.txt": b"yes"}) as box:
        assert await output(box, "cat here.txt") == "yes"


@promise(isolation=True)
async def _(bench: Bench) -> None:
    """the work folder is /workspace"""
    async with bench.box() as box:
        assert await output(box, "pwd") == "/workspace\n"


@promise()
async def _(bench: Bench) -> None:
    """cwd is relative to the work folder"""
    async with bench.box(files={"a/b/c.txt": b"deep"}) as box:
        for work_folder in ("a/b", "./a/b/", "a/../a/b"):
            assert (await sh(box, "cat c.txt", cwd=work_folder)).stdout == b"deep", work_folder


@promise()
async def _(bench: Bench) -> None:
    """a cwd that is missing, a file, or leads out is exit code 126, a result"""
    async with bench.box(files={"file": b""}) as box:
        for work_folder in ("missing", "file", "../..", "/etc", "a\0b"):
            assert (await box.exec(["true"], cwd=work_folder)).exit_code == 126, work_folder


# --- commands: time ---------------------------------------------------------------------------------------------------


@promise()
async def _(bench: Bench) -> None:
    """a timeout ends the command soon and is flagged; what it wrote before is kept"""
    async with bench.box() as box:
        with trio.fail_after(GUARD_S):
            result = await sh(box, "echo before; sleep 600; echo after", timeout_s=3.0)
        assert result.timed_out and result.exit_code == 137 and result.stdout == b"before\n", result


@promise()
async def _(bench: Bench) -> None:
    """the default deadline is the limit's wall_s"""
    async with bench.box(limits=Limits(wall_s=1.0)) as box:
        with trio.fail_after(GUARD_S):
            assert (await sh(box, "sleep 600")).timed_out


@promise()
async def _(bench: Bench) -> None:
    """a command that ignores SIGTERM is ended by its timeout too"""
    async with bench.box() as box:
        with trio.fail_after(GUARD_S):
            result = await sh(box, "trap '' TERM INT HUP; while :; do sleep 1; done", timeout_s=0.5)
        assert result.timed_out, result


@promise()
async def _(bench: Bench) -> None:
    """children that hold the output open do not delay the end of a command for long"""
    async with bench.box() as box:
        with trio.fail_after(GUARD_S):
            result = await sh(box, "sleep 600 & echo done", timeout_s=10.0)
        assert result.stdout == b"done\n", result


@promise()
async def _(bench: Bench) -> None:
    """after a timeout the box is as good as before"""
    async with bench.box(files={"kept": b"1"}) as box:
        await sh(box, "sleep 600", timeout_s=0.3)
        assert await output(box, "cat kept") == "1"


@promise()
async def _(bench: Bench) -> None:
    """cancelling the caller ends the command; the box is as good as before"""
    async with bench.box() as box:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sh, box, "while :; do date +%N > beat; sleep 0.02; done")
            with trio.fail_after(GUARD_S):
                while not await _holds(box, "beat"):  # noqa: ASYNC110 - no event announces a file
                    await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
        with trio.fail_after(GUARD_S):
            first_beat = await output(box, "cat beat")
            assert await output(box, "sleep 0.3; cat beat") == first_beat, "the cancelled command still runs"


async def _holds(box: Sandbox, path: str) -> bool:
    """Whether a file is there and holds something."""
    try:
        return bool(await box.read(path))
    except SandboxPathError:
        return False


# --- output bounds ----------------------------------------------------------------------------------------------------


@promise()
async def _(bench: Bench) -> None:
    """stdout and stderr are each cut at the limit, and that is flagged"""
    async with bench.box(limits=Limits(output_bytes=1000)) as box:
        result = await py(box, "import sys; sys.stdout.write('o' * 5000); sys.stderr.write('e' * 5000)")
        assert (result.stdout, result.stderr, result.truncated) == (b"o" * 1000, b"e" * 1000, True), result


@promise()
async def _(bench: Bench) -> None:
    """output of exactly the limit is whole and not flagged"""
    async with bench.box(limits=Limits(output_bytes=1000)) as box:
        result = await py(box, "print('o' * 1000, end='')")
        assert (len(result.stdout), result.truncated) == (1000, False), result


@promise()
async def _(bench: Bench) -> None:
    """a command that writes beyond the limit goes on to its own end"""
    async with bench.box(limits=Limits(output_bytes=1000)) as box:
        result = await sh(box, "head -c 3000000 /dev/zero; exit 7")
        assert (result.exit_code, result.truncated) == (7, True), result
