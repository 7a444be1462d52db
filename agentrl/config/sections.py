"""What the sections of the run file are made of, and some of them: environment, curriculum, buffer, reward sources,
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
from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentrl.errors import ConfigError
from agentrl.records import SamplingParams

_Section = TypeVar("_Section", bound=BaseModel)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Wait = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["always"]
Gpus = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Resume = Literal["tokens", "turns", "episode", "group"]


def check_template(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a chat template as they are. Raises ConfigError for what they may not be."""
    if ours := sorted({"messages", "tools", "add_generation_prompt"} & arguments.keys()):
        raise ConfigError("template", ours, "an episode says these itself: leave them out")
    try:
        json.dumps(arguments)
    except TypeError as error:
        raise ConfigError("template", arguments, f"a chat template takes what JSON can say: {error}") from None
    return arguments


def switched_off(table: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """A table of the run file with None for each setting of `model` that may be None and is given as `false` or "off",
    as TOML has no null. Where a text may be given, "off" is one."""

    def admits(name: str, kind: type) -> bool:
        parts = get_args(model.model_fields[name].annotation) if name in model.model_fields else ()
        return kind in [get_args(part)[0] if get_origin(part) is Annotated else part for part in parts]

    return {
        name: None
        if admits(name, NoneType) and (value is False or (value == "off" and not admits(name, str)))
        else value
        for name, value in table.items()
    }


class Section(BaseModel):
    """A table of the run file: unknown keys are refused, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _off(cls, given: Any) -> Any:
        return switched_off(cast("dict[str, Any]", given), cls) if isinstance(given, dict) else given


class EnvSource(Section):
    """Which tasks: environment id, constructor arguments, and the stream of seeds."""

    id: str  # environment: an id, module:Class or file.py:Class
    kwargs: dict[str, Any] = Field(default_factory=dict)  # arguments of its constructor
    options: dict[str, Any] = Field(default_factory=dict)  # reset options of every episode
    first_seed: Annotated[int, Field(ge=0)] = 0  # where the stream of seeds begins
    reward: str | None = None  # module:name of a rewarder (trajectory -> float, a judge) in the place of its outcome


class CurriculumSettings(Section):
    """Which tasks are left out for a while: see `agentrl.env.tasks.Curriculum`."""

    pool: Count = 10_000  # tasks it chooses from: the first ones of its sources
    solved: Annotated[float, Field(ge=0, le=1)] = 0.95  # smoothed success rate from which a task pauses
    hopeless: Annotated[float, Field(ge=0, le=1)] = 0.02  # and down to which
    min_plays: Count = 8  # episodes of a task before it may pause
    pause: Count = 1_000  # groups of others before it is tested again
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.5  # weight of what was measured before


class BufferSettings(Section):
    """How far generation may run ahead, which groups the learner takes, and what the store keeps."""

    groups_per_step: Count = 16  # groups that one optimizer step learns from
    max_lag: Annotated[int, Field(ge=0)] = 4  # optimizer steps; 0 is synchronous training
    max_tokens: Count | None = None  # sampled tokens that wait: from then on only groups for the next step start
    order: Annotated[str, Field(min_length=1)] = "oldest"  # of groups: windowed, freshest, prioritised, module:Class
    window: Annotated[float, Field(gt=0, le=1)] = 0.3  # of order windowed: the share of groups it takes from
    skip_without_signal: bool | Literal["auto"] = "auto"  # groups without any advantage leave, others take their place
    skip_at_most: Positive = 1.0  # times groups_per_step, for one step: then it takes groups without signal as well
    close: Literal["auto", "full", "quorum"] = "auto"  # of groups: by the last member or a quorum; auto: full at lag 0
    quorum: Annotated[int, Field(ge=2)] | None = None  # scored members that close a group; default: three in four
    quorum_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0  # that it then waits for the others
    wait_at_bound: Wait = "always"  # for episodes that a step makes too old; or times as long as the learner works
    keep_steps: Annotated[int, Field(ge=0)] = 50  # trained groups of so many last steps keep their token arrays
    keep_sample: Annotated[float, Field(ge=0, le=1)] = 0.02  # and this share of the older ones

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
        return math.ceil(self.skip_at_most * self.groups_per_step) if self.skip_without_signal else 0


def as_stored(document: Any) -> Any:
    """A run's stored settings with what an older agentrl, which did not store them, meant: it skipped no group, and
    computed a prompt in every pass; its store could be in several databases. What is no table is left to be refused."""
    if not isinstance(document, dict):
        return document
    table = cast("dict[str, Any]", document)
    for name, meant in (("buffer", {"skip_without_signal": False}), ("train", {"prompt_once": False})):
        own = table.get(name, {})
        if isinstance(own, dict):
            table = table | {name: meant | cast("dict[str, Any]", own)}
    match table.get("cluster"):
        case {"store": [first, *_]} as cluster:
            table = table | {"cluster": {**cast("dict[str, Any]", cluster), "store": first}}
        case _:
            pass
    return table


PIVOT_RULES = ("uniform", "entropy", "low_reward")


class PivotSettings(Section):
    """Forks of played episodes: a group that plays one on from one of its turns, in the place of a new group."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.25  # of the groups that closed, those that get a fork
    k: Annotated[int, Field(ge=2)] = 4  # members of a fork
    rule: str = "uniform"  # which turn: uniform, entropy, low_reward, or the module:function of yours
    below: Annotated[float, Field(allow_inf_nan=False)] = 0.0  # low_reward: a turn with less is played anew

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
    """A conversation that outgrows its context goes on from less of it. See `docs/how-to/long-episodes.md`."""

    at: Annotated[float, Field(gt=0, lt=1)] = 0.6  # share of max_context; the rest is for one more answer and the notes
    how: str = "summary"  # the policy writes notes; drop_tools: old tool answers go; or the module:function of yours
    request: Annotated[str, Field(min_length=1)] = _ASK_FOR_NOTES  # summary: the user's message that asks for the notes
    keep: Annotated[int, Field(ge=0)] = 1  # drop_tools: so many of the newest tool answers stay

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.how not in ("summary", "drop_tools") and ":" not in self.how:
            hint = "give summary, drop_tools, or the module:function of yours"
            raise ConfigError("rollout.compaction.how", self.how, hint)
        return self


class RewardSource(Section):
    """Who says what single turns are worth, beside the environment. See `docs/how-to/process-rewards.md`."""

    source: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # its name, in tables and records; `env` is the environment's
    kind: Literal[
        "callable", "shaping", "tests", "prm", "judge", "teacher", "overlong"
    ]  # who is asked, see docs/how-to/rewards.md
    call: str | None = None  # module:name of (trajectory up to the turn) -> float; tests: of (task) -> files by path
    potential: Literal["callable", "tests"] = "callable"  # shaping: what measures it
    command: list[str] = Field(default_factory=list)  # tests: what runs them in their box
    files: str | None = None  # tests: a folder whose files go into that box, beside the agent's work
    score: Literal["share", "exit", "number"] = "share"  # tests: passed of all, exit code 0, or the last line it prints
    sandbox: str = "bubblewrap"  # tests: where boxes come from
    image: str | None = None  # tests: what boxes are made of
    box_s: Positive = 20.0  # tests: of the command; work that takes longer gets 0
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0  # shaping: of its formula, as algo.discount
    most_tokens: Count | None = None  # overlong: of a turn, which costs 1; as rollout.max_tokens_per_turn
    margin_tokens: Count | None = None  # overlong: the last ones before, over which the cost rises from 0
    url: str | None = None  # prm, judge, teacher: the server; teacher: or "policy", the run's own engines
    prompt: str | None = None  # teacher: a system message that it alone reads, before the episode
    envs: list[str] = Field(default_factory=list)  # teacher: of the environments that it teaches; none: of all
    model: str | None = None  # by which the server knows the model; default: its only one
    api_key_env: str | None = None  # the environment variable with the key that the server asks for
    rubric: str | None = None  # judge: by which it scores the last action, from 0 to 1
    label: Annotated[int, Field(ge=0)] = 0  # prm: which output, of a model with several
    activation: bool = False  # prm: through a sigmoid or softmax first
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0  # in a turn's process reward; teacher: no part of it
    version: Count = 1  # of what it says; scores of another version do not count
    concurrency: Count = 8  # calls at once
    call_deadline_s: Positive = 30.0  # of one call
    retries: Annotated[int, Field(ge=0)] = 2  # calls after one that failed
    deadline_s: Positive = 120.0  # after an episode's end: it is waited for no longer
    late: Literal["drop", "neutral", "partial"] = "drop"  # then: leave the episode out, count none, or what there is

    @property
    def measure(self) -> str:
        """What is asked about a turn: the kind, or a shaping's potential."""
        return self.potential if self.kind == "shaping" else self.kind

    def beside(self, folder: Path) -> Self:
        """With a folder of tests taken from `folder`."""
        return self if self.files is None else self.model_copy(update={"files": str((folder / self.files).resolve())})

    def api_key(self) -> str | None:
        """The key for `url`. Raises ConfigError if the variable that should hold it is not set."""
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env)):
            raise ConfigError(
                "rewards.api_key_env", self.api_key_env, "this environment variable is not set: export it"
            )
        return key

    @model_validator(mode="after")
    def _possible(self) -> Self:
        needed = {
            "callable": ("call",),
            "tests": ("command",),
            "judge": ("url", "rubric"),
            "overlong": ("most_tokens", "margin_tokens"),
        }
        for name in needed.get(self.measure, ("url",)):
            if not getattr(self, name):
                raise ConfigError(f"rewards.{name}", getattr(self, name), f"a source of kind {self.kind!r} needs it")
        if self.url is not None and not (self.kind == "teacher" and self.url == "policy"):
            check_url("rewards.url", self.url)
        if self.measure == "tests" and self.box_s >= self.call_deadline_s:
            hint = f"must be below rewards.call_deadline_s = {self.call_deadline_s:g}, or work that hangs is a failure"
            raise ConfigError("rewards.box_s", self.box_s, hint)
        if self.kind == "shaping" and self.late == "partial":
            hint = "a part of the differences of a potential adds up to a reward: give 'drop' or 'neutral'"
            raise ConfigError("rewards.late", self.late, hint)
        if self.kind == "teacher" and self.late != "partial":
            hint = "a teacher that is late or refuses must not take an episode out: give 'partial'"
            raise ConfigError("rewards.late", self.late, hint)
        if self.most_tokens and self.margin_tokens and self.margin_tokens > self.most_tokens:
            hint = f"must be at most rewards.most_tokens = {self.most_tokens}"
            raise ConfigError("rewards.margin_tokens", self.margin_tokens, hint)
        if self.source == "env":
            raise ConfigError("rewards.source", "env", "this is the environment itself: choose another name")
        return self


