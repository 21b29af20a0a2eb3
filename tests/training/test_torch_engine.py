"""The training engine against Hugging Face's own forward in float64, and its invariances."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headrace.algorithms.reduction import token_weights
from headrace.config import AlgorithmConfig
from headrace.data.batch import Batch
from headrace.errors import RunError
from headrace.models.causal_lm import CausalLM
from headrace.models.heads import critic_from
from headrace.training.optimizer import OptimizerSettings
from headrace.training.policy_loss import PolicyLoss
from headrace.training.torch_engine import TorchEngine
from headrace.training.value_loss import SupervisedLoss, ValueLoss

TEMPERATURE = 0.7


def make_batch(vocab: int, lengths: list[tuple[int, int]], seed: int = 0) -> Batch:
    """Rows of (prompt, response) lengths with everything a policy update reads."""
    g = torch.Generator().manual_seed(seed)
    total = sum(p + r for p, r in lengths)
    mask = torch.cat([torch.tensor([False] * p + [True] * r) for p, r in lengths])
    noise = torch.randn(total, generator=g, dtype=torch.float32)
    return Batch(
        [p + r for p, r in lengths],
        {
            "input_ids": torch.randint(0, vocab, (total,), generator=g),
            "response_mask": mask,
            "loss_mask": mask,
            "advantages": torch.where(mask, torch.randn(total, generator=g), 0.0),
            "logprobs": torch.where(mask, -3 + 0.3 * noise, 0.0),
            "rollout_logprobs": torch.where(mask, -3 + 0.3 * noise, 0.0),
            "reference_logprobs": torch.where(mask, -3 - 0.2 * noise, 0.0),
            "values": torch.where(mask, 0.1 * noise, 0.0),
            "returns": torch.where(mask, noise, 0.0),
        },
    )


ROWS = [(3, 5), (1, 1), (7, 12), (2, 9), (5, 3), (4, 0)]
SAMPLES = [
    (7, 12),
    (3, 5),
    (7, 2),
    (3, 9),
    (7, 7),
    (7, 0),
    (3, 1),
    (9, 4),
]  # rows of 7 and of 3 share a prompt


def with_shared_prompts(batch: Batch) -> Batch:
    """The same batch where all prompts of one length are the same tokens."""
    ids, first = batch["input_ids"].clone(), {}
    for r in range(batch.num_rows):
        start, end = int(batch.offsets[r]), int(batch.offsets[r + 1])
        p = int((~batch["response_mask"][start:end]).sum())
        ids[start : start + p] = first.setdefault(p, ids[start : start + p].clone())
    return batch.with_columns({"input_ids": ids})


def hf_double(model: CausalLM):
    """Hugging Face's own model in float64 with its own attention: an implementation we did not write."""
    hf = copy.deepcopy(model.hf).double()
    hf.set_attn_implementation("eager")
    return hf.eval()


