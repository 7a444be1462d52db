"""TRL's `GRPOTrainer` with an environment, sampled by the scripted engine in the place of `generate`.

What enters the loss is what `_compute_loss` gets. Generation is TRL's own seam, `_generate_single_turn`: prompts of
tokens in, tokens and log-probs out, as from vLLM. The loop of tools, masks, rewards and advantages are TRL's. Where the
grader's host fails, the reward is None: TRL's own way to say that a completion has none.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# (TRL lives in another environment)

from __future__ import annotations

import json
import os
import re
import warnings
from typing import Any, Final

from agentrl.conformance.adapters.adapter import Adapter, Setup
from agentrl.conformance.observation import Recorder
from agentrl.conformance.scenario import NAME, Scenario, task_text

_LONGEST: Final = 2048
_IN_PROCESS: Final = "GRPOTrainer with a server needs vLLM beside it, and the adapter samples in its process"
_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def train(scenario: Scenario, setup: Setup, recorder: Recorder) -> None:
    """Train one group in each step."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import transformers
    from datasets import Dataset

    trainer_class, tokenizer_class, callback_class = _classes(setup, recorder)
    tokenizer = tokenizer_class.from_pretrained(setup.model)
    tokenizer.response_template = {}  # tells TRL that the tokenizer parses for itself
    last_checkpoint = transformers.trainer_utils.get_last_checkpoint(str(setup.folder))
    if last_checkpoint is not None:
        recorder.resumed(int(last_checkpoint.rpartition("-")[2]))
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        grpo_trainer = trainer_class(
            model=transformers.AutoModelForCausalLM.from_pretrained(setup.model, dtype="float32"),
            reward_funcs=_reward_of(setup),
            args=_settings(scenario, setup),
            train_dataset=Dataset.from_dict(
                {
                    "prompt": [
                        [{"role": "user", "content": task_text(group_index)}] for group_index in range(scenario.groups)
                    ]
                }
            ),
            processing_class=tokenizer,
            environment_factory=_environment_of(scenario),
            callbacks=[callback_class()],
        )
        grpo_trainer.train(resume_from_checkpoint=last_checkpoint)
    for caught_warning in caught_warnings:
        recorder.notice(str(caught_warning.message)[:300])


def _settings(scenario: Scenario, setup: Setup) -> Any:
    import trl

    group_size = len(scenario.members)
    return trl.GRPOConfig(
        output_dir=str(setup.folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=group_size,
        num_generations=group_size,
        max_completion_length=_LONGEST,
        shuffle_dataset=False,
        learning_rate=1e-4,
        max_steps=scenario.groups,
        logging_steps=1,
        save_strategy="steps" if scenario.checkpoint_every else "no",
        save_steps=scenario.checkpoint_every or 1,
        report_to=[],
        disable_tqdm=True,
    )


def _environment_of(scenario: Scenario) -> type:
    class Looking:
        """`reset`, and one public method, which TRL offers to the model as a tool."""

        def reset(self, **_: object) -> None:
            return None

        def look(self, key: str) -> str:
            """Look.

            Args:
                key: Where.
            """
            return scenario.tool_text

    return Looking


def _reward_of(setup: Setup) -> Any:
    def graded(completions: list[list[dict[str, Any]]], **_: object) -> list[float | None]:
        completion_rewards: list[float | None] = []
        for messages in completions:
            try:
                completion_rewards.append(
                    setup.grade(next(name_match[0] for name_match in map(_name_in, reversed(messages)) if name_match))
                )
            except OSError:
                completion_rewards.append(None)
        return completion_rewards

    return graded


def _name_in(message: dict[str, Any]) -> re.Match[str] | None:
    return NAME.search(f"{message.get('content')} {message.get('tool_calls')}")


def _classes(setup: Setup, recorder: Recorder) -> tuple[Any, Any, Any]:
    """The trainer that records, the tokenizer that parses calls, and the callback that reports steps."""
    import torch
    import transformers
    import trl

    class Tokenizer(transformers.PreTrainedTokenizerFast):
        def parse_response(self, response: list[int], *_: Any, **__: Any) -> dict[str, Any]:
            decoded_text = str(self.decode(response, skip_special_tokens=True))
            assistant_message: dict[str, Any] = {
                "role": "assistant",
                "content": _CALL.sub("", decoded_text).rstrip("\n"),
            }
            tool_calls = [
                {"type": "function", "function": json.loads(call_json)} for call_json in _CALL.findall(decoded_text)
            ]
            return {**assistant_message, "tool_calls": tool_calls} if tool_calls else assistant_message

    class Recording(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
            sampled_tokens: list[list[int]] = []
            sampled_logprobs: list[list[float]] = []
            for prompt_tokens in prompt_ids:
                request_body = {"token_ids": list(prompt_tokens), "sampling_params": {"max_tokens": _LONGEST}}
                sampled_choice = setup.post("/inference/v1/generate", request_body)["choices"][0]
                sampled_tokens.append(sampled_choice["token_ids"])
                sampled_logprobs.append(
                    [logprob_entry["logprob"] for logprob_entry in sampled_choice["logprobs"]["content"]]
                )
            return sampled_tokens, sampled_logprobs

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            loss_mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            sampled_logprobs = inputs.get("sampling_per_token_logps")
            for row_index in range(len(loss_mask)):
                prompt_tokens = inputs["prompt_ids"][row_index][inputs["prompt_mask"][row_index].bool()].tolist()
                is_token = inputs["completion_mask"][row_index].bool()
                scored_tokens = loss_mask[row_index][is_token].tolist()
                advantage = inputs["advantages"][row_index]
                token_advantages = (advantage.expand(is_token.shape) if advantage.ndim == 0 else advantage)[
                    is_token
                ].tolist()
                prompt_blank = [0] * len(prompt_tokens)
                recorder.row(
                    self.state.global_step + 1,
                    prompt_tokens + inputs["completion_ids"][row_index][is_token].tolist(),
                    [bool(token_scored) for token_scored in [*prompt_blank, *scored_tokens]],
                    [*prompt_blank, *token_advantages],
                    None
                    if sampled_logprobs is None
                    else [*prompt_blank, *sampled_logprobs[row_index][is_token].tolist()],
                )
            return super()._compute_loss(model, inputs)

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            is_finite = all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
            recorder.step(state.global_step, finite=is_finite)

    return Recording, Tokenizer, Steps


ADAPTER = Adapter(
    packages=("trl", "transformers", "torch"),
    train=train,
    not_applicable={"client-retries": "an environment of GRPOTrainer sends no requests to the model"},
    not_observed=dict.fromkeys(("engine-dies", "straggler", "late-weights", "lost-weights"), _IN_PROCESS),
)
