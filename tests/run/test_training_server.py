"""`agentrl serve --training` with the real Tinker client: its numbers are those of transformers, PEFT and torch."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trio
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.errors import UsageError
from agentrl.models.resolve import model_dir
from agentrl.run.training_server import training_server as training_server_module
from agentrl.run.training_server.training_server import (
    RunningTrainingServer,
    TrainingServerSettings,
    training_server,
)
from tests.closeness import assert_gradients_alike, norm_of

from .training_servers import MODEL, in_thread

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

ROWS = [[5, 9, 40, 77, 12, 300], [8, 8, 31, 2]]
RANK = 4

LINEAR = 1e7
"""A learning rate that is `eps` too, far above any gradient here: then Adam's step is the gradient itself."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningTrainingServer, Path]]:
    state = tmp_path_factory.mktemp("state")
    with in_thread(state) as running:
        yield running, state


@pytest.fixture
def service(server: tuple[RunningTrainingServer, Path]) -> Iterator[Any]:
    import tinker

    with tinker.ServiceClient(base_url=server[0].url, api_key=server[0].key) as client:
        yield client


@pytest.fixture
def client(service: Any) -> Any:
    return service.create_lora_training_client(MODEL, rank=RANK, seed=7).result()


def datum(tokens: Sequence[int], **columns: Sequence[float]) -> Any:
    from tinker import types

    inputs = {"target_tokens": list(tokens[1:]), **{name: list(column) for name, column in columns.items()}}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def weights_of(number: int, tokens: Sequence[int]) -> list[float]:
    return [math.sin(number + place) for place in range(len(tokens) - 1)]  # also below 0


def advantages_of(number: int, tokens: Sequence[int]) -> list[float]:
    return [math.cos(3 * number + place) for place in range(len(tokens) - 1)]


def exported(client: Any, state: Path) -> Path:
    """The folder with the adapter as it is now, for PEFT."""
    client.save_weights_for_sampler("now", ttl_seconds=None).result()
    return max((state / "weights").iterdir(), key=lambda folder: int(folder.name))


