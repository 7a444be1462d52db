"""Train an adapter with the client of Tinker on a server of ours, supervised and then by a reward.

    pip install '.[train,tinker]'
    agentrl serve agentrl/tiny-coder --training          # prints the two variables that this program reads
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-… python examples/tinker_client.py

The loops are written for Tinker; nothing in them is ours.
"""

from __future__ import annotations

import sys

import tinker
from tinker import types

PROMPT, ANSWER = "def add(a, b):\n    return", " a + b\n"
STEPS, SAMPLES = 8, 8


def supervised(trainer: tinker.TrainingClient, prompt: list[int], answer: list[int]) -> None:
    """Raise the probability of the answer's tokens."""
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )
    for step in range(STEPS):
        computed = trainer.forward_backward([datum], "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=3e-3))
        loss = computed.result().metrics["loss:sum"] / len(answer)
        stepped.result()
        print(f"supervised step {step}: loss {loss:.3f}", flush=True)


def by_reward(trainer: tinker.TrainingClient, prompt: list[int], answer: list[int]) -> None:
    """A step of policy gradients: the reward is the share of the answer's tokens that a sample has."""
    sampler = trainer.save_weights_and_get_sampling_client().result()
    asked = types.SamplingParams(max_tokens=len(answer), stop=[])
    samples = sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, asked).result().sequences
    rewards = [sum(a == b for a, b in zip(one.tokens, answer, strict=True)) / len(answer) for one in samples]
    mean = sum(rewards) / len(rewards)
    before = [0.0] * (len(prompt) - 1)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([*prompt, *one.tokens][:-1]),
            loss_fn_inputs={
                "target_tokens": [*prompt, *one.tokens][1:],
                "logprobs": [*before, *(one.logprobs or [])],
                "advantages": [*before, *([reward - mean] * len(one.tokens))],
            },
        )
        for one, reward in zip(samples, rewards, strict=True)
    ]
    trainer.forward_backward(data, "importance_sampling")
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print(f"a step by reward: mean reward {mean:.2f}", flush=True)


def main(model: str) -> None:
    """Train on the server of TINKER_BASE_URL."""
    with tinker.ServiceClient() as service:
        trainer = service.create_lora_training_client(model, rank=8, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        prompt, answer = tokenizer.encode(PROMPT), tokenizer.encode(ANSWER)
        supervised(trainer, prompt, answer)
        by_reward(trainer, prompt, answer)
        print(f"saved: {trainer.save_state('trained').result().path}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["agentrl/tiny-coder"]))