class HeldOut(Section):
    """One held-out evaluation: `n` tasks from the environment's own held-out seeds."""

    name: str  # what the set is called in tables and curves
    id: str | None = None  # default: the training environment
    kwargs: dict[str, Any] = Field(default_factory=dict)  # laid over those of the training environment
    options: dict[str, Any] = Field(default_factory=dict)  # likewise
    n: Count = 256  # tasks, of eval.samples episodes each
    first_seed: Annotated[int, Field(ge=0)] = 1_000_000_000  # of its tasks; far from those of training


Action = Literal["warn", "lower_lag", "stop"]
Watched = Literal["mismatch", "ess", "kl", "entropy", "clip", "non_finite", "routing"]


class Alarms(Section):
    """Thresholds for a step's measures, and what happens beyond them: see `docs/reference/metrics.md`."""

    mismatch_above: Positive | None = 0.2  # mean |difference| of log-probs of fresh tokens, engine and learner, nats
    ess_below: Annotated[float, Field(ge=0, le=1)] | None = 0.3  # effective sample size over sample size
    kl_above: Positive | None = 0.3  # KL of behaviour to learner in nats per token
    entropy_below: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # of the policy, in nats
    clip_above: Annotated[float, Field(ge=0, le=1)] | None = 0.5  # share of tokens that a clip cut
    actions: dict[Watched, Action] = Field(default_factory=dict[Watched, Action])  # default: warn, for each of these
    calm_steps: Count = 10  # steps without an alarm that lowers the lag, until buffer.max_lag holds again

    def action(self, name: Watched) -> Action:
        """What the alarm of that name does."""
        return self.actions.get(name, "warn")


