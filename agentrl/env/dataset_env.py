"""`RowsEnv` and `RowsToolEnv`: environments of a data set and reward functions. Nobody has to write an environment for
one question and one answer.

A row is the question, the policy answers once, and functions judge the answer: `(prompt, completion, row) -> float`, or
those written for TRL (`agentrl.env.reward_functions`). With functions as tools the policy may call them before it
answers. The rows are reset options, of `[[tasks]] rows = "train.jsonl"`; held-out ones are those of the argument
`rows`, by seed.
"""

from __future__ import annotations

import functools
import json
import logging
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

from agentrl import notices
from agentrl.env.chat_messages import plain_messages, plain_tools, without_padded_arguments
from agentrl.env.checks.tasks.verdicts import TaskText
from agentrl.env.core import Env, ResetResult, StepResult
from agentrl.env.datasets import read_rows
from agentrl.env.limits import EpisodeLimits, ParsePolicy, finite, positive_seconds
from agentrl.env.reward_functions import NOBODY_JUDGES, Answer, RewardFunction
from agentrl.env.reward_process import AnswerScores, RewardProcesses
from agentrl.env.tool_env import Grade, ToolEnv
from agentrl.env.tools.by_name import Named
from agentrl.env.tools.tools import CallResult, completion_messages, without_last_results
from agentrl.errors import EnvError, UsageError, boundary
from agentrl.records import Json, Message, Messages

ID: Final = "agentrl.env.dataset_env:RowsEnv"
"""The id of the environment of questions and answers in a run file."""
TOOLS_ID: Final = "agentrl.env.dataset_env:RowsToolEnv"
"""The id of the environment whose policy may call tools before it answers."""
IDS: Final = (ID, TOOLS_ID)

log = logging.getLogger(__name__)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


