"""The run file: one TOML document, validated here and nowhere else.

Unknown keys, wrong types and impossible combinations raise `ConfigError` naming field, value and hint. Units stand in
the names: `deadline_s` is in seconds, `kv_cache_mb` in megabytes. Defaults are those of a laptop.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, Field, PrivateAttr, SerializeAsAny, ValidationError, field_validator, model_validator

from agentrl.algos.algorithm import Algorithm
from agentrl.algos.grpo import GRPO
from agentrl.config import algorithms, gpu_placement, sglang_arguments, vllm_arguments, weight_sync
from agentrl.config import cluster as cluster_settings
from agentrl.config import roles as role_settings
from agentrl.config.algorithms import algorithm as algorithm
from agentrl.config.cluster import Cluster
from agentrl.config.league import LeagueSettings
from agentrl.config.overrides import apply_override
from agentrl.config.roles import LearnerSettings, RoleTable, WithRoles
from agentrl.config.sections import (
    URL_SCHEMES,
    Alarms,
    BufferSettings,
    CompactionSettings,
    Count,
    CurriculumSettings,
    EnvSource,
    Evaluation,
    Gpus,
    PivotSettings,
    Positive,
    Resume,
    RewardSource,
    Sandboxes,
    check_sources,
    check_temperatures,
    check_template,
    check_url,
    check_weights_url,
    config_error,
)
from agentrl.config.sections import Section as _Section
from agentrl.config.train import Train as Train
from agentrl.config.train import check_experts
from agentrl.config.weight_sync import Transport
from agentrl.errors import ConfigError, FormatError, UsageError
from agentrl.records import POLICY, EngineKey, SamplingParams

RUN_FORMAT = 1
"""The format of a run's stored configuration: `config.json`, and the store's copy."""

MAX_LORA_RANK = 512  # that vLLM takes


def key_in(variable: str, field: str) -> EngineKey:
    """The key in an environment variable that the setting `field` names. Raises ConfigError if it is not set."""
    if not (variable_value := os.environ.get(variable)):
        raise ConfigError(field, variable, "this environment variable is not set: export it")
    return EngineKey.of(variable_value)


class TaskTable(_Section):
    """One source of training tasks: rows of a data set as reset options, a range of seeds, or (neither) an endless
    stream of seeds that also the run's seed decides. Without `id` the environment is that of `[env]`; the `kwargs` and
    `options` of `[env]` hold for every table of the same environment."""

    id: str | None = None
    """Environment of these tasks: an id, module:Class or file.py:Class. Without it, `env.id`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor, laid over `env.kwargs` in the environment of `env.id`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Reset options of these episodes, overridden by the fields of a row, and laid over `env.options` in the
    environment of `env.id`."""

    weight: Positive = 1.0
    """Weight of this source: its share of the training tasks is its weight over the sum of all weights."""

    rows: str | None = None
    """Data set whose rows are the tasks, each row as reset options: a .jsonl, .json, .csv or .tsv file (also with .gz)
    or a .parquet file beside the run file, or `hf:NAME[:CONFIG][:SPLIT]` of the Hugging Face hub. Without it, the tasks
    are seeds."""

    first_seed: Annotated[int, Field(ge=0)] = 0
    """First seed of these tasks; an endless stream adds an offset from `seed`. Rows get seeds of their own and ignore
    it."""

    seeds: Count | None = None
    """Number of seeds from `tasks[].first_seed` on. Without it and `tasks[].rows`, the stream never ends."""

    epochs: Count | None = None
    """Number of times that the rows or seeds are played, each time in another order. Without it, they repeat endlessly.
    A `[curriculum]` excludes it."""

    algo: SerializeAsAny[Algorithm] | None = None
    """Algorithm that trains these tasks, as a table like `[algo]`, the same in all tables of one environment. Without
    it, that of `[algo]`."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.rows is not None and self.seeds is not None:
            raise ConfigError("tasks.seeds", self.seeds, "rows bring their own seeds: leave one of the two out")
        if self.rows is None and self.seeds is None and self.epochs is not None:
            raise ConfigError("tasks.epochs", self.epochs, "an endless stream of seeds has none: give seeds or rows")
        return self

    def beside(self, folder: Path) -> Self:
        """Return these settings with a file of rows taken from `folder`."""
        if self.rows is None or self.rows.startswith("hf:"):
            return self
        return self.model_copy(update={"rows": str((folder / self.rows).resolve())})


