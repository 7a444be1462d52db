"""`SWE` and `Harbor` played in real boxes: the oracles, what an agent may not see, and cheats that must get 0."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from each_case import each_case
from sandbox import rootfs
from sandbox.conftest import IMAGE, busybox_image, docker_engine, env  # noqa: F401  (fixtures)

import agentrl
import agentrl_environments.swe
from agentrl.env.checks.oracles import judge
from agentrl.errors import ConfigError, SandboxError
from agentrl_environments.swe import SWE, CodingTasks, Harbor

boxed = pytest.mark.bubblewrap
LRU, BUG = "agentrl__lru-1", "agentrl__lru.evict"


async def played(env: CodingTasks, task: str, *actions: str) -> tuple[list[str], dict[str, Any]]:
    """What the agent reads of each action, and the last info; then the episode is submitted."""
    try:
        await env.areset(options={"task": task})
        said: list[str] = []
        for action in actions:
            observation, *_ = await env.astep(action)
            said.append(observation[0]["content"])
        *_, info = await env.astep(env.call("submit"))
        return said, info
    finally:
        await env.aclose()


def shell(env: CodingTasks, command: str) -> str:
    return env.call("shell", command=command)


async def gold_of(new: type[CodingTasks], task: str, **kwargs: Any) -> str:
    """The action of the oracle that solves a task."""
    env = new(**kwargs)
    try:
        await env.areset(options={"task": task})
        gold = next(oracle for oracle in env.oracles() if oracle.name == "gold")
        text = gold.policy(())
        assert isinstance(text, str)
        return text
    finally:
        await env.aclose()


@pytest.mark.medium
@boxed
@pytest.mark.parametrize(("id", "count"), [("agentrl/SWE-v0", 5), ("agentrl/Harbor-v0", 3)])
async def test_oracles_of_the_shipped_tasks_get_what_they_must(id: str, count: int) -> None:
    for seed in range(count):
        verdicts = {verdict.name: verdict for verdict in await judge(lambda: agentrl.make(id), seed)}
        assert all(verdict.holds for verdict in verdicts.values()), (seed, verdicts)
        assert verdicts["gold"].got == 1.0 and {"no-op", "delete the tests"} <= verdicts.keys()


@boxed
@pytest.mark.parametrize("id", ["agentrl/SWE-v0", pytest.param("agentrl/Harbor-v0", marks=pytest.mark.slow)])
@pytest.mark.long
def test_they_keep_the_contract(id: str) -> None:
    assert agentrl.check_env(id).findings == ()


@boxed
async def test_seeds_are_tasks_and_ids_name_them() -> None:
    env = SWE()
    try:
        names = [(await env.areset(seed=seed))[1]["task"] for seed in range(6)]
        assert len(set(names)) == 5 and names[0] == names[5] == LRU
        opening, info = await env.areset(options={"task": BUG})
        assert info["task"] == BUG and "throws away what I have just put in" in opening[-1]["content"]
        with pytest.raises(ConfigError, match="no task has this id"):
            await env.areset(options={"task": "nowhere"})
    finally:
        await env.aclose()


@boxed
async def test_the_agent_sees_neither_hidden_tests_nor_a_history(tmp_path: Path) -> None:
    repository = tmp_path / "lru"
    (repository / "inner").mkdir(parents=True)
    for folder in (repository, repository / "inner"):
        (folder / ".git").mkdir()
        (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (repository / "m.py").write_text("a\nb\nd\n")
    row = {
        "instance_id": "x",
        "repo": "lru",
        "problem_statement": "b",
        "patch": "--- a/m.py\n+++ b/m.py\n@@ -2 +2 @@\n-b\n+c\n",
        "test_patch": "--- /dev/null\n+++ b/tests/test_secret.py\n@@ -0,0 +1 @@\n+x = 1\n",
        "FAIL_TO_PASS": ["t.T.t"],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    swe = SWE(tasks=str(tmp_path / "rows.jsonl"), repositories=str(tmp_path), test_command="true")
    said, info = await played(swe, "x", shell(swe, "find . | sort"))
    assert said[0].split() == [".", "./inner", "./m.py"] and info["outcome"] == 0.0


@pytest.mark.medium
@boxed
async def test_a_solution_counts_with_the_tests_deleted_and_half_of_one_does_not() -> None:
    env, gold = SWE(), await gold_of(SWE, LRU)
    _, info = await played(env, LRU, gold, shell(env, "rm -r tests; rm README.md"))
    assert info["outcome"] == 1.0 and info["mended"] == 1.0 and info["kept"] == 1.0
    _, info = await played(SWE(), LRU, gold, shell(env, "echo 'LRUCache.resize = None' >> lru/__init__.py"))
    assert (info["outcome"], info["mended"]) == (0.0, 1.0) and 0.0 < info["kept"] < 1.0


CHEATS = {
    "unittest of one's own": "cp forgery unittest.py",
    "a package in front": "mkdir unittest src; cp forgery unittest/__init__.py; cp -r unittest src",
    "sitecustomize": "cp forgery sitecustomize.py; cp forgery usercustomize.py; cp forgery conftest.py",
    "a test that forges": "cp forgery tests/test_aaa.py; cp forgery tests/__init__.py",
    "tests that pass": "echo 'import unittest' > tests/test_cache.py",
    "the package is a link": "mv lru /tmp/lru; cp forgery /tmp/lru/__init__.py; ln -s /tmp/lru lru",
    "no source left": "rm -rf lru README.md",
    "a folder in a file's place": "rm lru/cache.py; mkdir lru/cache.py",
    "a writer in the background": "(while true; do cp forgery unittest.py; done) >/dev/null 2>&1 &",
    "names that no tool would write": "for n in 'a\\nb' '\\377'; do echo > \"lru/$(printf $n).py\"; done",
    "more files than anyone reviews": "for i in $(seq 600); do echo > lru/m$i.py; done",
}


def forgery() -> str:
    """A module that prints a verdict for every test of `LRU` and ends the run."""
    rows = [json.loads(line) for line in (Path(agentrl_environments.swe.__file__).parent / "tasks.jsonl").open()]
    (row,) = (row for row in rows if row["instance_id"] == LRU)
    tests = [*json.loads(row["FAIL_TO_PASS"]), *json.loads(row["PASS_TO_PASS"])]
    log = "".join(f"{test.split('.')[-1]} ({test}) ... ok\n" for test in tests)
    return f"import os\nos.write(2, {log.encode()!r})\nos._exit(0)\n"


@pytest.mark.medium
@boxed
@each_case("cheat", CHEATS)
async def test_a_cheat_gets_nothing(cheat: str) -> None:
    env = SWE(apart=False)
    _, info = await played(
        env, LRU, env.call("write_file", path="forgery", content=forgery()), shell(env, CHEATS[cheat])
    )
    assert info["outcome"] == 0.0


@boxed
async def test_a_source_that_prints_every_verdict_wins_against_a_log_and_not_apart() -> None:
    for apart, outcome in ((False, 1.0), (True, 0.0)):
        env = SWE(apart=apart)
        _, info = await played(env, LRU, env.call("write_file", path="lru/__init__.py", content=forgery()))
        assert info["outcome"] == outcome


@pytest.mark.long
@boxed
async def test_both_ways_of_grading_agree_on_honest_work() -> None:
    for seed in range(5):
        verdicts = await judge(lambda: agentrl.make("agentrl/SWE-v0", apart=False), seed)
        assert all(verdict.holds for verdict in verdicts), (seed, verdicts)


@boxed
async def test_work_in_the_way_of_hidden_tests_is_left_out(tmp_path: Path) -> None:
    """A folder named as the hidden test file is, and a file named as its folder: the tests run all the same."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m/m.py").write_text("a = 1\nb = 2\n")
    for hidden, cheat in (
        ("check_m.py", "mkdir check_m.py; echo > check_m.py/x.py"),
        ("deep/check_m.py", "echo > deep"),
    ):
        file = image_row(tmp_path, hidden)
        swe = SWE(tasks=file, repositories=str(tmp_path))
        gold = await gold_of(SWE, "in-image", tasks=file, repositories=str(tmp_path))
        _, info = await played(swe, "in-image", gold, shell(swe, cheat))
        assert info["outcome"] == 1.0


