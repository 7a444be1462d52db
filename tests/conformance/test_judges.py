"""Each judge on a trainer that is right, and on the same trainer with one mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.conformance.adapters.adapter import Setup
from agentrl.conformance.cases import CASES, Case
from agentrl.conformance.conduct import judge
from agentrl.conformance.judges import Verdict
from agentrl.conformance.observation import Observation, Recorder, add_events
from agentrl.conformance.scripted_engine import serving
from agentrl.conformance.tiny_forward import TinyModel
from agentrl.conformance.tiny_model import encode, write_model
from tests.conformance.plain_trainer import adapter

BY_NAME = {case.name: case for case in CASES}
IN_PROCESS = [name for name, case in BY_NAME.items() if case.scenario.kill_at_step is None]


def judged(case: Case, mistake: str, folder: Path) -> Verdict:
    events = folder / "events.jsonl"
    with serving(case.scenario) as (engine, url):
        with events.open("w") as file:
            recorder = Recorder(file)
            try:
                setup = Setup(model=folder, url=url, folder=folder)
                adapter(mistake).train(case.scenario, setup, recorder)
                recorder.finished()
            except Exception as error:
                recorder.stopped(repr(error))
        seen = Observation(samples=engine.samples())
        add_events(seen, events, 0)
        return judge(case, seen)


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_right_trainer_holds(name: str, tmp_path: Path) -> None:
    verdict = judged(BY_NAME[name], "", tmp_path)
    assert verdict.outcome == "holds", verdict.evidence


@pytest.mark.parametrize(
    ("name", "mistake", "evidence"),
    [
        ("tokens", "tokenizes again", "g0m0t1a was tokenized again: 31 tokens for 32 sampled ones"),
        ("tokens", "other log-probs", "has log-probs 0.1 nats from those that it was sampled with"),
        ("tokens", "trains the tool", "are scored and nobody sampled them"),
        ("engine-dies", "trains the part", "g0m1t1a is trained as if it had ended where the engine failed"),
        ("straggler", "trains the part", "g0m3t0a is trained as if it had ended where the engine failed"),
        ("client-retries", "trains what nobody read", "g0m1t1 is trained as g0m1t1a and as g0m1t1b: its client read"),
        ("grader-fails", "scores a failure", "g0m2 has no reward and is trained with advantage"),
        ("grader-fails", "counts failures", "do not follow the rewards around the mean of those judged"),
        ("late-weights", "forgets ages", "step 4 trains tokens that are 3 steps old; the bound is 1"),
        ("lost-weights", "believes the engine", "step 2 trains tokens of weights that never arrived, and no word"),
        ("control-tokens", "believes control tokens", "a text of the tool became 4 control tokens"),
        ("truncated", "ends what was cut", "1 tokens behind g0m0t1a are scored and nobody sampled them: '<|im_end|>'"),
        ("unequal-turns", "last turn alone", "g0m1t0a is in the context of a trained turn and is not trained itself"),
        ("equal-rewards", "divides by zero", "an advantage is not a number"),
        ("nan-reward", "takes NaN", "an advantage is not a number"),
        ("dropped-answer", "drops answers", "trained without the tool's answers, and no word about it"),
    ],
)
def test_a_wrong_trainer_breaks(name: str, mistake: str, evidence: str, tmp_path: Path) -> None:
    verdict = judged(BY_NAME[name], mistake, tmp_path)
    assert verdict.outcome == "breaks"
    assert evidence in verdict.evidence


def test_an_error_of_the_trainer_is_no_broken_promise() -> None:
    seen = Observation(stopped="OutOfMemory: no room")
    assert judge(BY_NAME["tokens"], seen) == Verdict("stops", "OutOfMemory: no room")


def test_what_an_adapter_cannot_see_is_not_judged() -> None:
    hidden = Observation(finished=True, unseen={"rows": "they stay in another process"})
    assert judge(BY_NAME["tokens"], hidden) == Verdict("not observed", "they stay in another process")
    skipped = Observation(skipped=("not applicable", "it has no engine"))
    assert judge(BY_NAME["engine-dies"], skipped) == Verdict("not applicable", "it has no engine")


def test_the_plain_model_computes_what_transformers_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = write_model(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = encode("a text, which no tokenizer spells so")
    logprobs = model(torch.tensor([tokens])).logits.log_softmax(-1)[0]
    expected = [logprobs[place, token].item() for place, token in enumerate(tokens[1:])]
    assert TinyModel(folder / "model.safetensors").logprobs(tokens) == pytest.approx(expected, abs=1e-5)


def test_the_tokenizer_has_merges_that_the_engine_never_uses(tmp_path: Path) -> None:
    """Else a trainer that tokenizes again would go unseen."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(write_model(tmp_path / "model") / "tokenizer.json"))
    text = BY_NAME["tokens"].scenario.text(0, 0, 1, 0)
    assert tokenizer.decode(encode(text), skip_special_tokens=False) == text
    assert len(tokenizer.encode(text).ids) < len(encode(text))