class Rollout(_Section):
    """Limits, deadlines and sampling of the episodes that workers play."""

    workers: Count = 1
    """Number of worker processes that play episodes."""

    group_size: Count = 8
    """Number of episodes of one task, which form a group; at least 2 if the algorithm compares members."""

    max_running: Count = 128
    """Largest number of episodes that run at once in all workers together, at least `rollout.group_size`."""

    max_turns: Count | None = None
    """Largest number of turns of an episode. Without it, as many as its environment allows."""

    max_tokens_per_turn: Count = 64
    """Largest number of tokens sampled in one turn. A longer turn is cut, and the environment is informed. It must be
    below `rollout.max_context`."""

    max_context: Count = 1024
    """Largest number of tokens, prompts and sampled ones together, in one conversation. An episode that reaches it
    ends, unless `rollout.compaction` shortens the conversation before."""

    max_observation_bytes: Count | None = None
    """Largest size in bytes of the text in one answer of the environment. A longer one is cut, and its step records the
    loss. Without it, 16 bytes for each token of `rollout.max_context`."""

    temperature: Positive = 1.0
    """Sampling temperature of training episodes. Evaluation may have another one (`eval.temperature`)."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass to sample from: the fewest likeliest tokens that have at least this probability together. 1
    keeps all tokens. Evaluation may have another one (`eval.top_p`)."""

    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of likeliest tokens to sample from, in evaluation too; 0 keeps all tokens."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Least probability of a sampled token relative to the likeliest one, in evaluation too; 0 keeps all."""

    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end a turn once they are sampled, besides the stop tokens of the chat template."""

    turn_deadline_s: Positive = 60.0
    """Seconds of sampling that one turn may take; a longer turn is cut. Queues, pauses and restarts of engines do not
    count."""

    step_deadline_s: Positive = 60.0
    """Seconds for the work that the policy requests in one step, and as many for the environment's code in one call.
    Slow work of the policy ends the episode and is scored; slow code of the environment is an infrastructure failure
    and is not."""

    episode_deadline_s: Positive = 300.0
    """Seconds that all steps of an episode may take together, without the time of engines and host. A longer episode
    ends at a time limit and is scored."""

    group_deadline_s: Positive = 600.0
    """Seconds from a group's start after which it closes with the members that have ended. After twice this time its
    late members expire, and so does a group with too few scored members to close."""

    checkpoint_tokens: Annotated[int, Field(ge=0)] = 64
    """Largest number of tokens of a running turn that the death of its worker can cost. With 0, a death can cost the
    whole turn."""

    resume: Resume = "tokens"
    """Point from which an interrupted episode continues: its last written token ("tokens"), its last whole turn
    ("turns"), its start ("episode") or the start of its group ("group"). All but "tokens" lose work and are for
    comparisons."""

    lease_s: Positive = 120.0
    """Seconds without a sign of life after which a worker's episodes go to other workers. A worker that hangs for half
    of this time is ended and started again."""

    snapshot_every_turns: Annotated[int, Field(ge=0)] = 1
    """Turns between two snapshots of an environment that offers them. 0 takes none: an interrupted episode is restored
    by a replay of its actions."""

    max_replays: Annotated[int, Field(ge=0)] = 2
    """Number of times that a task is played again after its group was lost to a failure of infrastructure or its
    deadline. With `rollout.resume = "group"`, it also bounds the restarts of a group."""

    skip_tasks: list[str] = Field(default_factory=list)
    """Ids of tasks that are not trained on. `agentrl tasks RUN --failed` lists those that failed."""

    failure_budget: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Largest share of episodes that may fail through no doing of the policy before the run ends. One outage counts as
    one failure, and up to 8 failures never end a run."""

    template: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model's chat template, such as `{ enable_thinking = false }`."""

    roles: dict[str, str] = Field(default_factory=dict)
    """Policy of each role of the environment: "trained" (also for roles that are not listed), "frozen" (the model as
    the run began), another model's id or folder, or the URL of an engine that somebody else runs. All need the
    tokenizer of the run's `model`."""

    roles_api_key_env: str | None = None
    """Environment variable with the key of the engines at the URLs in `rollout.roles`. Without it, none is sent."""

    pivot: PivotSettings | None = None
    """Table of the forks that the run makes by itself. Without it, only `agentrl fork` makes forks."""

    compaction: CompactionSettings | None = None
    """Table of how conversations that outgrow `rollout.max_context` are shortened. Without it, they end."""

    @field_validator("template")
    @classmethod
    def _of_template(cls, template: dict[str, Any]) -> dict[str, Any]:
        return check_template(template)

    @property
    def sampling(self) -> SamplingParams:
        """How training samples a turn; token ids that end it are the renderer's."""
        return SamplingParams(
            max_tokens=self.max_tokens_per_turn,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=tuple(self.stop),
        )

    @property
    def observation_bytes(self) -> int:
        """The most bytes of text in one answer of an environment."""
        return self.max_observation_bytes or 16 * self.max_context

    @property
    def hang_deadline_s(self) -> float:
        """Seconds after which a worker whose loop stands still is ended: before another may claim the episode that
        blocks it, and hang as well."""
        return self.lease_s / 2

    def roles_key(self) -> EngineKey | None:
        """The key of engines in `roles` that somebody else runs. Raises ConfigError if its variable is not set."""
        if self.roles_api_key_env is None:
            return None
        return key_in(self.roles_api_key_env, "rollout.roles_api_key_env")

    def frozen_roles(self) -> dict[str, str]:
        """The roles that the policy which learns (`"trained"`) does not play, and who does: `"frozen"`, the model as
        the run began with it; another model, by its id or folder; or, by its URL, an engine that somebody else runs.
        All must have the tokenizer of the run's model."""
        return {role_name: role_policy for role_name, role_policy in self.roles.items() if role_policy != "trained"}

    def frozen_models(self) -> set[str]:
        """Return the models of `frozen_roles` for which the run has to start an engine."""
        return {policy for policy in self.frozen_roles().values() if not policy.startswith(URL_SCHEMES)}