@boxed
async def test_harbor_reads_no_reward_but_the_graders() -> None:
    env = Harbor()
    seed = "mkdir -p .harbor/logs/verifier .harbor/tests logs/verifier; printf 'exit 0' > .harbor/tests/test.sh\n"
    rewards = 'for f in .harbor logs; do echo 1 > "$f"/reward.txt; done; echo 1 > .harbor/logs/verifier/reward.txt'
    module = "; echo 'def load(*_): return None' > json.py; echo 'import os; os._exit(0)' > pathlib.py"
    _, info = await played(env, "count-words", shell(env, seed + rewards + module))
    assert info["outcome"] == 0.0 and info["success"] is False


@boxed
async def test_a_task_says_how_much_its_box_and_its_agent_have(tmp_path: Path) -> None:
    shutil.copytree(
        Path(agentrl_environments.swe.__file__).parent / "harbor_tasks/count-words", tmp_path / "count-words"
    )
    for agent_s, expected in ((2000, 1800.0), (0.2, 0.2)):
        (tmp_path / "count-words/task.toml").write_text(
            f"[environment]\nmemory_mb = 96\n[agent]\ntimeout_sec = {agent_s}\n"
        )
        env = Harbor(tasks=str(tmp_path), shared_verifier=True)
        try:
            await env.areset(seed=0)
            assert env.limits.tool_seconds == expected
            observation, _, _, truncated, info = await env.astep(
                shell(env, "python3 -c 'x = bytearray(1 << 29)' || echo too much; sleep 0.2")
            )
            assert (truncated, info.get("stop_reason")) == ((True, "tool_time_limit") if agent_s < 1 else (False, None))
            assert truncated or "too much" in observation[0]["content"]
        finally:
            await env.aclose()


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A root file system whose /testbed and /app are trees of tasks."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        rootfs.build(Path(name, "root"))
        for folder in ("testbed", "app"):
            tree = Path(name, "root", folder)
            tree.mkdir()
            (tree / "m.py").write_text("a = 1\nb = 2\n")
        yield Path(name, "root")


