"""Potential-based rewards: what they add up to, that measuring leaves no trace, and what the lint counts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from each_case import each_case

from agentrl.errors import AgentRLError, SandboxError, SandboxPathError
from agentrl.protocols import Sandbox, SandboxSpec
from agentrl.sandbox.bubblewrap.backend import Bubblewrap
from agentrl.testing.fake_sandbox import FakeSandbox
from agentrl_environments import judging
from agentrl_environments.rewards import LARGEST_ARTIFACT, LintDelta, PotentialDelta, carried

sys.path.append(str(judging.BOXED))
from lint import findings  # pyright: ignore[reportMissingImports]


async def length(copy: Sandbox) -> float:
    data = await copy.read("a")
    await copy.write("a", b"what is done to a copy is seen by nobody")
    return float(len(data))


async def play(texts: Sequence[bytes], *, gamma: float, weight: float = 1.0) -> tuple[list[float], FakeSandbox]:
    """The rewards of an episode whose box holds these texts in turn, the first at its start."""
    box = FakeSandbox(SandboxSpec())
    delta = PotentialDelta(length, gamma=gamma, weight=weight)
    box.files["a"] = texts[0]
    await delta.begin(box)
    rewards: list[float] = []
    for text in texts[1:]:
        box.files["a"] = text
        rewards.append(await delta.step(box, over=text is texts[-1]))
        assert box.files == {"a": text}
    return rewards, box


async def test_each_step_is_a_difference_of_potentials() -> None:
    rewards, _ = await play([b"ab", b"abcde", b"", b"abc"], gamma=0.5, weight=2.0)
    assert rewards == [2 * (0.5 * 3 - 0), 2 * (0.5 * -2 - 3), 2 * (0 + 2)]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
async def test_an_episode_adds_up_to_nothing(gamma: float) -> None:
    """Whatever was done on the way: sum of gamma^t r_t = -phi(s0) (Ng, Harada and Russell 1999), and phi(s0) is 0."""
    for texts in ([b"abc", b"a", b"ab"], [b"abc", b"abcdefgh", b"", b"x", b"abcdefgh"]):
        rewards, _ = await play(texts, gamma=gamma)
        assert sum(gamma**at * reward for at, reward in enumerate(rewards)) == pytest.approx(0.0)


@pytest.mark.parametrize("error", [SandboxError("the host failed"), SandboxPathError("no such file")])
async def test_copies_are_closed_also_if_measuring_fails(error: AgentRLError) -> None:
    """What the host did is raised; what the policy did to its box has no potential."""
    copies: list[Sandbox] = []

    async def failing(copy: Sandbox) -> float:
        copies.append(copy)
        if len(copies) > 1:
            raise error
        return 5.0

    box, delta = FakeSandbox(SandboxSpec()), PotentialDelta(failing)
    await delta.begin(box)
    if isinstance(error, SandboxPathError):
        assert await delta.step(box, over=False) == -5.0
    else:
        with pytest.raises(SandboxError, match="the host failed"):
            await delta.step(box, over=False)
    assert [copy.closed for copy in copies] == [True, True]  # type: ignore[attr-defined]


@pytest.mark.bubblewrap
async def test_a_box_that_cannot_be_copied_has_no_potential() -> None:
    boxes = Bubblewrap()
    box = await boxes.create(SandboxSpec())
    delta = LintDelta(["a.py"])
    await box.write("a.py", b"")
    await delta.begin(box)
    await box.exec(["mkdir", "-p", "/".join("d" * 120)])
    assert await delta.step(box, over=False) == -1.0
    await boxes.aclose()


async def test_only_declared_files_are_carried() -> None:
    box = FakeSandbox(SandboxSpec())
    box.files = {"p/a.py": b"a", "p/other.py": b"b", "p/large.py": b"x" * (LARGEST_ARTIFACT + 1)}
    assert await carried(box, ["p/a.py", "p/large.py", "p/gone.py"]) == {"p/a.py": b"a"}


@pytest.mark.bubblewrap
async def test_links_out_of_the_box_are_not_carried() -> None:
    boxes = Bubblewrap()
    box = await boxes.create(SandboxSpec(files={"p/a.py": b"a"}))
    await box.exec(["sh", "-c", "ln -s /etc/passwd p/b.py; ln -s a.py p/c.py; mkdir p/d.py; mkfifo p/e.py"])
    assert await carried(box, [f"p/{name}.py" for name in "abcde"]) == {"p/a.py": b"a", "p/c.py": b"a"}
    await boxes.aclose()


@pytest.mark.bubblewrap
async def test_lint_potential_in_a_real_box() -> None:
    """One finding halves it; a file that does not parse, and one that is not there, count ten each."""
    boxes = Bubblewrap()
    box = await boxes.create(SandboxSpec(files={"a.py": b"import os\n", "ast.py": b"raise SystemExit(0)"}))
    delta = LintDelta(["a.py"])
    await delta.begin(box)
    await box.write("a.py", b"x = 1\n")
    assert await delta.step(box, over=False) == pytest.approx(1 - 1 / 2)
    await box.write("a.py", b"def f(:\n")
    assert await delta.step(box, over=False) == pytest.approx(1 / 11 - 1)
    assert await delta.step(box, over=True) == pytest.approx(1 / 2 - 1 / 11)
    await boxes.aclose()


@each_case(
    ("source", "count"),
    [
        ("import os, sys\nprint(sys.path)\n", 1),
        ("from a import b as c\n", 1),
        ("from __future__ import annotations\n", 0),
        ("from a import b\n__all__ = ['b']\n", 0),
        ("def f():\n    x = 1\n    _y = 2\n", 1),
        ("def f():\n    x = 1\n    return lambda: x\n", 0),
        ("def f():\n    global x\n    x = 1\n", 0),
        ("def f():\n    return 1\n    print(2)\n", 1),
        ("for x in y:\n    if x:\n        continue\n        print(x)\n", 1),
        ("try:\n    pass\nexcept:\n    pass\n", 1),
        ("def f(a=[], *, b={}): pass\n", 2),
        ("x == None or None is x or x != None\n", 2),
        ("def f(): pass\ndef f(): pass\n", 1),
        ("@a\ndef f(): pass\n@f.b\ndef f(): pass\n", 0),
        ("x = 1\n", 0),
    ],
)
def test_findings(source: str, count: int) -> None:
    assert findings(source) == count