class Plain:
    """The same adapter by PEFT over transformers' model, trained by torch's AdamW."""

    def __init__(self, folder: Path, **adam: Any) -> None:
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(model_dir(MODEL), dtype=torch.float32)
        self.model: Any = PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
        self.parameters = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self.adam = torch.optim.AdamW(self.parameters.values(), **adam) if adam else None

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        logits = self.model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def difference(weights: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    assert weights.keys() == others.keys()
    return {name: weight - others[name] for name, weight in weights.items()}


def numbers(result: Any) -> list[list[float]]:
    return [list(output["logprobs"].tolist()) for output in result.loss_fn_outputs]


def close(found: Sequence[Sequence[float]], wanted: Sequence[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other.tolist(), abs=1e-4)


@pytest.mark.medium
def test_loss_gradient_and_steps_are_those_of_plain_torch(
    client: Any, server: tuple[RunningTrainingServer, Path]
) -> None:
    from tinker import types

    adam = {"betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}
    plain = Plain(exported(client, server[1]), lr=3e-2, **adam)
    assert plain.adam is not None
    begun = plain.weights()
    data = [datum(row, weights=weights_of(at, row)) for at, row in enumerate(ROWS)]
    settings = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-2, "weight_decay": 0.1}
    for clip in (0.0, 0.5):
        first, second = (
            client.forward_backward(data, "cross_entropy"),
            client.forward_backward(data[:1], "cross_entropy"),
        )
        params = types.AdamParams(learning_rate=3e-2, grad_clip_norm=clip, **settings)
        stepped = client.optim_step(params).result()
        logprobs = [plain.logprobs(row) for row in ROWS]
        losses = [-(one * torch.tensor(weights_of(at, ROWS[at]))).sum() for at, one in enumerate(logprobs)]
        close(numbers(first.result()), logprobs)
        assert first.result().metrics["loss:sum"] == pytest.approx(float(sum(losses).detach()), rel=1e-5, abs=1e-4)
        assert second.result().metrics["loss:sum"] == pytest.approx(float(losses[0].detach()), rel=1e-5, abs=1e-4)
        (2 * losses[0] + losses[1]).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters.values(), clip or math.inf)
        assert stepped.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        plain.adam.step()
        plain.adam.zero_grad()
    trained = Plain(exported(client, server[1]))
    moved, apart = (difference(plain.weights(), other) for other in (begun, trained.weights()))
    assert norm_of(apart) <= 1e-3 * norm_of(moved)  # a gradient near `eps` carries its rounding into the weight
    assert max(float(one.detach().abs().max()) for name, one in trained.parameters.items() if "lora_B" in name) > 1e-3


def importance_sampling(ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -(ratio * advantages).sum()


def ppo(ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    pairs = zip(ratio, advantages, strict=True)
    return -torch.stack([torch.minimum(r * a, r.clamp(0.9, 1.05) * a) for r, a in pairs]).sum()


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -(ratio.detach().clamp(0.9, 1.05) * advantages * logprobs).sum()


@pytest.mark.parametrize("loss", [importance_sampling, ppo, cispo], ids=lambda loss: loss.__name__)
def test_a_policy_loss_and_its_gradient_are_those_of_plain_torch(
    loss: Callable[..., Tensor], client: Any, server: tuple[RunningTrainingServer, Path]
) -> None:
    from tinker import types

    plain = Plain(exported(client, server[1]))
    begun = plain.weights()
    now = [plain.logprobs(row) for row in ROWS]
    before = [one.detach() + 0.3 * torch.sin(torch.arange(len(one)) + 1) for one in now]
    data = [datum(row, logprobs=before[at].tolist(), advantages=advantages_of(at, row)) for at, row in enumerate(ROWS)]
    config = None if loss is importance_sampling else {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
    result = client.forward_backward(data, loss.__name__, config).result()
    client.optim_step(types.AdamParams(learning_rate=LINEAR, eps=LINEAR)).result()
    total = sum(
        loss((one - before[at]).exp(), one, torch.tensor(advantages_of(at, ROWS[at]))) for at, one in enumerate(now)
    )
    assert isinstance(total, Tensor)
    assert result.metrics["loss:sum"] == pytest.approx(float(total), rel=1e-5, abs=1e-4)
    total.backward()
    found = difference(begun, Plain(exported(client, server[1])).weights())
    assert_gradients_alike(found, plain.gradients())


def test_a_loss_of_the_clients_own_and_its_gradient(client: Any, server: tuple[RunningTrainingServer, Path]) -> None:
    from tinker import types

    def squares(data: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return sum((one**2).sum() for one in logprobs), {"rows": float(len(logprobs))}  # pyright: ignore

    plain = Plain(exported(client, server[1]))
    begun = plain.weights()
    total, _ = squares(None, [plain.logprobs(row) for row in ROWS])
    result = client.forward_backward_custom([datum(row) for row in ROWS], squares).result()
    assert result.metrics["loss:sum"] == pytest.approx(float(total), rel=1e-5)
    assert result.metrics["rows"] == 2
    client.optim_step(types.AdamParams(learning_rate=LINEAR, eps=LINEAR)).result()
    total.backward()
    found = difference(begun, Plain(exported(client, server[1])).weights())
    assert_gradients_alike(found, plain.gradients())


def test_several_targets_at_a_place(client: Any) -> None:
    from tinker import types

    row = ROWS[1]
    targets = [[token, token + 1] for token in row[1:]]
    shape = [len(targets), 2]
    two = types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(
                data=[one for pair in targets for one in pair], dtype="int64", shape=shape
            ),
            "weights": types.TensorData(data=[0.25, 0.75] * len(targets), dtype="float32", shape=shape),
        },
    )
    both, one = client.forward([two, datum(row)], "cross_entropy").result().loss_fn_outputs
    assert both["logprobs"].shape == shape
    assert both["logprobs"].to_torch()[:, 0].tolist() == pytest.approx(one["logprobs"].tolist(), abs=1e-4)


def test_samples_have_the_log_probs_that_the_trainer_computes(client: Any) -> None:
    from tinker import types

    data = [datum(row, weights=weights_of(at, row)) for at, row in enumerate(ROWS)]
    client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(ROWS[0])
    sampled = sampler.sample(prompt, 3, types.SamplingParams(max_tokens=5, stop=[])).result()
    assert [len(one.tokens) for one in sampled.sequences] == [5, 5, 5]
    for sequence in sampled.sequences:
        whole = [*ROWS[0], *sequence.tokens]
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
        assert scored[0] is None
        assert list(sequence.logprobs) == pytest.approx(scored[len(ROWS[0]) :], abs=1e-4)
        (trained,) = numbers(client.forward([datum(whole)], "cross_entropy").result())
        assert trained == pytest.approx(scored[1:], abs=1e-4)


@pytest.mark.medium
def test_the_reward_of_a_clients_own_loop_rises(client: Any) -> None:
    """Even tokens are rewarded: at first a quarter of what the model says."""
    from tinker import types

    prompt, rewards = ROWS[1], list[float]()
    before = [0.0] * (len(prompt) - 1)
    for _ in range(6):
        sampler = client.save_weights_and_get_sampling_client().result()
        asked = types.SamplingParams(max_tokens=1, stop=[])
        samples = sampler.sample(types.ModelInput.from_ints(prompt), 64, asked).result().sequences
        earned = [float(one.tokens[0] % 2 == 0) for one in samples]
        rewards.append(sum(earned) / len(earned))
        data = [
            datum([*prompt, *one.tokens], logprobs=[*before, *one.logprobs], advantages=[*before, reward - rewards[-1]])
            for one, reward in zip(samples, earned, strict=True)
        ]
        client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert rewards[0] < 0.5 and rewards[-1] > 0.7, rewards


def test_the_base_model_is_sampled_without_an_adapter(client: Any, service: Any) -> None:
    from tinker import types

    fresh = numbers(client.forward([datum(ROWS[0])], "cross_entropy").result())
    base = service.create_sampling_client(base_model=MODEL).result()
    assert base.get_base_model() == MODEL
    scored = base.compute_logprobs(types.ModelInput.from_ints(ROWS[0])).result()
    assert scored[1:] == pytest.approx(fresh[0], abs=1e-4)


def test_a_saved_state_goes_on_with_its_optimizer_or_without(client: Any, service: Any) -> None:
    from tinker import types

    data = [datum(row, weights=weights_of(at, row)) for at, row in enumerate(ROWS)]
    params = types.AdamParams(learning_rate=1e-2, eps=1e-2)

    def step(of: Any) -> list[list[float]]:
        of.forward_backward(data, "cross_entropy")
        of.optim_step(params).result()
        return numbers(of.forward(data, "cross_entropy").result())

    step(client)
    path = client.save_state("after-one").result().path
    whole = service.create_training_client_from_state_with_optimizer(path).result()
    bare = service.create_training_client_from_state(path).result()
    assert whole.get_info().lora_rank == RANK
    second = step(client)
    assert step(whole) == second
    assert step(bare) != second
    client.load_state_with_optimizer(path).result()
    assert step(client) == second


def test_clients_train_beside_each_other_as_alone(service: Any, server: tuple[RunningTrainingServer, Path]) -> None:
    import tinker
    from tinker import types

    def loop(of: Any, shift: int, steps: int) -> list[Any]:
        futures = []
        for _ in range(steps):
            futures.append(of.forward_backward([datum([token + shift for token in ROWS[0]])], "cross_entropy"))
            of.optim_step(types.AdamParams(learning_rate=1e-2))
        return futures

    alone = service.create_lora_training_client(MODEL, rank=2, seed=3, train_mlp=False).result()
    wanted = [numbers(future.result()) for future in loop(alone, 0, 4)]
    with tinker.ServiceClient(base_url=server[0].url, api_key=server[0].key) as other:
        first = service.create_lora_training_client(MODEL, rank=2, seed=3, train_mlp=False).result()
        second = other.create_lora_training_client(MODEL, rank=8, seed=4).result()
        both = [loop(first, 0, 4), loop(second, 1, 4)]
        assert [numbers(future.result()) for future in both[0]] == wanted
        assert numbers(both[1][-1].result()) != numbers(both[1][0].result())


def test_another_key_is_refused(server: tuple[RunningTrainingServer, Path]) -> None:
    import tinker

    with pytest.raises(tinker.AuthenticationError, match="another API key: give the key that the server printed"):
        tinker.ServiceClient(base_url=server[0].url, api_key="tml-wrong").create_sampling_client(base_model=MODEL)


def test_a_request_that_cannot_be_is_refused_in_a_few_words(server: tuple[RunningTrainingServer, Path]) -> None:
    """Numbers that the log cannot hold, and bodies that an answer would quote: the server goes on."""
    running, _ = server
    headers = {"x-api-key": running.key or "", "content-type": "application/json"}
    key = "m:train:0"
    cases: list[tuple[str, bytes]] = [
        *((route, b"[" * 100_000) for route in ("optim_step", "asample", "create_model", "retrieve_future")),
        ("create_model", json.dumps({"session_id": "s", "model_seq_id": 1 << 63, "base_model": MODEL}).encode()),
        *(
            (route, json.dumps({"model_id": key, "seq_id": number, "path": "x"}).encode())
            for route in ("optim_step", "save_weights", "load_weights")
            for number in (1 << 63, 10**40)
        ),
        ("create_sampling_session", json.dumps({"session_id": "s", "sampling_session_seq_id": 1 << 63}).encode()),
        ("optim_step", json.dumps({"model_id": "m" * 1_000_000, "seq_id": 1}).encode()),
        ("weights_info", json.dumps({"tinker_path": "p" * 1_000_000}).encode()),
        ("sessions/" + "x" * 3000 + "/finish", b"{}"),
    ]
    for route, body in cases:
        reply = httpx.post(f"{running.url}/api/v1/{route}", content=body, headers=headers, timeout=60)
        assert 400 <= reply.status_code < 500, (route, reply.status_code)
        assert len(reply.content) < 5000 and reply.json()["error"], route
    assert httpx.get(f"{running.url}/api/v1/healthz", timeout=60).json() == {"status": "ok"}


def test_a_state_folder_that_was_open_is_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)

    async def start() -> None:
        async with training_server(TrainingServerSettings(model=MODEL, state=folder, port=0)):
            raise AssertionError("it has no engine")

    def no_learner(*_: object) -> None:
        raise UsageError("far enough")

    monkeypatch.setattr(training_server_module, "_learner", no_learner)
    with pytest.raises(UsageError, match="far enough"):
        trio.run(start)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert f"{folder} was open to other users (mode 755): it is yours alone now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loss", "columns", "said"),
    [
        ("dro", {"weights": [1.0] * 3}, "loss_fn = 'dro': this server has cross_entropy"),
        ("ppo", {"advantages": [1.0] * 3}, r"data\[0\].loss_fn_inputs.logprobs = None: the loss reads it"),
        ("cross_entropy", {"advantages": [1.0] * 3}, r"loss_fn_inputs.advantages = \[3\]: the loss does not read it"),
        ("cross_entropy", {"weights": [1.0] * 2}, r"loss_fn_inputs.weights = \[2\]: give the shape of target_tokens"),
        ("cross_entropy", {"weights": [math.nan] * 3}, "give finite numbers"),
    ],
)
def test_a_call_that_cannot_be_computed_says_why_and_the_next_goes_on(
    loss: str, columns: dict[str, list[float]], said: str, client: Any
) -> None:
    import tinker
    from tinker import types

    row = ROWS[1]
    with pytest.raises(tinker.RequestFailedError, match=said) as failure:
        client.forward_backward([datum(row, **columns)], loss).result()
    assert failure.value.category == types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="optim_step has no gradients: call forward_backward before"):
        client.optim_step(types.AdamParams()).result()
    client.forward_backward([datum(row)], "cross_entropy")
    assert client.optim_step(types.AdamParams()).result().metrics["grad_norm"] > 0