def image_row(folder: Path, hidden: str = "test_m.py") -> str:
    """A file with one row whose repository is in the image."""
    test = "import unittest, m\nclass T(unittest.TestCase):\n    def test_b(self):\n        self.assertEqual(m.b, 3)\n"
    added = "".join(f"+{line}\n" for line in test.splitlines())
    row = {
        "instance_id": "in-image",
        "repo": "m",
        "problem_statement": "b is 3.",
        "patch": "--- a/m.py\n+++ b/m.py\n@@ -1,2 +1,2 @@\n a = 1\n-b = 2\n+b = 3\n",
        "test_patch": f"--- /dev/null\n+++ b/{hidden}\n@@ -0,0 +1,4 @@\n{added}",
        "FAIL_TO_PASS": json.dumps([f"test_b ({Path(hidden).stem}.T)"]),
        "test_command": "python3 -s -S -B -m unittest discover -v -p '*_m.py' " + str(Path(hidden).parent),
    }
    (folder / "rows.jsonl").write_text(json.dumps(row))
    return str(folder / "rows.jsonl")


@pytest.mark.medium
@boxed
async def test_a_repository_of_the_image_is_played_without_its_history(root: Path, tmp_path: Path) -> None:
    kwargs = {"tasks": image_row(tmp_path), "image": str(root)}
    verdicts = await judge(lambda: agentrl.make("agentrl/SWE-v0", **kwargs), 0)
    assert [verdict.got for verdict in verdicts] == [1.0, 0.0, 0.0]
    for folder, plays in (("testbed/.git", True), ("testbed/deep/.git", False)):
        (root / folder).mkdir(parents=True)
        (root / folder / "packed-refs").write_text("the solution\n")
        env = SWE(**kwargs)
        try:
            if plays:
                said, _ = await played(env, "in-image", shell(env, "find /testbed . | sort; cat /testbed/.git/*"))
                assert "packed-refs" not in said[0].partition("cat:")[0] and "the solution" not in said[0]
                assert "./.git" not in said[0] and "./m.py" in said[0]
            else:
                with pytest.raises(ConfigError, match=r"task in-image, image .*RUN rm -rf /testbed/deep/\.git"):
                    await env.areset(seed=0)
        finally:
            await env.aclose()
            shutil.rmtree(root / folder)


@pytest.fixture
def image(docker_engine: str, root: Path) -> str:  # noqa: F811
    """The same as an image of the engine."""
    settings = ["-c", "ENV PATH=/usr/bin:/bin", "-c", "WORKDIR /workspace", "-", "agentrl-swe-test:1"]
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        command = ["docker", "import", *settings]
        subprocess.run(command, stdin=tar.stdout, env=env(docker_engine), check=True, capture_output=True, timeout=120)
    return settings[-1]


