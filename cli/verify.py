"""`lamella verify`: the laws of a transfer on the user's own geometry; if one is broken, a minimal counterexample."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Annotated

import typer
from rich.pretty import pretty_repr

import lamella
from lamella.cli._device import open_device
from lamella.cli._progress import progress_bar
from lamella.cli._refusal import refuse_bad_input
from lamella.cli._sizes import MOST_LAYERS, parse_bytes
from lamella.cli._tables import print_table
from lamella.cli._verification import Choice, Row, Runner, choose_runners, count_rows
from lamella.cli._verification import verify as each_row
from lamella.cli._verification_case import Scope, Width, build_case, default_tokens, default_widths
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.laws import TransferCase
from lamella.reference.layout import LAYOUTS, KernelGroup, ObjectLayout
from lamella.reference.models import MODELS, find_model
from lamella.reference.slices import parse_width

SCHEMA_VERSION = 1
DEFAULT_KV, DEFAULT_ELEMENT_BYTES, DEFAULT_BLOCK_TOKENS = 2, 2, 16


def register(app: typer.Typer) -> None:
    """Adds the verb."""

    @app.command(short_help="Checks that every slice width leaves exactly the right bytes.")
    def verify(
        model: Annotated[str | None, typer.Option(help=f"A shipped cache shape: {', '.join(MODELS)}.")] = None,
        layers: Annotated[int | None, typer.Option(help="Geometry in place of a model: layers of the stage.")] = None,
        kv: Annotated[int | None, typer.Option(help="2: keys and values apart; 1: MLA or packed. Default: 2.")] = None,
        heads: Annotated[int | None, typer.Option(help="KV heads of one rank; 1 for MLA.")] = None,
        head_dim: Annotated[int | None, typer.Option(help="Elements of a head; for MLA the latent's width.")] = None,
        element_bytes: Annotated[int | None, typer.Option(help="1, 2 or 4. Default: 2.")] = None,
        block_tokens: Annotated[int | None, typer.Option(help="Tokens of an engine block. Default: 16.")] = None,
        chunk_tokens: Annotated[int, typer.Option(help="Tokens of an object.")] = 256,
        layout: Annotated[str | None, typer.Option(help=f"Of the engine's cache: {', '.join(LAYOUTS)}.")] = None,
        form: Annotated[str, typer.Option(help="Of the objects: token or block.")] = "token",
        width: Annotated[
            list[str] | None,
            typer.Option(
                "--width",
                "--widths",
                metavar="WIDTH",
                help="Layers per slice, or 1,1,2,4; repeatable.",
            ),
        ] = None,
        device: Annotated[str, typer.Option(help="cpu (the best executor), numpy, engine (on a CPU), cuda.")] = "cpu",
        threads: Annotated[int, typer.Option(help="Of the native executor.")] = 2,
        tensor_parallel: Annotated[int, typer.Option(help="Ranks that share a model's heads; one is checked.")] = 1,
        tokens: Annotated[int | None, typer.Option(help="Tokens of the longer request.")] = None,
        staging: Annotated[str, typer.Option(help="Budget of the staging ring.")] = "64MiB",
        memory: Annotated[str, typer.Option(help="Most memory that the check may take.")] = "2GiB",
        block_ids: Annotated[str | None, typer.Option(help="Your own block table, such as 5,11,7.")] = None,
        num_blocks: Annotated[int | None, typer.Option(help="Blocks of the cache.")] = None,
        null_block: Annotated[int | None, typer.Option(help="With --block-ids: the id that means no block.")] = None,
        skip_tokens: Annotated[int, typer.Option(help="With --block-ids: leading tokens that stay.")] = 0,
        seed: Annotated[int, typer.Option(help="Of bytes, block tables and addresses.")] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    ) -> None:
        """Checks that every slice width leaves exactly the bytes it must, on a cache of real size."""
        started = time.perf_counter_ns()
        with refuse_bad_input():
            if model is None:
                if tensor_parallel != 1:
                    raise ValueError(
                        f"--tensor-parallel shares a model's heads: name --model, or give --heads of one rank; got "
                        f"{tensor_parallel}"
                    )
                found = _own_geometry(layers, kv, heads, head_dim, element_bytes, chunk_tokens, block_tokens)
            else:
                own = [layers, kv, heads, head_dim, element_bytes, block_tokens]
                if any(value is not None for value in own):
                    raise ValueError(
                        "name a model or a geometry (--layers, --kv, --heads, --head-dim, --element-bytes, "
                        "--block-tokens), not both"
                    )
                found = find_model(model).object_layout(chunk_tokens, tensor_parallel)
            found, name = _with_layout(found, layout, form)
            table = _parse_ids(block_ids)
            if table is None and (null_block is not None or skip_tokens):
                raise ValueError("--null-block and --skip-tokens say more about --block-ids, which is not given")
            max_bytes = parse_bytes(memory)
            if tokens is None and table is not None:
                tokens = len(table) * max(group.block_tokens for group in found.groups)
            elif tokens is None:
                tokens = default_tokens(found, max_bytes)
            scope = Scope(
                layout=found,
                layout_name=name,
                widths=_parse_widths(width, found.num_layers),
                num_tokens=tokens,
                staging_bytes=parse_bytes(staging),
                seed=seed,
                block_ids=table,
                num_blocks=num_blocks,
                null_block=null_block,
                skip_tokens=skip_tokens,
            )
            case = build_case(scope, max_bytes)
            choice = _runners(device, threads)
        document = {
            "schema_version": SCHEMA_VERSION,
            "kind": "lamella.verify",
            "lamella": lamella.__version__,
            "model": model,
            "layout": name,
            "form": form,
            "device": device,
            "executor": choice.reason,
            "seed": seed,
            "tokens": [request.num_tokens for request in case.requests],
            "object_bytes": found.object_bytes,
        }
        done: list[Row] = []
        if not as_json:
            typer.echo(_headline(model, case, name))
            typer.echo(f"Executor: {choice.reason}. Seed {seed}.")
        with progress_bar("verifying", count_rows(choice.runners)) as advance:
            for row in each_row(case, scope.widths, choice.runners):
                done.append(row)
                advance(1)
        wall_ns = time.perf_counter_ns() - started
        broken = next((row for row in done if row.broken), None)
        if as_json:
            document |= {"rows": [_as_json(row) for row in done], "holds": broken is None, "wall_ns": wall_ns}
            typer.echo(json.dumps(document, indent=2))
        else:
            _print_table(done, wall_ns)
            _print_end(done, broken)
        if broken:
            raise typer.Exit(1)


def _own_geometry(
    layers: int | None,
    kv: int | None,
    heads: int | None,
    head_dim: int | None,
    element_bytes: int | None,
    chunk_tokens: int,
    block_tokens: int | None,
) -> ObjectLayout:
    if layers is None or heads is None or head_dim is None:
        raise ValueError("name --model, or a geometry with --layers, --heads and --head-dim")
    if not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"layers must be between 1 and {MOST_LAYERS}, got {layers}")
    bytes_each = DEFAULT_ELEMENT_BYTES if element_bytes is None else element_bytes
    geometry = KVGeometry(layers, DEFAULT_KV if kv is None else kv, heads, head_dim, bytes_each, chunk_tokens)
    return ObjectLayout.single(geometry, DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens)


def _with_layout(found: ObjectLayout, layout: str | None, form: str) -> tuple[ObjectLayout, str]:
    """The objects for that cache layout and form; packed layouts hold a head's keys and values in one run."""
    if form not in {known.value for known in ObjectForm}:
        raise ValueError(f"unknown form {form!r}; known: {', '.join(known.value for known in ObjectForm)}")
    latent = all(group.geometry.kv == 1 and group.geometry.num_heads == 1 for group in found.groups)
    name = layout or ("mla" if latent else "packed-nhd" if found.groups[0].geometry.kv == 1 else "kv-nb-bs-h-d")
    groups = found.groups
    if name.startswith("packed"):
        groups = tuple(_packed(group) for group in groups)
    return ObjectLayout(groups, ObjectForm(form)), name


