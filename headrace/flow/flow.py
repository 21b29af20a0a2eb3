"""`Flow`, the third door: describe stages, compile, run."""

from __future__ import annotations

from typing import Any

from headrace.errors import ConfigError
from headrace.flow.cluster import check_placement
from headrace.flow.compile import CheckedFlow, examine_graph
from headrace.flow.graph import Graph
from headrace.flow.run import Evaluation, RunResult, run_flow


class CompiledFlow(CheckedFlow):
    """A checked flow that can be run."""

    def run(
        self, dataset: Any, steps: int | None = None, *, evaluation: Evaluation | None = None
    ) -> RunResult:
        """Runs the flow over `dataset` for `steps` (default: train.steps, else train.epochs).

        Raises ConfigError before any weights are loaded when the data do not fit; RunError when a step fails.
        """
        return run_flow(self, dataset, steps, evaluation)


class Flow(Graph):
    """A dataflow of stages over one batch, from prompts to an updated model.

    Example:
        flow = Flow("my_grpo")
        rollout = flow.add_stage("rollout", actor.generate, samples_per_prompt=8)
        reward = flow.add_stage("reward", score, depends_on=rollout)
        advantage = flow.add_stage("advantage", grpo_advantages, depends_on=reward)
        flow.add_stage("update", actor.update, depends_on=advantage)
        flow.compile().run(dataset, steps=100)
    """

    def compile(self, cluster: Any = None) -> CompiledFlow:
        """Checks the whole flow and returns what can be run. Raises ConfigError with all violations at once.

        `cluster` is a layout in any form of `cluster.layout` and replaces that setting; None leaves it as it is.
        """
        checked, problems = examine_graph(self, cluster)
        try:
            check_placement(checked)
        except ConfigError as error:
            problems += error.violations
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        return CompiledFlow(
            checked.name, checked.config, checked.stages, checked.data_columns, checked.placement
        )
