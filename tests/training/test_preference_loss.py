"""The losses over pairs against Hugging Face's own forward in float64, one sequence at a time, and by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_torch_engine import TEMPERATURE, gradients, hf_double, with_shared_prompts
from torch.nn.functional import logsigmoid

from headrace.algorithms.losses.preference import bradley_terry, dpo_reward
from headrace.data.batch import Batch
from headrace.data.prefixes import share_prefixes
from headrace.models.heads import critic_from
from headrace.observe.metrics import MetricSums
from headrace.training.engine import TokenOutputs
from headrace.training.preference_loss import DPOLoss, PreferenceLoss, pair_rows, pair_weights
from headrace.training.torch_engine import TorchEngine

BETA = 0.3
# (prompt, chosen, rejected) tokens of each pair
PAIRS = [(3, 5, 2), (1, 1, 9), (7, 12, 12), (2, 3, 1), (5, 4, 6)]


def pair_batch(vocab: int, pairs: list[tuple[int, int, int]], seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    ids, mask, lengths = [], [], []
    for prompt, *responses in pairs:
        shared = torch.randint(0, vocab, (prompt,), generator=g)
        for n in responses:
            ids.append(torch.cat([shared, torch.randint(0, vocab, (n,), generator=g)]))
            mask.append(torch.tensor([False] * prompt + [True] * n))
            lengths.append(prompt + n)
    total = sum(lengths)
    batch = Batch(
        lengths,
        {
            "input_ids": torch.cat(ids),
            "response_mask": torch.cat(mask),
            "reference_logprobs": torch.where(torch.cat(mask), -4 + torch.randn(total, generator=g), 0.0),
        },
        {
            "pair_id": torch.tensor([10 + i for i in range(len(pairs)) for _ in range(2)]),
            "is_chosen": torch.tensor([True, False] * len(pairs)),
        },
    )
    return batch.with_columns({"loss_weight": pair_weights(batch)})


def plain_dpo(hf: Any, batch: Batch) -> tuple[torch.Tensor, list[float], list[float]]:
    """Rafailov et al. eq. 7 written out: the loss, and the rewards of chosen and rejected responses."""
    rewards = []
    for r in range(batch.num_rows):
        ids = batch.row_values("input_ids", r)
        logp = (hf(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        mask, reference = (batch.row_values(c, r) for c in ("response_mask", "reference_logprobs"))
        terms = [logp[t - 1, ids[t]] - reference[t].double() for t in range(1, len(ids)) if mask[t]]
        rewards.append(BETA * sum(terms[1:], terms[0]))
    return _mean_loss(rewards)


def plain_bradley_terry(hf: Any, batch: Batch) -> tuple[torch.Tensor, list[float], list[float]]:
    """Ouyang et al. eq. 1: the class's own pooled score of one sequence at a time."""
    scores = [
        hf(input_ids=batch.row_values("input_ids", r)[None]).logits[0, 0] for r in range(batch.num_rows)
    ]
    return _mean_loss(scores)


def _mean_loss(rewards: list[torch.Tensor]) -> tuple[torch.Tensor, list[float], list[float]]:
    chosen, rejected = rewards[0::2], rewards[1::2]
    losses = [-logsigmoid(c - r) for c, r in zip(chosen, rejected, strict=True)]
    return sum(losses[1:], losses[0]) / len(losses), [c.item() for c in chosen], [r.item() for r in rejected]


def case(kind: str, model: Any) -> tuple[Any, PreferenceLoss, dict[str, Any], Any]:
    """Model, loss, engine options and plain float64 computation of a kind of training."""
    if kind == "dpo":
        return model, DPOLoss("dpo", BETA), {}, plain_dpo
    scalar = critic_from(model)
    torch.manual_seed(3)
    torch.nn.init.normal_(scalar.hf.score.weight, 0, 0.3)
    return scalar, PreferenceLoss("reward_model"), {"scores_rows": True}, plain_bradley_terry


