"""A regime and a device as people say them: `--prompt-tokens 16k --hit 90% --concurrency 8 --link pcie4`."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Final

import typer

from lamella.cli._durations import parse_time_ns
from lamella.cli._model import milliseconds, open_device
from lamella.cli._tables import NOTHING
from lamella.sim.alone import alone
from lamella.sim.bounds import MOST_TOKENS, check_range
from lamella.sim.hardware import FULL_SPEED, Hardware, Ratio, Sharing, Tier
from lamella.sim.overheads import open_overheads, shipped_overheads
from lamella.sim.serving import Slo
from lamella.sim.strategies import FULL_GRAPHS, Device, Regime
from lamella.sim.what_if import LEAST_TIER_GB_PER_S, parse_rate, with_compute, with_link

DEFAULT_HIT_TOKENS: Final = 15_152
DEFAULT_NEW_TOKENS: Final = 768
BLOCK_TOKENS: Final = 16
MOST_RANKS: Final = 64
MOST_LATENCY_NS: Final = 10**10
_UNITS: Final = {"": 1, "k": 1000, "ki": 1024}

PromptOption = Annotated[str | None, typer.Option(help="Whole prompt, such as 16k or 16384; goes with --hit.")]
HitOption = Annotated[
    str | None, typer.Option(help="Share of the prompt found in host memory, such as 90% or 0.9, in whole blocks.")
]
HitTokensOption = Annotated[
    int | None, typer.Option(help=f"Or: prompt tokens found in host memory. Default: {DEFAULT_HIT_TOKENS:,}.")
]
NewTokensOption = Annotated[int | None, typer.Option(help=f"Or: tokens to compute. Default: {DEFAULT_NEW_TOKENS}.")]
ConcurrencyOption = Annotated[int, typer.Option(help="Users; each asks again when it has its answer.")]
OutputTokensOption = Annotated[int, typer.Option(help="Tokens to generate for each request.")]
LinkOption = Annotated[
    str | None,
    typer.Option(help="Another link than the profile's: pcie3 .. pcie6, pcie4x8, or a rate you measured: 24GB/s."),
]
ComputeSpeedOption = Annotated[
    float, typer.Option(help="Another GPU, every step so many times as fast as on the profile's: 0.5 for half.")
]
FullGraphsOption = Annotated[
    str,
    typer.Option(
        help="What decoding steps replay where layers are waited for, as the vLLM connector's full_graphs: before "
        "(full graphs; a step that must wait for a load waits in front of its graph), or never (piecewise ones)."
    ),
]
PrefillGraphsOption = Annotated[
    int,
    typer.Option(
        help="Steps with prefills replay captured graphs up to so many tokens, as the engine's cudagraph_capture_sizes "
        "say; 0: the host launches them kernel by kernel, as by vLLM's defaults. Goes with --overheads."
    ),
]
BeforeBatchOption = Annotated[
    bool,
    typer.Option(
        help="As the vLLM connector's before_batch: a load that its request's own step waits for begins before the "
        "host prepares the batch. Of the strategies auto alone has such loads. Goes with --overheads."
    ),
]
SloTtftOption = Annotated[str | None, typer.Option(help="SLO: first token within, such as 300ms.")]
SloTpotOption = Annotated[str | None, typer.Option(help="SLO: each further token within, such as 20ms.")]


TierOption = Annotated[
    str | None, typer.Option(help="Hits lie in a slower tier first: its rate, such as 5GB/s, and latency: 5GB/s:1ms.")
]
RanksOption = Annotated[
    str | None,
    typer.Option(help="Tensor-parallel ranks by the speed of each one's link: 2, or 1,0.8 for a slower second."),
]
SharingOption = Annotated[
    str, typer.Option(help="How loads share the link: serial (in the order's turn), or equal (all at once).")
]


def parse_tokens(text: str, what: str) -> int:
    """A number of tokens.

    Raises:
        ValueError: not a whole positive one, or more than any engine serves.

    >>> parse_tokens("16k", "prompt"), parse_tokens("16Ki", "prompt"), parse_tokens("1.5k", "prompt")
    (16000, 16384, 1500)
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)(k|ki)?", text.strip().lower().replace(",", ""), flags=re.ASCII)
    tokens = Fraction(found[1]) * _UNITS[found[2] or ""] if found else Fraction(0)
    if not 1 <= tokens <= MOST_TOKENS or tokens.denominator != 1:
        raise ValueError(
            f"{what} must be a whole number of tokens, such as 16384, 16k (16,000) or 16Ki, and at most "
            f"{MOST_TOKENS:,}; got {text!r}"
        )
    return int(tokens)


