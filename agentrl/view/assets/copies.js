// An episode in forms to take elsewhere. A text stays a text: JSON escapes it, in Python too.

export const chatOf = (episode) => [
  ...episode.start,
  ...episode.turns.flatMap((turn) => [{ role: "assistant", name: turn.role, content: turn.text }, ...(turn.observation ?? [])]),
].map((one) => ({ role: one.role, ...(one.name && one.name !== "policy" ? { name: one.name } : {}), content: one.content.text }));

// A test for pytest: the environment answers the same actions in the same way. The episode is a string of JSON in a
// string of Python: what JSON escapes, Python reads.
export function testCaseOf(episode, run) {
  const contents = (messages) => messages.map((one) => one.content.text);
  const turns = episode.turns.filter((turn) => turn.observation !== null).map((turn) => ({
    action: turn.text.text, observation: contents(turn.observation), reward: turn.rewards.env ?? 0, terminated: turn.terminated, truncated: turn.truncated,
  }));
  const { kwargs, options } = episode.task;
  const document = { env: episode.env, kwargs, seed: episode.seed, options, start: contents(episode.start), turns };
  return `"""Episode ${episode.id} of the run ${JSON.stringify(run).slice(1, -1)}: the environment answers its actions as it did then."""

import json

import agentrl

EPISODE = json.loads(
    ${JSON.stringify(JSON.stringify(document))}
)


def test_episode_${episode.id}() -> None:
    env = agentrl.make(EPISODE["env"], **EPISODE["kwargs"])
    try:
        messages, _ = env.reset(seed=EPISODE["seed"], options=EPISODE["options"])
        assert [one["content"] for one in messages] == EPISODE["start"]
        for turn in EPISODE["turns"]:
            messages, reward, terminated, truncated, _ = env.step(turn["action"])
            assert [one["content"] for one in messages] == turn["observation"]
            assert (reward, terminated, truncated) == (turn["reward"], turn["terminated"], turn["truncated"])
    finally:
        env.close()
`;
}
