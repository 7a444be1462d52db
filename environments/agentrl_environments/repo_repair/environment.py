"""`RepoRepair`: a repository with something wrong or missing; the policy reads, edits, runs tests and submits.

Outcome: all tests pass, the hidden ones too, on the declared source files alone, which are carried to fresh boxes and
judged there (`agentrl_environments.judging`). No other file of the agent's box is looked at: no test, no history, no
result. Process reward: potential-based (`agentrl_environments.rewards`). Knows nothing of models or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from agentrl.env import EpisodeLimits, Grade, ToolEnv
from agentrl.env.checks.oracles import Oracle, script
from agentrl.env.core import StepResult
from agentrl.env.tools.by_name import Named
from agentrl.errors import ConfigError
from agentrl.host.platform_checks import default_sandbox
from agentrl.protocols import Limits, SandboxSpec, ToolResult
from agentrl.records import Json
from agentrl.sandbox import known_backend
from agentrl.sandbox.current_box import CurrentBox
from agentrl.sandbox.shared_backend import SharedBackend, once_a_loop, shared
from agentrl_environments.judging import DEADLINE_S, SourceJudge
from agentrl_environments.repo_repair import catalogue, texts
from agentrl_environments.repo_repair.repository import FOLDER, SPLITS, Split, encoded
from agentrl_environments.repo_repair.tasks import LEVELS, Level, RepoTask, make_task
from agentrl_environments.rewards import LintDelta, PotentialDelta, TestDelta, carried
from agentrl_tools.base import command_result, text_result
from agentrl_tools.editing import RunTests, Submit
from agentrl_tools.files import ApplyPatch, ListFiles, ReadFile, ReplaceText, WriteFile
from agentrl_tools.search import Search

Process = Literal["tests", "lint"]
_LIMITS: Final = Limits(wall_s=30.0, cpu_s=10.0, memory_bytes=384 << 20, pids=32)
_TESTS_S: Final = 20.0
_TEST_COMMAND: Final = ["python3", "-s", "-S", "-B", "-m", "unittest", "discover", "tests"]
_OUTPUT_BYTES: Final = 8_192


class RepoRepair(ToolEnv):
    """One episode repairs one repository; its seed, `split` and `level` decide which and what is wrong.

    `split`: `train` or `held_out` (other repositories). `level`: `easy`, `medium`, `hard` or `all`. `process`: which
    potentials give process rewards. `sandbox`: id of a sandbox backend; `image`: what its boxes are made of, with a
    `python3` in it; `ready`: how many of them are made ahead; `remember`: how many verdicts a process keeps."""

    limits = EpisodeLimits(turns=30, tool_seconds=300.0)
    blocking = False
    replayable = True
    task_files = (catalogue.FILE, FOLDER)
    needs_step_s = _TESTS_S + DEADLINE_S  # the visible tests, and judging by the hidden ones

    def __init__(
        self,
        *,
        split: Split = "train",
        level: Level = "easy",
        process: Sequence[Process] = ("tests",),
        sandbox: str | None = None,
        image: str | None = None,
        ready: int = 0,
        remember: int = 4096,
        tools: Sequence[Named] = (),
        **settings: Any,
    ) -> None:
        for setting_name, setting_value, known_values in (("split", split, SPLITS), ("level", level, LEVELS)):
            if setting_value not in known_values:
                raise ConfigError(setting_name, setting_value, f"choose one of {', '.join(known_values)}")
        if unknown_sources := set(process) - {"tests", "lint"}:
            raise ConfigError("process", sorted(unknown_sources), "choose among tests and lint")
        self._split: Split = split
        self._level: Level = level
        self._process = tuple(process)
        self._sandbox, self._image = known_backend(sandbox or default_sandbox()), image
        self._ready, self._remember = ready, remember
        self._box = self.own_box = current_box = CurrentBox()
        self._boxes: SharedBackend | None = None
        self._deltas: list[PotentialDelta] = []
        looking_tools = [ListFiles(current_box), ReadFile(current_box), Search(current_box)]
        changing_tools = [ReplaceText(current_box), WriteFile(current_box), ApplyPatch(current_box)]
        ending_tools = [RunTests(self._run_tests), Submit(self.finish)]
        super().__init__(tools=[*looking_tools, *changing_tools, *ending_tools, *tools], **settings)

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        return {"seed": self.task_seed()}

    async def setup(self, task: Mapping[str, Json]) -> None:
        repo_task = self._repair = make_task(task["seed"], self._split, self._level)
        shared_boxes = shared(self._sandbox, ready=self._ready)
        self._judge = _judge_in(shared_boxes, self._image, self._remember)
        await shared_boxes.enter()
        self._boxes = shared_boxes
        test_files = {f"tests/{test_file}": test_text for test_file, test_text in repo_task.visible.items()}
        box_files = encoded({**repo_task.broken, **test_files, "README.md": repo_task.readme})
        self._box.box = await shared_boxes.create(SandboxSpec(image=self._image, limits=_LIMITS, files=box_files))
        self._deltas = [self._delta(delta_kind, repo_task) for delta_kind in self._process]
        for reward_delta in self._deltas:
            await reward_delta.begin(self._box)

    def _delta(self, kind: Process, repair: RepoTask) -> PotentialDelta:
        artifacts = sorted(repair.broken)
        if kind == "lint":
            return LintDelta(artifacts)
        return TestDelta(self._judge, artifacts, encoded(repair.tests), [*repair.fails, *repair.passes])

    async def teardown(self) -> None:
        open_boxes, self._boxes = self._boxes, None
        if open_boxes is not None:
            try:
                await self._box.close()
            finally:
                await open_boxes.leave()

    def prompt(self, task: Mapping[str, Json]) -> str:
        self.note(repository=self._repair.repository, kind=self._repair.breakage.kind)
        return texts.prompt(self._repair)

    async def _run_tests(self) -> ToolResult:
        """The tests as they stand in the box: feedback for the policy, and nothing that is judged by."""
        exec_result = await self._box.exec(_TEST_COMMAND, env={"PYTHONHASHSEED": "0"}, timeout_s=_TESTS_S)
        test_report = command_result(exec_result, _LIMITS.output_bytes, _TESTS_S)
        return text_result(
            texts.report(test_report.content),
            _OUTPUT_BYTES,
            is_error=test_report.is_error,
            truncated=test_report.truncated,
        )

    async def astep(self, action: str) -> StepResult:
        observation, reward, terminated, truncated, info = await super().astep(action)
        for reward_delta in self._deltas:
            reward += await reward_delta.step(self._box, over=terminated or truncated)
        unsettled = sum(reward_delta.unsettled for reward_delta in self._deltas)
        return observation, reward, terminated, truncated, {**info, "unsettled": unsettled}

    async def artifacts(self) -> Mapping[str, bytes]:
        """The sources as they stand, for tests elsewhere."""
        return await carried(self._box, sorted(self._repair.broken))

    async def grade(self) -> Grade:
        """All tests pass on the declared files, in boxes that the agent has not seen."""
        repo_task = self._repair
        final_sources = await carried(self._box, sorted(repo_task.broken))
        verdicts = await self._judge.run(final_sources, encoded(repo_task.tests))
        is_success = verdicts.passed.issuperset([*repo_task.fails, *repo_task.passes])
        fixed_share = len(verdicts.passed.intersection(repo_task.fails)) / len(repo_task.fails)
        kept_share = len(verdicts.passed.intersection(repo_task.passes)) / len(repo_task.passes)
        return Grade(outcome=float(is_success), success=is_success, info={"mended": fixed_share, "kept": kept_share})

    def oracles(self) -> list[Oracle]:
        repo_task, submit_call = self._repair, self.call("submit")
        changed_paths = [
            source_path
            for source_path, gold_text in repo_task.gold.items()
            if gold_text != repo_task.broken[source_path]
        ]
        rewrite_calls = [
            self.call("write_file", path=source_path, content=repo_task.gold[source_path])
            for source_path in changed_paths
        ]
        wreck_calls = [self.call("write_file", path=source_path, content="") for source_path in repo_task.broken]
        passing_test = "import unittest\n\n\nclass Test(unittest.TestCase):\n    def test_all(self):\n        pass\n"
        forget_calls = [
            self.call("write_file", path=f"tests/{test_file}", content=passing_test) for test_file in repo_task.visible
        ]
        return [
            Oracle("gold", 1.0, script("".join(rewrite_calls), submit_call)),
            Oracle("no-op", 0.0, script(submit_call)),
            Oracle(
                "delete the tests", 0.0, script("".join(forget_calls), self.call("run_tests"), submit_call), cheats=True
            ),
            Oracle("empty the sources", 0.0, script("".join(wreck_calls), submit_call), cheats=True),
        ]


@once_a_loop
def _judge_in(boxes: SharedBackend, image: str | None, remember: int) -> SourceJudge:
    """One judge for all episodes of a trio loop, so that siblings share what was judged."""
    return SourceJudge(boxes, image=image, remembered=remember)