class Evaluation(Section):
    """When and on what the policy is measured. Every set runs before and after; those of `during` also every
    `every`."""

    every: Annotated[int, Field(ge=0)] = 0  # steps between evaluations during training; 0: only before and after
    during: list[str] | None = None  # the names of the sets that are measured then; default: the first
    n_during: Count = 96  # tasks of each set in such an evaluation
    engines: Annotated[int, Field(ge=0)] = 0  # of evaluation during training alone; 0: it shares those of training
    gpus: list[list[int]] = Field(default_factory=list[list[int]])  # of each of these engines, with vLLM
    samples: Count = 1  # episodes of each task: pass@k for k = 1, 2, 4, … up to it
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # 0: greedy; default: rollout's
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None  # likewise
    top_k: Annotated[int, Field(ge=0)] | None = None  # likewise
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None  # likewise
    sets: list[HeldOut] = Field(default_factory=list[HeldOut])

    @model_validator(mode="after")
    def _named(self) -> Self:
        names = [held_out.name for held_out in self.sets]
        if unknown := [name for name in self.during or () if name not in names]:
            hint = (
                f"no held-out set of that name: give some of {', '.join(names)}"
                if names
                else "there is no [[eval.sets]]"
            )
            raise ConfigError("eval.during", unknown[0], hint)
        return self

    @property
    def sets_during(self) -> list[HeldOut]:
        """The sets that are measured during training."""
        return self.sets[:1] if self.during is None else [one for one in self.sets if one.name in self.during]

    def sampling(self, training: SamplingParams, engine: str) -> SamplingParams:
        """How to sample in an evaluation of a run whose training samples as given. A vLLM that tells kept sets takes no
        greedy request: it gets one for the likeliest token."""
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        sampling = replace(training, **{name: value for name, value in own.items() if value is not None})
        if sampling.temperature == 0 and training.cuts and engine == "vllm":
            return replace(sampling, temperature=1.0, top_k=1)
        return sampling