def _packed(group: KernelGroup) -> KernelGroup:
    if group.geometry.kv == 1:
        return group
    return replace(group, geometry=replace(group.geometry, kv=1, head_dim=2 * group.geometry.head_dim))


def _parse_widths(texts: list[str] | None, num_layers: int) -> tuple[Width, ...]:
    if not texts:
        return default_widths(num_layers)
    return tuple(parse_width(text) for text in texts)


def _parse_ids(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--block-ids takes whole numbers between commas, got {text!r}") from None


def _runners(device: str, threads: int) -> Choice:
    if device != "engine" and not device.startswith("cuda"):
        return choose_runners(device, threads)
    from lamella.cuda_ext.engine_trial import run_on_device

    opened = open_device({"engine": "cpu", "cuda": "cuda:0"}.get(device, device))
    engine = Runner(f"engine, {opened.name}", lambda trial: run_on_device(opened, trial), None)
    return Choice((engine,), f"the transfer engine on {opened.name}, asked for")


def _headline(model: str | None, case: TransferCase, layout: str) -> str:
    lengths = " and ".join(
        f"{request.num_tokens:,}" + (f" (the first {request.skip_tokens} skipped)" if request.skip_tokens else "")
        for request in case.requests
    )
    return (
        f"{model or 'your geometry'}: {case.layout.num_layers} layers, {len(case.caches)} kernel group(s), layout "
        f"{layout}, {case.form.value} form, chunks of {case.chunk_tokens} tokens; requests of {lengths} tokens."
    )


def _size(num_bytes: int) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} B"  # a handful are not 0.0 KiB
    return f"{num_bytes / (1 << 20):,.0f} MiB" if num_bytes >= 10 << 20 else f"{num_bytes / 1024:,.1f} KiB"


def _written(width: Width) -> str:
    if width is None:
        return "chunk-major"
    return str(width) if isinstance(width, int) else "[" + ",".join(map(str, width)) + "]"


def _as_json(row: Row) -> dict[str, object]:
    case = None if row.counterexample is None else pretty_repr(row.counterexample)
    return {**row._asdict(), "widths": [_written(width) for width in row.widths], "counterexample": case}


def _print_table(rows: list[Row], wall_ns: int) -> None:
    print_table(
        ("law", "executor", "layers per slice", "moved", "compared", "time", "holds"),
        [
            [
                row.law,
                row.executor,
                " ".join(_written(width) for width in row.widths),
                _size(row.bytes_moved),
                _size(row.bytes_compared) if row.bytes_compared else "",
                f"{row.wall_ns / 1e9:.1f} s",
                "no" if row.broken else "yes",
            ]
            for row in rows
        ],
        spare=("compared", "moved", "time", "layers per slice", "executor"),
        fuller="--json",
    )
    typer.echo(f"{wall_ns / 1e9:.1f} s in all.")


def _print_end(rows: list[Row], broken: Row | None) -> None:
    if broken is None:
        moved = sum(row.bytes_moved for row in rows)
        if moved:
            typer.echo(f"Every law holds: {_size(moved)} moved, no byte differs.")
        else:
            typer.echo("No byte was to be moved, and none was: every token is skipped or in a null block.")
        return
    typer.echo(f"BROKEN: {broken.law} ({broken.executor}): {broken.broken}")
    typer.echo("The smallest case found that shows it:")
    typer.echo(pretty_repr(broken.counterexample, max_width=100))
