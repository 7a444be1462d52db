"""Common parts of the run file's sections, and some of the sections: environment, curriculum, buffer, reward sources,
evaluation and sandbox. `agentrl.config` has the others.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agentrl.errors import ConfigError
from agentrl.host.platform_checks import default_sandbox
from agentrl.records import SamplingParams

_Section = TypeVar("_Section", bound=BaseModel)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Wait = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["always"]
Gpus = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Resume = Literal["tokens", "turns", "episode", "group"]


def check_template(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a chat template as they are. Raises ConfigError for what they may not be."""
    if own_names := sorted({"messages", "tools", "add_generation_prompt"} & arguments.keys()):
        raise ConfigError("template", own_names, "an episode says these itself: leave them out")
    try:
        json.dumps(arguments)
    except TypeError as json_error:
        raise ConfigError("template", arguments, f"a chat template takes what JSON can say: {json_error}") from None
    return arguments


def switched_off(table: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """A table of the run file with None for each setting of `model` that may be None and is `false` or "off" there:
    TOML has no null. A setting that takes a text keeps "off"."""

    def admits(name: str, kind: type) -> bool:
        type_parts = get_args(model.model_fields[name].annotation) if name in model.model_fields else ()
        return kind in [
            get_args(type_part)[0] if get_origin(type_part) is Annotated else type_part for type_part in type_parts
        ]

    return {
        setting_name: None
        if admits(setting_name, NoneType)
        and (setting_value is False or (setting_value == "off" and not admits(setting_name, str)))
        else setting_value
        for setting_name, setting_value in table.items()
    }


class Section(BaseModel):
    """A table of the run file: unknown keys are refused, and nothing changes after it was read."""

    # `strict`, as pydantic would otherwise read "16" as a number and 1 as true: in a run file each of them is a slip
    # that somebody should hear about. `frozen`, as a section is shared between all parts of a process.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _off(cls, table: Any) -> Any:
        return switched_off(cast("dict[str, Any]", table), cls) if isinstance(table, dict) else table


class EnvSource(Section):
    """Environment of the training tasks: its id, its arguments and its reward."""

    id: str
    """Environment to train in: a registered id, `module:Class` or `file.py:Class`. Without it, the environment of the
    first `[[tasks]]` table."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor. A `[[tasks]]` or `[[eval.sets]]` table of the same environment may
    override single ones."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Reset options of every episode. A `[[tasks]]` or `[[eval.sets]]` table of the same environment may override
    single ones."""

    reward: str | None = None
    """Rewarder that replaces the environment's outcome, as `module:name` or `file.py:name`: a function from a
    trajectory to a float, or a judge."""


class CurriculumSettings(Section):
    """Pauses tasks that the policy almost always or almost never solves. See `agentrl.env.tasks.Curriculum`."""

    pool: Count = 10_000
    """Largest number of tasks that the curriculum chooses from: the first ones of the task sources."""


class BufferSettings(Section):
    """Limits how far generation may run ahead, and sets which groups the learner takes and what the store keeps."""

    groups_per_step: Count = 16
    """Number of groups that one optimizer step learns from."""

    max_lag: Annotated[int, Field(ge=0)] = 4
    """Maximum age of a sampled token in optimizer steps; older tokens never enter the loss. 0 is synchronous
    training."""

    max_tokens: Count | None = None
    """Number of sampled tokens in the buffer from which only groups for the next step start. Without it, there is no
    limit. Set it to bound memory where lengths differ much."""

    order: Annotated[str, Field(min_length=1)] = "oldest"
    """Order in which the learner takes groups: `oldest`, `windowed`, `freshest`, `prioritised`, a registered order, or
    `module:Class`. See `docs/explanation/buffer.md`."""

    skip_without_signal: bool | Literal["auto"] = "auto"
    """Drops groups without any advantage, at most `buffer.groups_per_step` per step, and plays others instead. Groups
    of an algorithm that learns from equal returns stay; if all algorithms do, `true` is refused. Choose `false`, which
    trains every group, where sampling costs more than training."""

    close: Literal["auto", "full", "quorum"] | int = "auto"
    """Rule that closes a group: once all members have ended (`full`), three in four are scored (`quorum`), or so many
    are scored (a number from 2). `auto` is `quorum`, but `full` if `buffer.max_lag = 0`."""

    quorum_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Seconds to wait for a group's remaining members once its quorum is reached. Choose less than an optimizer step
    takes."""

    wait_at_bound: Wait = "always"
    """Limit of the learner's wait for running episodes that its next step would make too old: `always` waits until they
    end, 0 never waits, and another number bounds all waits of the run to so many times the learner's working time."""

    keep_steps: Annotated[int, Field(ge=0)] = 50
    """Number of optimizer steps before the oldest checkpoint whose trained groups keep their tokens in the store. Of
    older groups one in fifty does. Lower it to save disk space."""

    @field_validator("close")
    @classmethod
    def _several(cls, close: str | int) -> str | int:
        if isinstance(close, int) and close < 2:
            raise ConfigError("buffer.close", close, "give auto, full, quorum, or the number of scored members, from 2")
        return close

    @property
    def synchronous(self) -> bool:
        """Whether a step trains only what the weights before it sampled."""
        return self.max_lag == 0

    @property
    def steps_ahead(self) -> int:
        """How many optimizer steps may train a token, the one after the weights that sampled it among them."""
        return self.max_lag + 1

    @property
    def groups_ahead(self) -> int:
        """How many groups may be under way or buffered, from the learner's step on, within `max_lag`."""
        return self.steps_ahead * self.groups_per_step

    @property
    def patience(self) -> float:
        """`wait_at_bound` as a number; always is inf."""
        return math.inf if self.wait_at_bound == "always" else self.wait_at_bound

    @property
    def skips(self) -> int:
        """The most groups without signal that leave for one step. With "auto" too: those of an algorithm that learns
        from equal returns never leave."""
        return self.groups_per_step if self.skip_without_signal else 0


PIVOT_RULES = ("uniform", "entropy", "low_reward")


class PivotSettings(Section):
    """Forks of played episodes: a group that continues an episode from one of its turns, in place of a new group."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the closed groups that get a fork, chosen at random."""

    k: Annotated[int, Field(ge=2)] = 4
    """Number of members of a fork, at most `rollout.group_size`."""

    rule: str = "uniform"
    """Rule that chooses the turn of a fork: any turn (`uniform`), the one with the least expected tokens (`entropy`),
    the first with a negative process reward (`low_reward`), or `module:function` of yours."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.rule not in PIVOT_RULES and ":" not in self.rule:
            hint = f"give {', '.join(PIVOT_RULES)}, or the module:function of yours"
            raise ConfigError("rollout.pivot.rule", self.rule, hint)
        return self


_ASK_FOR_NOTES = (
    "Your context is nearly full. Write down all that you need to go on: only the task and these notes will remain."
)


class CompactionSettings(Section):
    """Shortens a conversation that outgrows its context, so that the episode can go on. See
    `docs/how-to/long-episodes.md`."""

    at: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Share of `rollout.max_context` at which the conversation is shortened. The rest must hold one more answer and the
    policy's notes."""

    how: str = "summary"
    """Method: the policy writes notes (`summary`), old tool answers lose their text (`drop_tools`), or
    `module:function` of yours."""

    request: Annotated[str, Field(min_length=1)] = _ASK_FOR_NOTES
    """User message that asks for the notes of `rollout.compaction.how = "summary"`."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.how not in ("summary", "drop_tools") and ":" not in self.how:
            hint = "give summary, drop_tools, or the module:function of yours"
            raise ConfigError("rollout.compaction.how", self.how, hint)
        return self


class RewardSource(Section):
    """Scores single turns, in addition to the environment. See `docs/how-to/process-rewards.md`."""

    source: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    """Name of the source in tables and records. `env` is reserved for the environment."""

    kind: Literal["callable", "shaping", "tests", "prm", "judge", "agent_judge", "teacher", "overlong"]
    """Scorer of a turn: a function (`callable`), differences of a potential (`shaping`), tests in a fresh box
    (`tests`), a reward model (`prm`), a chat model with a rubric (`judge`), one with tools over the finished work
    (`agent_judge`), a teacher model (`teacher`), or a cost of long turns (`overlong`). See
    `docs/how-to/process-rewards.md`."""

    call: str | None = None
    """Function as `module:name` or `file.py:name`. For `callable` and `shaping` it maps the trajectory up to the turn
    to a float; for `tests` and `agent_judge` it maps the task to more test files, by their paths."""

    command: list[str] = Field(default_factory=list)
    """Command that runs the `tests` in their box, as a list of words. With `shaping`, the share of passed tests becomes
    the potential; an `agent_judge` reads it in its instructions."""

    files: str | None = None
    """Folder of test files to copy into the test box, beside the agent's work. A relative path starts at the run file's
    folder."""

    score: Literal["share", "exit", "number"] = "share"
    """Reading of a test run: the share of passed tests (`share`), 1 for exit code 0 (`exit`), or the last line that the
    command prints, a number from 0 to 1 (`number`)."""

    sandbox: str = Field(default_factory=default_sandbox)
    """Backend that makes the boxes for tests, such as `bubblewrap` or `docker`."""

    image: str | None = None
    """Image of the boxes for tests. Without it, the backend's default."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount in the formula of `shaping`. Give it the value of `algo.discount`."""

    margin_tokens: Count | None = None
    """Number of tokens before `rollout.max_tokens_per_turn` over which the cost of `overlong` rises from 0 to 1."""

    url: str | None = None
    """URL of the server, for `prm`, `judge`, `agent_judge` and `teacher`. A teacher at `policy` is the run's own
    engines."""

    prompt: str | None = None
    """System message that only the teacher reads, before the episode."""

    envs: list[str] = Field(default_factory=list)
    """Ids of the environments that the teacher teaches. An empty list means all."""

    model: str | None = None
    """Name by which the server knows the model. Without it, the server's only model."""

    api_key_env: str | None = None
    """Environment variable with the key for the server at `rewards.url`. Without it, none is sent; the run's own
    engines need none."""

    rubric: str | None = None
    """Rubric by which a `judge` scores the last action, and an `agent_judge` the finished work, from 0 to 1."""

    label: Annotated[int, Field(ge=0)] = 0
    """Index of the output that is the score, for a reward model with several (`prm`)."""

    activation: bool = False
    """Applies a sigmoid (one output) or softmax (several) to a reward model's outputs (`prm`)."""

    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of the source's score in a turn's process reward. A teacher's scores are no part of the reward."""

    concurrency: Count = 8
    """Maximum number of simultaneous calls to the source."""

    call_deadline_s: Positive = 30.0
    """Seconds after which one call counts as failed. A test command may run for two thirds of them, and gets 0 beyond;
    the rest is for making its box. An `agent_judge` needs some minutes."""

    retries: Annotated[int, Field(ge=0)] = 2
    """Number of repeated calls after a failed call."""

    deadline_s: Positive = 120.0
    """Seconds to wait for missing scores after an episode's end; then `rewards.late` applies. It must be below
    `train.stall_deadline_s`."""

    late: Literal["drop", "neutral", "partial"] = "drop"
    """Treatment of an episode that lacks scores at `rewards[].deadline_s`: `drop` removes it from loss and baseline,
    `neutral` ignores all its scores of this source, `partial` counts those that arrived. A teacher needs `partial`;
    `shaping` excludes it."""

    @property
    def box_s(self) -> float:
        """Seconds that a test command may run. Less than the call has, or work that hangs would be a failure of the
        host, which leaves the loss, and not of the policy (law 3)."""
        return self.call_deadline_s * 2 / 3

    @property
    def measure(self) -> str:
        """Measure of a turn: the kind, or a shaping's potential."""
        if self.kind == "shaping":
            return "tests" if self.command else "callable"
        return self.kind

    @property
    def reads_work(self) -> bool:
        """Whether it reads the files of the agent's work, and needs a box for them."""
        return self.measure in ("tests", "agent_judge")

    def beside(self, folder: Path) -> Self:
        """Return these settings with a folder of tests taken from `folder`."""
        return self if self.files is None else self.model_copy(update={"files": str((folder / self.files).resolve())})

    def api_key(self) -> str | None:
        """The key for `url`. Raises ConfigError if the variable that should hold it is not set."""
        if self.api_key_env is None:
            return None
        if not (variable_value := os.environ.get(self.api_key_env)):
            raise ConfigError(
                "rewards.api_key_env", self.api_key_env, "this environment variable is not set: export it"
            )
        return variable_value

    @model_validator(mode="after")
    def _possible(self) -> Self:
        needed_by_kind = {
            "callable": ("call",),
            "tests": ("command",),
            "judge": ("url", "rubric"),
            "agent_judge": ("url", "rubric"),
            "overlong": ("margin_tokens",),
        }
        for setting_name in needed_by_kind.get(self.measure, ("url",)):
            if not getattr(self, setting_name):
                hint = f"a source of kind {self.kind!r} needs it"
                raise ConfigError(f"rewards.{setting_name}", getattr(self, setting_name), hint)
        if self.url is not None and not (self.kind == "teacher" and self.url == "policy"):
            check_url("rewards.url", self.url)
        # Ng et al. (1999): shaping leaves the best policy as it is because the differences add up to nothing over an
        # episode. With some of them missing they do not.
        if self.kind == "shaping" and self.late == "partial":
            hint = "a part of the differences of a potential adds up to a reward: give 'drop' or 'neutral'"
            raise ConfigError("rewards.late", self.late, hint)
        if self.kind == "teacher" and self.late != "partial":
            hint = "a teacher that is late or refuses must not take an episode out: give 'partial'"
            raise ConfigError("rewards.late", self.late, hint)
        if self.source == "env":
            raise ConfigError("rewards.source", "env", "this is the environment itself: choose another name")
        return self


class HeldOut(Section):
    """Held-out evaluation set: `n` tasks that training does not use."""

    name: str
    """Name of the set in tables and curves."""

    id: str | None = None
    """Environment of the set: a registered id, `module:Class` or `file.py:Class`. Without it, the training
    environment."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor, laid over `env.kwargs` in the training environment."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Reset options of the set's episodes, laid over `env.options` in the training environment."""

    n: Count = 256
    """Number of tasks, each played in `eval.samples` episodes. Without it, a set of rows has each row once."""

    first_seed: Annotated[int, Field(ge=0)] = 1_000_000_000
    """First seed of the set's tasks. Keep it far from the seeds of training."""


Action = Literal["warn", "lower_lag", "stop"]
Watched = Literal["mismatch", "ess", "kl", "entropy", "clip", "non_finite", "routing"]


class Alarms(Section):
    """Thresholds for the measures of an optimizer step, and the actions beyond them. See
    `docs/reference/metrics.md`."""

    mismatch_above: Positive | None = 0.2
    """Threshold in nats for the mean absolute difference between the log-probabilities of engine and learner on fresh
    tokens (lag 0)."""

    ess_below: Annotated[float, Field(ge=0, le=1)] | None = 0.3
    """Threshold for the effective sample size, as a share of the sample size."""

    kl_above: Positive | None = 0.3
    """Threshold for the KL divergence of the behaviour policy to the learner, in nats per token."""

    entropy_below: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Threshold for the policy's entropy, in nats. There is no default, as the right value depends on the model."""

    clip_above: Annotated[float, Field(ge=0, le=1)] | None = 0.5
    """Threshold for the share of tokens that the algorithm's clip cut."""

    actions: dict[Watched, Action] = Field(default_factory=dict[Watched, Action])
    """Actions by alarm name (`mismatch`, `ess`, `kl`, `entropy`, `clip`, `non_finite`, `routing`), by default `warn`,
    which prints a line. `lower_lag` halves `buffer.max_lag` until 10 steps have passed without such an alarm; `stop`
    saves and ends the run."""

    def action(self, name: Watched) -> Action:
        """Return what the alarm of that name does."""
        return self.actions.get(name, "warn")


class Evaluation(Section):
    """Measures the policy on held-out sets. Every set runs before and after training; the sets of `during` also run
    every `every` optimizer steps."""

    every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between evaluations during training. 0 evaluates only before and after it."""

    during: list[str] | None = None
    """Names of the held-out sets to measure during training. Without it, the first one."""

    n_during: Count = 96
    """Largest number of tasks of each set in an evaluation during training."""

    engines: Annotated[int, Field(ge=0)] | list[Gpus] = 0
    """Number of engines for evaluation during training alone, or with vLLM their GPUs, such as `[[1], [2]]`. 0
    evaluates on the training engines."""

    samples: Count = 1
    """Number of episodes of each task, from which pass@k is reported for k = 1, 2, 4, … up to it."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Sampling temperature of evaluation. 0 is greedy. Without it, `rollout.temperature`."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Probability mass that evaluation samples from. Without it, `rollout.top_p`."""

    sets: list[HeldOut] = Field(default_factory=list[HeldOut])

    @model_validator(mode="after")
    def _named(self) -> Self:
        set_names = [held_out.name for held_out in self.sets]
        if unknown_names := [during_name for during_name in self.during or () if during_name not in set_names]:
            hint = (
                f"no held-out set of that name: give some of {', '.join(set_names)}"
                if set_names
                else "there is no [[eval.sets]]"
            )
            raise ConfigError("eval.during", unknown_names[0], hint)
        return self

    @property
    def engine_gpus(self) -> list[list[int]]:
        """The GPUs of each engine of evaluation; none where they have no GPU."""
        return [[]] * self.engines if isinstance(self.engines, int) else self.engines

    @property
    def sets_during(self) -> list[HeldOut]:
        """The sets that are measured during training."""
        return (
            self.sets[:1]
            if self.during is None
            else [each_set for each_set in self.sets if each_set.name in self.during]
        )

    def sampling(self, training: SamplingParams, engine: str) -> SamplingParams:
        """How to sample in an evaluation of a run that trains with `training`. A vLLM that returns kept sets takes no
        greedy request, so it gets top-k 1 at temperature 1."""
        overrides = {setting_name: getattr(self, setting_name) for setting_name in ("temperature", "top_p")}
        sampling = replace(
            training,
            **{setting_name: own_value for setting_name, own_value in overrides.items() if own_value is not None},
        )
        if sampling.temperature == 0 and training.cuts and engine == "vllm":
            return replace(sampling, temperature=1.0, top_k=1)
        return sampling


def check_temperatures(engine: str, **temperatures: float | None) -> None:
    """Raises ConfigError for a temperature, by its section, that vLLM refuses or would change silently."""
    for section_name, temperature in temperatures.items():
        if engine == "vllm" and temperature and not 0.01 <= temperature <= 2:
            hint = "vLLM samples at 0.01 to 2, and takes what is colder for 0.01: give one in between"
            raise ConfigError(f"{section_name}.temperature", temperature, hint)


def check_sources(sources: Sequence[RewardSource], max_tokens: int, *, stall_deadline_s: float) -> None:
    """Raises ConfigError for sources of one name, one for which a run would wait until it ends as standing still, or
    one that punishes a turn from before its first of `max_tokens` on."""
    source_names = [reward_source.source for reward_source in sources]
    if len(set(source_names)) != len(source_names):
        raise ConfigError("rewards.source", source_names, "each source has a name of its own")
    for reward_source in sources:
        if reward_source.margin_tokens is not None and reward_source.margin_tokens > max_tokens:
            hint = f"must be at most rollout.max_tokens_per_turn = {max_tokens}, where a turn is cut"
            raise ConfigError("rewards.margin_tokens", reward_source.margin_tokens, hint)
        if reward_source.deadline_s >= stall_deadline_s:
            hint = f"must be below train.stall_deadline_s = {stall_deadline_s:g}, or a silent source ends the run"
            raise ConfigError("rewards.deadline_s", reward_source.deadline_s, hint)


URL_SCHEMES = ("http://", "https://", "unix://")
"""How the URLs of servers begin; after the last comes the path of a Unix socket."""


def check_url(field: str, url: str) -> str:
    """Return the URL of a server unchanged. Raises ConfigError for one that no server can have."""
    try:
        url_parts = urlsplit(url)
        is_complete = url_parts.scheme in ("http", "https") and url_parts.hostname and url_parts.port != 0
        is_complete = is_complete or url.startswith("unix:///")
    except ValueError:  # of the port
        is_complete = False
    if not is_complete:
        raise ConfigError(field, url, "give the URL of a server, as http://HOST:8000 or unix:///run/engine.sock")
    return url


def check_weights_url(weights_url: str | None) -> None:
    """Raises ConfigError for what is no URL of a folder."""
    if weights_url is not None and not re.match(r"[a-z][a-z0-9+.-]*://.", weights_url):
        hint = 'must be a URL: "s3://bucket/folder", or "file:///folder" for one that all machines mount'
        raise ConfigError("engine.weights_url", weights_url, hint)


def config_error(error: ValidationError, model: type[BaseModel], section: tuple[str, ...] = ()) -> ConfigError:
    """The first thing wrong with a document of `model`, which is the run file's `section`: field, value and hint."""
    first_error = error.errors()[0]
    setting_path = _place(model, first_error["loc"])
    field_name = ".".join(str(path_part) for path_part in (*section, *setting_path))
    # Pydantic has an error for each kind of value, and its own name for the kind.
    if len(setting_path) < len(first_error["loc"]):
        kind_errors = [
            other_error for other_error in error.errors() if other_error["loc"][: len(setting_path)] == setting_path
        ]
        corrections = dict.fromkeys(_hint(other_error["msg"]).removeprefix("Input ") for other_error in kind_errors)
        wrong_value = min(kind_errors, key=lambda other: len(other["loc"]))["input"]
        return ConfigError(field_name, wrong_value, ", or ".join(corrections))
    if first_error["type"] == "extra_forbidden":
        known_keys, last_key = _keys_of(model, first_error["loc"][:-1]), str(first_error["loc"][-1])
        close_keys = difflib.get_close_matches(last_key, known_keys, n=1)
        hint = (
            f"no such key; did you mean {close_keys[0]!r}?"
            if close_keys
            else f"no such key; known: {', '.join(sorted(known_keys))}"
        )
        return ConfigError(field_name, first_error["input"], hint)
    if first_error["type"] == "missing":
        return ConfigError(field_name, None, "give it a value", is_missing=True)
    hint, wrong_value = _hint(first_error["msg"]), first_error["input"]
    if isinstance(wrong_value, dict):  # settings of a section that do not go together: those that the hint names
        wrong_value = {
            setting_name: each_value
            for setting_name, each_value in cast("dict[str, Any]", wrong_value).items()
            if setting_name in hint
        }
    return ConfigError(field_name, wrong_value, hint)


def _hint(message: str) -> str:
    """A message of pydantic in the words of a run file, which has lists and tables."""
    hint_words = message.removeprefix("Value error, ")
    for python_words, toml_words in (
        ("a valid tuple", "a list"),
        ("a valid list", "a list"),
        ("a valid dictionary", "a table"),
    ):
        hint_words = hint_words.replace(python_words, toml_words)
    return hint_words


def read_section(model: type[_Section], settings: _Section | Mapping[str, Any] | None, name: str) -> _Section:
    """A section of the run file from a table of its settings; one that is read already is returned as it is. Raises
    ConfigError, which names the setting in the section `name`."""
    if isinstance(settings, model):
        return settings
    try:
        return model.model_validate({} if settings is None else dict(cast("Mapping[str, Any]", settings)))
    except ValidationError as error:
        raise config_error(error, model, (name,)) from None


def _place(model: Any, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The path of a setting, without what pydantic puts behind one that takes several kinds of values."""
    for part_index, path_part in enumerate(loc):
        if isinstance(path_part, int):
            continue
        if path_part not in getattr(model, "model_fields", {}):
            break
        annotation = model.model_fields[path_part].annotation
        value_kinds = [value_kind for value_kind in get_args(annotation) if value_kind is not NoneType]
        if get_origin(annotation) in (Union, UnionType) and len(value_kinds) > 1:
            return loc[: part_index + 1]
        model = value_kinds[0] if value_kinds else annotation
    return loc


def _keys_of(model: Any, path: tuple[int | str, ...]) -> list[str]:
    """The keys of the table at `path`, which pydantic gives for an unknown key: a close one is proposed."""
    for path_part in path:
        if isinstance(path_part, int):
            continue
        annotation = model.model_fields[path_part].annotation
        if get_origin(annotation) is not None:  # a list of sections, or a section that may be left out
            annotation = get_args(annotation)[0]
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)


class DockerSettings(Section):
    """Docker engine that makes the boxes of the backend `docker`, for a whole run. Without these settings, docker's own
    environment variables choose it."""

    base_url: str | None = None
    """Address of the docker engine: `tcp://HOST:2376` or `unix:///PATH`. Without it, `DOCKER_HOST`, else docker's
    socket on this machine."""

    cert_path: str | None = None
    """Folder with `ca.pem`, `cert.pem` and `key.pem`, required for a `tcp://` address and refused for others. A
    relative path starts at the run file's folder; on a cluster every node needs it."""

    image: str | None = None
    """Image of boxes whose environment names none. Without it, such an environment gets no box."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        url_parts = urlsplit(self.base_url or "")
        if self.base_url and (url_parts.scheme not in ("tcp", "unix") or not (url_parts.netloc or url_parts.path)):
            raise ConfigError("sandbox.docker.base_url", self.base_url, "give tcp://HOST:2376 or unix:///PATH")
        if url_parts.scheme == "tcp" and self.cert_path is None:
            hint = f"{self.base_url} is reached over TLS alone: give the folder of ca.pem, cert.pem and key.pem"
            raise ConfigError("sandbox.docker.cert_path", None, hint)
        if url_parts.scheme != "tcp" and self.cert_path is not None:
            hint = "it is for an engine over TLS: give base_url = 'tcp://HOST:2376' as well, or leave it out"
            raise ConfigError("sandbox.docker.cert_path", self.cert_path, hint)
        return self


class BubblewrapSettings(Section):
    """Folders that the boxes of the backend `bubblewrap` see beside this machine's /usr, for a whole run."""

    readonly: dict[str, str] = Field(default_factory=dict)
    """Read-only folders in every box: a table from absolute paths here to absolute paths in the box."""

    @model_validator(mode="after")
    def _absolute(self) -> Self:
        for source_path, target_path in self.readonly.items():
            if not (source_path.startswith("/") and target_path.startswith("/")):
                hint = "give absolute paths: { '/opt/agents' = '/opt/agents' }"
                raise ConfigError("sandbox.bubblewrap.readonly", self.readonly, hint)
        return self


class Sandboxes(Section):
    """Settings of the sandbox backends. The environment chooses which backend makes its boxes."""

    bubblewrap: BubblewrapSettings = BubblewrapSettings()
    docker: DockerSettings = DockerSettings()

    swe_rex: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the backend `swe-rex`: `deployment`, `network`, `image`, and the fields of SWE-ReX's configuration
    of that deployment."""

    inspect: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the backend `inspect`: `kind`, `config`, `network` and `image`."""

    def beside(self, folder: Path) -> Self:
        """Return these settings with a folder of certificates taken from `folder`."""
        if self.docker.cert_path is None:
            return self
        certificate_path = str((folder / Path(self.docker.cert_path).expanduser()).resolve())
        return self.model_copy(update={"docker": self.docker.model_copy(update={"cert_path": certificate_path})})

    def arguments(self) -> dict[str, dict[str, Any]]:
        """Return the arguments of each backend's constructor, by its registry id."""
        by_backend = {
            "bubblewrap": self.bubblewrap.model_dump(),
            "swe-rex": dict(self.swe_rex),
            "inspect": dict(self.inspect),
        }
        return {"docker": self.docker.model_dump(exclude_none=True), **by_backend}