def parse_share(text: str) -> Fraction:
    """A share between 0 and 1, exactly: a float of 29% of 1,600 tokens is a block short.

    Raises:
        ValueError: it is not.

    >>> parse_share("90%"), parse_share("0.9")
    (Fraction(9, 10), Fraction(9, 10))
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) ?(%?)", text.strip(), flags=re.ASCII)
    share = Fraction(found[1]) / (100 if found[2] else 1) if found else Fraction(-1)
    if not 0 < share < 1:
        raise ValueError(
            f"hit must be a share above 0 and below 1, such as 90% or 0.9: a token is left to compute; got {text!r}"
        )
    return share


def parse_regime(
    prompt_tokens: str | None,
    hit: str | None,
    hit_tokens: int | None,
    new_tokens: int | None,
    concurrency: int,
    output_tokens: int,
) -> Regime:
    """The regime that the options describe, in either way of saying it.

    Raises:
        ValueError: both ways at once, half of one, or impossible values.
    """
    if (prompt_tokens is None) != (hit is None):
        raise ValueError("--prompt-tokens and --hit go together: the prompt, and the share of it that is found")
    if prompt_tokens is None or hit is None:
        return Regime(
            DEFAULT_HIT_TOKENS if hit_tokens is None else hit_tokens,
            DEFAULT_NEW_TOKENS if new_tokens is None else new_tokens,
            concurrency,
            output_tokens,
        )
    if hit_tokens is not None or new_tokens is not None:
        raise ValueError("say either --prompt-tokens and --hit, or --hit-tokens and --new-tokens, not both")
    prompt = parse_tokens(prompt_tokens, "prompt_tokens")
    cached = int(prompt * parse_share(hit)) // BLOCK_TOKENS * BLOCK_TOKENS
    if not cached:
        raise ValueError(f"{hit} of {prompt:,} tokens is not one block of {BLOCK_TOKENS}: there is nothing to load")
    return Regime(cached, prompt - cached, concurrency, output_tokens)


def parse_hardware(tier: str | None, ranks: str | None, sharing: str) -> tuple[Hardware, list[str]]:
    """What a load passes on its way, and sentences that say so; none for one serial link.

    Raises:
        ValueError: an impossible tier, rank or discipline.
    """
    said: list[str] = []
    tiers: tuple[Tier, ...] = ()
    if tier is not None:
        rate, colon, latency = tier.partition(":")
        bytes_per_s = parse_rate(rate.strip(), "a tier", LEAST_TIER_GB_PER_S)
        if bytes_per_s is None:
            raise ValueError(f"a tier is a rate such as 5GB/s, perhaps with a latency: 5GB/s:1ms; got {tier!r}")
        latency_ns = parse_time_ns(latency) if colon else 0
        check_range("a tier's latency in ns", latency_ns, 0, MOST_LATENCY_NS)
        tiers = (Tier("tier", bytes_per_s, latency_ns),)
        said.append(f"all hits lie in a tier of {tier.strip()}, which brings one slice after another")
    speeds: tuple[Ratio, ...] = (FULL_SPEED,)
    if ranks is not None:
        speeds = _ranks(ranks)
        said.append(
            f"{len(speeds)} tensor-parallel ranks, whose links each carry what the profile's one would; a layer is "
            "there when the slowest rank has it"
        )
    names = [one.value for one in Sharing]
    if sharing not in names:
        raise ValueError(f"sharing must be one of {', '.join(names)}; got {sharing!r}")
    if sharing != Sharing.SERIAL.value:
        said.append("loads share the link equally, whatever the order says")
    return Hardware(ranks=speeds, sharing=Sharing(sharing), tiers=tiers), said


def _ranks(text: str) -> tuple[Ratio, ...]:
    """A number of equal ranks, or a speed for each.

    Raises:
        ValueError: neither.

    >>> _ranks("2")
    (Ratio(numerator=1000, denominator=1000), Ratio(numerator=1000, denominator=1000))
    """
    try:
        equal = text.isascii() and text.strip().isdecimal()
        speeds = [1.0] * min(int(text), MOST_RANKS + 1) if equal else [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if not 1 <= len(speeds) <= MOST_RANKS or not all(0.001 <= speed <= 1 for speed in speeds):
        raise ValueError(
            f"ranks are a number up to {MOST_RANKS}, or the speed of each one's link up to 1, such as 1,0.8; "
            f"got {text!r}"
        )
    return tuple(Ratio(round(1000 * speed), 1000) for speed in speeds)


def parse_slo(ttft: str | None, tpot: str | None) -> Slo:
    """The bounds, those that were given.

    Raises:
        ValueError: no time.
    """
    return Slo(None if ttft is None else parse_time_ns(ttft), None if tpot is None else parse_time_ns(tpot))


def within_slo(slo: Slo, goodput_per_s: float, share: float) -> tuple[str, str]:
    """Both as a table shows them; dashes without an SLO, by which whatever takes long is in time.

    >>> within_slo(Slo(ttft_ns=10**9), 4.85, 0.5), within_slo(Slo(), 4.85, 1.0)
    (('4.8', '50%'), ('-', '-'))
    """
    return (NOTHING, NOTHING) if slo == Slo() else (f"{goodput_per_s:.1f}", f"{share:.0%}")


def open_derived_device(
    profile: str,
    model: str | None,
    link: str | None,
    compute_speed: float,
    *,
    extrapolate: bool,
    overheads: str | None = None,
    before_batch: bool = False,
    full_graphs: str = "before",
    prefill_graphs: int = 0,
) -> Device:
    """The device of a profile, on another link or with another GPU if asked for, behind an engine's host thread if any.

    Raises:
        ValueError: as `open_device`, `with_link`, `with_compute` and `open_overheads`; or other graphs than modelled,
            or graphs of prefills without the overheads of a host that launches them.
    """
    if full_graphs not in FULL_GRAPHS:
        raise ValueError(
            f"full_graphs must be one of {', '.join(FULL_GRAPHS)} (of waits inside a graph there is no model), "
            f"got {full_graphs!r}"
        )
    found = open_device(profile, model, extrapolate).profile
    if link is not None:
        found = with_link(found, link)
    host = None if overheads is None else open_overheads(overheads)
    if host is not None:
        host = replace(host, overheads=host.overheads.with_prefill_graphs(prefill_graphs))
    elif prefill_graphs:
        raise ValueError(
            f"prefill_graphs is {prefill_graphs}, and on the bare device nobody launches: add --overheads "
            f"{shipped_overheads()[0]}, or leave it out"
        )
    if before_batch and host is None:
        raise ValueError(
            "before_batch is set, and on the bare device nobody prepares a batch: add --overheads, or leave it out"
        )
    return Device(
        with_compute(found, compute_speed),
        extrapolate=extrapolate,
        overheads=None if host is None else host.overheads,
        overheads_said="" if host is None else host.assumption(),
        graphs=FULL_GRAPHS[full_graphs],
        before_batch=before_batch,
    )


def describe_regime(device: Device, regime: Regime, hardware: Hardware | None = None, who: str | None = None) -> str:
    """The regime in one sentence, with what the device makes of one request of it alone.

    Args:
        device: where.
        regime: who asks for what.
        hardware: what a load passes on its way; None: one link.
        who: asks; None: the regime's users.
    """
    one = alone(device, regime, hardware)
    prompt = regime.hit_tokens + regime.new_tokens
    who = who or f"{regime.concurrency} user{'s' if regime.concurrency > 1 else ''}"
    tier = f" (the tier's reading {milliseconds(one.tier_ns)} of it)" if one.tier_ns else ""
    return (
        f"{who} on {device.profile.device}, {device.profile.model}: prompts of {prompt:,} tokens, "
        f"{regime.hit_tokens:,} cached + {regime.new_tokens:,} new ({regime.hit_tokens / prompt:.0%} hit), "
        f"{regime.output_tokens:,} generated. Alone, transfer {milliseconds(one.transfer_ns)} ms{tier}, prefill "
        f"{milliseconds(one.prefill_ns)} ms, T/P {one.ratio:.2f}; overlap can save at most {one.ceiling:.0%}."
    )
