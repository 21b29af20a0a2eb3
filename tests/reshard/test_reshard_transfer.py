"""Layouts that torch made of real models, resharded between gloo processes, equal to the whole weights bit for bit."""

import time

import live_cases
import pytest
import torch
from gloo_ranks import run_cases

from headrace.errors import ConfigError
from headrace.reshard.layout import Layout, Mesh
from headrace.reshard.plan import plan
from headrace.reshard.transfer import run, target_tensors

CASES = [
    live_cases.zero3_to_others,
    live_cases.tensor_parallel_to_others,
    live_cases.both_to_others,
    live_cases.tied_and_cast,
    live_cases.tied_across_stages,
    live_cases.uneven_strided,
    live_cases.mixed_dtypes,
    live_cases.nested,
    live_cases.wrong_tensors,
    live_cases.untied_tensors,
    live_cases.among_some,
    live_cases.ranks_disagree,
]


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def outcomes(request, tmp_path_factory):
    return run_cases(CASES, request.param, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_in_real_processes(outcomes, case):
    assert set(outcomes[case]) == {"ok"}, "\n".join(outcomes[case])


@pytest.mark.parametrize("case", [live_cases.killed, live_cases.raising, live_cases.not_coming])
def test_a_rank_that_ends_does_not_hold_up_the_others(case, tmp_path):
    started = time.monotonic()
    outcome = run_cases([case], 3, tmp_path, timeout_s=2, ended_by=30)[case.__name__]
    assert outcome[0] == outcome[2] == "ok", outcome
    assert time.monotonic() - started < 25
    if case is live_cases.raising:
        assert "rank 1 failed" in outcome[1]


def one_rank(dtype=torch.float32):
    return Layout.parallel({"w": ((4, 2), dtype), "s": ((), dtype)}, Mesh({"dp": 1}))


def test_one_process_needs_no_group():
    source = {"w": torch.randn(4, 2), "s": torch.tensor(3.0)}
    made = plan(one_rank(), one_rank())
    views = target_tensors(made, 0, source)
    report = run(made, 0, source, views)
    assert views["w"].data_ptr() == source["w"].data_ptr()
    assert (report.viewed_bytes, report.copied_bytes, report.new_bytes, report.staging_bytes) == (36, 0, 0, 0)
    cast = plan(one_rank(), one_rank(torch.bfloat16))
    into = target_tensors(cast, 0, source)
    report = run(cast, 0, source, into)
    assert torch.equal(into["w"], source["w"].bfloat16())
    assert torch.equal(into["s"], source["s"].bfloat16())
    assert (report.copied_bytes, report.new_bytes) == (18, 18)


def test_more_ranks_need_one():
    two = Layout.parallel({"w": ((4, 2), torch.float32)}, Mesh({"dp": 2}))
    source = {"w": torch.ones(4, 2)}
    with pytest.raises(ConfigError, match="init_process_group first"):
        run(plan(two, two), 0, source, source)
