"""The report of a learner step.

Owns the numbers and their names, which are those of the metrics file. Never computes anything that training needs.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypedDict, TypeVar

import torch
from torch import Tensor

from agentrl.algos.algorithm import Algorithm, Loss, Outputs
from agentrl.algos.importance import Gauges, Mismatch, gauges
from agentrl.algos.kl_penalty import kl_penalty
from agentrl.algos.token_metrics import Measures, Ratios, by_number, measured, ratios_by_level
from agentrl.learner.data.batch import GroupRows
from agentrl.learner.data.device_copy import moved
from agentrl.learner.data.prefix_trees import Pack
from agentrl.learner.data.rows import Row
from agentrl.learner.environment_report import Computed, EnvironmentReport, by_environment, group_spread
from agentrl.learner.flops import Use
from agentrl.learner.moe.routers import RouterRecord
from agentrl.learner.moe.routing_replay import Routed, RoutingSummary, routed, summary

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step. A mean over nothing is None.

    Gauges (`ess` to `entropy`) are over the tokens that were computed; `lag_*` and `advantage_*` over all scored ones.
    `updated` is False where no token had an advantage, and where all updates were skipped. See `importance.Gauges` for
    what the gauges mean."""

    step: int
    updated: bool
    skipped_updates: int  # whose gradient was not finite: they changed nothing
    loss: float | None
    grad_norm: float | None
    lr: float
    # the data
    group_count: int  # taken in this step; groups that only have late members in it do not count
    groups_without_signal: int
    groups_skipped: int  # these left without signal, untrained; their episodes are only in the means below
    episodes: int
    episodes_late: int  # of these, those that ended after their group had closed
    episodes_left_out: int  # infrastructure failed them (law 3)
    episodes_rejected: int  # trained with weight 0, since their ratios were out of bounds (`algo.reject`)
    episodes_stale: int  # every token beyond the lag bound: not trained, but counted in the means below (law 5)
    outcome_mean: float | None
    process_mean: float | None  # sum of an episode's process rewards
    reward_mean: float | None  # outcome plus process
    reward_min: float | None
    reward_max: float | None
    success_mean: float | None
    reward_functions: dict[str, float]
    """By reward function of the environment: its mean score over the episodes that it judged."""
    reward_functions_judged: dict[str, int]
    """By reward function: how many episodes it judged. It may abstain from others."""
    reward_functions_late: dict[str, int]
    """By reward function: how many answers it had not judged in time, which give nothing."""
    advantage_mean: float | None
    advantage_std: float | None
    # tokens
    tokens_scored: int  # sampled tokens in the normalisation
    tokens_computed: int  # of these, computed
    tokens_row: int  # tokens of the computed rows, prompts and answers included
    tokens_distinct: int  # of these, nodes of the trees: what the passes computed, prompts that ranks share once
    turns_cut: float | None  # share of the policy's turns that ended by their length
    tokens_stale: int  # beyond the lag bound, not scored (law 5)
    tokens_stale_by_lag: Mapping[str, int]  # the same by their lag
    # off-policy
    lag_mean: float | None
    lag_max: int
    ess: float | None
    kl_k1: float | None
    kl_k3: float | None
    truncated: float | None
    masked: float | None  # share of tokens whose importance weight is 0 (`algo.importance_mode`)
    clip_fraction: float | None
    mismatch_mean: float | None  # of fresh tokens: the difference of engine and learner alone
    mismatch_max: float | None
    mismatch: Mapping[str, Mismatch]  # by kind of token, see `importance.mismatch_by_kind`
    entropy: float | None
    # in detail
    measures: Measures | None  # of all computed tokens
    by_lag: Mapping[str, Measures]  # the same by their age, see `measures.by_number`
    by_turn: Mapping[str, Measures]  # and by the index of their turn
    ratios: Mapping[str, Ratios]  # of tokens, sequences and geometric means of these
    group_spread: float | None  # mean over groups of the deviation of their members' rewards
    routing: RoutingSummary | None  # of the policy's mixtures of experts
    use: Use  # of the learner's device
    algorithm: Mapping[str, float]  # what the algorithm itself measures, see `StepTally.algorithm_gauges`
    environments: Mapping[str, EnvironmentReport]  # by the environment's id
    seconds: Mapping[str, float]


