"""What moves between stages of a step: by hand, and against the bytes that a run's workers got from each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import configuration

from headrace.cluster import group
from headrace.flow.cluster_plan import ClusterPlan, plan_cluster
from headrace.flow.edges import DATA, SETTLED, Edge, RowLimits, direct_source
from headrace.flow.flow import CompiledFlow
from headrace.flow.memory_terms import Load
from headrace.roles.actor import Actor
from headrace.trainers.recipes import policy_flow, sft_flow

LIMITS = RowLimits(prompts=4, rows=16, prompt_tokens=4, response_tokens=5)
PPO: dict[str, Any] = {"name": "ppo", "kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}


def compiled(folder: Path, tmp_path: Path, **sections: Any) -> CompiledFlow:
    config = configuration(folder, tmp_path, {"run": {"device": "cpu"}, **sections})
    return policy_flow(config, Actor(config.model, config.run.device), f"{folder}/reward.py:score").compile()


def planned(flow: CompiledFlow) -> ClusterPlan:
    return plan_cluster(flow, lambda dp: Load(9, 16 // dp, 16 // dp, 4 // dp), LIMITS)


def edge(plan: ClusterPlan, source: str, target: str) -> Edge:
    (found,) = [e for e in plan.edges if (e.source, e.target) == (source, target)]
    return found


def test_four_groups(arithmetic: Path, tmp_path: Path) -> None:
    """16 rows of at most 9 tokens; each set of columns goes with 16 bytes a row."""
    flow = compiled(arithmetic, tmp_path, algorithm=PPO, cluster={"layout": "cpu_4_split"})
    plan = planned(flow)
    tokens = 16 * 9
    assert edge(plan, "rollout", "reference") == Edge(
        "rollout",
        "reference",
        ("group_id", "input_ids", "response_mask"),
        "actor dp1",
        "reference dp1",
        "to another group",
        16 * 16 + 16 * 8 + tokens * (8 + 1),
    )
    assert edge(plan, "values", "advantage").bytes == 16 * 16 + tokens * 4
    assert edge(plan, "advantage", "critic").bytes == 16 * 16 + tokens * (4 + 1)  # returns, loss_mask
    for source, target in (
        (DATA, "rollout"),
        ("rollout", SETTLED),
        ("rollout", "reward"),
        ("values", "critic"),
    ):
        assert (edge(plan, source, target).kind, edge(plan, source, target).bytes) == ("stays", 0)
    update = edge(plan, "reference", "update")
    assert (update.columns, direct_source(flow, update)) == (("reference_logprobs",), "advantage")


def test_data_parallel_ranks_share_out_what_was_generated_and_nothing_after(
    arithmetic: Path, tmp_path: Path
) -> None:
    plan = planned(compiled(arithmetic, tmp_path, algorithm=PPO, cluster={"layout": "cpu_2"}))
    moves = {(e.source, e.target): e.kind for e in plan.edges if e.bytes}
    assert moves == {(DATA, "rollout"): "shared out again", ("rollout", SETTLED): "shared out again"}
    assert plan.together == []


def test_tensor_parallel_ranks_get_copies(arithmetic: Path, tmp_path: Path) -> None:
    """The controller gives the prompts to the first rank, the other copies them; what a stage writes is on both."""
    plan = planned(compiled(arithmetic, tmp_path, cluster={"parallelism": {"tp": 2}}))
    first = edge(plan, DATA, "rollout")
    assert first.columns == ("group_id", "prompt", "prompt_id", "prompt_ids")
    assert (first.kind, first.bytes) == ("stays", 4 * (16 + 8 + 8 + 4 * 4 + 4 * 7))
    assert {e.bytes for e in plan.edges if e is not first} == {0}


def test_between_layouts_of_one_group(arithmetic: Path, tmp_path: Path) -> None:
    """The reference under tp2 beside an actor under dp2: both its ranks need all rows."""
    layout = {
        "device": "cpu",
        "groups": {"a": 2},
        "roles": {"actor": {"gpu_group": "a"}, "reference": {"gpu_group": "a", "parallelism": {"tp": 2}}},
    }
    sections: dict[str, Any] = {"algorithm": {"kl_coefficient": 0.1}, "cluster": {"layout": layout}}
    found = edge(planned(compiled(arithmetic, tmp_path, **sections)), "rollout", "reference")
    assert (found.before, found.after, found.kind) == ("a dp2", "a tp2", "shared out again")
    assert found.bytes == 2 * (16 * 16 + 16 * 8 + 16 * 9 * 9)


def test_which_stages_may_run_at_the_same_time(arithmetic: Path, tmp_path: Path) -> None:
    plan = planned(compiled(arithmetic, tmp_path, algorithm=PPO, cluster={"layout": "cpu_4_split"}))
    # the reward is a function beside the actor, and the actor cannot do two things at once
    assert plan.together == [
        ("reference", "values", "logprobs"),
        ("reference", "values", "reward"),
        ("critic", "update"),
    ]
    stages = {s.name: s for s in plan.stages}
    assert stages["reference"].beside == ("values", "logprobs", "reward")
    assert [stages[n].column for n in ("rollout", "reference", "advantage", "update")] == [0, 1, 2, 3]


def test_what_a_rollout_made_ahead_runs_beside(arithmetic: Path, tmp_path: Path) -> None:
    layout = {"device": "cpu", "groups": {"a": 1, "b": 1}, "roles": {"actor": {"gpu_group": "a"}}}
    layout["roles"]["rollout"] = {"gpu_group": "b"}
    sections: dict[str, Any] = {"cluster": {"layout": layout}}
    assert planned(compiled(arithmetic, tmp_path, **sections)).beside_next_rollout == ()
    sections["algorithm"] = {"importance_weights": "token_truncate"}
    sections["rollout"] = {"staleness": 1}
    assert planned(compiled(arithmetic, tmp_path, **sections)).beside_next_rollout == (
        "reward",
        "advantage",
        "update",
    )


def test_micro_batches_of_a_rank(arithmetic: Path, tmp_path: Path) -> None:
    """16 rows of 9 tokens on two ranks: 8 rows, 72 tokens each, in budgets of 20 tokens."""
    train = {"tokens_per_microbatch": 20}
    plan = planned(compiled(arithmetic, tmp_path, train=train, algorithm=PPO, cluster={"layout": "cpu_2"}))
    found = {s.name: s.microbatches for s in plan.stages}
    groups = {g.group: g.largest for g in plan.memory.groups}
    held = {s.name: s.memory_bytes for s in plan.stages}
    always = sum(part.bytes for part in groups["all"].always)
    assert held["reward"] == always
    assert held["rollout"] == always + sum(part.bytes for part in groups["all"].phases["rollout"])
    assert (found["update"], found["logprobs"], found["rollout"], found["reward"]) == (4, 4, None, None)


def test_supervised_rows_stay_where_they_were_put(arithmetic: Path, tmp_path: Path) -> None:
    config = configuration(arithmetic, tmp_path, {"run": {"device": "cpu"}, "cluster": {"layout": "cpu_2"}})
    plan = planned(sft_flow(config, Actor(config.model, "cpu")).compile())
    (only,) = plan.edges
    assert (only.source, only.kind, only.columns) == (DATA, "stays", ("input_ids", "response_mask"))
    assert plan.weights is None


def test_weights_stay_where_actor_and_rollout_lie_alike(arithmetic: Path, tmp_path: Path) -> None:
    weights = planned(compiled(arithmetic, tmp_path, cluster={"layout": "cpu_2"})).weights
    assert weights is not None
    assert weights.same_storage


def test_weights_that_move(arithmetic: Path, tmp_path: Path) -> None:
    """From two ranks under tp2 to one rank apart: one copy of the model of float32."""
    layout = {
        "device": "cpu",
        "groups": {"a": 2, "b": 1},
        "roles": {
            "actor": {"gpu_group": "a", "parallelism": {"tp": 2}},
            "rollout": {"gpu_group": "b"},
        },
    }
    flow = compiled(arithmetic, tmp_path, cluster={"layout": layout})
    weights = planned(flow).weights
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 512 + 2 * 128 + 2 * 32
    assert weights is not None
    assert (weights.before, weights.after, weights.same_storage) == ("a tp2", "b dp1", False)
    assert weights.bytes == 4 * (2 * 14 * 128 + 2 * layer + 128)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cpu_4_split", "cpu_2"])
def test_the_bytes_are_those_that_workers_get_from_each_other(
    arithmetic: Path, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every response has its five tokens, so the most is what there is."""
    moved: dict[str, int] = {}
    result = group.Call.result

    def note(call: group.Call, *args: Any) -> group.Result:
        found = result(call, *args)
        what = call.output.partition("/")[0]
        if found.written or what in ("actor.stage", "critic.stage"):
            moved[found.written[0] if found.written else what] = found.moved_bytes
        return found

    monkeypatch.setattr(group.Call, "result", note)
    sections: dict[str, Any] = {
        "algorithm": PPO,
        "cluster": {"layout": layout},
        "rollout": {"min_new_tokens": 5},
        "run": {"device": "cpu"},
        "train": {"steps": 1},
    }
    flow = compiled(arithmetic, tmp_path, **sections)
    flow.run(str(arithmetic / "train.jsonl"))
    said: dict[str, int] = {}
    for e in planned(flow).edges:
        said[e.target] = said.get(e.target, 0) + e.bytes
    by_stage = {
        "reference": moved["reference_logprobs"],
        "values": moved["values"],
        "logprobs": moved["logprobs"],
        "advantage": moved["advantages"],
        "critic": moved["critic.stage"],
        "update": moved["actor.stage"],
    }
    assert by_stage == {name: said[name] for name in by_stage}