def check_temperatures(engine: str, **temperatures: float | None) -> None:
    """Raises ConfigError for a temperature, by its section, that vLLM refuses or would change silently."""
    for section, temperature in temperatures.items():
        if engine == "vllm" and temperature and not 0.01 <= temperature <= 2:
            hint = "vLLM samples at 0.01 to 2, and takes what is colder for 0.01: give one in between"
            raise ConfigError(f"{section}.temperature", temperature, hint)


def check_sources(sources: Sequence[RewardSource], max_tokens: int, *, stall_deadline_s: float) -> None:
    """Raises ConfigError for sources of one name, one for which a run would wait until it ends as standing still, or
    one that punishes turns longer than the `max_tokens` that there can be."""
    names = [one.source for one in sources]
    if len(set(names)) != len(names):
        raise ConfigError("rewards.source", names, "each source has a name of its own")
    for one in sources:
        if one.most_tokens is not None and one.most_tokens > max_tokens:
            hint = f"must be at most rollout.max_tokens_per_turn = {max_tokens}, where a turn is cut"
            raise ConfigError("rewards.most_tokens", one.most_tokens, hint)
        if one.deadline_s >= stall_deadline_s:
            hint = f"must be below train.stall_deadline_s = {stall_deadline_s:g}, or a silent source ends the run"
            raise ConfigError("rewards.deadline_s", one.deadline_s, hint)


URL_SCHEMES = ("http://", "https://", "unix://")
"""How the URLs of servers begin; after the last comes the path of a Unix socket."""


def check_url(field: str, url: str) -> str:
    """The URL of a server as it was given. Raises ConfigError for one that no server can have."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        whole = whole or url.startswith("unix:///")
    except ValueError:  # of the port
        whole = False
    if not whole:
        raise ConfigError(field, url, "give the URL of a server, as http://HOST:8000 or unix:///run/engine.sock")
    return url


def check_weights_url(weights_url: str | None) -> None:
    """Raises ConfigError for what is no URL of a folder."""
    if weights_url is not None and not re.match(r"[a-z][a-z0-9+.-]*://.", weights_url):
        hint = 'must be a URL: "s3://bucket/folder", or "file:///folder" for one that all machines mount'
        raise ConfigError("engine.weights_url", weights_url, hint)


def config_error(error: ValidationError, model: type[BaseModel], section: tuple[str, ...] = ()) -> ConfigError:
    """The first thing wrong with a document of `model`, which is the run file's `section`: field, value and hint."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in (*section, *first["loc"]))
    if first["type"] == "extra_forbidden":
        known, last = _keys_of(model, first["loc"][:-1]), str(first["loc"][-1])
        near = difflib.get_close_matches(last, known, n=1)
        hint = f"no such key; did you mean {near[0]!r}?" if near else f"no such key; known: {', '.join(sorted(known))}"
        return ConfigError(field, first["input"], hint)
    if first["type"] == "missing":
        return ConfigError(field, None, "required: give it a value")
    hint, value = first["msg"].removeprefix("Value error, "), first["input"]
    if isinstance(value, dict):  # settings of a section that do not go together: those that the hint names
        value = {name: given for name, given in cast("dict[str, Any]", value).items() if name in hint}
    return ConfigError(field, value, hint)