def dense_outputs(hf, batch: Batch, temperature: float):
    """float64 (log-probability, entropy) of every response token, one unpacked row at a time."""
    logprobs = torch.zeros(batch.num_tokens, dtype=torch.float64)
    entropy = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for r in range(batch.num_rows):
        ids = batch.row_values("input_ids", r)
        logits = hf(input_ids=ids[None], use_cache=False).logits[0] / temperature
        logp = logits.log_softmax(-1)
        start = int(batch.offsets[r])
        for t in range(1, len(ids)):
            if batch["response_mask"][start + t]:
                logprobs[start + t] = logp[t - 1, ids[t]]
                entropy[start + t] = -(logp[t - 1].exp() * logp[t - 1]).sum()
    return logprobs, entropy


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("budget", [1, 20, 10_000])
@pytest.mark.parametrize("shared", [False, True])
def test_outputs_equal_hf(tiny, name: str, budget: int, shared: bool) -> None:
    model = tiny(name)
    batch = make_batch(model.vocab_size, ROWS)
    if shared:
        batch = with_shared_prompts(make_batch(model.vocab_size, SAMPLES))
    engine = TorchEngine(
        copy.deepcopy(model), prefix="actor", temperature=TEMPERATURE, tokens_per_microbatch=budget
    )
    out = engine.outputs(batch, with_entropy=True)
    with torch.no_grad():
        logprobs, entropy = dense_outputs(hf_double(model), batch, TEMPERATURE)
    torch.testing.assert_close(out.logprobs.double(), logprobs, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(out.entropy.double(), entropy, atol=2e-4, rtol=1e-4)


def dense_loss(hf, batch: Batch, a: AlgorithmConfig) -> torch.Tensor:
    """The same objective written plainly in float64: token mean of clipped loss + KL - entropy."""
    logprobs, entropy = dense_outputs_with_grad(hf, batch)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for t in range(batch.num_tokens):
        if not batch["loss_mask"][t]:
            continue
        advantage = float(batch["advantages"][t])
        ratio = (logprobs[t] - float(batch["logprobs"][t])).exp()
        clipped = ratio.clamp(1 - a.clip_low, 1 + a.clip_high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        if a.dual_clip is not None and advantage < 0:
            loss = torch.minimum(loss, torch.tensor(-a.dual_clip * advantage, dtype=torch.float64))
        d = float(batch["reference_logprobs"][t]) - logprobs[t]
        loss = loss + a.kl_coefficient * (d.exp() - 1 - d) - a.entropy_coefficient * entropy[t]
        total, count = total + loss, count + 1
    return total / count


def dense_outputs_with_grad(hf, batch: Batch):
    logprobs: dict[int, torch.Tensor] = {}
    entropy: dict[int, torch.Tensor] = {}
    for r in range(batch.num_rows):
        ids = batch.row_values("input_ids", r)
        logp = (hf(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        start = int(batch.offsets[r])
        for t in range(1, len(ids)):
            logprobs[start + t] = logp[t - 1, ids[t]]
            entropy[start + t] = -(logp[t - 1].exp() * logp[t - 1]).sum()
    return logprobs, entropy


class KeepGradients:
    """Stands where the optimizer is and keeps the accumulated gradients for a look."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self):
        from headrace.training.optimizer import StepResult

        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        for p in self.model.parameters():
            p.grad = None
        return StepResult(True, 0.0, 0.0)


def check_gradients(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Equal up to rounding: 1e-4 of a parameter's largest, or 1e-6 of the model's, as some are exactly 0 but for that."""
    assert got.keys() == wanted.keys()
    of_model = max((g.abs().max().item() for g in wanted.values()), default=0.0)
    for name, g in wanted.items():
        limit = max(1e-4 * g.abs().max().item(), 1e-6 * of_model) + 1e-10
        assert (got[name] - g).abs().max().item() < limit, name


def gradients(
    model: CausalLM, batch: Batch, loss, **engine_options
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    engine = TorchEngine(
        model, prefix="actor", temperature=TEMPERATURE, optimizer=OptimizerSettings(1e-3), **engine_options
    )
    keeper = KeepGradients(model)
    engine.optimizer = keeper
    metrics = engine.update(batch, loss)
    return metrics.means(), keeper.gradients


ALGORITHM = AlgorithmConfig(
    kl_coefficient=0.05, entropy_coefficient=0.01, dual_clip=3.0, clip_low=0.1, clip_high=0.3
)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["qwen2-tied", "gemma3", "gpt2"])
def test_update_gradient_equals_plain_float64(build_model, name: str, shared: bool) -> None:
    model = build_model(name)
    batch = make_batch(model.vocab_size, ROWS)
    if shared:
        batch = with_shared_prompts(make_batch(model.vocab_size, SAMPLES))
    hf = hf_double(model)
    expected = dense_loss(hf, batch, ALGORITHM)
    expected.backward()
    wanted = {f"hf.{n}": p.grad for n, p in hf.named_parameters() if p.grad is not None}
    weighted = batch.with_columns(
        {"loss_weight": token_weights(batch["loss_mask"], batch.offsets, "token_mean")}
    )
    metrics, got = gradients(
        model, weighted, PolicyLoss(ALGORITHM, measure_gap=False), tokens_per_microbatch=28 if shared else 16
    )
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert got.keys() == wanted.keys()
    for n, g in got.items():
        scale = wanted[n].abs().max().item() + 1e-6
        assert (g.double() - wanted[n]).abs().max().item() < 2e-3 * scale, n


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=2, max_size=7),
    budget=st.integers(1, 60),
    parts=st.one_of(st.none(), st.integers(1, 8)),
    reduction=st.sampled_from(["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"]),
    seed=st.integers(0, 100),
)
def test_loss_and_gradient_do_not_depend_on_packing(tiny, lengths, budget, parts, reduction, seed) -> None:
    model = copy.deepcopy(tiny("qwen3"))
    batch = make_batch(model.vocab_size, lengths, seed)
    weights = token_weights(batch["loss_mask"], batch.offsets, reduction, divisor_tokens=7)
    batch = batch.with_columns({"loss_weight": weights})
    loss = PolicyLoss(ALGORITHM, measure_gap=False)
    whole_metrics, whole = gradients(model, batch, loss, tokens_per_microbatch=10_000)
    order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(seed))
    cut_metrics, cut = gradients(
        model, batch.select(order), loss, tokens_per_microbatch=budget, microbatches_per_update=parts
    )
    check_gradients(cut, whole)
    assert cut_metrics.keys() == whole_metrics.keys()
    for name in whole_metrics:
        assert cut_metrics[name] == pytest.approx(whole_metrics[name], rel=1e-3, abs=1e-5), name


def test_sequence_mean_case_by_hand() -> None:
    """One token with loss 4, three tokens with loss 0: 2.0 by sequence mean, 0.5 with a constant divisor of 4."""
    mask, offsets = torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 4])
    losses = torch.tensor([4.0, 0.0, 0.0, 0.0])
    assert float((token_weights(mask, offsets, "sequence_mean") * losses).sum()) == 2.0
    assert float((token_weights(mask, offsets, "constant", divisor_tokens=4) * losses).sum()) == 0.5


