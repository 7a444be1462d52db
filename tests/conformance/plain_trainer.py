"""A trainer of a page, right in all cases, and wrong in one way on demand: the judges must tell the two apart.

It samples, masks and judges by itself, with the standard library. Nothing of agentrl's learner or rollouts is here.
"""

from __future__ import annotations

import json
import math
import re
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentrl.conformance.adapters.adapter import Adapter, Setup
from agentrl.conformance.observation import Recorder
from agentrl.conformance.scenario import Scenario, task_text
from agentrl.conformance.tiny_model import SPECIAL, STOP, decode, encode, vocabulary

_PATIENCE_S = 1.0
_TRIES = 20


@dataclass
class Episode:
    tokens: list[int] = field(default_factory=list)
    scored: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float | None = None

    def add(self, tokens: list[int], logprobs: list[float] | None = None) -> None:
        self.tokens += tokens
        self.scored += [logprobs is not None] * len(tokens)
        self.logprobs += logprobs or [0.0] * len(tokens)


def message(role: str, text: str, *, believes_text: bool = False) -> list[int]:
    """A ChatML message. One that believes what a text says makes control tokens of it."""
    inner = [text] if not believes_text else re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text)
    body = [id for part in inner for id in ([SPECIAL.index(part)] if part in SPECIAL else encode(part))]
    return [1, *encode(f"{role}\n"), *body, 2, *encode("\n")]


def sampled(setup: Setup, prompt: list[int]) -> tuple[list[int], list[float], str | None, int]:
    """Tokens, log-probs, how it finished (None: the engine failed), and the weight version."""
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 500}, "stream": True}
    request = urllib.request.Request(f"{setup.url}/inference/v1/generate", json.dumps(body).encode())
    tokens: list[int] = []
    logprobs: list[float] = []
    finish, version = None, 0
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    tokens += choice["token_ids"]
                    logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
                    finish, version = choice["finish_reason"], int(choice["weight_versions"][0]["version"])
    except OSError:
        finish = None
    return tokens, logprobs, finish, version


def merged(tokens: list[int]) -> list[int]:
    """The same text as a tokenizer would spell it: with the merge of `an`."""
    pair = [vocabulary()["a"], vocabulary()["n"]]
    for place in range(len(tokens) - 1):
        if tokens[place : place + 2] == pair:
            return [*tokens[:place], vocabulary()["an"], *tokens[place + 2 :]]
    return tokens


def play(scenario: Scenario, setup: Setup, recorder: Recorder, group: int, mistake: str) -> tuple[Episode | None, int]:
    """An episode, None if the engine failed, and the oldest weight version of its tokens."""
    episode, oldest = Episode(), 1 << 30
    episode.add(message("user", task_text(group)))
    for turn in range(9):
        episode.add([1, *encode("assistant\n")])
        for _ in range(1 if scenario.client_patience_s is None else _TRIES):
            tokens, logprobs, finish, version = sampled(setup, episode.tokens)
            if finish is not None:
                break
        if mistake == "trains what nobody read" and decode(tokens[:7]) == "g0m1t1b":
            begun = encode("g0m1t1a")  # the engine goes on with the answer that was given up
            lost = [*begun, *sampled(setup, [*episode.tokens, *begun])[0]]
            extra = [*episode.scored, *[True] * len(lost)]
            recorder.row(1, [*episode.tokens, *lost], extra, [0.0] * len(extra), None)
        oldest = min(oldest, version)
        if finish is None and not (mistake == "trains the part" and tokens):
            return None, oldest
        text = decode(tokens)
        if mistake == "tokenizes again":
            tokens = merged(tokens)
            logprobs = logprobs[: len(tokens)]
        if mistake == "other log-probs":
            logprobs = [logprob - 0.1 for logprob in logprobs]
        if mistake == "ends what was cut" and finish == "length":
            tokens, logprobs = [*tokens, STOP], [*logprobs, -1.0]
        episode.add(tokens, None if mistake == "last turn alone" and not scenario.is_last(text) else logprobs)
        if finish is None or scenario.is_last(text) or turn == 8:
            break
        answer = scenario.tool_text
        if not scenario.writes_tool:
            continue
        shown = [*encode("\n"), *message("tool", answer, believes_text=mistake == "believes control tokens")]
        episode.add(shown, [-1.0] * len(shown) if mistake == "trains the tool" else None)
    try:
        episode.reward = setup.grade(text.removesuffix("<|im_end|>")[:8])
    except OSError:
        episode.reward = 0.0 if mistake == "scores a failure" else None
    if mistake != "takes NaN" and episode.reward is not None and math.isnan(episode.reward):
        episode.reward = None
    return episode, oldest


def train(mistake: str, scenario: Scenario, setup: Setup, recorder: Recorder) -> None:
    if not scenario.writes_tool and mistake != "drops answers":
        raise ValueError("the template writes no message of the tool")
    saved = setup.folder / "step"
    begun = 0
    if saved.exists():
        begun = int(saved.read_text())
        recorder.resumed(begun)
    begun -= mistake == "repeats a step" and begun > 0
    for step in range(begun, scenario.groups):
        setup.post("/update_weight_version", {"new_version": step + 1})
        if scenario.delivery == "lost" and step > 0 and mistake != "believes the engine":
            raise RuntimeError("the engine has other weights than it says")
        played = [play(scenario, setup, recorder, step, mistake) for _ in scenario.members]
        fresh = [each for each, version in played if each and step + 1 - version <= scenario.max_lag]
        if mistake == "forgets ages":
            fresh = [each for each, _ in played if each]
        elif not fresh:
            raise RuntimeError("nothing fresh is left")
        judged = [each for each in fresh if each.reward is not None]
        rewards = [each.reward or 0.0 for each in judged]
        failed = len(played) - len(judged) if mistake == "counts failures" else 0
        mean = sum(rewards) / (len(rewards) + failed)
        spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        for episode, reward in zip(judged, rewards, strict=True):
            if mistake == "divides by zero":
                advantage = (reward - mean) / spread if spread else math.nan
            else:
                advantage = (reward - mean) / (spread + 1e-4)
            values = [advantage * is_scored for is_scored in episode.scored]
            recorder.row(step + 1, episode.tokens, episode.scored, values, episode.logprobs)
        recorder.step(step + 1, finite=True)
        if scenario.checkpoint_every and (step + 1) % scenario.checkpoint_every == 0:
            Path(saved).write_text(str(step + 1))


def adapter(mistake: str = "") -> Adapter:
    bound: Callable[[Scenario, Setup, Recorder], None] = partial(train, mistake)
    return Adapter(packages=(), train=bound)


RIGHT = adapter()
REPEATS = adapter("repeats a step")
SCORES_FAILURES = adapter("scores a failure")
WAITS = Adapter(packages=(), train=lambda *_: threading.Event().wait(600))
