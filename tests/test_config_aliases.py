"""Names from tutorials, and where models run, as keywords."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config_aliases import ALIASES, apply_aliases
from headrace.config_explain import all_keys
from headrace.errors import ConfigError


def test_every_alias_names_a_setting() -> None:
    assert set(ALIASES.values()) <= set(all_keys())


@pytest.mark.parametrize(
    "keywords, wanted",
    [
        (
            {"rollout_batch_size": 128, "train_batch_size": 32},
            {"train": {"prompts_per_step": 128, "samples_per_update": 32}},
        ),
        ({"batch_size": 8}, {"train": {"prompts_per_step": 8}}),
        ({"gradient_accumulation_steps": 2}, {"train": {"microbatches_per_update": 2}}),
        ({"rollout_max_batch_size": 64}, {"rollout": {"max_concurrent_sequences": 64}}),
        ({"sequence_length": 512}, {"rollout": {"max_sequence_tokens": 512}}),
        (
            {"num_gpus": 1, "communication_backend": "nccl"},
            {"cluster": {"num_gpus": 1, "communication_backend": "nccl"}},
        ),
        ({"hybrid_engine_mode": "optimized"}, {"cluster": {"hybrid_engine_mode": "optimized"}}),
        ({"enable_gradient_checkpointing": True}, {"model": {"gradient_checkpointing": True}}),
        ({"offload_optimizer": True}, {"train": {"offload_optimizer": True}}),
        ({"model_name": "m"}, {"model": {"path": "m"}}),
        ({"num_epochs": 2, "steps": 3}, {"train": {"epochs": 2, "steps": 3}}),
        ({"num_generations": 4}, {"rollout": {"samples_per_prompt": 4}}),
        (
            {"parallel_config": {"tp": 1, "pp": 1, "dp": 2}},
            {"cluster": {"parallelism": {"tp": 1, "pp": 1, "dp": 2}}},
        ),
        ({"device_map": "cpu"}, {"run": {"device": "cpu"}}),
        ({"device_map": {"actor": "cuda:0", "critic": "cuda:0"}}, {"run": {"device": "cuda:0"}}),
        ({"device_map": 1}, {"run": {"device": "cuda:1"}}),
        ({"device_map": [0, 2]}, {"cluster": {"layout": {"actor": {"devices": "cuda:0,2"}}}}),
        ({"device_map": "cpu:0-1"}, {"cluster": {"layout": {"actor": {"devices": "cpu:0-1"}}}}),
        (
            {"device_map": {"critic": "cuda:4-5", "actor": "cuda:0-3"}, "parallel_config": {"tp": 2}},
            {
                "cluster": {
                    "parallelism": {"tp": 2},
                    "layout": {"actor": {"devices": "cuda:0-3"}, "critic": {"devices": "cuda:4-5"}},
                }
            },
        ),
        (
            {"device_map": {"actor": "cuda:0", "critic": "cuda:1"}},
            {"cluster": {"layout": {"actor": {"devices": "cuda:0"}, "critic": {"devices": "cuda:1"}}}},
        ),
        ({"gpu_group": "pool"}, {"cluster": {"layout": {"actor": {"gpu_group": "pool"}}}}),
        (
            {
                "gpu_group": {"actor": "a", "critic": "b"},
                "parallel_config": {"actor": {"tp": 2, "zero3": True}},
            },
            {
                "cluster": {
                    "layout": {
                        "actor": {"gpu_group": "a", "parallelism": {"tp": 2, "zero3": True}},
                        "critic": {"gpu_group": "b"},
                    }
                }
            },
        ),
        ({"cluster": "cpu_2"}, {"cluster": {"layout": "cpu_2"}}),
        (
            {"cluster": {"actor": {"gpu_group": "a"}}},
            {"cluster": {"layout": {"actor": {"gpu_group": "a"}}}},
        ),
        ({"cluster": {"parallelism": {"dp": 2}}}, {"cluster": {"parallelism": {"dp": 2}}}),
        ({"train.steps": 3, "rollout__top_k": 5}, {"train": {"steps": 3}, "rollout": {"top_k": 5}}),
        (
            {"algorithm": "ppo", "critic": {"warmup_steps": 1}},
            {"algorithm": {"name": "ppo"}, "critic": {"warmup_steps": 1}},
        ),
        ({"batch_size": 8, "rollout_batch_size": 8}, {"train": {"prompts_per_step": 8}}),
    ],
)
def test_aliases(keywords: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert apply_aliases(keywords) == wanted


@pytest.mark.parametrize(
    "keywords, parts",
    [
        (
            {"batch_size": 8, "rollout_batch_size": 9},
            ["rollout_batch_size", "batch_size", "train.prompts_per_step"],
        ),
        (
            {"cluster.parallelism": {"tp": 1}, "parallel_config": {"tp": 2}},
            ["parallel_config", "cluster.parallelism"],
        ),
        ({"rolout_batch_size": 8}, ["did you mean rollout_batch_size?"]),
        ({"kl_coefficient": 8}, ["did you mean algorithm.kl_coefficient?"]),
        ({"train.stps": 8}, ["did you mean train.steps?"]),
        ({"zzzz": 8}, ["zzzz: unknown name"]),
        ({"device_map": "gpu"}, ["device_map: 'gpu' names no devices"]),
        ({"device_map": ["cuda:0", "cpu:1"]}, ["device_map", "names no devices"]),
        ({"device_map": ["cuda", "cuda:1"]}, ["device_map", "names no devices"]),
        ({"device_map": True}, ["device_map: True names no devices"]),
        ({"device_map": {"model.embed": 0}}, ["device_map: unknown model model.embed", "critic"]),
        ({"device_map": {}}, ["device_map: empty"]),
        ({"device_map": "cuda:0-1", "cluster": "cpu_2"}, ["device_map", "cluster.layout", "cpu_2"]),
        ({"gpu_group": ["a", "b"]}, ["gpu_group", "'a'", "'b'"]),
        ({"gpu_group": 3}, ["gpu_group: expected a name"]),
        ({"parallel_config": {"actor": {"tp": 0}}}, ["parallel_config: tp of actor is 0"]),
        ({"parallel_config": {"tp": 2, "actor": {"tp": 2}}}, ["parallel_config: unknown model tp"]),
        ({"parallel_config": {"tp": 1, "ep": 2}}, ["ep", "dp, sp, tp, pp and zero3"]),
        ({"parallel_config": 4}, ["parallel_config", "got 4"]),
        ({"train": 5}, ["train: expected a mapping"]),
        ({"train": {"stps": 5}}, ["did you mean train.steps?"]),
    ],
)
def test_aliases_that_are_refused(keywords: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_aliases(keywords)
    assert len(caught.value.violations) == 1
    for part in parts:
        assert part in caught.value.violations[0]


def test_all_refused_names_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        apply_aliases({"zzzz": 1, "device_map": "x", "parallel_config": 1, "seed": 1})
    assert len(caught.value.violations) == 3