def test_what_this_server_does_not_have_is_named(service: Any, client: Any) -> None:
    import tinker
    from tinker import types

    with pytest.raises(tinker.UnprocessableEntityError, match=f"base_model = 'gpt-7': this server has '{MODEL}'"):
        service.create_lora_training_client("gpt-7").result()
    with pytest.raises(tinker.RequestFailedError, match="does not train the unembedding"):
        service.create_lora_training_client(MODEL, train_mlp=False, train_attn=False).result()
    with pytest.raises(tinker.RequestFailedError, match=r"optimizer_config.type = 'dimuon': this server has adamw"):
        service.create_lora_training_client(MODEL, optimizer=types.DimuonOptimizerConfig()).result()
    with pytest.raises(tinker.RequestFailedError, match="no such checkpoint of save_state"):
        service.create_training_client_from_state("tinker://nobody/weights/none").result()
    sampler = service.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput.from_ints(ROWS[0])
    with pytest.raises(tinker.RequestFailedError, match=r"sampling_params.seed = 3: the engine has no seeds"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1, seed=3)).result()
    with pytest.raises(tinker.RequestFailedError, match="topk_prompt_logprobs = 2: this server does not have it"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), topk_prompt_logprobs=2).result()
    picture = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    seen = types.Datum(model_input=picture, loss_fn_inputs={"target_tokens": [1]})
    with pytest.raises(tinker.RequestFailedError, match="trains and samples text alone"):
        client.forward([seen], "cross_entropy").result()
    with pytest.raises(tinker.NotFoundError, match="has no GET /api/v1/training_runs"):
        tinker.RestClient(base_url=service._base_url, api_key=service._api_key).list_training_runs().result()