class Stopwatch:
    """Seconds by part: `lap(part)` adds the time since the last lap to that part. They are the host's: it waits for a
    GPU at the update alone, so the rest of a pass there counts to that."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, part: str) -> None:
        current_time = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + current_time - self._at
        self._at = current_time


_MEASURED = ("proximal", "behaviour", "lag", "origin", "episode", "role", "turn", "advantage")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The numbers of one pass for the report, detached and where the pass was computed: whoever reads one waits for the
    pass. Tensors are [K]; `loss`, a float64 scalar, is its share of the update's."""

    loss: Tensor
    tokens: Mapping[str, Tensor]
    clipped: Tensor
    importance: Tensor | None
    gauges: Mapping[str, Tensor]  # scalars
    gauged: Tensor | None  # None: nothing
    routed: Routed | None


def pass_result(tokens: Mapping[str, Tensor], outputs: Outputs, loss: Loss, heard: RouterRecord | None) -> PassResult:
    """The numbers of a pass with these columns, outputs and loss, and the choices of its routers, if it has some."""
    clipped_K, log_ratio_K = loss.clipped_K.detach(), loss.log_ratio_K
    measured_columns = {value_name: tokens[value_name] for value_name in _MEASURED if value_name in tokens}
    # The sign tells a token that became likelier from one that became rarer: the two bounds of a clip say different
    # things about a run.
    measured_columns["clip"] = clipped_K * (1 if log_ratio_K is None else log_ratio_K.sign())
    measured_columns["entropy"] = outputs.entropy_K.detach()
    if "reference" in tokens:
        measured_columns["reference_k3"] = kl_penalty(outputs.logprobs_K.detach(), tokens["reference"])
    return PassResult(
        loss=loss.total.detach().double(),
        tokens=measured_columns,
        clipped=clipped_K,
        importance=None if loss.importance_K is None else loss.importance_K.detach(),
        gauges={value_name: gauge_value.detach().double() for value_name, gauge_value in loss.gauges.items()},
        gauged=None if loss.gauged is None else loss.gauged.detach().double(),
        routed=routed(heard) if heard and heard.load else None,
    )


@dataclass(slots=True)
class StepTally:
    """The results of a step's passes. `algorithms` are those of the run that differ, by the fields that name them."""

    algorithms: Mapping[str, Algorithm]
    losses: list[Tensor] = field(default_factory=list[Tensor])
    skipped: int = 0
    grad_norms: list[float] = field(default_factory=list[float])
    packs: list[Pack] = field(default_factory=list[Pack])
    tokens: list[Mapping[str, Tensor]] = field(default_factory=list[Mapping[str, Tensor]])
    clipped: list[Tensor] = field(default_factory=list[Tensor])
    importance: list[Tensor] = field(default_factory=list[Tensor])
    routed: list[Routed | None] = field(default_factory=list["Routed | None"])
    gauges: dict[tuple[str, str], Tensor] = field(default_factory=dict[tuple[str, str], Tensor])
    gauged: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add_pass(self, pack: Pack, result: PassResult) -> None:
        """Record a pass."""
        self.packs.append(pack)
        self.tokens.append(result.tokens)
        self.clipped.append(result.clipped)
        self.routed.append(result.routed)
        if result.importance is not None:
            self.importance.append(result.importance)
        # By equality: entries of a run file that name the same algorithm are one, whichever object a row has.
        algorithm_field = next(
            algorithm_field for algorithm_field, algorithm in self.algorithms.items() if algorithm == pack.algo
        )
        for gauge_name, gauge_value in result.gauges.items():
            _add(self.gauges, (algorithm_field, gauge_name), gauge_value)
        if result.gauged is not None:
            _add(self.gauged, algorithm_field, result.gauged)

    def computed(self) -> list[Computed]:
        """The passes as `by_environment` takes them."""
        measured_passes = zip(self.packs, self.tokens, self.clipped, strict=True)
        return [
            (pack, token_columns["proximal"], token_columns["entropy"], clipped_K)
            for pack, token_columns, clipped_K in measured_passes
        ]

    def columns(self, n: int | None = None) -> dict[str, Tensor]:
        """Columns that were measured in all of the first `n` passes, or in all passes."""
        pass_columns = self.tokens[:n]
        # Algorithms of one step may measure different columns; a mean over some of the tokens only would not be
        # comparable with the others in its row.
        first_names = list(pass_columns[0]) if pass_columns else []
        common_names = [name for name in first_names if all(name in columns for columns in pass_columns)]
        return {name: torch.cat([columns[name] for columns in pass_columns]) for name in common_names}

    def add_update(self, loss: Tensor, grad_norm: float | None) -> None:
        """Record an optimizer update, or (`grad_norm` is None) one that was skipped."""
        if grad_norm is None:
            self.skipped += 1
            return
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)

    def merge(self, other: StepTally) -> None:
        """Add the passes of another part of the same update."""
        for list_name in ("packs", "tokens", "clipped", "importance", "routed"):
            getattr(self, list_name).extend(getattr(other, list_name))
        for gauge_key, gauge_value in other.gauges.items():
            _add(self.gauges, gauge_key, gauge_value)
        for gauge_key, gauge_value in other.gauged.items():
            _add(self.gauged, gauge_key, gauge_value)

    def algorithm_gauges(self) -> dict[str, float]:
        """The gauges of the algorithms, each a mean over the shares that it was measured on, or over the updates. Those
        of a run's first algorithm have plain names, those of another begin with its field, `tasks.1.algo.value_loss`.
        """
        first_field = next(iter(self.algorithms))
        measured_shares = {algorithm_field: float(gauge_sum) for algorithm_field, gauge_sum in self.gauged.items()}
        return {
            gauge_name if algorithm_field == first_field else f"{algorithm_field}.{gauge_name}": float(gauge_sum)
            / (measured_shares.get(algorithm_field) or len(self.losses) + self.skipped)
            for (algorithm_field, gauge_name), gauge_sum in self.gauges.items()
        }

    def on_host(self) -> StepTally:
        """Copy every tensor to host memory, all in one transfer."""
        tensor_fields = ("losses", "tokens", "clipped", "importance", "routed", "gauges", "gauged")
        return replace(self, **moved({field_name: getattr(self, field_name) for field_name in tensor_fields}, "cpu"))