def read_section(model: type[_Section], given: _Section | Mapping[str, Any] | None, name: str) -> _Section:
    """A section of the run file from a table of its settings; one that is read already is returned as it is. Raises
    ConfigError, which names the setting in the section `name`."""
    if isinstance(given, model):
        return given
    try:
        return model.model_validate({} if given is None else dict(cast("Mapping[str, Any]", given)))
    except ValidationError as error:
        raise config_error(error, model, (name,)) from None


def _keys_of(model: Any, path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        if get_origin(annotation) is not None:  # a list of sections, or a section that may be left out
            annotation = get_args(annotation)[0]
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)


class DockerSettings(Section):
    """The engine of the backend `docker`, for a whole run; without it docker's own variables name one."""

    base_url: str | None = None  # of the engine: tcp://HOST:2376 or unix:///PATH; default: DOCKER_HOST
    cert_path: str | None = None  # folder of ca.pem, cert.pem and key.pem, for tcp://; at this path on every node
    image: str | None = None  # of boxes whose environment names none

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        parts = urlsplit(self.base_url or "")
        if self.base_url and (parts.scheme not in ("tcp", "unix") or not (parts.netloc or parts.path)):
            raise ConfigError("sandbox.docker.base_url", self.base_url, "give tcp://HOST:2376 or unix:///PATH")
        if parts.scheme == "tcp" and self.cert_path is None:
            hint = f"{self.base_url} is reached over TLS alone: give the folder of ca.pem, cert.pem and key.pem"
            raise ConfigError("sandbox.docker.cert_path", None, hint)
        if parts.scheme != "tcp" and self.cert_path is not None:
            hint = "it is for an engine over TLS: give base_url = 'tcp://HOST:2376' as well, or leave it out"
            raise ConfigError("sandbox.docker.cert_path", self.cert_path, hint)
        return self


class BubblewrapSettings(Section):
    """What the boxes of the backend `bubblewrap` have beside this machine's /usr, for a whole run."""

    readonly: dict[str, str] = Field(
        default_factory=dict
    )  # folders of this machine to their paths in every box, which cannot change them

    @model_validator(mode="after")
    def _absolute(self) -> Self:
        for source, target in self.readonly.items():
            if not (source.startswith("/") and target.startswith("/")):
                hint = "give absolute paths: { '/opt/agents' = '/opt/agents' }"
                raise ConfigError("sandbox.bubblewrap.readonly", self.readonly, hint)
        return self


class Sandboxes(Section):
    """Settings of the backends that boxes come from; which backend, the environment says."""

    bubblewrap: BubblewrapSettings = BubblewrapSettings()
    docker: DockerSettings = DockerSettings()
    swe_rex: dict[str, Any] = Field(
        default_factory=dict
    )  # arguments of the backend `swe-rex`: deployment, network, and the deployment's fields
    inspect: dict[str, Any] = Field(
        default_factory=dict
    )  # arguments of the backend `inspect`: kind, config, network, image

    def beside(self, folder: Path) -> Self:
        """With a folder of certificates taken from `folder`."""
        if self.docker.cert_path is None:
            return self
        path = str((folder / Path(self.docker.cert_path).expanduser()).resolve())
        return self.model_copy(update={"docker": self.docker.model_copy(update={"cert_path": path})})

    def arguments(self) -> dict[str, dict[str, Any]]:
        """What the constructor of a backend is given, by its registry id."""
        own = {"bubblewrap": self.bubblewrap.model_dump(), "swe-rex": dict(self.swe_rex), "inspect": dict(self.inspect)}
        return {"docker": self.docker.model_dump(exclude_none=True), **own}
