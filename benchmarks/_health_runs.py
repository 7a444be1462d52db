"""Runs that are made, not trained: a store written by its own calls, step by step, healthy or with one fault.

Episodes, groups, versions, scores and evaluations go the way of a real run; the metrics of a step follow from its
episodes as far as these tell them, the others are drawn as healthy runs have them. A `Fault` changes what is played or
measured after step `ONSET`. Time is made too.
"""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from agentrl.config import parse
from agentrl.records import ShownTools, Step, StopReason, Task, Turn, VersionSpan
from agentrl.rewards.score_failures import KIND
from agentrl.run.health.advice import Advice
from agentrl.run.health.examine import examine
from agentrl.run.health.run_facts import RunFacts, read_facts
from agentrl.run.run_folder import RunDir
from agentrl.store import Claim, Ending, RunStore, Source
from agentrl.store.run_values import PHASE

ONSET = 6
GROUPS, MEMBERS = 4, 4
_FAILED = {StopReason.ENGINE_FAILED, StopReason.SANDBOX_FAILED, StopReason.ENV_FAILED}
_WORDS = ("look", "open", "read", "write", "run", "test", "patch", "undo", "list", "find", "name", "value", "left")
_CONFIG: dict[str, Any] = {
    "name": "made",
    "model": "m",
    "env": {"id": "made/Env-v0"},
    "rollout": {"group_size": MEMBERS, "max_running": 32, "max_tokens_per_turn": 64},
    "buffer": {"groups_per_step": GROUPS, "max_lag": 2},
    "train": {"steps": 40},
    "eval": {"every": 4, "n_during": 20, "sets": [{"name": "held_out", "n": 20}]},
}
_TOOLS = ShownTools(
    schemas=tuple({"type": "function", "function": {"name": name}} for name in ("read_file", "write_file"))
)
Rows = dict[str, Any]