class RowsEnv(Env):
    """One question, one answer. `rewards` are references of functions (`module:name`, `file.py:name`), and `weights`
    what each is multiplied by (default: 1); the outcome is the sum. It is a success from `success_from` on.

    `prompt` is the question with the row's columns in braces; a column of chat messages may stand there alone. `rows`
    is a file, or `hf:NAME:SPLIT`, whose row `seed` modulo their number is the question of a reset without options.
    `answer` is the column of the right answer, which `agentrl validate` gives to the functions; nothing else reads it.

    The functions run in the main threads of at most `processes` processes, started as they are needed; with 0 in
    threads of this process, for functions that share something large. If they run for more than `reward_s` seconds for
    an answer, those that have not judged it yet give 0, as the answer could have caused that, and the info names them
    in `scores_late`; in a thread nothing ends them. The wait for a free process, its start, and time in which this
    machine gives it no processor do not count. A function that raises fails the episode. One that abstains (None, as
    in TRL) adds nothing, and has no entry in the info's `scores`. `tools` are refused: `RowsToolEnv` takes them."""

    replayable = True

    def __init__(
        self,
        *,
        rewards: Sequence[str],
        weights: Sequence[float] | None = None,
        prompt: str = "{prompt}",
        system: str | None = None,
        rows: str | None = None,
        answer: str = "answer",
        success_from: float = 1.0,
        processes: int = 8,
        reward_s: float = 20.0,
        tools: Sequence[Named] = (),
    ) -> None:
        if tools:
            raise UsageError(f"tools = {tools!r}: a question with one answer has none: give env.id = {TOOLS_ID!r}")
        if not _is_list(rewards) or not all(
            isinstance(reward_name, str) for reward_name in cast("Sequence[object]", rewards)
        ):
            raise UsageError(f"rewards = {rewards!r}: give a list of functions, as ['rewards.py:correct']")
        if not rewards:
            raise UsageError("rewards = []: name a function, as ['rewards.py:correct']")
        if weights is not None and (not _is_list(weights) or len(weights) != len(rewards)):
            raise UsageError(f"weights = {weights!r}: give one for each of the {len(rewards)} rewards")
        for weight_index, weight in enumerate(weights or ()):
            finite(f"weights[{weight_index}]", weight)
        finite("success_from", success_from)
        if type(processes) is not int or processes < 0:
            raise UsageError(f"processes = {processes!r}: give how many processes may score at once, or 0 for threads")
        self._processes, self._reward_s = processes, positive_seconds("reward_s", reward_s)
        text_fields: dict[str, object] = {"prompt": prompt, "system": system or "", "answer": answer}
        for field_name, field_text in text_fields.items():
            if not isinstance(field_text, str):
                raise UsageError(f"{field_name} = {field_text!r}: give a text")
        self._names = tuple(rewards)
        self._functions = {reward_name: RewardFunction.of(reward_name) for reward_name in rewards}
        self.needs_step_s, self.needs_step_by = reward_s, "reward_s"
        self._weights = tuple(weights) if weights is not None else (1.0,) * len(rewards)
        self._prompt, self._system, self._success_from = prompt, system, success_from
        self._rows = None if rows is None else read_rows(rows)
        self._answer, self.task_count, self.bad_tasks = answer, len(self._rows or ()), ()

    def task_texts(self) -> Sequence[TaskText]:
        """The question of each row, and its right answer where it has one. A row without a
        question has no words: its reset says why."""
        return [
            TaskText(
                task=f"row {row_index}",
                text=self._question(data_row),
                answer="" if data_row.get(self._answer) is None else str(data_row[self._answer]),
                options=data_row,
            )
            for row_index, data_row in enumerate(self._rows or ())
        ]

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        return self.ask(self.row_of(seed, options)), {}

    def step(self, action: str) -> StepResult:
        return (), 0.0, True, False, self.judge(action)

    def row_of(self, seed: int | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
        """The row that a reset asks: its options, or without any the row `seed` of `rows`."""
        if options:
            return dict(options)
        if not self._rows:
            raise UsageError("there is no row to ask: give [[tasks]] rows = FILE, or env.kwargs.rows")
        return dict(self._rows[(seed or 0) % len(self._rows)])

    def ask(self, row: Mapping[str, Any]) -> Messages:
        """The question of a row, to which the next answers belong."""
        self._row, self._opening = row, self._messages(row)
        self._name_unused(row)
        return self._opening

    def judge(self, completion: str, messages: Sequence[Message] = ()) -> dict[str, Json]:
        """The info of an answer: its outcome and what each function gives. `messages` are all of its episode after the
        question, if it is more than one."""
        is_talk_row = isinstance(self._row.get(self._column), list)
        whole_answer = Answer(
            prompt=self._opening, completion=completion, row=self._row, talk=is_talk_row, messages=messages
        )
        judgement = self._scores(whole_answer)
        for function_name in judgement.late:
            log.warning(
                "reward function %r had not judged an answer within reward_s = %g: 0", function_name, self._reward_s
            )
        judged_scores: dict[str, Json] = {
            function_name: function_score
            for function_name, function_score in judgement.scores.items()
            if function_score is not None
        }
        weight_by_name = dict(zip(self._names, self._weights, strict=True))
        # If every function abstains, the outcome is a 0 that looks like a wrong answer. It is counted and named, since
        # the row is for none of the functions, or a function compares the wrong column.
        if not judged_scores and not judgement.late:
            notices.note("rewards", NOBODY_JUDGES, by_policy=True)
        outcome = sum(
            weight_by_name[function_name] * (function_score or 0.0)
            for function_name, function_score in judgement.scores.items()
        )
        judged_info: dict[str, Json] = {
            "outcome": outcome,
            "success": outcome >= self._success_from,
            "scores": judged_scores,
        }
        if judgement.late:
            judged_info["scores_late"] = list(judgement.late)
        return judged_info

    @property
    def _column(self) -> str:
        """The column that holds the question, if the prompt is nothing else."""
        return self._prompt.strip("{}")

    def _name_unused(self, row: Mapping[str, Any]) -> None:
        """Name columns that other libraries give to the model, and those that no function of TRL's can see."""
        # Named and not used: other libraries hand these columns to the chat template, so whoever brings such a data set
        # expects them to be shown (law 8).
        for column_name in ("tools", "images", "image", "chat_template_kwargs"):
            if row.get(column_name) and f"{{{column_name}}}" not in self._prompt:
                notices.note("data rows", f"the column {column_name!r} is not shown to the model", by_policy=True)
        if any(function.batched for function in self._functions.values()):
            for column_name in sorted({"prompts", "completions"} & row.keys()):
                reason = f"reward functions get the run's own {column_name} by this name"
                notices.note("data rows", f"the column {column_name!r} is hidden: {reason}", by_policy=True)

    def _messages(self, row: Mapping[str, Any]) -> Messages:
        column_value = row.get(self._column)
        if self._column in row and (column_value is None or column_value in ("", [])):
            raise UsageError(
                f"the row's column {self._column!r} is {column_value!r}: there is nothing to ask; leave the row out"
            )
        if isinstance(column_value, list):
            try:
                plain_column = plain_messages(cast("list[Mapping[str, Any]]", column_value))
                messages = list(without_padded_arguments(plain_column, plain_tools(row.get("tools"))))
            except TypeError as column_error:
                raise UsageError(
                    f"the row's column {self._column!r} holds no chat messages: {column_error}"
                ) from column_error
            if not any(message["content"] or message.get("images") for message in messages):
                correction = "there is nothing to ask; leave the row out"
                raise UsageError(f"the row's column {self._column!r} has messages without content: {correction}")
        elif isinstance(column_value, Mapping) and {"role", "content"} <= column_value.keys():
            raise UsageError(f"the row's column {self._column!r} is a single message: give a list of messages")
        else:
            if isinstance(column_value, str) and is_talk(column_value):
                notice_text = (
                    f"the column {self._column!r} holds chat messages as JSON text, which is the prompt as it is"
                )
                notices.note("data rows", notice_text, by_policy=True)  # read in an episode, which nothing may end
            try:
                messages = [Message(role="user", content=_Cells().vformat(self._prompt, (), row))]
            except (KeyError, IndexError, ValueError, AttributeError) as column_error:
                column_names = ", ".join(sorted(row))
                raise UsageError(
                    f"prompt = {self._prompt!r} cannot be filled: {column_error}; a row has {column_names}"
                ) from column_error
        system_messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return (*system_messages, *messages)

    def _question(self, row: Mapping[str, Any]) -> str:
        with suppress(UsageError):
            return "\n".join(str(message["content"]) for message in self._messages(row))
        return ""

    def _scores(self, answer: Answer) -> AnswerScores:
        if self._processes:
            return _shared(self._names, self._processes).judge(answer, self._reward_s)
        function_scores: dict[str, float | None] = {}
        for function_name in self._names:
            with boundary(EnvError, f"the reward function {function_name!r} raised", place=True):
                function_scores[function_name] = self._functions[function_name](answer)
        return AnswerScores(function_scores)


class RowsToolEnv(ToolEnv):
    """A question, tools, and one answer, as with TRL's `GRPOTrainer(tools=[multiply])`. `tools` are functions with type
    hints and a docstring, as for `@agentrl.tool`, or their references; `agentrl.env.tools.by_name` has what else they
    may be. `rewards` and the other `rows_settings` are those of `RowsEnv`.

    The policy calls tools and reads their results. Its first turn without a call is the answer: it ends the episode and
    is judged. A limit, such as `limits = { turns = 4 }`, may end the episode before that; then its last turn is judged,
    calls included.

    Reward functions get the text of that turn as completion. Where a row's prompt is a list of messages, those of TRL
    get the messages of the whole episode: with `tool_calls`, and the answers of the tools. As in TRL, the last one is
    the policy's: results that it never read are left out.

    A tool raises `ToolError` for what the policy should read. Against TRL's rule any other exception fails the episode,
    as it may be no doing of the policy's. It does not promise replay, since a tool may do anything."""

    def __init__(
        self,
        *,
        tools: Sequence[Named],
        rewards: Sequence[str],
        box: Mapping[str, Any] | None = None,
        limits: EpisodeLimits | Mapping[str, Any] | None = None,
        parse_policy: ParsePolicy | Mapping[str, Any] | None = None,
        tool_format: str | None = None,
        **rows_settings: Any,
    ) -> None:
        if not _is_list(tools) or not tools:
            raise UsageError(f"tools = {tools!r}: give a list of functions, as ['tools.py:multiply']")
        super().__init__(tools=tools, box=box, limits=limits, parse_policy=parse_policy, tool_format=tool_format)
        self._rows = RowsEnv(rewards=rewards, **rows_settings)
        self.needs_step_s, self.needs_step_by = self._rows.needs_step_s, self._rows.needs_step_by
        self._action = ""
        self._messages: list[Message] = []

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        return self._rows.row_of(self._seed, options)

    def prompt(self, task: Mapping[str, Json]) -> Messages:
        self._action, self._messages = "", []
        return self._rows.ask(task)

    async def astep(self, action: str) -> StepResult:
        self._action = action
        return await super().astep(action)

    def on_text(self, text: str) -> None:
        """Take a turn without a call for the answer."""
        self.finish()

    def after_turn(self, results: Sequence[CallResult]) -> None:
        self._messages += completion_messages(self._format.parse(self._action, self.schemas), self._action, results)

    def grade(self) -> Grade:
        judged_info = self._rows.judge(self._action, without_last_results(self._messages))
        outcome, success = cast("float", judged_info.pop("outcome")), bool(judged_info.pop("success"))
        return Grade(outcome=outcome, success=success, info=judged_info)


class _Cells(string.Formatter):
    """Fills a prompt with the cells of a row: lists, objects and truth values as JSON, not as Python writes them; a
    null as nothing, which is named."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            notices.note("data rows", "a null in a column of the prompt is written as nothing", by_policy=True)
            return ""
        if isinstance(value, dict | list | bool):
            return json.dumps(value, ensure_ascii=False)
        return str(super().format_field(value, format_spec))


def is_talk(text: str) -> bool:
    """Whether a text is the JSON of chat messages."""
    if not text.startswith("[{"):
        return False
    try:
        json_values: Any = json.loads(text)
    except ValueError:
        return False
    return all(
        isinstance(list_entry, dict) and "role" in list_entry and "content" in list_entry
        for list_entry in cast("list[Any]", json_values)
    )


@functools.cache
def _shared(names: tuple[str, ...], most: int) -> RewardProcesses:
    """The processes that all episodes of this process share."""
    return RewardProcesses(names, most)