@pytest.mark.parametrize("name", ["qwen2-tied", "gemma3", "gpt2"])
@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_loss_gradient_and_metrics_equal_plain_float64(build_model: Any, kind: str, name: str) -> None:
    model, loss, options, plain = case(kind, build_model(name))
    batch = pair_batch(97, PAIRS)
    hf = hf_double(model)
    expected, chosen, rejected = plain(hf, batch)
    expected.backward()
    wanted = {f"hf.{n}": p.grad for n, p in hf.named_parameters() if p.grad is not None}
    metrics, got = gradients(model, batch, loss, tokens_per_microbatch=16, **options)
    assert metrics[f"{kind}/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics[f"{kind}/chosen_reward"] == pytest.approx(sum(chosen) / 5, rel=1e-4)
    assert metrics[f"{kind}/rejected_reward"] == pytest.approx(sum(rejected) / 5, rel=1e-4)
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    assert metrics[f"{kind}/margin"] == pytest.approx(sum(margins) / 5, rel=1e-3)
    assert metrics[f"{kind}/accuracy"] == sum(m > 0 for m in margins) / 5
    assert got.keys() == wanted.keys()
    for n, g in got.items():
        scale = wanted[n].abs().max().item() + 1e-6
        assert (g.double() - wanted[n]).abs().max().item() < 2e-3 * scale, n


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_a_shared_prompt_changes_nothing_in_float64(build_model: Any, kind: str) -> None:
    """Loss and gradients as of rows computed one by one, where a pair, or two, have their prompt computed once."""
    model = build_model("gpt2")  # whose layers are all of the dtype of the weights
    model.hf.double()
    model, loss, options, plain = case(kind, model)
    batch = with_shared_prompts(pair_batch(97, [*PAIRS, (3, 4, 4)]))
    hf = hf_double(model)
    expected, *_ = plain(hf, batch)
    expected.backward()
    wanted = {f"hf.{n}": p.grad for n, p in hf.named_parameters() if p.grad is not None}
    needed = torch.ones(batch.num_tokens, dtype=torch.bool)
    prompts = 2 * sum(p for p, *_ in PAIRS) + 2 * 3
    assert len(share_prefixes(batch, needed).computed) == batch.num_tokens - prompts + sum(
        p for p, *_ in PAIRS
    )
    for budget in (24, 10_000):
        engine = TorchEngine(
            model, prefix=kind, temperature=TEMPERATURE, tokens_per_microbatch=budget, **options
        )
        model.set_trainable(True)  # without an optimizer, which would keep its weights in float32
        metrics, parts = MetricSums(), engine.microbatches(batch)
        for micro in parts:
            done = engine._pass(micro)
            value, found = loss(engine._head(done, done.run(0, None), with_entropy=False), micro)
            value.backward()
            metrics.merge(found)
        assert (len(parts) > 1) == (budget == 24)
        assert metrics.means()[f"{kind}/loss"] == pytest.approx(expected.item(), rel=1e-12)
        got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert got.keys() == wanted.keys()
        for n, g in got.items():
            torch.testing.assert_close(g, wanted[n], rtol=1e-6, atol=1e-7, msg=n)
        for parameter in model.parameters():
            parameter.grad = None


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    pairs=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=6
    ),
    budget=st.integers(1, 80),
    parts=st.one_of(st.none(), st.integers(1, 8)),
    kind=st.sampled_from(["dpo", "reward_model"]),
    seed=st.integers(0, 100),
)
def test_the_cut_changes_nothing(
    tiny: Any, pairs: Any, budget: int, parts: int | None, kind: str, seed: int
) -> None:
    """Rows in any order, one micro-batch or many, by budget or by number."""
    model, loss, options, _ = case(kind, copy.deepcopy(tiny("qwen3")))
    batch = pair_batch(97, pairs, seed)
    whole_metrics, whole = gradients(model, batch, loss, tokens_per_microbatch=10_000, **options)
    order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(seed))
    cut_metrics, cut = gradients(
        model,
        batch.select(order),
        loss,
        tokens_per_microbatch=budget,
        microbatches_per_update=parts,
        **options,
    )
    assert cut_metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-5)
    assert whole.keys() == cut.keys()
    size = max(g.abs().max().item() for g in whole.values())
    for name in whole:
        # sums of float32 in another order, where prompts are computed once or twice
        assert (cut[name] - whole[name]).abs().max().item() < 5e-6 * max(size, 1.0), name