class EngineSettings(_Section):
    """The inference engines that sample tokens: where they run, their memory, and how new weights reach them."""

    kind: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Inference engine: agentrl's own ("embedded"), which runs on the CPU, or a server of "vllm" or "sglang". The code
    for SGLang was not run with a real server yet."""

    urls: list[str] = Field(default_factory=list)
    """URLs of running servers to attach to, instead of starting engines. A `/v1` at the end is removed."""

    api_key_env: str | None = None
    """Environment variable with the key of the servers at `engine.urls`. Without it, none is sent."""

    secret_env: list[str] = Field(default_factory=list)
    """Environment variables with secrets that the run's engines and learner need. Without `engine.weights_url`, they
    get no other variable whose name looks like a secret, except those that agentrl itself needs there."""

    untested_vllm: bool = False
    """Tries a version of vLLM that agentrl was not tested with, after a warning. With false, it is refused."""

    replicas: Count | Annotated[list[Gpus], Field(min_length=1)] = 1
    """Number of engines for each trained model, all on the first GPU or where Ray places them; or, with vLLM and
    SGLang, the GPUs of each, as `[[0], [1, 2]]`."""

    colocated: bool = False
    """Lets engine and learner take turns on one GPU: the engine sleeps while the learner computes a step."""

    threads: Count | Literal["auto"] = "auto"
    """Number of CPU threads of each engine. "auto" takes the idle cores for an embedded engine with 20 million
    parameters or more, else 1."""

    max_batch: Count = 128
    """Largest number of requests that an engine computes at once."""

    kv_cache_mb: Count = 512
    """Memory in MiB for keys and values, of an embedded engine or on each GPU of vLLM. SGLang ignores it: set
    `engine.sglang.mem-fraction-static`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Number format of an engine's weights, KV cache and new weights. "auto" is the fastest on this CPU for the
    embedded engine; for vLLM and SGLang it is float16 for a float16 model, else bfloat16."""

    stream_tokens: Count = 16
    """Number of tokens in each chunk that an engine streams."""

    sync: str = "auto"
    """Transport of new weights to the engines: "auto", "full", "delta", "adapter", "nccl", "ipc", or one of yours.
    "auto" sends the adapter alone if the engine is vLLM or if roles have adapters or past selves; else all weights, or
    only the changes with `engine.weights_url`."""

    weights_url: str | None = None
    """Folder in an object store, such as `s3://bucket/folder`, through which new weights travel to engines that share
    no disk with the learner. Without it, they travel as files or from memory to memory."""

    weights_from: list[str] = Field(default_factory=list)
    """Folders and URLs from which the engines that the run starts may read weights, besides the run's folders and
    `engine.weights_url`."""

    canary: bool | Positive = True
    """Comparison of the log-probabilities of a probe on engine and learner after each weight update; a mismatch ends
    the run. It allows what rounding explains (true), or a number of nats; false compares nothing."""

    routed_experts: bool | Literal["required"] = False
    """Journals the experts that a mixture used for each token, and replays them in the learner. A token without them is
    left to the learner's router (true) or ends the run ("required"). Only vLLM reports them."""

    at_update: Literal["keep", "recompute", "leave"] = "keep"
    """Treatment of running turns when new weights arrive: they go on with the keys and values of older weights
    ("keep"), compute these anew ("recompute", which SGLang always does), or end their request and continue under the
    new weights ("leave", also from one adapter version to the next)."""

    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the vLLM servers that the run starts, under vLLM's names."""

    sglang: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the SGLang servers that the run starts, under SGLang's names."""

    hedge_after: Positive | None = None
    """Multiple of the median wait for a first token after which a turn asks a second engine too, and keeps the first to
    answer. Without it, it never does. The embedded engine needs `engine.stream_tokens = 1` for it."""

    outage_deadline_s: Positive = 600.0
    """Seconds that a turn may wait for queues, pauses and restarts of engines before its episode fails as an
    infrastructure failure. Choose more than a restart of your engine takes."""

    start_deadline_s: Positive = 600.0
    """Seconds for an engine to start, which includes reading and compiling a large model. Learner and workers have as
    long until their first sign of life."""

    liveness_deadline_s: Positive = 60.0
    """Seconds without any answer after which a replica is ended and started again. A request about weights, pauses or
    state has half of them: raise it if loading takes long. After as many without a token, a turn checks its engine and
    leaves a silent one."""

    _own_key: EngineKey | None = PrivateAttr(default=None)

    @field_validator("urls")
    @classmethod
    def _roots(cls, urls: list[str]) -> list[str]:
        return [check_url("engine.urls", engine_url).rstrip("/").removesuffix("/v1") for engine_url in urls]

    def with_key(self, key: EngineKey) -> Self:
        """Return these settings for the process that made this key for the engines that the run starts."""
        copied_settings = self.model_copy()
        copied_settings._own_key = key
        return copied_settings

    @property
    def own_key(self) -> EngineKey | None:
        """Key of the engines that the run starts; None outside of its processes."""
        return self._own_key or EngineKey.of_environment()

    def key_of(self, url: str) -> EngineKey | None:
        """The key of one of `urls`, or else of an engine that the run started. Raises ConfigError if the variable that
        should hold it is not set."""
        if url.rstrip("/").removesuffix("/v1") not in self.urls:
            return self.own_key
        # Never our own key to a server that somebody else runs: it opens all engines of this run.
        return None if self.api_key_env is None else key_in(self.api_key_env, "engine.api_key_env")

    @property
    def fixed_threads(self) -> int:
        """Threads of an engine that does not follow what idles, and of the rest of one that does."""
        return 1 if self.threads == "auto" else self.threads

    @property
    def weight_backend(self) -> str:
        """The part of vLLM that takes new weights, by its name there."""
        return weight_sync.transport_of(weight_sync.chosen(self.sync, adapters=False, objects=False)).backend

    @property
    def gpus(self) -> list[list[int]]:
        """The GPUs of each engine, if the run file names them."""
        return [] if isinstance(self.replicas, int) else self.replicas

    @property
    def places(self) -> list[list[int]]:
        """The GPUs of each engine that the run starts; none where vLLM takes the first, or there is no vLLM."""
        return [[]] * self.replicas if isinstance(self.replicas, int) else self.replicas

    @property
    def admin_deadline_s(self) -> float:
        """Seconds for one request about weights, pauses or an engine's state. An engine that takes weights may be
        silent for so long, and must not be taken for hung."""
        return self.liveness_deadline_s / 2

    @property
    def mending_deadline_s(self) -> float:
        """Seconds within which engines that all went silent at once must serve again: seen to hang, started, and
        fitted."""
        return self.liveness_deadline_s + self.start_deadline_s + self.admin_deadline_s

    @model_validator(mode="after")
    def _of_hedges(self) -> Self:
        if self.hedge_after is not None and self.kind == "embedded" and self.stream_tokens > 1:
            hint = "a first token must come alone, or short answers win: set engine.stream_tokens = 1"
            raise ConfigError("engine.hedge_after", self.hedge_after, hint)
        return self

    @model_validator(mode="after")
    def _of_sglang(self) -> Self:
        if self.sglang and (self.kind != "sglang" or self.urls):
            hint = "it is for replicas of SGLang that the run starts: leave it out"
            raise ConfigError("engine.sglang", self.sglang, hint)
        if self.kind != "sglang":
            return self
        for setting_name in ("colocated", "weights_url"):
            if setting_value := getattr(self, setting_name):
                hint = "SGLang is not run so here: leave it out, or take 'vllm'"
                raise ConfigError(f"engine.{setting_name}", setting_value, hint)
        return self

    @field_validator("vllm")
    @classmethod
    def _spelled(cls, vllm: dict[str, Any]) -> dict[str, Any]:
        return vllm_arguments.normal(vllm)

    @field_validator("sglang")
    @classmethod
    def _spelled_there(cls, sglang: dict[str, Any]) -> dict[str, Any]:
        return sglang_arguments.normal(sglang)

    @model_validator(mode="after")
    def _of_gpus(self) -> Self:
        if self.vllm and (self.kind != "vllm" or self.urls):
            raise ConfigError("engine.vllm", self.vllm, "it is for replicas of vLLM that the run starts: leave it out")
        for engine_gpus in self.gpus or [[]] * bool(self.vllm):
            vllm_arguments.split_over(self.vllm, max(1, len(engine_gpus)))
        if not self.gpus:
            return self
        if self.kind == "embedded" or self.urls:
            hint = "GPUs are for replicas of vLLM or SGLang that the run starts: leave it out"
            raise ConfigError("engine.replicas", self.gpus, hint)
        if any(len(set(engine_gpus)) != len(engine_gpus) for engine_gpus in self.gpus):
            raise ConfigError("engine.replicas", self.gpus, "a replica takes each of its GPUs once")
        return self


