"""`CodeRepair`: a small module with one bug; the policy edits lines, runs the visible tests and submits.

Outcome: the hidden tests pass in a fresh box, judged at `submit` or, at a limit, on whatever stands. Process reward
of a turn: the change in the share of visible tests that pass. Knows nothing of models or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentrl.env import CallResult, EpisodeLimits, Grade, ToolEnv
from agentrl.env.checks.oracles import Oracle, script
from agentrl.env.tools.by_name import Named
from agentrl.errors import ConfigError
from agentrl.host.platform_checks import default_sandbox
from agentrl.protocols import ToolResult
from agentrl.records import Json, Messages
from agentrl.sandbox import known_backend
from agentrl.sandbox.shared_backend import SharedBackend, once_a_loop, shared
from agentrl_environments.code_repair import texts
from agentrl_environments.code_repair.running import DEADLINE_S, Runner, Values
from agentrl_environments.code_repair.tasks import SPLITS, RepairTask, Split, make_task, wrong_text
from agentrl_environments.code_repair.templates import LEVELS, Level
from agentrl_tools.editing import ReplaceLine, RunTests, Submit, TextLines

_task = lru_cache(maxsize=1024)(make_task)


class CodeRepair(ToolEnv):
    """One episode repairs one module; its seed and `split` decide which.

    `split`: `train`, `held_out` (no function in common with `train`) or `held_out_templates` (of kinds that `train`
    does not know). `shuffle_tests` shows the visible tests of another task with the same function headers, so that
    they say nothing of the bug: a policy that reads them fails. `sandbox`: id of a sandbox backend; `image`: what its
    boxes are made of, with a `python3` in it; `ready`: how many of them are made ahead. `remember`: how many test runs
    a process keeps the results of. `warm`: whether visible tests run in warm interpreters where they can."""

    limits = EpisodeLimits(turns=2)
    blocking = False
    replayable = True
    needs_step_s = DEADLINE_S

    def __init__(
        self,
        *,
        split: Split = "train",
        level: Level = "easy",
        shuffle_tests: bool = False,
        sandbox: str | None = None,
        image: str | None = None,
        ready: int = 0,
        remember: int = 4096,
        warm: bool = True,
        tools: Sequence[Named] = (),
        **settings: Any,
    ) -> None:
        if split not in SPLITS:
            raise ConfigError("split", split, f"choose one of {', '.join(SPLITS)}")
        if level not in LEVELS:
            raise ConfigError("level", level, f"choose one of {', '.join(LEVELS)}")
        if remember < 0:
            raise ConfigError("remember", remember, "give how many test runs are kept, 0 for none")
        self._split: Split = split
        self._level: Level = level
        self._shuffle = shuffle_tests
        self._sandbox, self._image = known_backend(sandbox or default_sandbox()), image
        self._ready, self._remember, self._warm = ready, remember, warm
        self._boxes: SharedBackend | None = None
        self._document = TextLines("")
        own_tools = [ReplaceLine(self._document), RunTests(self._run_tests), Submit(self.finish)]
        super().__init__(tools=[*own_tools, *tools], **settings)

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        return {"seed": self.task_seed()}

    async def setup(self, task: Mapping[str, Json]) -> None:
        self._repair: RepairTask = _task(task["seed"], self._split, level=self._level, shuffle_tests=self._shuffle)
        shared_boxes = shared(self._sandbox, ready=self._ready)
        self._runner = _runner_in(shared_boxes, self._image, self._remember, self._warm)
        await shared_boxes.enter()
        self._boxes = shared_boxes
        self._document.load(self._repair.source)

    async def teardown(self) -> None:
        open_boxes, self._boxes = self._boxes, None
        if open_boxes is not None:
            await open_boxes.leave()

    async def prompt(self, task: Mapping[str, Json]) -> Messages:
        call_values = await self._visible()
        self._share = self._passing(call_values)
        self.note(templates=list(self._repair.templates))
        return texts.opening(self._repair.source, self._repair.visible, call_values)

    async def _visible(self) -> Values:
        """Run the visible tests on the module as it stands."""
        return await self._runner.run(
            self._document.text, [visible_check.call for visible_check in self._repair.visible]
        )

    def _passing(self, values: Values) -> float:
        return texts.passed(self._repair.visible, values) / len(self._repair.visible)

    async def _run_tests(self) -> ToolResult:
        return ToolResult(content=texts.report(self._repair.visible, await self._visible()))

    async def after_turn(self, results: Sequence[CallResult]) -> float:
        """The change in the share of visible tests that pass, whether or not the turn ran them."""
        share_before = self._share
        self._share = self._passing(await self._visible())
        return self._share - share_before

    async def artifacts(self) -> Mapping[str, bytes]:
        """The module as it stands, for tests elsewhere."""
        return {"module.py": self._document.text.encode("utf-8", "replace")}

    async def grade(self) -> Grade:
        """All hidden tests pass, in a box that the policy's code has not seen."""
        hidden_checks = self._repair.hidden
        call_values = await self._runner.run(
            self._document.text, [hidden_check.call for hidden_check in hidden_checks], fresh=True
        )
        is_success = texts.passed(hidden_checks, call_values) == len(hidden_checks)
        return Grade(outcome=float(is_success), success=is_success, info={"visible": self._share})

    def oracles(self) -> list[Oracle]:
        repair_task, submit_call, run_tests = self._repair, self.call("submit"), self.call("run_tests")

        def replaced(line: int, text: str) -> str:
            return self.call("replace_line", line=line, text=text)

        repair_call = replaced(repair_task.fix_line, repair_task.fix_text)
        forged_line = f"import os; os._exit(0)\n{repair_task.source.split(chr(10))[0]}"
        all_oracles = [
            Oracle("gold", 1.0, script(repair_call + submit_call)),
            Oracle("no-op", 0.0, script(submit_call)),
            Oracle("empty the module", 0.0, script(replaced(1, "raise SystemExit(0)") + submit_call), cheats=True),
            Oracle("end the test run", 0.0, script(replaced(1, forged_line) + submit_call), cheats=True),
        ]
        if (wrong_line := wrong_text(repair_task)) is not None:
            wrong_call = replaced(repair_task.fix_line, wrong_line)
            all_oracles.append(Oracle("second try", 1.0, script(wrong_call + run_tests, repair_call + submit_call)))
            all_oracles.append(Oracle("wrong repair", 0.0, script(wrong_call + submit_call)))
        return all_oracles


@once_a_loop
def _runner_in(boxes: SharedBackend, image: str | None, remember: int, warm: bool) -> Runner:
    """One runner for all episodes of a trio loop, so that siblings share what was run."""
    return Runner(boxes, image=image, remembered=remember, warm=warm)