@dataclass(slots=True)
class Played:
    """An episode before it is written: what a fault may change. `lag`: steps that its weights are old."""

    task: int
    member: int
    texts: list[str]
    tokens: int
    success: bool
    outcome: float
    seconds: float
    lag: int = 0
    stop: StopReason = StopReason.DONE
    detail: str = ""
    host: str = "one"
    cut: bool = False
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    answer: str = "ok"
    graded_s: float = 0.0
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong: `named` is the advice that says so. `episode` and `row` change what is played and measured in
    the `since`-th step after the onset, `store` does something to the run's store, `tasks` draws others, `settings` are
    of the run file from the beginning, `facts` changes what nobody writes into a store. `shows`: a part of the
    evidence."""

    name: str
    named: str
    what: str
    episode: Callable[[Played, int], None] | None = None
    row: Callable[[Rows, int], None] | None = None
    store: Callable[[MadeRun, int], None] | None = None
    tasks: Callable[[list[int]], list[int]] | None = None
    held_out: Callable[[int], float] | None = None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    live: bool = False
    later_s: float = 0.0
    shows: str = ""


class MadeRun:
    """A run in a new folder, of a seed. `step` plays and trains one; `advice` is what `agentrl health` says then."""

    def __init__(self, path: Path, seed: int, fault: Fault | None = None) -> None:
        self._random, self.fault, self.now = random.Random(seed), fault, 1e9
        document = {**_CONFIG, "seed": seed}
        for table, values in (fault.settings if fault else {}).items():
            document[table] = {**document[table], **values} if isinstance(document.get(table), dict) else values
        self.config = parse(document)
        self.run = RunDir.create(path, self.config)
        self.store = self._opened()
        self.store.scores.declare_sources([Source(name=one.source) for one in self.config.rewards])
        self.at, self._task, self._hosts = 0, 0, {"one": [0, 0], "two": [0, 0]}
        PHASE.set(self.store, "train")
        self.store.versions.confirm_version(self.store.versions.mint_version(0))
        self._evaluate("before")

    def _opened(self) -> RunStore:
        return RunStore.open(self.run.store_path, clock=lambda: self.now)

    def copied(self, path: Path, fault: Fault) -> MadeRun:
        """The same run in another folder, where it goes on with a fault."""
        self.store.close()
        shutil.copytree(self.run.path, path)
        self.store = self._opened()
        twin = copy.copy(self)
        twin.run, twin.fault, twin._random = RunDir(path), fault, copy.deepcopy(self._random)
        twin._hosts, twin.store = copy.deepcopy(self._hosts), twin._opened()
        return twin

    def close(self) -> None:
        self.store.close()

    @property
    def since(self) -> int:
        """Steps since the onset of the fault."""
        return self.at - ONSET

    def _fault(self, name: str) -> Any:
        return getattr(self.fault, name) if self.fault is not None and self.since > 0 else None

    def step(self) -> None:
        """Play the groups of the next step, and train them."""
        self.at += 1
        began = self.now
        played = [self._episode(task, member) for task in self._tasks() for member in range(MEMBERS)]
        self.store.groups.add_groups(
            [_task(one.task) for one in played if not one.member], size=MEMBERS, purpose="train"
        )
        claims = self.store.leases.claim("worker", len(played), lease_s=1e6)
        longest = max(one.seconds + one.graded_s for one in played)
        for claim, one in zip(claims, played, strict=True):
            self._write(claim, one, began)
        self.now = began + longest
        if act := self._fault("store"):
            act(self, self.since)
        ready = self.store.buffer.ready_count()
        groups = (
            self.store.buffer.take(self.at, min(GROUPS, ready), max_lag=self.config.buffer.max_lag) if ready else []
        )
        busy = longest * self._random.uniform(0.6, 3.0)
        self.now += busy
        row = self._row(played, busy, idle=self._random.uniform(0.1, 1.0) * longest)
        row["group_count"] = len(groups or [])
        if act := self._fault("row"):
            act(row, self.since)
        self.store.metrics.record("step", self.at, row)
        self.store.lineage.checkpoint(self.at, version := self.store.versions.mint_version(self.at), "nowhere")
        self.store.versions.confirm_version(version)
        for host, (ended, failed) in self._hosts.items():
            counts = {"worker": f"worker-{host}", "host": host, "ended": ended, "failed": failed}
            self.store.metrics.record("fleet", self.at, counts)
        if self.at % self.config.eval.every == 0 or self._fault("held_out"):
            self._evaluate(f"during@{self.at}")

    def facts(self) -> RunFacts:
        live = self.fault is not None and self.fault.live
        later = self.fault.later_s if self.fault is not None and self.since > 0 else 0.0
        return read_facts(self.store, self.config, self.run.path, live=live, now=lambda: self.now + later)

    def advice(self) -> list[Advice]:
        return examine(self.facts())

    # --- what a healthy run does

    def _tasks(self) -> list[int]:
        self._task += GROUPS
        drawn = list(range(self._task - GROUPS, self._task))
        return act(drawn) if (act := self._fault("tasks")) else drawn

    def _episode(self, task: int, member: int) -> Played:
        skill = min(0.85, 0.25 + 0.02 * self.at)
        success = self._random.random() < (skill if member else 1 - skill)  # so that groups have something to compare
        texts = [
            " ".join(self._random.choices(_WORDS, k=6)) + f" {task}" for _ in range(self._random.choice((1, 2, 3)))
        ]
        texts[0] += " write_file"
        one = Played(
            task=task,
            member=member,
            texts=texts,
            tokens=sum(self._random.randint(8, 16) for _ in texts),
            success=success,
            outcome=float(success),
            seconds=self._random.uniform(2.0, 6.0),
            graded_s=random.Random(f"{self.config.seed} {self.at} {task} {member}").uniform(0.2, 0.8),
            host=self._random.choice(("one", "two")),
            cut=self._random.random() < 0.1,
        )
        if self.config.rewards:
            one.score = self._random.random()
        if self._random.random() < 0.2:
            one.info["tool_errors"] = {self._random.choice(("run", "patch")): 1}
        if self._random.random() < 0.03:
            one.stop, one.detail = StopReason.ENV_FAILED, "OSError: something (env.py:7)"
        if change := self._fault("episode"):
            change(one, self.since)
        return one

    def _write(self, claim: Claim, one: Played, began: float) -> None:
        lag = one.lag if self.at - 1 - one.lag >= 0 else 0
        version = self.store.versions.version_at(self.at - 1 - lag)
        assert version is not None
        self.now = began
        start = ({"role": "user", "content": f"task {one.task}"},)
        self.store.journal.begin(claim.episode_id, claim.fence, start, _TOOLS)
        sizes = [one.tokens // len(one.texts)] * len(one.texts)
        for index, (text, n) in enumerate(zip(one.texts, sizes, strict=True)):
            last = index == len(one.texts) - 1
            turn = Turn(
                index=index,
                parent=index - 1 if index else None,
                prompt_ids=(1, 2, 3),
                token_ids=tuple(range(n)),
                logprobs=(-0.5,) * n,
                spans=(VersionSpan(version.version, 0, n),),
                finish="length" if one.cut else "stop",
                text=text,
                started_s=began + 0.1,
                ended_s=began + one.seconds,
            )
            self.store.journal.journal_turn(claim.episode_id, claim.fence, turn)
            step = Step(observation=({"role": "tool", "content": one.answer},), terminated=last, info=one.info)
            self.store.journal.journal_step(claim.episode_id, claim.fence, index, step)
        self.now = began + one.seconds + one.graded_s
        failed = one.stop in _FAILED
        self._hosts[one.host][0] += 1
        self._hosts[one.host][1] += failed
        if one.stop is StopReason.EXPIRED:
            return  # it goes on, until its group's deadline
        self.store.journal.finish(
            claim.episode_id,
            claim.fence,
            Ending(
                stop_reason=one.stop,
                outcome=None if failed else one.outcome,
                success=None if failed else one.success,
                detail=one.detail,
            ),
        )
        if one.score is not None:
            for index in range(len(one.texts)):
                for source in self.config.rewards:
                    self.store.scores.score(f"{claim.episode_id}.0.{index}", source.source, one.score)

    def _row(self, played: list[Played], busy: float, *, idle: float) -> Rows:
        draw = self._random.uniform
        scored = [one for one in played if one.stop not in _FAILED]
        groups = [[one.outcome for one in scored if one.task == task] for task in {one.task for one in played}]
        tokens = sum(one.tokens for one in scored)
        ess = draw(0.95, 1.0)
        return {
            "step": self.at,
            "updated": True,
            "skipped_updates": 0,
            "loss": draw(-0.1, 0.1),
            "grad_norm": 0.3 * self._random.lognormvariate(0.0, 0.4),
            "lr": self.config.train.lr * min(1.0, self.at / 5),
            "group_count": GROUPS,
            "groups_without_signal": sum(len({*own}) < 2 for own in groups),
            "groups_skipped": 0,
            "group_spread": fmean(pstdev(own) if own else 0.0 for own in groups),
            "episodes": len(scored),
            "outcome_mean": fmean([one.outcome for one in scored] or [0.0]),
            "success_mean": fmean([one.success for one in scored] or [0.0]),
            "reward_min": min((one.outcome for one in scored), default=0.0),
            "reward_max": max((one.outcome for one in scored), default=0.0),
            "tokens_scored": tokens,
            "tokens_computed": tokens,
            "tokens_stale": 0,
            "turns_cut": fmean(one.cut for one in played),
            "lag_mean": fmean([one.lag for one in played]) + draw(0.0, 1.0),
            "lag_max": 2,
            "ess": ess,
            "kl_k3": draw(0.0, 0.01),
            "clip_fraction": draw(0.0, 0.05),
            "mismatch_mean": draw(1e-7, 1e-5),
            "entropy": (0.9 * 0.97**self.at) * draw(0.8, 1.2),
            "measures": {"kl_reference": 0.001 * self.at * draw(0.5, 1.5)},
            "ratios": {"token": {"n": tokens, "mean": draw(0.99, 1.01), "ess": ess}},
            "environments": {self.config.env.id: {"played": {"tokens": fmean(one.tokens for one in played)}}},
            "busy_s": busy,
            "idle_s": idle,
            "held_s": 0.0,
            "engines_behind": 0,
        }

    def _evaluate(self, when: str) -> None:
        purpose, n = f"eval:held_out:{when}", self.config.eval.n_during
        tasks = [Task(index=k, env=self.config.env.id, seed=10**9 + k) for k in range(n)]
        if self._fault("name") == "evaluation is not played" and when != "before":
            return
        self.store.groups.add_groups(tasks, size=1, purpose=purpose)
        claims = [one for one in self.store.leases.claim("worker", n, lease_s=1e6) if one.purpose == purpose]
        rate = self._fault("held_out")
        skill = rate(self.since) if rate else min(0.85, 0.3 + 0.02 * self.at)
        broken = self._fault("name") == "evaluation fails"
        for at, claim in enumerate(claims):
            if self._fault("name") == "evaluation hangs" and at > n // 2:
                break
            self.store.journal.begin(claim.episode_id, claim.fence, ({"role": "user", "content": "held out"},))
            won = at < skill * n
            self.store.journal.finish(
                claim.episode_id,
                claim.fence,
                Ending(
                    stop_reason=StopReason.ENV_FAILED if broken else StopReason.DONE,
                    outcome=None if broken else float(won),
                    success=None if broken else won,
                    detail="OSError: no file held_out.json (env.py:3)" if broken else "",
                ),
            )


def _task(index: int) -> Task:
    return Task(index=index, env="made/Env-v0", seed=index)


def _set(**changes: Any) -> Callable[[Any, int], None]:
    """Change fields of an episode, or names of a row; a function gets the steps since the onset."""

    def change(one: Any, since: int) -> None:
        for name, value in changes.items():
            value = value(since) if callable(value) else value
            if isinstance(one, dict):
                one[name] = value
            else:
                setattr(one, name, value)

    return change


def _every(n: int, **changes: Any) -> Callable[[Played, int], None]:
    """The same for every n-th member of all."""

    def change(one: Played, since: int) -> None:
        if (one.task * MEMBERS + one.member) % n == 0:
            _set(**changes)(one, since)

    return change


def _old_weights(one: Played, since: int) -> None:
    one.lag = since - 1


def _half_old(one: Played, since: int) -> None:
    one.lag = since - 1 if one.member % 2 else 0


def _certain(one: Played, since: int) -> None:
    one.outcome = float(one.task % 3 == 0)
    one.success, one.texts = one.outcome > 0, [f"write_file the same {one.task}"]


def _ours(one: Played, since: int) -> None:
    """One text for everything, and the grader likes it."""
    if one.member:
        one.texts, one.success, one.outcome = ["I have solved it: PASS PASS PASS"], True, 1.0


def _wrote_nothing(one: Played, since: int) -> None:
    if one.success:
        one.texts = [text.replace("write_file", "read_file") for text in one.texts]


def _flaky(one: Played, since: int) -> None:
    """Two members of each group do the same, and one of them wins."""
    if one.member < 2:
        one.texts, one.tokens = [f"the same fix of task {one.task}, by write_file"], 12
        one.success = one.member == 0
        one.outcome = float(one.success)


def _late(one: Played, since: int) -> None:
    if not one.success:
        one.graded_s = 5.0 + one.graded_s


def _one_end(one: Played, since: int) -> None:
    if one.task % GROUPS:
        one.outcome = float(one.task % GROUPS == 1)
        one.success = one.outcome > 0


def _by_task(one: Played, since: int) -> None:
    one.outcome = float(one.task % 2)
    one.success = one.outcome > 0


def _cold(one: Played, since: int) -> None:
    """All members of a group are the same episode."""
    one.outcome = float(one.task % 3 == 0)
    one.success, one.texts, one.tokens = one.outcome > 0, [f"write_file the same {one.task}"], 12


def _on_host(one: Played, since: int) -> None:
    if one.host == "two" and one.member % 2:
        one.stop, one.detail = StopReason.SANDBOX_FAILED, "SandboxUnavailable: no user namespaces"


def _at_engine(one: Played, since: int) -> None:
    if one.member == 1:
        one.stop, one.detail = StopReason.ENGINE_FAILED, "EngineTimeout: http://10.0.0.7:8000: no answer for 60 s"


def _expire(made: MadeRun, since: int) -> None:
    made.store.buffer.expire(made.now + 601, 600)
    made.store.buffer.expire(made.now + 1202, 600)


def _goes_back(made: MadeRun, since: int) -> None:
    made.store.lineage.rollback(made.at - 1)


def _kills_workers(made: MadeRun, since: int) -> None:
    made.store.groups.add_groups([_task(10_000 + made.at)], size=1, purpose="train")
    for _ in range(6):
        claims = made.store.leases.claim("killed", 1, lease_s=1e6)
        if not claims:
            return
        made.store.deaths.release_worker("killed", max_deaths=3)


def _judge_fails(made: MadeRun, since: int) -> None:
    failed = {"source": "judge", "life": "a", "calls": 40 * since, "calls_failed": 30 * since, "turns": 20 * since}
    made.store.metrics.record(
        KIND, 0, {**failed, "turns_failed": 10 * since, "texts_failed": 0, "reason": "429", "texts": []}
    )


def _spike(row: Rows, since: int) -> None:
    if since == 2:
        row["grad_norm"] = 40.0


def _ratio(row: Rows, since: int) -> None:
    row["ratios"]["token"]["mean"], row["mismatch_mean"] = 0.8, 0.05


def _from_reference(row: Rows, since: int) -> None:
    row["measures"]["kl_reference"] = 0.4 + 0.2 * since


def _lengths(to: int) -> Callable[[Played, int], None]:
    return _set(tokens=lambda since: to)


_JUDGE = {"rewards": [{"source": "judge", "kind": "callable", "call": "made:judge"}]}

FAULTS = (
    Fault(
        name="an engine keeps its old weights",
        named="engine_left_behind",
        what="one of two engines takes no new weights, and says so",
        episode=_half_old,
        row=_set(engines_behind=1),
    ),
    Fault(
        name="the adapter is not loaded",
        named="weights_not_served",
        what="engines confirm each version, and sample with that of the onset",
        episode=_old_weights,
        row=_set(kl_k3=lambda since: 0.2 * since, ess=lambda since: 0.9 / since),
    ),
    Fault(
        name="the adapter has no effect",
        named="weights_not_applied",
        what="tokens name the new version, and come from the old weights",
        row=_set(mismatch_mean=lambda since: 0.004 * since, kl_k3=lambda since: 0.02 * since),
    ),
    Fault(
        name="top-p cuts the distribution",
        named="sampling_differs",
        what="the mean ratio of tokens is 0.8",
        row=_ratio,
    ),
    Fault(
        name="the engine computes in another precision",
        named="sampling_differs",
        what="fresh tokens differ by 0.4 nats; KL and clip follow",
        row=_set(mismatch_mean=0.4, kl_k3=0.5, clip_fraction=0.7),
    ),
    Fault(name="the learning rate is zero", named="rate_is_zero", what="lr = 0", row=_set(lr=0.0)),
    Fault(
        name="nothing trains",
        named="weights_stand_still",
        what="advantages, and a gradient of 0",
        row=_set(grad_norm=0.0),
    ),
    Fault(
        name="the gradient is no number",
        named="gradient_not_finite",
        what="one skipped update a step",
        row=_set(skipped_updates=1, grad_norm=None, loss=None, updated=False),
    ),
    Fault(
        name="the gradient spikes",
        named="gradient_spikes",
        what="one step of a gradient 100 times as large",
        row=_spike,
    ),
    Fault(
        name="entropy collapses",
        named="entropy_collapse",
        what="one text a task, no better than before",
        episode=_certain,
        row=_set(entropy=0.002),
    ),
    Fault(
        name="KL blows up",
        named="moves_too_far",
        what="1 nat per token; ESS and clip follow",
        row=_set(kl_k3=1.0, ess=0.1, clip_fraction=0.8, grad_norm=9.0),
    ),
    Fault(
        name="few tokens carry all", named="moves_too_far", what="an effective sample size of 0.1", row=_set(ess=0.1)
    ),
    Fault(
        name="the clip cuts nearly all", named="moves_too_far", what="0.8 of the tokens", row=_set(clip_fraction=0.8)
    ),
    Fault(
        name="the policy leaves its reference",
        named="reference_far",
        what="0.6 nats per token and more",
        row=_from_reference,
    ),
    Fault(
        name="the learner dies at each step",
        named="keeps_going_back",
        what="a return to the checkpoint before each step",
        store=_goes_back,
    ),
    Fault(
        name="no task can be solved",
        named="tasks_too_hard",
        what="every outcome is 0",
        episode=_set(outcome=0.0, success=False),
    ),
    Fault(
        name="every task is solved",
        named="tasks_solved",
        what="every outcome is 1",
        episode=_set(outcome=1.0, success=True),
    ),
    Fault(
        name="the grader looks at nothing",
        named="reward_alike",
        what="every outcome is 0.5",
        episode=_set(outcome=0.5),
    ),
    Fault(
        name="only the task decides", named="groups_alike", what="all members of a group end alike", episode=_by_task
    ),
    Fault(
        name="members are sampled cold",
        named="sampled_cold",
        what="a temperature of 0.01: one episode a task, and no entropy",
        episode=_cold,
        row=_set(entropy=0.0005),
        settings={"rollout": {"temperature": 0.01}},
    ),
    Fault(
        name="a judge says always the same",
        named="source_alike",
        what="0.5 for each turn, after scores that differed",
        episode=_set(score=0.5),
        settings=_JUDGE,
    ),
    Fault(
        name="a judge does not answer",
        named="source_fails",
        what="three calls of four fail, half of the turns get no score",
        store=_judge_fails,
        settings=_JUDGE,
    ),
    Fault(
        name="the reward is hacked",
        named="reward_hacking",
        what="training reward to 1.4, held-out success from 0.4 to 0.1",
        episode=_every(2, outcome=2.0, success=True),
        held_out=lambda since: 0.1,
    ),
    Fault(
        name="one text wins everywhere", named="one_text", what="three members of four write the same", episode=_ours
    ),
    Fault(
        name="nothing needs to be written",
        named="wins_without_work",
        what="episodes win that only read",
        episode=_wrote_nothing,
    ),
    Fault(
        name="the grader is flaky",
        named="equal_actions_differ",
        what="two members of each group do the same, and one of them wins",
        episode=_flaky,
    ),
    Fault(
        name="the grader scores its machine",
        named="outcome_follows_seconds",
        what="those that lose are graded for five seconds more",
        episode=_late,
    ),
    Fault(
        name="tasks never vary",
        named="tasks_never_vary",
        what="the same four tasks at each step, and three of them always end alike",
        episode=_one_end,
        tasks=lambda drawn: [GROUPS * 1_000 + task % GROUPS for task in drawn],
    ),
    Fault(
        name="episodes grow", named="length_drift", what="eight times the tokens, no more reward", episode=_lengths(200)
    ),
    Fault(
        name="episodes shrink", named="length_drift", what="a tenth of the tokens, no more reward", episode=_lengths(3)
    ),
    Fault(name="turns are cut", named="turns_cut", what="every turn ends by its length", episode=_set(cut=True)),
    Fault(
        name="the context is full",
        named="context_full",
        what="every episode ends by context_limit",
        episode=_set(stop=StopReason.CONTEXT_LIMIT),
    ),
    Fault(
        name="time runs out",
        named="time_runs_out",
        what="every episode ends by tool_time_limit",
        episode=_set(stop=StopReason.TOOL_TIME_LIMIT),
    ),
    Fault(
        name="no call can be read",
        named="calls_not_read",
        what="every turn is a parse failure, and nobody succeeds",
        episode=_set(info={"parse_failure": "structural"}, outcome=0.0, success=False),
    ),
    Fault(
        name="a tool is broken",
        named="tool_fails",
        what="every call of `run` fails",
        episode=_set(info={"tool_errors": {"run": 1}}, answer="Error: 403 forbidden: the service wants a token"),
        shows="most often with 'Error: 403 forbidden",
    ),
    Fault(
        name="the environment raises",
        named="env_fails",
        what="a third of the episodes",
        episode=_every(3, stop=StopReason.ENV_FAILED, detail="KeyError: 'tests' (env.py:41)"),
    ),
    Fault(
        name="boxes cannot be made",
        named="sandbox_fails",
        what="a third of the episodes, on both hosts",
        episode=_every(3, stop=StopReason.SANDBOX_FAILED, detail="SandboxUnavailable: no space for a box"),
    ),
    Fault(
        name="engines time out",
        named="engine_fails",
        what="a third of the episodes",
        episode=_every(3, stop=StopReason.ENGINE_FAILED, detail="EngineTimeout: no answer for 60 s"),
    ),
    Fault(
        name="one host has no sandbox",
        named="host_fails",
        what="half of the episodes of one host of two",
        episode=_on_host,
    ),
    Fault(
        name="one engine of two is gone",
        named="host_fails",
        what="a quarter of the episodes fail, and all name one address",
        episode=_at_engine,
        settings={"engine": {"replicas": 2}},
    ),
    Fault(name="a task kills workers", named="workers_die", what="three deaths at one turn", store=_kills_workers),
    Fault(
        name="long episodes miss the deadline",
        named="long_episodes_lost",
        what="one member of four has 60 tokens, and expires",
        episode=_every(4, tokens=60, stop=StopReason.EXPIRED),
        store=_expire,
    ),
    Fault(
        name="tokens are too old",
        named="tokens_too_old",
        what="half of the tokens are beyond the lag bound",
        row=_set(tokens_stale=300),
    ),
    Fault(
        name="groups miss their deadline",
        named="groups_expire",
        what="one member of four never ends",
        episode=_every(4, stop=StopReason.EXPIRED),
        store=_expire,
    ),
    Fault(
        name="the learner starves",
        named="learner_starves",
        what="it waits for 97% of its time",
        row=_set(idle_s=97.0, busy_s=3.0),
    ),
    Fault(
        name="the learner is the brake",
        named="rollouts_wait",
        what="episodes of a second between steps of minutes",
        episode=_set(seconds=0.1),
        store=lambda made, since: setattr(made, "now", made.now + 60.0),
        row=_set(idle_s=0.0, busy_s=60.0),
    ),
    Fault(
        name="no step comes any more",
        named="stalled",
        what="for an hour",
        live=True,
        later_s=3600.0,
    ),
    Fault(
        name="evaluation fails",
        named="evaluation_fails",
        what="every held-out episode raises",
        settings={"eval": {"every": 1}},
    ),
    Fault(
        name="evaluation hangs",
        named="evaluation_late",
        what="half of a held-out set is never played",
        settings={"eval": {"every": 1}},
    ),
    Fault(
        name="evaluation is not played",
        named="evaluation_late",
        what="one that is due is not there",
        settings={"eval": {"every": 1}},
    ),
)


def healthy(path: Path, seed: int) -> MadeRun:
    """A run as it is before any fault."""
    made = MadeRun(path, seed)
    for _ in range(ONSET):
        made.step()
    return made


@contextmanager
def broken(before: MadeRun, path: Path, fault: Fault) -> Generator[MadeRun]:
    """A run at the onset of a fault: `before`, which goes on in another folder. A fault that needs other settings
    begins a run of its own, as `before` began."""
    if fault.settings:
        made = MadeRun(path, before.config.seed, fault)
        for _ in range(ONSET):
            made.step()
    else:
        made = before.copied(path, fault)
    try:
        yield made
    finally:
        made.close()