class RunConfig(WithRoles, _Section):
    """A whole run. `seed` decides tasks and their order; the same file runs on one CPU or many GPUs."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] = "run"
    """Name of the run, and of its folder below runs/ unless the command names another."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the tasks, their order, the order of minibatches and a fresh adapter's weights. The engines' sampling
    does not follow it."""

    model: str
    """Model to train: a registered id, a folder, a Hugging Face id, or a run (its newest checkpoint)."""

    scratch_dir: Annotated[str, Field(pattern="^/")] | None = None
    """Absolute path of a folder for weight files on their way to the engines, which must be able to read it. Without
    it, shared memory, else the temporary folder; on Ray, the run's folder. Set it if shared memory is too small."""

    env: EnvSource
    tasks: list[TaskTable] = Field(default_factory=list[TaskTable])
    curriculum: CurriculumSettings | None = None
    rollout: Rollout = Rollout()
    rewards: list[RewardSource] = Field(default_factory=list[RewardSource])
    engine: EngineSettings = EngineSettings()
    buffer: BufferSettings = BufferSettings()
    cluster: Cluster = Cluster()
    sandbox: Sandboxes = Sandboxes()

    algo: SerializeAsAny[Algorithm] = Field(default_factory=GRPO)
    """Algorithm of the run, chosen by its `kind`, with the settings of that algorithm."""

    roles: list[RoleTable] = Field(default_factory=list[RoleTable])
    league: LeagueSettings = LeagueSettings()
    train: Train = Train()
    eval: Evaluation = Evaluation()
    alarms: Alarms = Alarms()

    trackers: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """Trackers that receive the run's metrics too: one table `[trackers.ID]` of arguments for each. See
    `docs/how-to/trackers.md`."""

    @property
    def sync(self) -> str:
        """How new weights travel, the name of a transport: that of `engine.sync`. `auto` is the adapter alone where one
        is trained and the engine is vLLM, or roles have their own. An adapter that does not travel alone is
        merged first."""
        engine_settings = self.engine
        takes_adapters = engine_settings.kind == "vllm" or bool(self.adapted_roles or self.league_roles)
        holds_adapters = takes_adapters and bool(self.train.lora_rank)
        has_object_store = engine_settings.weights_url is not None
        return weight_sync.chosen(engine_settings.sync, adapters=holds_adapters, objects=has_object_store)

    @property
    def transport(self) -> Transport:
        """The class of this transport, which says what else of a run depends on it."""
        return weight_sync.transport_of(self.sync)

    @property
    def quorum(self) -> int | None:
        """How many scored members close a group; the others are trained when they end. None: the last member closes it,
        as in synchronous training, where late members come too late (see `benchmarks/simulate.md`)."""
        closing_rule = self.buffer.close
        if closing_rule == "full" or (closing_rule == "auto" and self.buffer.synchronous):
            return None
        if isinstance(closing_rule, int):
            return closing_rule
        group_size = self.rollout.group_size
        least_members = max(algo.least_members for algo in self.algorithms.values())
        # Three in four: long episodes are the ones that come late, so a smaller quorum would fill the steps with short
        # ones. The late members are not lost, they are trained when they end.
        return max(2, least_members, 3 * group_size // 4) if group_size > 1 else None

    @property
    def eval_sampling(self) -> SamplingParams:
        """How evaluation samples a turn."""
        return self.eval.sampling(self.rollout.sampling, self.engine.kind)

    @property
    def syncs_memory(self) -> bool:
        """Whether new weights go from memory to memory, and no file holds them."""
        return self.transport.form == "memory"

    @property
    def sends_adapters(self) -> bool:
        """Whether adapters travel alone, and engines hold several versions beside each other."""
        return self.transport.form == "adapter"

    @property
    def algorithms(self) -> dict[str, Algorithm]:
        """The algorithms that train something, by the field that names them: `algo`, `tasks.1.algo`, `roles.0.algo`."""
        by_task = {
            f"tasks.{number}.algo": task_table.algo
            for number, task_table in enumerate(self.tasks)
            if task_table.algo is not None
        }
        # `[algo]` counts only if some tasks use it: an algorithm that trains nothing must not refuse the group size of
        # one that does.
        default_algorithm = {"algo": self.algo} if len(by_task) < max(1, len(self.tasks)) else {}
        by_role = {f"roles.{number}.algo": role.algo for number, role in enumerate(self.roles) if role.algo is not None}
        return default_algorithm | by_task | by_role

    @property
    def environments(self) -> tuple[str, ...]:
        """The environments of the training tasks, each once."""
        return tuple(dict.fromkeys(task_table.id or self.env.id for task_table in self.tasks)) or (self.env.id,)

    def algo_of(self, env: str, role: str = POLICY) -> Algorithm:
        """Return the algorithm that trains a role in the tasks of an environment."""
        if role in self.algo_by_role:
            return self.algo_by_role[role]
        task_algorithms = (
            task_table.algo for task_table in self.tasks if task_table.algo and (task_table.id or self.env.id) == env
        )
        return next(task_algorithms, self.algo)

    @property
    def learner(self) -> LearnerSettings:
        """The part of it that a learner reads."""
        return LearnerSettings(
            model=self.model,
            train=self.train,
            algo=self.algo,
            algo_by_env={environment: self.algo_of(environment) for environment in self.environments},
            roles=self.roles,
            named=self.algorithms,
            seed=self.seed,
            temperature=self.rollout.temperature,
            buffer=self.buffer,
            quorum=self.quorum,
            keeps_kv=self.engine.at_update != "recompute",
            routed_experts=self.engine.routed_experts,
        )

    @field_validator("algo", mode="before")
    @classmethod
    def _of_algorithm(cls, table: Any) -> Any:
        return algorithms.read(table, "algo")

    @model_validator(mode="before")
    @classmethod
    def _of_algorithms(cls, document: Any) -> Any:
        return algorithms.read_tables(cast("dict[str, Any]", document)) if isinstance(document, dict) else document

    @model_validator(mode="before")
    @classmethod
    def _of_tasks(cls, document: Any) -> Any:
        """Take `env.id` from the first [[tasks]] table if [env] has none. Raises ConfigError for an `env.id` that none
        of these tables plays, since it would have no effect."""
        match document:
            case {"env": {"id": str(env_id)}, "tasks": [{"id": str()}, *_] as tables}:
                task_tables = [
                    cast("dict[str, Any]", each_table)
                    for each_table in cast("list[Any]", tables)
                    if isinstance(each_table, dict)
                ]
                played_ids = [str(task_table.get("id") or env_id) for task_table in task_tables]
                if env_id not in played_ids:
                    hint = f"no [[tasks]] table plays it (they name {', '.join(played_ids)}): leave it out"
                    raise ConfigError("env.id", env_id, hint)
                return document
            case {"env": {"id": _}} | {"env": BaseModel()}:
                return document
            case {"tasks": [{"id": env_id}, *_]} if isinstance(document.get("env", {}), dict):
                return {**document, "env": {**document.get("env", {}), "id": env_id}}
            case _:
                return document

    @model_validator(mode="after")
    def _possible(self) -> Self:
        rollout, buffer = self.rollout, self.buffer
        check_sources(self.rewards, rollout.max_tokens_per_turn, stall_deadline_s=self.train.stall_deadline_s)
        if rollout.max_tokens_per_turn >= rollout.max_context:
            hint = f"must be below rollout.max_context = {rollout.max_context}"
            raise ConfigError("rollout.max_tokens_per_turn", rollout.max_tokens_per_turn, hint)
        compaction, prompt_tokens = rollout.compaction, rollout.max_context - rollout.max_tokens_per_turn
        if compaction is not None and compaction.at * rollout.max_context > prompt_tokens:
            largest_share = prompt_tokens / rollout.max_context
            hint = f"leave rollout.max_tokens_per_turn for the policy's notes: at most {largest_share:.2f}"
            raise ConfigError("rollout.compaction.at", compaction.at, hint)
        least_members = max(algo.least_members for algo in self.algorithms.values())
        if rollout.pivot is not None and not least_members <= rollout.pivot.k <= rollout.group_size:
            hint = f"must be at least {least_members} for this algorithm"
            if rollout.pivot.k >= least_members:
                hint = (
                    f"must be at most rollout.group_size = {rollout.group_size}, in the place of which a fork is played"
                )
            raise ConfigError("rollout.pivot.k", rollout.pivot.k, hint)
        if rollout.max_running < rollout.group_size:
            raise ConfigError(
                "rollout.max_running",
                rollout.max_running,
                f"must be at least rollout.group_size = {rollout.group_size}, or no group can finish",
            )
        if isinstance(buffer.close, int) and buffer.close > rollout.group_size:
            raise ConfigError(
                "buffer.close",
                buffer.close,
                f"must be at most rollout.group_size = {rollout.group_size}, or no quorum is ever reached",
            )
        self._possible_algorithms()
        if self.train.tokens_per_batch < rollout.max_context:
            raise ConfigError(
                "train.tokens_per_batch",
                self.train.tokens_per_batch,
                f"must be at least rollout.max_context = {rollout.max_context}, or a row does not fit a batch",
            )
        if rollout.resume != "tokens" and self.engine.at_update == "leave":
            raise ConfigError("rollout.resume", rollout.resume, "preempted turns go on from tokens: take 'tokens'")
        check_weights_url(self.engine.weights_url)
        on_ray, transport = self.cluster.on_ray, self.transport
        transport.check(self.engine, self.train, on_ray=on_ray)
        check_experts(self.engine.kind, self.engine.routed_experts)
        if self.engine.kind == "sglang" and self.rollout.sampling.cuts and self.rollout.top_k <= 0:
            hint = "SGLang tells the set that a token is drawn from under a top_k alone: give 1 to 4096"
            raise ConfigError("rollout.top_k", self.rollout.top_k, hint)
        check_temperatures(self.engine.kind, rollout=rollout.temperature, eval=self.eval.temperature)
        cluster_settings.check(self.cluster, self.engine, self.train, several=bool(self.role_models))
        other_models = {*rollout.frozen_models(), *self.role_models.values()}
        if other_models and self.engine.kind == "sglang":
            model_names = ", ".join(sorted(other_models))
            hint = f"the run starts no SGLang for other models ({model_names}): give their engines' URLs"
            raise ConfigError("engine.kind", "sglang", hint)
        gpu_placement.check_colocated(self.engine, self.train, form=transport.form, on_ray=on_ray, others=other_models)
        if self.curriculum is not None:
            for table_index, task_table in enumerate(self.tasks):
                if task_table.epochs is not None:
                    hint = "a curriculum decides how often a task is played: leave it out"
                    raise ConfigError(f"tasks.{table_index}.epochs", task_table.epochs, hint)
        self._possible_engines_of_evaluation()
        set_names = [held_out.name for held_out in self.eval.sets]
        if len(set(set_names)) != len(set_names):
            raise ConfigError("eval.sets", set_names, "give each set a name of its own")
        return self

    def _possible_engines_of_evaluation(self) -> None:
        """Engines that measure one version, from a file of the learner's, while training goes on."""
        engine, evaluation = self.engine, self.eval
        if any(evaluation.engine_gpus) and engine.kind != "vllm":
            raise ConfigError("eval.engines", evaluation.engines, "vLLM alone takes GPUs: give the number of engines")
        if not evaluation.engines:
            return
        memory_reason = f"engine.sync = {self.sync!r} sends weights to the engines of training alone: give 'full'"
        reasons = {
            memory_reason: self.syncs_memory,
            "engine.colocated shares its GPU by turns: leave it out": engine.colocated,
            "the run starts no engines beside engine.urls: leave them out": bool(engine.urls),
            "it starts none of SGLang: give engine.kind = 'vllm', or leave it out": engine.kind == "sglang",
            "on Ray it shares the engines of training: give 0": self.cluster.on_ray,
            "engine.weights_url keeps no version for it: leave it out": engine.weights_url is not None,
            "roles with a model of their own, or past selves, have other engines: give 0": bool(
                self.role_models or self.league_roles
            ),
            "name their GPUs, as [[1], [2]]": engine.kind == "vllm" and not any(evaluation.engine_gpus),
        }
        for hint, is_wrong in reasons.items():
            if is_wrong:
                raise ConfigError("eval.engines", evaluation.engines, hint)

    def _possible_algorithms(self) -> None:
        """Tasks of one environment have one algorithm, by which the learner knows theirs."""
        first_tables: dict[str, int] = {}
        for table_index, task_table in enumerate(self.tasks):
            environment, algo = task_table.id or self.env.id, task_table.algo or self.algo
            first_index = first_tables.setdefault(environment, table_index)
            if algo != (self.tasks[first_index].algo or self.algo):
                hint = f"tasks.{first_index} plays {environment} too, with another algorithm: give both the same"
                raise ConfigError(f"tasks.{table_index}.algo", algo.kind, hint)
        frozen_roles, league_share = self.rollout.frozen_roles(), self.league.share
        engine_facts = role_settings.Engines(
            sync=self.sync, transport=self.transport, urls=self.engine.urls, on_ray=self.cluster.on_ray
        )
        role_settings.check(self.roles, frozen_roles, train=self.train, engines=engine_facts, share=league_share)
        role_settings.check_models(self, frozen_roles, train=self.train, engines=engine_facts, rewards=self.rewards)
        algorithms.check(self.algorithms, self.buffer, group_size=self.rollout.group_size, quorum=self.quorum)


def load(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a TOML run file and apply `a.b=c` overrides (values are TOML; bare words are strings).

    Raises ConfigError for a bad setting, UsageError for a file that cannot be read or parsed."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as file_error:
        hint = (
            "; agentrl's examples lie in its repository, and agentrl demo needs none"
            if path.parts[:1] == ("examples",)
            else ""
        )
        raise UsageError(f"cannot read run file {str(path)!r}: {file_error.strerror}{hint}") from file_error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no run file: it is not a text in UTF-8") from None
    except tomllib.TOMLDecodeError as file_error:
        raise UsageError(f"{path} is not valid TOML: {file_error}") from file_error
    for override in overrides or []:
        apply_override(document, override)
    return parse(document, folder=path.parent)


def parse(document: dict[str, Any], *, folder: Path = Path()) -> RunConfig:
    """Validate a parsed document; files of rows and tests are taken from `folder`. Where it names no environment, its
    first task does. Raises ConfigError naming the first wrong field, its value and a hint."""
    try:
        config = RunConfig.model_validate(document)
    except ValidationError as error:
        raise config_error(error, RunConfig) from None
    # Made absolute once, here: the processes of a run have other working folders than the shell in which the run file
    # was named.
    resolved_tables = {
        section_name: [table_entry.beside(folder) for table_entry in getattr(config, section_name)]
        for section_name in ("tasks", "rewards")
    }
    return config.model_copy(update={**resolved_tables, "sandbox": config.sandbox.beside(folder)})


def to_json(config: RunConfig, *, defaults: bool = True) -> str:
    """The configuration as JSON, without `defaults` only what differs from these; `from_json` reads it back equal."""
    document = config.model_dump(mode="json", exclude_defaults=not defaults)
    return json.dumps({"format": RUN_FORMAT, **document}, indent=2)


def from_json(text: str, path: object = "the run's configuration") -> RunConfig:
    """Read what `to_json` wrote. Raises FormatError, which names `path`, if its format is another."""
    stored_value = json.loads(text)
    document = cast("dict[str, Any]", stored_value if isinstance(stored_value, dict) else {})
    stored_format = document.pop("format", 0)
    # Looked at before the settings are: another format's unknown keys would be reported as mistakes of the user.
    if stored_format != RUN_FORMAT:
        raise FormatError(path, "run format", stored_format, RUN_FORMAT)
    return parse(document)