def summarise(
    step: int,
    ready: Sequence[GroupRows],
    laid: Sequence[Pack],
    tally: StepTally,
    *,
    lr: float,
    use: Use,
    seconds: Mapping[str, float],
    replays: bool,
) -> StepReport:
    """The report of step number `step`. `laid` are the step's passes; `replays`: all tokens should have experts."""
    taken_groups = [group for group in ready if not group.taken_before]
    skipped_groups = [group for group in ready if group.skipped]
    stale_by_lag = sum((group.stale for group in ready), Counter[int]())
    stale_members = sum(group.members_stale for group in ready)
    group_rows = [row for group in ready for row in group.rows]
    lags = [row.columns["lag"] for row in group_rows]
    lag_S = torch.cat(lags) if lags else torch.zeros(0, dtype=torch.long)
    advantage_S = _advantages(group_rows, laid)
    outcomes = [outcome for group in ready for outcome in group.outcomes]
    process_rewards = [reward for group in ready for reward in group.process]
    total_rewards = [outcome + process for outcome, process in zip(outcomes, process_rewards, strict=True)]
    token_columns = tally.columns()
    drift_gauges = _drift(token_columns, tally.packs) if token_columns else None
    fresh_mismatch = (mismatch_by_kind := drift_gauges.mismatch if drift_gauges else {}).get("fresh")
    return StepReport(
        step=step,
        updated=bool(tally.losses),
        skipped_updates=tally.skipped,
        loss=_mean([float(update_loss) for update_loss in tally.losses]),
        grad_norm=_mean(tally.grad_norms),
        lr=lr,
        group_count=len(taken_groups),
        groups_without_signal=sum(not any(row.has_signal for row in group.rows) for group in taken_groups),
        groups_skipped=len(skipped_groups),
        episodes=len(outcomes) - stale_members - sum(len(group.outcomes) for group in skipped_groups),
        episodes_late=sum(group.late for group in ready),
        episodes_left_out=sum(group.left_out for group in ready),
        episodes_rejected=_rejected(laid),
        episodes_stale=stale_members,
        outcome_mean=_mean(outcomes),
        process_mean=_mean(process_rewards),
        reward_mean=_mean(total_rewards),
        reward_min=min(total_rewards, default=None),
        reward_max=max(total_rewards, default=None),
        success_mean=_mean([float(success) for group in ready for success in group.successes]),
        **_by_function(ready),
        advantage_mean=_mean(advantage_S.tolist()),
        advantage_std=float(advantage_S.std(correction=0)) if len(advantage_S) else None,
        tokens_scored=len(lag_S),
        tokens_computed=sum(len(pack.target_K) for pack in tally.packs),
        tokens_row=sum(pack.row_tokens for pack in tally.packs),
        tokens_distinct=round(sum(pack.distinct for pack in tally.packs)),
        turns_cut=_mean([float(was_cut) for group in ready for was_cut in group.cut]),
        tokens_stale=stale_by_lag.total(),
        tokens_stale_by_lag={str(token_lag): token_count for token_lag, token_count in sorted(stale_by_lag.items())},
        lag_mean=_mean(lag_S.tolist()),
        lag_max=int(lag_S.max()) if len(lag_S) else 0,
        ess=drift_gauges.ess if drift_gauges else None,
        kl_k1=drift_gauges.kl_k1 if drift_gauges else None,
        kl_k3=drift_gauges.kl_k3 if drift_gauges else None,
        truncated=drift_gauges.truncated if drift_gauges else None,
        masked=float((torch.cat(tally.importance) == 0).float().mean()) if tally.importance else None,
        clip_fraction=float(torch.cat(tally.clipped).float().mean()) if tally.clipped else None,
        mismatch_mean=fresh_mismatch.mean if fresh_mismatch else None,
        mismatch_max=fresh_mismatch.max if fresh_mismatch else None,
        mismatch=mismatch_by_kind,
        entropy=float(token_columns["entropy"].mean()) if token_columns else None,
        measures=measured(token_columns) if token_columns else None,
        by_lag=by_number(token_columns, "lag") if token_columns else {},
        by_turn=by_number(token_columns, "turn") if token_columns else {},
        ratios=ratios_by_level(tally.columns(len(laid))) if token_columns else {},
        group_spread=_mean([spread for group in ready if (spread := group_spread(group)) is not None]),
        routing=summary(tally.packs, tally.routed, replays=replays),
        use=use,
        algorithm=tally.algorithm_gauges(),
        environments=by_environment(ready, laid, tally.computed()),
        seconds=dict(seconds),
    )


