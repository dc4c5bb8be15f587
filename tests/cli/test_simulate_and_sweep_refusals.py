"""What `lamella simulate` and `lamella sweep` refuse: one sentence, exit code 2, and nothing written."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from lamella.reference.release import parse_release
from lamella.sim.profiles import DEFAULT_PROFILE
from model_verbs import refusal, run


@pytest.mark.parametrize("verb", ["simulate", "sweep", "replay"])
def test_a_profile_with_one_wild_step_time_is_refused_by_that_value(verb: str, tmp_path: Path) -> None:
    profile = json.loads((files("lamella.sim.profiles") / f"{DEFAULT_PROFILE}.json").read_text("utf-8"))
    profile["decode"]["full"]["step_ns"][0][0] *= 100
    (tmp_path / "wild.json").write_text(json.dumps(profile))
    said = refusal(verb, "--profile", str(tmp_path / "wild.json"))
    assert "wild.json: profile.decode.full: step_ns[0][0] = 492,030,000 (batch 1, context 144) cannot be right" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("simulate", "--width", "0"), "a width is a positive number or a schedule"),
        (("simulate", "--width", "40"), "layers_per_slice must be between 1 and 32, got 40"),
        (("simulate", "--order", "lifo"), "order must be one of fifo, shortest_remaining, deadline, round_robin"),
        (("simulate", "--release", "late"), "release must be one of whole, first"),
        (("simulate", "--release", "first:33"), "release after 33 layers needs as many, but the load has 32"),
        (("simulate", "--hit-tokens", "0"), "hit_tokens must be at least 1, got 0"),
        (("simulate", "--requests", "0"), "requests must be at least 1, got 0"),
        (("simulate", "--new-tokens", "200000"), "does not cover"),
        (("simulate", "--model", "llama-3.1-70b"), "has step times of llama-3.1-8b, not of llama-3.1-70b"),
        (("simulate", "--profile", "nope"), "no profile 'nope'; shipped: h200-llama-3.1-8b"),
        (("sweep", "--hit-tokens", "0"), "hit_tokens must be at least 1, got 0"),
        (("sweep", "--hit-tokens", "200000"), "does not cover 200,000 cached"),
        (("sweep", "--concurrencies", "1,x"), "each concurrency must be a number, got 'x'"),
        (("sweep", "--concurrencies", "0"), "each concurrency must be positive, got 0"),
        (("sweep", "--concurrency", "0"), "concurrency must be at least 1, got 0"),
        (("sweep", "--ratios", ""), "each ratio must be a number, got ''"),
        (("sweep", "--repeats", "0"), "repeats must be at least 1, got 0"),
        (("sweep", "--seed", "-1"), "seed must be at least 0, got -1"),
        (("sweep", "--engine", "cluster"), "engine must be one of auto, serial, processes, ray; got 'cluster'"),
        (("sweep", "--workers", "0"), "workers must be at least 1, got 0"),
        (("sweep", "--strategy", "round_robin/1/first"), "a study needs a layerwise strategy besides interleaving"),
        (("sweep", "--prompt-tokens", "16k"), "--prompt-tokens and --hit go together"),
        (("sweep", "--hit", "90%"), "--prompt-tokens and --hit go together"),
        (("sweep", "--prompt-tokens", "16x", "--hit", "90%"), "prompt_tokens must be a whole number of tokens"),
        (("sweep", "--prompt-tokens", "16k", "--hit", "100%"), "hit must be a share above 0 and below 1"),
        (
            ("simulate", "--width", "auto", "--order", "round_robin"),
            "one load after another; got round_robin and first",
        ),
        (("simulate", "--question-tokens", "10"), "add --turns, got 10 alone"),
        (("simulate", "--table", "no-folder/x.csv"), "make the folder no-folder first"),
        (("sweep", "--prompt-tokens", "16", "--hit", "90%"), "is not one block of 16"),
        (("sweep", "--prompt-tokens", "16k", "--hit", "90%", "--hit-tokens", "5"), "not both"),
        (
            ("sweep", "--overheads", "nobodys"),
            "no overheads 'nobodys'; shipped: vllm-0.26-h200-llama-3.1-8b; or name a .json file",
        ),
        (("simulate", "--prefill-graphs", "512"), "on the bare device nobody launches: add --overheads vllm-0.26-h200"),
        (
            ("sweep", "--overheads", "vllm-0.26-h200-llama-3.1-8b", "--prefill-graphs", "128"),
            "prefill_graphs must be 0 or more than 128, got 128: steps of up to so many tokens replay graphs anyway",
        ),
        (("sweep", "--link", "pcie9"), "a link is one of pcie3, pcie4, pcie5, pcie6, such as pcie4 or pcie4x8"),
        (("sweep", "--compute-speed", "0"), "compute speed must be between 0.01 and 100"),
        (("sweep", "--slo-ttft", "fast"), "a time is a positive number with us, ms or s, such as 200ms, got 'fast'"),
        (
            ("simulate", "--tier", "fast"),
            "a tier is a rate such as 5GB/s, perhaps with a latency: 5GB/s:1ms; got 'fast'",
        ),
        (("simulate", "--tier", "5GB/s:"), "a time is a positive number with us, ms or s, such as 200ms, got ''"),
        (
            ("sweep", "--prompt-tokens", "128k", "--hit", "90%", "--concurrency", "2"),
            "8 at once, a row of the map: the profile h200-llama-3.1-8b does not cover 1,024,400 tokens",
        ),
        (
            ("sweep", "--prompt-tokens", "128k", "--hit", "90%", "--concurrency", "2"),
            "or ask for fewer: --concurrencies 1,2,3,4,5,6",
        ),
        (("simulate", "--tier", "5GB/s:soon"), "a time is a positive number with us, ms or s"),
        (("simulate", "--ranks", "0"), "ranks are a number up to 64, or the speed of each one's link up to 1"),
        (("simulate", "--ranks", "1,2"), "ranks are a number up to 64, or the speed of each one's link up to 1"),
        (("simulate", "--full-graphs", "inside"), "full_graphs must be one of before, never (of waits inside a graph"),
        (("sweep", "--full-graphs", ""), "there is no model), got ''"),
        (("simulate", "--sharing", "fair"), "sharing must be one of serial, equal; got 'fair'"),
        (("simulate", "--rate", "0"), "a rate must be between 0.001 and 100,000 requests a second, got 0"),
        (("simulate", "--rate", "2", "--turns", "2"), "give one of them"),
        (("simulate", "--turns", "0"), "turns must be at least 1, got 0"),
        (("simulate", "--turns", "3000"), "does not cover"),
        (("simulate", "--table", "requests.xlsx"), "requests are written as .csv or .parquet, got requests.xlsx"),
        (("sweep", "--concurrency", "500"), "500 requests at once"),
        (("sweep", "--ratios", "100"), "no number of new tokens over 15,152 cached ones gives T/P = 100"),
        (("sweep", "--ratios", "nan"), "each ratio must be positive, got nan"),
        (("sweep", "--strategy", "fifo/1"), "a strategy is chunk-major, recompute, auto or order/width/release"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(*arguments, "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_help_names_every_release_rule() -> None:
    with pytest.raises(ValueError, match="release must be one of") as refused:
        parse_release("")
    forms = re.sub(r" \([^)]*\)", "", str(refused.value).partition("one of ")[2].partition(";")[0]).split(", ")
    said = " ".join(run("simulate", "--help").split())
    assert {form for form in forms if not re.search(rf"(?<![a-z:]){re.escape(form)}(?![a-z:])", said)} == set()
    assert "weighed" in forms