def test_dropout_is_off_with_and_without_checkpointing(build_model) -> None:
    """A model with dropout everywhere: ratio 1 and clip fraction 0 on the first update; equal gradients."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from headrace.models.hf import wrap

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        attn_pdrop=0.1,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    hf = GPT2LMHeadModel(config)
    found = []
    for checkpointing in (False, True):
        model = wrap(copy.deepcopy(hf), None, gradient_checkpointing=checkpointing)
        batch = make_batch(50, ROWS)
        before = TorchEngine(copy.deepcopy(model), prefix="actor", temperature=TEMPERATURE).outputs(batch)
        weights = token_weights(batch["loss_mask"], batch.offsets, "token_mean")
        batch = batch.with_columns({"logprobs": before.logprobs, "loss_weight": weights})
        metrics, grads = gradients(model, batch, PolicyLoss(AlgorithmConfig(), measure_gap=False))
        assert metrics["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["actor/clip_fraction"] == 0.0
        found.append(grads)
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-6, rtol=1e-5, msg=name)


def test_gradient_checkpointing_recomputes(build_model) -> None:
    """It is really on: the layers run again in the backward pass."""
    model = build_model("qwen3")
    model.use_gradient_checkpointing()
    calls = []
    model.hf.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = make_batch(model.vocab_size, ROWS)
    batch = batch.with_columns(
        {"loss_weight": token_weights(batch["loss_mask"], batch.offsets, "token_mean")}
    )
    gradients(model, batch, PolicyLoss(AlgorithmConfig(), measure_gap=False))
    assert len(calls) == 2


def test_nan_outside_the_mask_stays_outside(build_model) -> None:
    model = build_model("llama")
    batch = make_batch(model.vocab_size, ROWS)
    poison = torch.where(batch["loss_mask"], batch["advantages"], float("nan"))
    weights = token_weights(batch["loss_mask"], batch.offsets, "token_mean")
    batch = batch.with_columns({"advantages": poison, "loss_weight": weights})
    metrics, grads = gradients(model, batch, PolicyLoss(AlgorithmConfig(), measure_gap=False))
    assert math.isfinite(metrics["actor/loss"])
    assert all(torch.isfinite(g).all() for g in grads.values())


def supervised(model: CausalLM, **options) -> tuple[TorchEngine, Batch]:
    batch = make_batch(model.vocab_size, ROWS)
    batch = batch.with_columns(
        {"loss_weight": token_weights(batch["response_mask"], batch.offsets, "token_mean")}
    )
    return TorchEngine(model, prefix="sft", optimizer=OptimizerSettings(1e-3), **options), batch


def test_nothing_to_learn_changes_nothing(build_model) -> None:
    """All tokens masked out (truncated responses, say): no update, no NaN."""
    model = build_model("llama")
    engine, batch = supervised(model)
    before = copy.deepcopy(model.state_dict())
    engine.update(batch.with_columns({"loss_weight": torch.zeros(batch.num_tokens)}), SupervisedLoss())
    assert engine.optimizer.updates == 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_non_finite_gradient_skips_and_counts(build_model) -> None:
    model = build_model("llama")
    engine, batch = supervised(model, max_skipped_updates=2)
    before = copy.deepcopy(model.state_dict())
    bad = batch.with_columns({"loss_weight": torch.where(batch["loss_weight"] != 0, float("inf"), 0.0)})
    engine.update(bad, SupervisedLoss())
    assert (engine.optimizer.updates, engine.optimizer.skipped) == (0, 1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    engine.update(batch, SupervisedLoss())
    assert (engine.optimizer.updates, engine.optimizer.skipped) == (1, 1)
    engine.update(bad, SupervisedLoss())
    with pytest.raises(RunError, match="2 updates in a row had non-finite gradients"):
        engine.update(bad, SupervisedLoss())


def test_supervised_loss_falls(build_model) -> None:
    model = build_model("qwen2-tied")
    engine, batch = supervised(model)
    losses = [engine.update(batch, SupervisedLoss()).means()["sft/loss"] for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_critic_starts_at_zero_and_fits_returns(build_model) -> None:
    critic = critic_from(build_model("qwen3"))
    batch = make_batch(97, ROWS)
    engine = TorchEngine(critic, prefix="critic", optimizer=OptimizerSettings(1e-2))
    assert torch.equal(engine.outputs(batch).values, torch.zeros(batch.num_tokens))
    zeros = torch.zeros(batch.num_tokens)
    weights = token_weights(batch["loss_mask"], batch.offsets, "token_mean")
    batch = batch.with_columns({"values": zeros, "loss_weight": weights})
    first = engine.update(batch, ValueLoss(None)).means()["critic/loss"]
    mask = batch["loss_mask"]
    assert first == pytest.approx(float(0.5 * (batch["returns"][mask] ** 2).mean()), rel=1e-5)
    for _ in range(60):
        last = engine.update(batch, ValueLoss(None)).means()["critic/loss"]
    assert last < 0.3 * first


def test_value_does_not_see_its_own_token(build_model) -> None:
    """values[t] is made before token t: changing token t must not change it, changing t - 1 must."""
    critic = critic_from(build_model("llama"))
    torch.nn.init.normal_(critic.hf.score.weight)
    engine = TorchEngine(critic, prefix="critic")
    batch = make_batch(97, [(3, 6)])
    before = engine.outputs(batch).values
    ids = batch["input_ids"].clone()
    ids[5] = (ids[5] + 1) % 97
    after = engine.outputs(batch.with_columns({"input_ids": ids})).values
    torch.testing.assert_close(after[:6], before[:6])
    assert not torch.allclose(after[6:], before[6:])


def test_frozen_model_cannot_be_updated(build_model) -> None:
    engine = TorchEngine(build_model("llama"), prefix="reference")
    assert not any(p.requires_grad for p in engine.model.parameters())
    with pytest.raises(RunError, match="frozen"):
        engine.update(make_batch(97, ROWS), SupervisedLoss())
