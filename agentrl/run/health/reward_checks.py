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
    skipped = sum(facts.values("groups_skipped"))
    return sum(facts.values("groups_without_signal")) + skipped, sum(facts.values("group_count")) + skipped


def _silent(facts: RunFacts) -> Sequence[EpisodeFacts]:
    """The scored episodes of the last steps, if nearly all groups were without signal; else none."""
    silent, groups = _silence(facts)
    if groups < _LEAST_GROUPS or share(silent, groups) < _SILENT:
        return ()
    return [episode for episode in facts.episodes if episode.stop_reason.by_policy and episode.outcome is not None]


def _groups(facts: RunFacts) -> str:
    silent, groups = _silence(facts)
    return f"{silent:.0f} of {groups:.0f} groups of the last {len(facts.recent)} steps taught nothing"


def tasks_too_hard(facts: RunFacts) -> Advice | None:
    """Nobody ever succeeds."""
    played = _silent(facts)
    if (
        not played
        or any(episode.success for episode in played)
        or max(episode.outcome or 0.0 for episode in played) > 0
    ):
        return None
    env = facts.config.env.id
    return Advice(
        name="tasks_too_hard",
        cause="no episode succeeds, so no member of a group is better than another",
        evidence=f"{_groups(facts)}; 0 of {len(played)} episodes succeeded",
        settings=(f"rollout.group_size={2 * facts.config.rollout.group_size}", "curriculum.pool=10000"),
        commands=(f"agentrl validate {env}", f"agentrl play {env}"),
    )


def tasks_solved(facts: RunFacts) -> Advice | None:
    """Everybody always succeeds."""
    played = _silent(facts)
    if not played or not all(episode.success for episode in played):
        return None
    return Advice(
        name="tasks_solved",
        cause="every episode succeeds: these tasks have nothing left to teach",
        evidence=f"{_groups(facts)}; {len(played)} of {len(played)} episodes succeeded",
        settings=("curriculum.pool=10000",),
        commands=(f"agentrl eval {facts.path}",),
    )


def reward_alike(facts: RunFacts) -> Advice | None:
    """All episodes get the same reward, whatever they did."""
    played = _silent(facts)
    outcomes = {episode.outcome for episode in played}
    texts = {episode.text for episode in played if episode.turns}
    if (
        len(outcomes) != 1
        or len(texts) < 2
        or all(episode.success for episode in played)
        or max(outcomes, default=0) == 0  # pyright: ignore[reportArgumentType]
    ):
        return None
    return Advice(
        name="reward_alike",
        cause="different episodes all get the same reward: what grades them does not look at what they did",
        evidence=f"{_groups(facts)}; {len(played)} episodes with {len(texts)} texts got {outcomes.pop():g}",
        commands=(f"agentrl validate {facts.config.env.id}", f"agentrl rewards {facts.path}"),
    )


def sampled_cold(facts: RunFacts) -> Advice | None:
    """The members of a group come out equal, by a low temperature or a policy that was certain from the beginning. A
    run of which no group has a signal makes no step, so this needs none."""
    temperature, entropy = facts.config.rollout.temperature, facts.values("entropy", facts.steps)
    if not (temperature <= _COLD or (len(entropy) >= RECENT and max(entropy) < _CERTAIN)):
        return None
    groups: dict[int, list[EpisodeFacts]] = {}
    for episode in facts.episodes:
        if episode.stop_reason.by_policy and episode.outcome is not None:
            groups.setdefault(episode.group, []).append(episode)
    compared = [members for members in groups.values() if len(members) > 1]
    alike = [members for members in compared if _equal(members)]
    solved = all(episode.success for members in compared for episode in members)
    if len(compared) < _LEAST_GROUPS or share(len(alike), len(compared)) < _SILENT or solved:
        return None
    measured = f", entropy {max(entropy[-RECENT:]):.2g} nats" if entropy else ""
    return Advice(
        name="sampled_cold",
        cause="the policy is sampled cold: the members of a group come out equal, and nothing is explored",
        evidence=f"{len(alike)} of {len(compared)} groups have members of one length and one outcome; "
        f"rollout.temperature = {temperature:g}{measured}",
        settings=("rollout.temperature=1.0",) if temperature < 1 else ("algo.entropy_weight=0.003",),
    )


