"""An agent program that knows only a model's HTTP API: as `agentrl/Program-v0` it becomes an environment.

Its model is the policy. Each request is an observation, what the policy writes is the answer.
"""

import httpx


def answer(session):
    """Ask for a number and check it: the reward is what the function returns."""
    number = int(session.task.get("number", 21))
    reply = httpx.post(
        f"{session.base_url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {session.api_key}"},
        json={"model": session.model, "messages": [{"role": "user", "content": f"What is twice {number}?"}]},
        timeout=300,
        trust_env=False,
    )
    return float(str(2 * number) in reply.json()["choices"][0]["message"]["content"])
