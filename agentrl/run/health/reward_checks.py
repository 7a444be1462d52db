"""Is there something to learn from, and does the policy earn it as it should?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.run.health.advice import Advice, mean, middle, percent, share
from agentrl.run.health.run_facts import RECENT, EpisodeFacts, EvalFacts, RunFacts

_SILENT = 0.9  # of the groups: the few that teach are not worth the others
_LEAST_GROUPS = 6
_COLD = 0.3  # temperature of sampling
_CERTAIN = 0.05  # nats of entropy, from the first step on
_SCORES = 24  # turns of the last episodes that a source has to have scored
_ROSE, _FELL = 0.1, 0.1  # of the training reward, and of held-out success, between evaluations
_SURE = 2.0  # standard errors of the difference of two success rates
_SAME = 0.5  # of the episodes that were read: one text
_GREW = 3.0  # times its share of the first ones
_LEAST_EPISODES, _TASKS = 12, 6
_TEXT = 16  # characters: a shorter text is an action, as in a game
_LONGER, _SHORTER = 2.0, 0.4  # times the length of the first steps
_EARLY = 5  # steps that say how it was at first
_PAYS = 0.05  # more reward, and longer answers are what earns it


def _silence(facts: RunFacts) -> tuple[float, float]:
    """Groups without signal, and all groups, of the last steps."""
    skipped_count = sum(facts.values("groups_skipped"))
    silent_count = sum(facts.values("groups_without_signal")) + skipped_count
    return silent_count, sum(facts.values("group_count")) + skipped_count


def _silent(facts: RunFacts) -> Sequence[EpisodeFacts]:
    """The scored episodes of the last steps, if nearly all groups were without signal; else none."""
    silent_count, group_count = _silence(facts)
    if group_count < _LEAST_GROUPS or share(silent_count, group_count) < _SILENT:
        return ()
    return [episode for episode in facts.episodes if episode.stop_reason.by_policy and episode.outcome is not None]


def _groups(facts: RunFacts) -> str:
    silent_count, group_count = _silence(facts)
    return f"{silent_count:.0f} of {group_count:.0f} groups of the last {len(facts.recent)} steps taught nothing"


def tasks_too_hard(facts: RunFacts) -> Advice | None:
    """Nobody ever succeeds."""
    scored_episodes = _silent(facts)
    if (
        not scored_episodes
        or any(episode.success for episode in scored_episodes)
        or max(episode.outcome or 0.0 for episode in scored_episodes) > 0
    ):
        return None
    env_id = facts.config.env.id
    return Advice(
        name="tasks_too_hard",
        cause="no episode succeeds, so no member of a group is better than another",
        evidence=f"{_groups(facts)}; 0 of {len(scored_episodes)} episodes succeeded",
        settings=(f"rollout.group_size={2 * facts.config.rollout.group_size}", "curriculum.pool=10000"),
        commands=(f"agentrl validate {env_id}", f"agentrl play {env_id}"),
    )


def tasks_solved(facts: RunFacts) -> Advice | None:
    """Everybody always succeeds."""
    scored_episodes = _silent(facts)
    if not scored_episodes or not all(episode.success for episode in scored_episodes):
        return None
    return Advice(
        name="tasks_solved",
        cause="every episode succeeds: these tasks have nothing left to teach",
        evidence=f"{_groups(facts)}; {len(scored_episodes)} of {len(scored_episodes)} episodes succeeded",
        settings=("curriculum.pool=10000",),
        commands=(f"agentrl eval {facts.path}",),
    )


def reward_alike(facts: RunFacts) -> Advice | None:
    """All episodes get the same reward, whatever they did."""
    scored_episodes = _silent(facts)
    outcomes = {episode.outcome for episode in scored_episodes}
    distinct_texts = {episode.text for episode in scored_episodes if episode.turns}
    if (
        len(outcomes) != 1
        or len(distinct_texts) < 2
        or all(episode.success for episode in scored_episodes)
        or max(outcomes, default=0) == 0  # pyright: ignore[reportArgumentType]
    ):
        return None
    return Advice(
        name="reward_alike",
        cause="different episodes all get the same reward: what grades them does not look at what they did",
        evidence=f"{_groups(facts)}; {len(scored_episodes)} episodes with {len(distinct_texts)} texts got "
        f"{outcomes.pop():g}",
        commands=(f"agentrl validate {facts.config.env.id}", f"agentrl rewards {facts.path}"),
    )


def sampled_cold(facts: RunFacts) -> Advice | None:
    """The members of a group come out equal, by a low temperature or a policy that was certain from the beginning. A
    run of which no group has a signal makes no step, so this needs none."""
    temperature, step_entropies = facts.config.rollout.temperature, facts.values("entropy", facts.steps)
    if not (temperature <= _COLD or (len(step_entropies) >= RECENT and max(step_entropies) < _CERTAIN)):
        return None
    members_by_group: dict[int, list[EpisodeFacts]] = {}
    for episode in facts.episodes:
        if episode.stop_reason.by_policy and episode.outcome is not None:
            members_by_group.setdefault(episode.group, []).append(episode)
    compared = [members for members in members_by_group.values() if len(members) > 1]
    alike_groups = [members for members in compared if _equal(members)]
    is_all_solved = all(episode.success for members in compared for episode in members)
    if len(compared) < _LEAST_GROUPS or share(len(alike_groups), len(compared)) < _SILENT or is_all_solved:
        return None
    measured = f", entropy {max(step_entropies[-RECENT:]):.2g} nats" if step_entropies else ""
    return Advice(
        name="sampled_cold",
        cause="the policy is sampled cold: the members of a group come out equal, and nothing is explored",
        evidence=f"{len(alike_groups)} of {len(compared)} groups have members of one length and one outcome; "
        f"rollout.temperature = {temperature:g}{measured}",
        settings=("rollout.temperature=1.0",) if temperature < 1 else ("algo.entropy_weight=0.003",),
    )


def _equal(own: Sequence[EpisodeFacts]) -> bool:
    distinct_texts = {episode.text for episode in own if episode.turns}
    return len({(episode.tokens, episode.outcome) for episode in own}) == 1 and len(distinct_texts) < 2


def groups_alike(facts: RunFacts) -> Advice | None:
    """Tasks differ, the members of a group do not."""
    scored_episodes = _silent(facts)
    if not scored_episodes or len({episode.outcome for episode in scored_episodes}) < 2:
        return None
    temperature = facts.config.rollout.temperature
    return Advice(
        name="groups_alike",
        cause="the members of a group all end alike, only tasks differ",
        evidence=f"{_groups(facts)}; success {mean(bool(episode.success) for episode in scored_episodes):.2f} "
        f"of {len(scored_episodes)} episodes",
        settings=(
            f"rollout.group_size={2 * facts.config.rollout.group_size}",
            *((f"rollout.temperature={1.0:g}",) if temperature < 1 else ()),
            "curriculum.pool=10000",
        ),
    )


def source_alike(facts: RunFacts) -> Advice | None:
    """A reward source gives every turn the same score; one that the policy has come to satisfy always is no such."""
    for reward_source in facts.config.rewards:
        if reward_source.kind in ("overlong", "shaping"):  # mostly 0, as it should be
            continue
        source_name = reward_source.source
        scored_turns = [read_turn for read_turn in facts.turns if source_name in read_turn.scores]
        distinct_scores = {read_turn.scores[source_name] for read_turn in scored_turns}
        distinct_texts = {read_turn.text for read_turn in scored_turns}
        first_scores = {
            read_turn.scores[source_name]
            for episode in facts.first
            for read_turn in episode.turns
            if source_name in read_turn.scores
        }
        # A source that once told turns apart and now gives all of them its best score has been learned; one that never
        # did is broken.
        is_satisfied = len(first_scores) > 1 and distinct_scores == {max(first_scores)}
        if len(scored_turns) >= _SCORES and len(distinct_scores) == 1 and len(distinct_texts) > 1 and not is_satisfied:
            return Advice(
                name="source_alike",
                cause=f"reward source {source_name!r} scores everything alike, so it teaches nothing",
                evidence=f"the last {len(scored_turns)} turns, with {len(distinct_texts)} texts, all got "
                f"{distinct_scores.pop():g}",
                commands=(f"agentrl rewards {facts.path}", f"agentrl rescore {facts.path} --source {source_name}"),
            )
    return None


def source_fails(facts: RunFacts) -> Advice | None:
    """A reward source gives no score."""
    if not facts.unscored:
        return None
    return Advice(
        name="source_fails",
        cause="a reward source leaves turns without a score, so it decides which episodes are trained",
        evidence="; ".join(facts.unscored),
        commands=(f"agentrl rewards {facts.path}",),
    )


def reward_hacking(facts: RunFacts) -> Advice | None:
    """The training reward rises while held-out success falls."""
    for set_name in dict.fromkeys(evaluation.name for evaluation in facts.evaluations):
        set_evaluations = [
            evaluation
            for evaluation in facts.evaluations
            if evaluation.name == set_name and evaluation.finished and evaluation.success is not None
        ]
        if len(set_evaluations) < 2:
            continue
        best_evaluation = max(set_evaluations[:-1], key=lambda point: point.success or 0.0)
        last_evaluation = set_evaluations[-1]
        success_loss = (best_evaluation.success or 0.0) - (last_evaluation.success or 0.0)
        near_steps = [
            [step_metrics for step_metrics in facts.steps if abs(step_metrics["step"] - evaluation.step) <= RECENT]
            for evaluation in (best_evaluation, last_evaluation)
        ]
        mean_rewards = [mean(facts.values("outcome_mean", steps)) for steps in near_steps]
        reward_gain = mean_rewards[1] - mean_rewards[0]
        # Both have to hold: held-out success falls by more than the luck of so few tasks, and the reward rises
        # meanwhile. Either alone is over-fitting or plain noise, which have other remedies.
        if (
            success_loss >= _FELL
            and success_loss >= _SURE * _error(best_evaluation, last_evaluation)
            and reward_gain >= _ROSE * max(1.0, abs(mean_rewards[0]))
        ):
            return Advice(
                name="reward_hacking",
                cause="the reward rises while held-out success falls: the policy earns it in another way than you mean",
                evidence=f"reward {mean_rewards[0]:.2f} at step {best_evaluation.step}, {mean_rewards[1]:.2f} at step "
                f"{last_evaluation.step}; success on {set_name!r} {best_evaluation.success:.2f}, then "
                f"{last_evaluation.success:.2f} (n = {last_evaluation.n})",
                settings=(f"algo.kl_weight={3 * getattr(facts.config.algo, 'kl_weight', 0.0) or 0.01:g}",),
                commands=(f"agentrl view {facts.path}", f"agentrl validate {facts.config.env.id}"),
            )
    return None


def _error(*points: EvalFacts) -> float:
    """The standard error of the difference of two success rates, of all the same tasks taken for others."""
    rates_and_counts = [(evaluation.success or 0.0, max(1, evaluation.n)) for evaluation in points]
    return (
        sum(success_rate * (1 - success_rate) / episode_count for success_rate, episode_count in rates_and_counts)
        ** 0.5
    )


def one_text(facts: RunFacts) -> Advice | None:
    """Episodes of different tasks are the same text, word by word, and it pays."""
    read_episodes = [episode for episode in facts.episodes if episode.turns]
    if len(read_episodes) < _LEAST_EPISODES:
        return None
    commonest_text, text_count = Counter(episode.text for episode in read_episodes).most_common(1)[0]
    same_episodes = [episode for episode in read_episodes if episode.text == commonest_text]
    group_count = len({episode.group for episode in same_episodes})
    early_episodes = [episode for episode in facts.first if episode.turns]
    early_share = share(sum(episode.text == commonest_text for episode in early_episodes), len(early_episodes))
    # Each of these excuses a run that is sound: a few equal texts, one task that is drawn often, games whose actions
    # are a word, a run without its first episodes, and a habit that the model has brought along.
    if (
        text_count < _SAME * len(read_episodes)
        or group_count < _TASKS
        or len(commonest_text) < _TEXT
        or not early_episodes
        or text_count < _GREW * early_share * len(read_episodes)
    ):
        return None
    text_reward, early_reward = (
        mean(episode.outcome or 0.0 for episode in compared_episodes)
        for compared_episodes in (same_episodes, early_episodes)
    )
    # A text that repeats and does not pay is an early habit of an untrained model, and is trained away by itself.
    if text_reward <= early_reward:
        return None
    return Advice(
        name="one_text",
        cause="one text earns the reward of different tasks: the grader takes it for an answer to all of them",
        evidence=f"{text_count} of {len(read_episodes)} episodes, of {group_count} groups, are the same "
        f"{len(commonest_text)} characters ({percent(early_share)} at first), and earn {text_reward:.2f} "
        f"({early_reward:.2f} at first)",
        settings=(f"algo.kl_weight={3 * getattr(facts.config.algo, 'kl_weight', 0.0) or 0.01:g}",),
        commands=(f"agentrl view {facts.path}", f"agentrl validate {facts.config.env.id}"),
    )


def _gain(facts: RunFacts) -> tuple[float, float]:
    """Return how much the reward gained since the first steps, and the standard error of that, as far as success shows
    it."""
    first_steps = facts.before[:_EARLY]
    success_rates, episode_counts = (
        [mean(facts.values(metric_name, window_steps)) for window_steps in (first_steps, facts.recent)]
        for metric_name in ("success_mean", "episodes")
    )
    reward_gain = mean(facts.values("outcome_mean")) - mean(facts.values("outcome_mean", first_steps))
    variances = [
        success_rate * (1 - success_rate) / (episode_count * step_count)
        for success_rate, episode_count, step_count in zip(success_rates, episode_counts, (_EARLY, RECENT), strict=True)
        if episode_count
    ]
    standard_error = sum(variances) ** 0.5
    return reward_gain, standard_error if standard_error == standard_error else 0.0


def length_drift(facts: RunFacts) -> Advice | None:
    """Episodes grow, or shrink, and earn no more."""
    env_id = facts.config.env.id
    metric_name = f"environments.{env_id}.played.tokens"
    early_lengths, recent_lengths = facts.values(metric_name, facts.before[:_EARLY]), facts.values(metric_name)
    if len(early_lengths) < _EARLY or len(recent_lengths) < RECENT:
        return None
    length_ratio = mean(recent_lengths) / max(middle(early_lengths), 1e-9)
    is_longer = min(recent_lengths) >= _LONGER * middle(early_lengths)
    is_shorter = max(recent_lengths) <= _SHORTER * middle(early_lengths)
    reward_gain, standard_error = _gain(facts)
    # Length alone is no fault: longer answers that earn more are what training is for.
    if not (is_longer or is_shorter) or reward_gain >= max(_PAYS, standard_error):
        return None
    token_limit = facts.config.rollout.max_tokens_per_turn
    return Advice(
        name="length_drift",
        cause=f"episodes grow {'longer' if is_longer else 'shorter'}, and earn no more for it",
        evidence=f"{mean(recent_lengths):.0f} tokens an episode, {middle(early_lengths):.0f} in the first steps (x "
        f"{length_ratio:.2g}); reward {reward_gain:+.2f}",
        settings=(
            f"algo.normalise={token_limit}",
            *(
                (f"rollout.max_tokens_per_turn={max(1, round(token_limit / 2))}",)
                if is_longer
                else ("algo.entropy_weight=0.003",)
            ),
        ),
    )