def _equal(own: Sequence[EpisodeFacts]) -> bool:
    texts = {episode.text for episode in own if episode.turns}
    return len({(episode.tokens, episode.outcome) for episode in own}) == 1 and len(texts) < 2


def groups_alike(facts: RunFacts) -> Advice | None:
    """Tasks differ, the members of a group do not."""
    played = _silent(facts)
    if not played or len({episode.outcome for episode in played}) < 2:
        return None
    temperature = facts.config.rollout.temperature
    return Advice(
        name="groups_alike",
        cause="the members of a group all end alike, only tasks differ",
        evidence=f"{_groups(facts)}; success {mean(bool(episode.success) for episode in played):.2f} "
        f"of {len(played)} episodes",
        settings=(
            f"rollout.group_size={2 * facts.config.rollout.group_size}",
            *((f"rollout.temperature={1.0:g}",) if temperature < 1 else ()),
            "curriculum.pool=10000",
        ),
    )


def source_alike(facts: RunFacts) -> Advice | None:
    """A reward source gives every turn the same score; one that the policy has come to satisfy always is no such."""
    for source in facts.config.rewards:
        if source.kind in ("overlong", "shaping"):  # mostly 0, as it should be
            continue
        name = source.source
        scored = [turn for turn in facts.turns if name in turn.scores]
        values, texts = {turn.scores[name] for turn in scored}, {turn.text for turn in scored}
        before = {turn.scores[name] for episode in facts.first for turn in episode.turns if name in turn.scores}
        # A source that once told turns apart and now gives all of them its best score has been learned; one that never
        # did is broken.
        satisfied = len(before) > 1 and values == {max(before)}
        if len(scored) >= _SCORES and len(values) == 1 and len(texts) > 1 and not satisfied:
            return Advice(
                name="source_alike",
                cause=f"reward source {name!r} scores everything alike, so it teaches nothing",
                evidence=f"the last {len(scored)} turns, with {len(texts)} texts, all got {values.pop():g}",
                commands=(f"agentrl rewards {facts.path}", f"agentrl rescore {facts.path} --source {name}"),
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
    for name in dict.fromkeys(point.name for point in facts.evaluations):
        points = [
            point for point in facts.evaluations if point.name == name and point.finished and point.success is not None
        ]
        if len(points) < 2:
            continue
        best, last = max(points[:-1], key=lambda point: point.success or 0.0), points[-1]
        fell = (best.success or 0.0) - (last.success or 0.0)
        rewards = [
            mean(facts.values("outcome_mean", [row for row in facts.steps if abs(row["step"] - point.step) <= RECENT]))
            for point in (best, last)
        ]
        rose = rewards[1] - rewards[0]
        # Both have to hold: held-out success falls by more than the luck of so few tasks, and the reward rises
        # meanwhile. Either alone is over-fitting or plain noise, which have other remedies.
        if fell >= _FELL and fell >= _SURE * _error(best, last) and rose >= _ROSE * max(1.0, abs(rewards[0])):
            return Advice(
                name="reward_hacking",
                cause="the reward rises while held-out success falls: the policy earns it in another way than you mean",
                evidence=f"reward {rewards[0]:.2f} at step {best.step}, {rewards[1]:.2f} at step {last.step}; success "
                f"on {name!r} {best.success:.2f}, then {last.success:.2f} (n = {last.n})",
                settings=(f"algo.kl_weight={3 * getattr(facts.config.algo, 'kl_weight', 0.0) or 0.01:g}",),
                commands=(f"agentrl view {facts.path}", f"agentrl validate {facts.config.env.id}"),
            )
    return None


def _error(*points: EvalFacts) -> float:
    """The standard error of the difference of two success rates, of all the same tasks taken for others."""
    rates = [(point.success or 0.0, max(1, point.n)) for point in points]
    return sum(rate * (1 - rate) / n for rate, n in rates) ** 0.5


def one_text(facts: RunFacts) -> Advice | None:
    """Episodes of different tasks are the same text, word by word, and it pays."""
    read = [episode for episode in facts.episodes if episode.turns]
    if len(read) < _LEAST_EPISODES:
        return None
    text, n = Counter(episode.text for episode in read).most_common(1)[0]
    same = [episode for episode in read if episode.text == text]
    tasks = len({episode.group for episode in same})
    early = [episode for episode in facts.first if episode.turns]
    at_first = share(sum(episode.text == text for episode in early), len(early))
    # Each of these excuses a run that is sound: a few equal texts, one task that is drawn often, games whose actions
    # are a word, a run without its first episodes, and a habit that the model has brought along.
    if n < _SAME * len(read) or tasks < _TASKS or len(text) < _TEXT or not early or n < _GREW * at_first * len(read):
        return None
    earned, others = (mean(episode.outcome or 0.0 for episode in group) for group in (same, early))
    # A text that repeats and does not pay is an early habit of an untrained model, and is trained away by itself.
    if earned <= others:
        return None
    return Advice(
        name="one_text",
        cause="one text earns the reward of different tasks: the grader takes it for an answer to all of them",
        evidence=f"{n} of {len(read)} episodes, of {tasks} groups, are the same {len(text)} characters "
        f"({percent(at_first)} at first), and earn {earned:.2f} ({others:.2f} at first)",
        settings=(f"algo.kl_weight={3 * getattr(facts.config.algo, 'kl_weight', 0.0) or 0.01:g}",),
        commands=(f"agentrl view {facts.path}", f"agentrl validate {facts.config.env.id}"),
    )


def _gain(facts: RunFacts) -> tuple[float, float]:
    """Return how much the reward gained since the first steps, and the standard error of that, as far as success shows
    it."""
    first = facts.before[:_EARLY]
    rates, sizes = (
        [mean(facts.values(name, rows)) for rows in (first, facts.recent)] for name in ("success_mean", "episodes")
    )
    gained = mean(facts.values("outcome_mean")) - mean(facts.values("outcome_mean", first))
    spread = [
        rate * (1 - rate) / (size * n) for rate, size, n in zip(rates, sizes, (_EARLY, RECENT), strict=True) if size
    ]
    error = sum(spread) ** 0.5
    return gained, error if error == error else 0.0


def length_drift(facts: RunFacts) -> Advice | None:
    """Episodes grow, or shrink, and earn no more."""
    env = facts.config.env.id
    name = f"environments.{env}.played.tokens"
    early, now = facts.values(name, facts.before[:_EARLY]), facts.values(name)
    if len(early) < _EARLY or len(now) < RECENT:
        return None
    change = mean(now) / max(middle(early), 1e-9)
    longer, shorter = min(now) >= _LONGER * middle(early), max(now) <= _SHORTER * middle(early)
    gained, error = _gain(facts)
    # Length alone is no fault: longer answers that earn more are what training is for.
    if not (longer or shorter) or gained >= max(_PAYS, error):
        return None
    most = facts.config.rollout.max_tokens_per_turn
    return Advice(
        name="length_drift",
        cause=f"episodes grow {'longer' if longer else 'shorter'}, and earn no more for it",
        evidence=f"{mean(now):.0f} tokens an episode, {middle(early):.0f} in the first steps (x {change:.2g}); "
        f"reward {gained:+.2f}",
        settings=(
            f"algo.normalise={most}",
            *(
                (f"rollout.max_tokens_per_turn={max(1, round(most / 2))}",)
                if longer
                else ("algo.entropy_weight=0.003",)
            ),
        ),
    )
