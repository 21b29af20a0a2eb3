"""The report of runs with several samples a prompt, checkpoints, episodes and metrics whose names have parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parsed_page import Page, make_run, read_page, sample

from headrace.observe.report import write_report


def sections(page: Page) -> dict[str, list[tuple[str, str]]]:
    """(metric, title) of each section that is not folded away."""
    return {
        s["title"]: [(c["metric"], c["title"]) for c in s["charts"]]
        for s in page.data["sections"]
        if not s["folded"]
    }


def page_of(tmp_path: Path, lines: list[dict[str, Any]], **more: Any) -> Page:
    return read_page(write_report([make_run(tmp_path / "r", lines, **more)]))


def test_pass_at_k(tmp_path: Path) -> None:
    """In the order of k; pass@1 is the accuracy and not drawn again."""
    names = ("eval/accuracy", "eval/pass_at_1", "eval/pass_at_16", "eval/pass_at_2")
    lines: list[dict[str, Any]] = [
        {"step": 0, **dict(zip(names, (0.1, 0.1, 0.6, 0.2), strict=True)), "eval/accuracy_stderr": 0.01},
        {"step": 4, **dict(zip(names, (0.2, 0.2, 0.8, 0.4), strict=True)), "eval/accuracy_stderr": 0.02},
    ]
    page = page_of(tmp_path, lines)
    assert sections(page)["Learning"] == [
        ("eval/accuracy", "Held-out accuracy"),
        ("eval/pass_at_2", "Held-out pass@2"),
        ("eval/pass_at_16", "Held-out pass@16"),
    ]
    assert "Held-out accuracy 10.0% → 20.0% ± 2.0%" in page.text
    assert "20.0% ±\N{NO-BREAK SPACE}2.0%" in page.html  # a narrow table breaks it before ± only
    assert "Held-out pass@16 60.0% → 80.0%" in page.text


def test_parts_and_new_metrics_have_titles_of_their_own(tmp_path: Path) -> None:
    names = (
        "reward/part/right_form",
        "eval/part/right_form",
        "reward/filtered_group_fraction",
        "importance/weight_mean",
        "actor/kl_coefficient",
        "reward/overlong_penalty",
    )
    page = page_of(tmp_path, [{"step": s, **dict.fromkeys(names, s / 4)} for s in (1, 2)])
    assert sections(page) == {
        "Learning": [
            ("reward/part/right_form", "Reward: right form"),
            ("eval/part/right_form", "Held-out reward: right form"),
            ("reward/filtered_group_fraction", "Prompts replaced for want of a spread"),
        ],
        "Policy": [
            ("actor/kl_coefficient", "Weight of the KL"),
            ("importance/weight_mean", "Importance weight"),
        ],
    }
    assert page.charts()["reward/overlong_penalty"]["unit"] == "reward"  # below, with everything else


def test_episodes(tmp_path: Path) -> None:
    names = (
        "agent/turns_mean",
        "agent/part/tool_calls",
        "eval/agent/part/tool_calls",
        "eval/agent/turns_mean",
    )
    turns = [
        {"role": "assistant", "content": "<call>"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "it is 42"},
    ]
    one = [{"role": "assistant", "content": "at once"}]
    page = page_of(
        tmp_path,
        [{"step": s, **dict.fromkeys(names, float(s))} for s in (1, 2)],
        samples=[
            sample(1, 0, completion="it is 42", episode=turns),
            sample(1, 1, completion="at once", episode=one),
            sample(1, 2, episode=["odd", 3]),
        ],
    )
    assert sections(page)["Episodes"] == [
        ("agent/turns_mean", "Turns in an episode"),
        ("agent/part/tool_calls", "Episodes: tool calls"),
        ("eval/agent/part/tool_calls", "Held-out episodes: tool calls"),
        ("eval/agent/turns_mean", "Turns in a held-out episode"),
    ]
    assert page.charts()["eval/agent/turns_mean"]["unit"] == "turns"
    assert "Turns in an episode 1.00 → 2.00" in page.text
    assert [s["completion"] for s in page.data["sets"][0]["samples"]] == [
        "assistant:\n<call>\n\ntool:\n42\n\nassistant:\nit is 42",
        "at once",
        "answer 2 at 1",
    ]


def test_checkpoints(tmp_path: Path) -> None:
    """They are no stage of a step, but take time of the run."""
    run = make_run(
        tmp_path / "r",
        [
            {"step": s, "time/step_s": 10.0, "time/update_s": 10.0, "time/checkpoint_s": 2.0}
            for s in (1, 2, 3)
        ],
    )
    for step in (10, 2, 3):
        (run / f"checkpoints/step_{step}").mkdir(parents=True)
    (run / "checkpoints/.step_4-abc").mkdir()
    (run / "checkpoints/best").write_text("step_3\n")
    page = read_page(write_report([run]))
    assert "after step 2, 3 (best), 10" in page.text
    assert list(page.data["stages"][0]["seconds"]) == ["update"]
    assert "Time 36" in page.text


PAIRS = {"eval/accuracy": (0.5, 0.75), "eval/margin": (0.0, 1.5)}


def pair_lines(area: str) -> list[dict[str, Any]]:
    """Two updates on pairs, and the held-out ones before and after."""
    return [
        {"step": 0, **{m: v[0] for m, v in PAIRS.items()}},
        {"step": 1, f"{area}/loss": 0.7, f"{area}/accuracy": 0.4, f"{area}/updates": 1},
        {
            "step": 2,
            f"{area}/loss": 0.3,
            f"{area}/accuracy": 0.8,
            f"{area}/updates": 2,
            **{m: v[1] for m, v in PAIRS.items()},
        },
    ]


@pytest.mark.parametrize(("area", "name"), [("reward_model", "Reward model"), ("dpo", "DPO")])
def test_preference_pairs(tmp_path: Path, area: str, name: str) -> None:
    """A share of pairs is not called an accuracy of answers, and no samples a step are spoken of."""
    config = (
        "train: {steps: 2, prompts_per_step: 64, samples_per_update: 32}\nrollout: {samples_per_prompt: 4}\n"
    )
    page = page_of(tmp_path, pair_lines(area), config=config)
    assert sections(page) == {
        "Learning": [
            ("eval/accuracy", "Held-out pairs in order"),
            (f"{area}/loss", f"{name}: loss"),
            (f"{area}/accuracy", f"{name}: pairs in order"),
        ],
        "Pairs": [("eval/margin", "Held-out margin")],
    }
    assert f"{area}/updates" not in page.charts()
    for seen in (
        "Held-out pairs in order 50.0% → 75.0%",
        "Held-out margin 0 → 1.50",
        "Loss 0.700 → 0.300",
        "Batch 32 pairs an update",
    ):
        assert seen in page.text
    assert "Held-out accuracy" not in page.text


def test_pairs_beside_answers(tmp_path: Path) -> None:
    """Each kind of accuracy has a row of its own; the chart that both share has the common name."""
    pairs = make_run(tmp_path / "dpo", pair_lines("dpo"))
    answers = make_run(tmp_path / "ppo", [{"step": s, "eval/accuracy": s / 4} for s in (1, 2)])
    page = read_page(write_report([pairs, answers]))
    assert "Held-out accuracy – 25.0% → 50.0%" in page.text
    assert "Held-out pairs in order 50.0% → 75.0% –" in page.text
    assert ("eval/accuracy", "Held-out accuracy") in sections(page)["Learning"]