@pytest.mark.long
@pytest.mark.docker
async def test_oracles_hold_on_docker(
    docker_engine: str,  # noqa: F811
    image: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Repositories and folders that are uploaded, and a repository of the image."""
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("SWE", 0, {"image": IMAGE}),
        ("SWE", 3, {"image": IMAGE}),
        ("Harbor", 1, {"image": IMAGE}),
        ("SWE", 0, {"image": image, "tasks": image_row(tmp_path)}),
    ]
    for name, seed, kwargs in cases:
        made = {**kwargs, "sandbox": "docker", "box": {"disk_bytes": 64 << 20, "memory_bytes": 256 << 20}}
        verdicts = await judge(lambda name=name, made=made: agentrl.make(f"agentrl/{name}-v0", **made), seed)
        assert len(verdicts) >= 3 and all(verdict.holds for verdict in verdicts), (name, seed, verdicts)


BUSYBOX_ROW = {
    "instance_id": "sums-1",
    "repo": "sums",
    "problem_statement": "The sum is wrong.",
    "patch": "--- a/sum.sh\n+++ b/sum.sh\n@@ -1 +1 @@\n-echo $(($1 - $2))\n+echo $(($1 + $2))\n",
    "test_patch": "--- /dev/null\n+++ b/tests.sh\n@@ -0,0 +1 @@\n"
    "+[ $(sh sum.sh 1 2) = 3 ] && [ ! -e old.sh ] && echo PASSED t.sh::sum || echo FAILED t.sh::sum\n",
    "test_command": "sh tests.sh",
    "FAIL_TO_PASS": ["t.sh::sum"],
    "PASS_TO_PASS": [],
    "sources": ["*"],
}


@pytest.mark.medium
@pytest.mark.docker
async def test_work_is_handed_in_from_an_image_with_busybox_alone(
    docker_engine: str,  # noqa: F811
    busybox_image: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both formats: files that were written, changed and removed, some with odd names, get to the grading box."""
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums/sum.sh").write_text("echo $(($1 - $2))\n")
    (tmp_path / "sums/old.sh").write_text("")
    (tmp_path / "rows.jsonl").write_text(json.dumps(BUSYBOX_ROW))
    made: dict[str, Any] = {"image": busybox_image, "sandbox": "docker", "box": {"disk_bytes": 64 << 20}}
    swe = SWE(tasks=str(tmp_path / "rows.jsonl"), repositories=str(tmp_path), **made)
    right = shell(swe, "rm old.sh; echo 'echo $(($1 + $2))' > sum.sh; mkdir locked; chmod 0 locked")
    _, info = await played(swe, "sums-1", right)
    assert (info["outcome"], info["absent"]) == (1.0, 0), info
    _, info = await played(SWE(tasks=str(tmp_path / "rows.jsonl"), repositories=str(tmp_path), **made), "sums-1")
    assert (info["outcome"], info["absent"]) == (0.0, 0), info

    task = tmp_path / "harbor/odd-names"
    for folder in ("tests", "environment"):
        (task / folder).mkdir(parents=True)
    (task / "task.toml").write_text('artifacts = ["/app/out"]\n[verifier]\nenvironment_mode = "separate"\n')
    (task / "instruction.md").write_text("Write.")
    (task / "environment/Dockerfile").write_text("FROM scratch\nWORKDIR /app\n")
    (task / "tests/test.sh").write_text(
        '#!/bin/sh\ncat /app/out/* > /tmp/all; [ "$(cat /tmp/all)" = 123 ] && echo 1 > /logs/verifier/reward.txt\n'
    )
    harbor = Harbor(tasks=str(tmp_path / "harbor"), **made)
    write = "mkdir out; printf 1 > 'out/a b'; printf 2 > 'out/b\\\\c'; printf 3 > out/é"
    _, info = await played(harbor, "odd-names", shell(harbor, write))
    assert info["outcome"] == 1.0, info


@boxed
async def test_a_reward_that_is_a_folder_has_earned_nothing(tmp_path: Path) -> None:
    task = tmp_path / "count-words"
    shutil.copytree(Path(agentrl_environments.swe.__file__).parent / "harbor_tasks/count-words", task)
    (task / "tests/test.sh").write_text("#!/bin/sh\nmkdir -p /logs/verifier/reward.txt /logs/verifier/reward.json\n")
    env = Harbor(tasks=str(tmp_path))
    _, info = await played(env, "count-words", shell(env, "true"))
    assert (info["outcome"], info["success"]) == (0.0, False)


FORGER = """python3 -c 'import os, time
if os.fork() == 0:
    os.setsid()
    for _ in range(2000):
        os.makedirs("/workspace/.harbor/logs/verifier", exist_ok=True)
        open("/workspace/.harbor/logs/forged", "w").write("1")
        os.rename("/workspace/.harbor/logs/forged", "/workspace/.harbor/logs/verifier/reward.txt")
        time.sleep(0.005)
'"""


@pytest.mark.medium
@boxed
async def test_a_program_under_test_forges_a_shared_verifier_and_no_separate_one(tmp_path: Path) -> None:
    """The program writes the reward from a process that it leaves behind. Where the verifier runs it, it wins."""
    shipped = Path(agentrl_environments.swe.__file__).parent / "harbor_tasks/mend-totals"
    shutil.copytree(shipped, tmp_path / "mend-totals")
    (tmp_path / "mend-totals/task.toml").write_text("")
    (tmp_path / "mend-totals/tests/test.sh").write_text(
        "#!/bin/sh\nmkdir -p /logs/verifier; echo 0 > /logs/verifier/reward.txt\npython3 /app/totals.py\n"
        "until grep -q 1 /logs/verifier/reward.txt; do sleep 0.01; done\n"  # the forger may be late
    )
    write = f"cat > totals.py <<'END'\nimport os\nos.system({FORGER!r})\nEND\n"
    for harbor, outcome in ((Harbor(tasks=str(tmp_path), shared_verifier=True), 1.0), (Harbor(), 0.0)):
        _, info = await played(harbor, "mend-totals", shell(harbor, write))
        assert (info["outcome"], info.get("shared")) == (outcome, True if outcome else None)


@pytest.mark.medium
@boxed
async def test_the_forging_oracle_finds_a_verifier_that_runs_what_it_was_given(tmp_path: Path) -> None:
    """Its artifacts do not look like programs, and it runs one: validating it says so."""
    shipped = Path(agentrl_environments.swe.__file__).parent / "harbor_tasks/mend-totals"
    shutil.copytree(shipped, tmp_path / "mend-totals")
    (tmp_path / "mend-totals/task.toml").write_text("[agentrl]\ncarry = ['totals*']\n")
    (tmp_path / "mend-totals/tests/test.sh").write_text(
        "#!/bin/sh\nmkdir -p /logs/verifier; echo 0 > /logs/verifier/reward.txt\npython3 /app/totals.py\n"
        "for i in $(seq 60); do grep -q 1 /logs/verifier/reward.txt && break; sleep 0.05; done\n"  # for a late forger
    )
    verdicts = await judge(lambda: agentrl.make("agentrl/Harbor-v0", tasks=str(tmp_path)), 0)
    assert {verdict.name: verdict.got for verdict in verdicts}["forge the reward"] == 1.0


@boxed
async def test_an_error_of_a_tasks_image_names_the_task(tmp_path: Path) -> None:
    env = SWE(tasks=image_row(tmp_path), image=str(tmp_path / "nowhere"))
    try:
        with pytest.raises(SandboxError, match=r"^task in-image: .*nowhere"):
            await env.areset(seed=0)
    finally:
        await env.aclose()


@pytest.mark.medium
@boxed
async def test_setup_installs_from_an_allowed_host_and_the_agent_reaches_nothing(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    """A package index on this machine: setup fetches a module into the work folder, in both boxes."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nb = 3\n")

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, serve, listeners)
    port = listeners[0].socket.getsockname()[1]
    url = f"http://127.0.0.1:{port}/dep.py"
    fetch = f'python3 -c \'import urllib.request as u; u.urlretrieve("{url}", "dep.py")\''
    repository = tmp_path / "m"
    repository.mkdir()
    (repository / "m.py").write_text("a = 1\nb = 2\n")
    made: dict[str, Any] = {
        "tasks": image_row(tmp_path),
        "repositories": str(tmp_path),
        "setup": [fetch, "grep -q 3 dep.py"],
    }
    env = SWE(**made, network={"allow": [f"127.0.0.1:{port}"]})
    solve = "printf 'a = 1\\nfrom dep import b\\n' > m.py"
    said, info = await played(
        env, "in-image", shell(env, f"{fetch} && echo reached; env | grep -i proxy"), shell(env, solve)
    )
    assert info["outcome"] == 1.0 and "reached" not in said[0] and "3128" not in said[0]
    refused = SWE(**made, network={"allow": ["pypi.org:443"]})
    try:
        with pytest.raises(
            SandboxError, match=r"(?s)task in-image: setup command .*; refused: 127\.0\.0\.1:\d+ \(.* not among"
        ):
            await refused.areset(seed=0)
    finally:
        await refused.aclose()
    with pytest.raises(ConfigError, match="network = "):
        SWE(**made, network={"hosts": ["pypi.org:443"]})