def _drift(columns: Mapping[str, Tensor], packs: Sequence[Pack]) -> Gauges:
    """Measure how far the sampling and the proximal policy of the tokens of `packs` are apart."""
    caps = [torch.full_like(pack.columns["weight"], pack.algo.importance_bounds[1]) for pack in packs]
    return gauges(columns["proximal"], columns["behaviour"], columns["lag"], columns["origin"], torch.cat(caps))


def _advantages(rows: Sequence[Row], laid: Sequence[Pack]) -> Tensor:
    """Advantages of all scored tokens of an algorithm that knows them before the passes, else of the tokens of its
    passes."""
    early_rows = [early_row for early_row in rows if "advantage" in early_row.columns]
    late_packs = [
        late_pack
        for late_pack in laid
        if "advantage" in late_pack.columns and all(early_row.algo != late_pack.algo for early_row in early_rows)
    ]
    advantage_columns = [row_or_pack.columns["advantage"] for row_or_pack in (*early_rows, *late_packs)]
    return torch.cat([advantage_K.cpu() for advantage_K in advantage_columns]) if advantage_columns else torch.zeros(0)


def _rejected(laid: Sequence[Pack]) -> int:
    """How many episodes the algorithm left out of the loss: those with a sequence that is not kept."""
    rejected_episodes = [
        step_pass.columns["episode"][~step_pass.columns["kept"]] for step_pass in laid if "kept" in step_pass.columns
    ]
    return len(torch.unique(torch.cat(rejected_episodes))) if rejected_episodes else 0


class _ByFunction(TypedDict):
    """The fields of a report about the reward functions of environments."""

    reward_functions: dict[str, float]
    reward_functions_judged: dict[str, int]
    reward_functions_late: dict[str, int]


def _by_function(ready: Sequence[GroupRows]) -> _ByFunction:
    """Summarise each reward function's scores of the episodes that it judged."""
    function_names = dict.fromkeys(function_name for group_rows in ready for function_name in group_rows.scores)
    scores_by_function = {
        function_name: [
            function_score for group_rows in ready for function_score in group_rows.scores.get(function_name, ())
        ]
        for function_name in function_names
    }
    return _ByFunction(
        reward_functions={
            function_name: fmean(function_scores) for function_name, function_scores in scores_by_function.items()
        },
        reward_functions_judged={
            function_name: len(function_scores) for function_name, function_scores in scores_by_function.items()
        },
        reward_functions_late=dict(sum((Counter(group_rows.scores_late) for group_rows in ready), Counter[str]())),
    )


def _add(sums: dict[K, Tensor], key: K, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