def test_a_micro_batch_never_holds_half_a_pair(tiny: Any) -> None:
    """Budgets of less than a row, a row, a pair: a pair of 8 + 5 tokens stays one micro-batch."""
    batch = pair_batch(97, PAIRS)
    for budget in (1, 8, 13, 30):
        engine = TorchEngine(tiny("llama"), prefix="dpo", tokens_per_microbatch=budget)
        for micro in engine.microbatches(batch.select(torch.randperm(10))):
            chosen, rejected = pair_rows(micro)
            assert len(chosen) == len(rejected) == micro.num_rows / 2


def test_hand_worked_pairs() -> None:
    """Margins 2, -1 and 0: losses log(1 + e^-2), log(1 + e), log 2; right 1, 0 and a half."""
    batch = Batch(
        [1] * 6,
        {"input_ids": torch.zeros(6, dtype=torch.int64)},
        {
            "pair_id": torch.tensor([7, 3, 3, 5, 7, 5]),
            "is_chosen": torch.tensor([False, True, False, False, True, True]),
        },
    )
    scores = torch.tensor([1.0, 0.5, 1.5, -4.0, 3.0, -4.0])
    metrics = PreferenceLoss("reward_model").measure(TokenOutputs(scores=scores), batch).means()
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(1)) + math.log(2)) / 3
    assert metrics["reward_model/loss"] == pytest.approx(expected)
    assert metrics["reward_model/accuracy"] == 0.5
    assert metrics["reward_model/margin"] == pytest.approx(1 / 3)
    assert metrics["reward_model/chosen_reward"] == pytest.approx((3.0 + 0.5 - 4.0) / 3)
    assert metrics["reward_model/rejected_reward"] == pytest.approx((1.0 + 1.5 - 4.0) / 3)


def test_hand_worked_dpo() -> None:
    """One pair, beta 0.5: log-ratios (1 - 0.5) and -2, rewards 0.25 and -1; what is masked may be NaN."""
    nan = math.nan
    batch = Batch(
        [3, 2],
        {
            "input_ids": torch.zeros(5, dtype=torch.int64),
            "response_mask": torch.tensor([False, True, True, False, True]),
            "reference_logprobs": torch.tensor([nan, -2.0, -1.0, nan, -1.0]),
        },
        {"pair_id": torch.tensor([0, 0]), "is_chosen": torch.tensor([True, False])},
    )
    logprobs = torch.tensor([nan, -1.0, -1.5, nan, -3.0], requires_grad=True)
    loss, metrics = DPOLoss("dpo", 0.5)(
        TokenOutputs(logprobs=logprobs), batch.with_columns({"loss_weight": pair_weights(batch)})
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log1p(math.exp(-1.25)))
    pull = 0.5 / (1 + math.exp(1.25))  # beta x sigmoid(-margin), Rafailov et al. section 4
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -pull, -pull, 0.0, pull])
    assert metrics.means()["dpo/margin"] == pytest.approx(1.25)


def test_extreme_margins_stay_finite() -> None:
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = bradley_terry(far, torch.zeros(2))
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.0, 1e4])
    assert far.grad is not None
    assert far.grad.tolist() == pytest.approx([0.0, -1.0])
    assert dpo_reward(torch.tensor([2.0]), 0.1).tolist() == pytest.approx([0.2])


@pytest.mark.parametrize("flags", [[True, True], [True, False, True], [False]])
def test_half_a_pair_is_an_error(flags: list[bool]) -> None:
    batch = Batch(
        [1] * len(flags),
        {"input_ids": torch.zeros(len(flags), dtype=torch.int64)},
        {"pair_id": torch.arange(len(flags)) // 2, "is_chosen": torch.tensor(flags)},
    )
    with pytest.raises(ValueError, match="one chosen and one rejected row"):
        pair_rows(batch)
