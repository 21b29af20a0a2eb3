"""What `compile()` refuses, by name and all at once, without loading anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.algorithms.stages import gae_advantages, grpo_advantages
from headrace.config import Config
from headrace.data.batch import Batch
from headrace.errors import ConfigError, RunError
from headrace.flow.execute import execute
from headrace.flow.flow import CompiledFlow, Flow
from headrace.flow.interrupt import InterruptGuard
from headrace.flow.runtime import LocalRuntime
from headrace.observe.metrics import MetricSums
from headrace.observe.progress import Progress
from headrace.stages import StageContext, stage
from headrace.trainers.recipes import evaluation_flow, policy_flow, sft_flow
from headrace.trainers.rl_trainer import get_hf_model


def score(completion: str) -> float:
    return float(len(completion))


@pytest.fixture
def parts() -> tuple[Any, Any, Any]:
    """Actor, reference and critic of a folder that does not exist: touching it would fail."""
    return (
        get_hf_model("/nowhere/actor"),
        get_hf_model("/nowhere/reference", role="reference"),
        get_hf_model("/nowhere/critic", role="critic"),
    )


def grpo(parts: Any, **rollout: Any) -> Flow:
    actor = parts[0]
    flow = Flow("mine")
    first = flow.add_stage("rollout", actor.generate, **rollout)
    reward = flow.add_stage("reward", score, depends_on=first)
    advantage = flow.add_stage("advantage", grpo_advantages, depends_on=reward)
    flow.add_stage("update", actor.update, depends_on=advantage)
    return flow


def problems(flow: Flow) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        flow.compile()
    return caught.value.violations


def test_the_flow_of_the_readme_compiles_without_loading_anything(parts: Any) -> None:
    actor, reference, _ = parts
    flow = Flow("my_grpo")
    rollout = flow.add_stage("rollout", actor.generate, samples_per_prompt=4, temperature=0.7)
    reward = flow.add_stage("reward", score, depends_on=rollout)
    ref = flow.add_stage("reference", reference.logprobs, depends_on=rollout)
    adv = flow.add_stage("advantage", grpo_advantages, depends_on=[reward, ref])
    flow.add_stage("update", actor.update, depends_on=adv, learning_rate=1e-5, kl_coefficient=0.1)
    checked = flow.compile()
    assert [s.name for s in checked.stages] == ["rollout", "reward", "reference", "advantage", "update"]
    c = checked.config
    assert (c.rollout.samples_per_prompt, c.rollout.temperature) == (4, 0.7)
    assert (c.train.learning_rate, c.algorithm.kl_coefficient) == (1e-5, 0.1)
    assert flow.config == Config()  # describing and compiling change nothing given
    assert checked.roles == [actor, reference]
    assert (checked.trains(actor), checked.trains(reference)) == (True, False)
    assert (checked.generates, checked.supervised) == (True, False)
    assert not actor.is_loaded


def test_recipes_declare_what_trains() -> None:
    config, actor = Config(), get_hf_model("/nowhere/actor")
    sft = sft_flow(config, actor).compile()
    assert (sft.supervised, sft.generates, sft.trains(actor)) == (True, False, True)
    assert not evaluation_flow(config, actor, score).compile().trains(actor)
    config.algorithm.name = "ppo"
    ppo = policy_flow(config, actor, score).compile()
    assert {type(r).__name__ for r in ppo.roles if ppo.trains(r)} == {"Actor", "Critic"}
    assert policy_flow(Config(), actor, score).compile().trains(actor)


def test_training_is_declared_not_read_from_a_name(parts: Any) -> None:
    def update(reward: Any) -> Any:
        return reward

    flow = Flow("named")
    rollout = flow.add_stage("rollout", parts[0].generate, samples_per_prompt=1)
    reward = flow.add_stage("reward", score, depends_on=rollout)
    flow.add_stage("update", update, depends_on=reward, reads=["reward"], writes=["shaped"])
    assert not flow.compile().trains(parts[0])


def test_order_follows_edges_not_addition(parts: Any) -> None:
    flow = Flow("backwards")
    flow.add_stage("update", parts[0].update, depends_on="advantage")
    flow.add_stage("advantage", grpo_advantages, depends_on="reward")
    flow.add_stage("reward", score, depends_on="rollout")
    flow.add_stage("rollout", parts[0].generate)
    assert [s.name for s in flow.compile().stages] == ["rollout", "reward", "advantage", "update"]


def duplicate(flow: Flow, parts: Any) -> None:
    flow.add_stage("reward", score, depends_on="rollout")


def unusable_name(flow: Flow, parts: Any) -> None:
    flow.add_stage("my shape/1", score, depends_on="reward")


def name_of_a_metric(flow: Flow, parts: Any) -> None:
    flow.add_stage("step", score, depends_on="reward")


def unknown_dependency(flow: Flow, parts: Any) -> None:
    flow.add_stage("extra", grpo_advantages, depends_on=["reward", "advantege"])


def cycle(flow: Flow, parts: Any) -> None:
    flow.add_stage("a", score, depends_on=["rollout", "b"])
    flow.add_stage("b", score, depends_on="a")


def not_written(flow: Flow, parts: Any) -> None:
    flow.add_stage("critic", parts[2].update, depends_on="advantage")


def edge_missing(flow: Flow, parts: Any) -> None:
    flow.add_stage(
        "shape", lambda reward: reward, depends_on="rollout", reads=["reward"], writes=["shaped_reward"]
    )


def optional_edge_missing(flow: Flow, parts: Any) -> None:
    flow.add_stage("reference", parts[1].logprobs, depends_on="rollout")


def two_writers(flow: Flow, parts: Any) -> None:
    flow.add_stage("second", score, depends_on="rollout")


def unknown_setting(flow: Flow, parts: Any) -> None:
    flow.add_stage("again", parts[0].update, depends_on="advantage", learning_rte=1e-5)


def other_value(flow: Flow, parts: Any) -> None:
    flow.add_stage("again", parts[0].update, depends_on="advantage", learning_rate=1e-5)
    flow.add_stage("more", parts[0].update, depends_on="again", learning_rate=1e-4)


def wrong_type(flow: Flow, parts: Any) -> None:
    flow.add_stage("again", parts[0].update, depends_on="advantage", max_grad_norm="much")


def indivisible(flow: Flow, parts: Any) -> None:
    flow.add_stage("again", parts[0].update, depends_on="advantage", samples_per_update=7)


def no_reference(flow: Flow, parts: Any) -> None:
    flow.add_stage("again", parts[0].update, depends_on="advantage", kl_coefficient=0.1)


def redeclared(flow: Flow, parts: Any) -> None:
    flow.add_stage("again", parts[0].update, depends_on="advantage", reads=["input_ids"])


def two_arguments_unknown(flow: Flow, parts: Any) -> None:
    flow.add_stage("bad", "no/such/file.py:score", depends_on="reward")


def no_function(flow: Flow, parts: Any) -> None:
    flow.add_stage("none", None, depends_on="reward")  # type: ignore[arg-type]


BREAKAGES: list[tuple[Callable[[Flow, Any], None], list[str]]] = [
    (duplicate, ["stage 'reward' is added 2 times"]),
    (unusable_name, ["stage 'my shape/1'", "metric 'time/<stage>_s'"]),
    (name_of_a_metric, ["stage 'step'", "metric 'time/<stage>_s'"]),
    (unknown_dependency, ["stage 'extra' depends on 'advantege'", "did you mean 'advantage'?"]),
    (cycle, ["stages a, b depend on each other in a circle"]),
    (not_written, ["stage 'critic' reads column 'returns'", "no stage of this flow writes it"]),
    (edge_missing, ["stage 'shape' reads column 'reward'", "stage 'reward' writes it: add it to depends_on"]),
    (optional_edge_missing, ["'reference_logprobs'", "stage 'reference' writes it: add it to depends_on"]),
    (two_writers, ["stages 'reward' and 'second' both write column 'reward'"]),
    (unknown_setting, ["stage 'again': unknown setting 'learning_rte'", "did you mean 'learning_rate'?"]),
    (other_value, ["train.learning_rate: stage 'again' sets 1e-05 and stage 'more' 0.0001"]),
    (wrong_type, ["train.max_grad_norm: expected", "much"]),
    (indivisible, ["train.samples_per_update: 7 does not divide the step's 256 samples"]),
    (no_reference, ["algorithm.kl_coefficient: 0.1 needs column 'reference_logprobs'"]),
    (redeclared, ["stage 'again': reads and writes are already declared"]),
    (two_arguments_unknown, ["reward.function: 'no/such/file.py:score'", "no file"]),
    (no_function, ["stage 'none': no function is given"]),
]


@pytest.mark.parametrize("break_it, wanted", BREAKAGES, ids=[b.__name__ for b, _ in BREAKAGES])
def test_each_violation_is_named(
    parts: Any, break_it: Callable[[Flow, Any], None], wanted: list[str]
) -> None:
    flow = grpo(parts)
    break_it(flow, parts)
    found = problems(flow)
    assert any(all(part in text for part in wanted) for text in found), found


def test_a_group_of_one(parts: Any) -> None:
    (only,) = problems(grpo(parts, samples_per_prompt=1))
    assert only.startswith("rollout.samples_per_prompt:")
    assert "at least 2" in only


def test_a_contradiction_of_settings_is_found_whoever_sets_them(parts: Any) -> None:
    (only,) = problems(grpo(parts, min_new_tokens=300))
    assert "rollout.min_new_tokens: 300 is more than rollout.max_new_tokens" in only
    config = Config()
    config.cluster.layout, config.cluster.parallelism = "cpu_2", {"tp": 3}
    with pytest.raises(
        ConfigError, match=r"cluster\.parallelism: .* 3 ranks for the actor, but group 'all' has 2"
    ):
        sft_flow(config, parts[0]).compile()


def test_all_violations_come_in_one_error(parts: Any) -> None:
    flow = grpo(parts, samples_per_prompt=1, temperatur=2)
    for break_it in (duplicate, unknown_dependency, not_written, other_value, no_reference, no_function):
        break_it(flow, parts)
    text = "\n".join(problems(flow))
    for part in (
        "rollout.samples_per_prompt",
        "'temperatur'",
        "added 2 times",
        "advantege",
        "'returns'",
        "train.learning_rate",
        "algorithm.kl_coefficient",
        "stage 'none'",
    ):
        assert part in text


def test_an_empty_flow_and_a_cluster() -> None:
    with pytest.raises(ConfigError, match="'nothing' has no stages"):
        Flow("nothing").compile()
    with pytest.raises(ConfigError, match=r"(?s)has no stages.*cluster\.layout"):
        Flow("nothing").compile(cluster=object())


def test_steps_below_one_are_refused(parts: Any) -> None:
    with pytest.raises(ConfigError, match="steps: must be at least 1, got 0"):
        grpo(parts).compile().run([{"prompt": "a"}], steps=0)


def test_columns_of_the_data_are_declared(parts: Any) -> None:
    def build(*names: str) -> Flow:
        flow = Flow("with_data", data_columns=names)
        rollout = flow.add_stage("rollout", parts[0].generate)
        flow.add_stage(
            "weigh", lambda answer: [1.0] * len(answer), rollout, reads=["answer"], writes=["weight"]
        )
        return flow

    (only,) = problems(build())
    assert "reads column 'answer'" in only
    assert "Flow(data_columns=...)" in only
    checked = build("answer").compile()
    assert checked.check_data({"prompt", "answer"}, "rows") == []
    (missing,) = checked.check_data({"prompt", "answers"}, "rows")
    assert "rows has no column 'answer'" in missing
    assert "did you mean 'answers'?" in missing


def test_a_reward_function_may_use_data_columns_and_rollout_columns_only(parts: Any) -> None:
    def graded(completion: str, answer: str, num_tokens: int) -> float:
        return float(completion == answer)

    flow = Flow("graded")
    rollout = flow.add_stage("rollout", parts[0].generate)
    flow.add_stage("reward", graded, depends_on=rollout)
    checked = flow.compile()
    assert checked.check_data({"question", "answer"}, "rows") == []
    (only,) = checked.check_data({"question", "answr"}, "rows")
    assert "asks for 'answer'" in only
    assert "did you mean 'answr'?" in only


# ---- executing in process


def run(flow: Flow, batch: Batch) -> tuple[Batch, MetricSums]:
    checked: CompiledFlow = flow.compile()
    context = StageContext(checked.config, 3, 3, MetricSums())
    return execute(
        LocalRuntime(), checked, batch, context, Progress(1, ""), InterruptGuard()
    ), context.metrics


def rows(n: int = 3) -> Batch:
    return Batch([0] * n, rows={"prompt": ["a"] * n, "prompt_id": torch.arange(n), "prompt_ids": [(1,)] * n})


def test_functions_of_columns_run_in_order() -> None:
    flow = Flow("columns")
    flow.add_stage("b", lambda x: x * 10, "a", reads=["x"], writes=["y"])
    flow.add_stage("a", lambda prompt_id: prompt_id + 1, reads=["prompt_id"], writes=["x"])

    def two(y: Any) -> Any:
        return {"low": y.min().expand(3), "high": [9, 9, 9]}

    flow.add_stage("c", two, "b", reads=["y"], writes=["low", "high"])
    seen: list[Any] = []
    flow.add_stage("d", lambda high: seen.append(high), "c", reads=["high"])
    batch, metrics = run(flow, rows())
    assert batch["y"].tolist() == [10, 20, 30]
    assert batch["low"].tolist() == [10, 10, 10]
    assert seen == [[9, 9, 9]]
    assert {f"time/{n}_s" for n in "abcd"} <= set(metrics.means())


@pytest.mark.parametrize(
    "function, part",
    [
        (lambda prompt: [1, 2], "stage 'x': column 'y' has 2 values; expected 3"),
        (lambda prompt: 5, "stage 'x': column 'y' has type int; expected a list or a tensor"),
        (lambda prompt: {"z": prompt}, "stage 'x' declared column 'y' but did not write it"),
    ],
)
def test_what_a_function_of_columns_returns_is_checked(function: Any, part: str) -> None:
    flow = Flow("bad")
    flow.add_stage("x", function, reads=["prompt"], writes=["y"])
    with pytest.raises(RunError, match=part):
        run(flow, rows())


def test_a_declared_stage_that_returns_nonsense() -> None:
    @stage(reads=("prompt",))
    def nonsense(batch: Batch, context: StageContext) -> Any:
        return [1, 2, 3]

    flow = Flow("bad")
    flow.add_stage("x", nonsense)
    with pytest.raises(RunError, match="stage 'x' returned a list"):
        run(flow, rows())


def test_errors_of_a_stage_keep_their_type_and_say_where() -> None:
    def broken(prompt: Any) -> Any:
        raise RuntimeError("a defect")

    flow = Flow("bad")
    flow.add_stage("x", broken, reads=["prompt"], writes=["y"])
    with pytest.raises(RuntimeError, match="a defect") as caught:
        run(flow, rows())
    assert caught.value.__notes__ == ["in stage 'x' of flow 'bad', step 3"]


def test_kl_in_reward_needs_the_actors_own_logprobs(parts: Any) -> None:
    actor, reference, critic = parts
    flow = Flow("ppo")
    rollout = flow.add_stage("rollout", actor.generate)
    needed = [
        flow.add_stage("reward", score, depends_on=rollout),
        flow.add_stage("reference", reference.logprobs, depends_on=rollout),
        flow.add_stage("values", critic.values, depends_on=rollout),
    ]
    flow.add_stage("advantage", gae_advantages, depends_on=needed, kl_coefficient=0.1, kl_placement="reward")
    flow.add_stage("update", actor.update, depends_on="advantage")
    (only,) = problems(flow)
    assert "needs column 'logprobs'" in only
    assert "actor.logprobs" in only
