"""`ktmoe inspect`: what a checkpoint holds, who reads it, what it takes here, and how fast this machine could be."""

from __future__ import annotations

import math
from collections.abc import Callable

import click

from ktmoe import progress_bar
from ktmoe.cli import options, output, units
from ktmoe.experts import PROJECTIONS
from ktmoe.loaders.naming import listed
from ktmoe.measuring.inspection import Inspection, LayerGroup, inspect
from ktmoe.measuring.speed import Speed, speed
from ktmoe.measuring.token_bytes import TokenBytes
from ktmoe.messages import printable
from ktmoe.weights.activation import GatedActivation

HELP = """What a checkpoint holds and takes here.

No weight is read. The report says which loader reads DIR and why; the layers' experts, formats and bytes; the memory
that they take on this machine; the bytes that a token reads of the model, and the tokens/s that this machine's memory
allows for them; what it allows for the routed experts alone; and what is not served, and why. Exit code 1: nothing is
served.
"""

#: What router weights multiply, in words.
_ROUTER_WEIGHTS = {
    "down_output": "an expert's output",
    "down_input": "what enters the down projection",
    "expert_input": "an expert's input",
}


@click.command("inspect", help=HELP)
@options.MODEL
@click.option("--loader", metavar="NAME", default="auto", help="By default the one that is surest.")
@options.BACKEND
@options.TOP_K
@click.option("--measure/--no-measure", default=True, help="Measure what the machine allows, for a few seconds. On by default.")
@options.JSON
def command(model: str, loader: str, backend: str, top_k: int | None, measure: bool, as_json: bool) -> int:
    found = inspect(model, loader, backend, top_k)
    measured = None
    if measure and found.groups:
        with progress_bar.steps() as step, step("measure the machine's limits"):
            measured = speed(found)
    if as_json:
        output.print_json(_data(found, measured))
    else:
        output.print_lines(_lines(found, measured))
    return 0 if found.groups else 1


def _lines(found: Inspection, measured: Speed | None) -> list[str]:
    nbytes = sum(len(group.layers) * group.experts.nbytes for group in found.groups)
    holds = f", {units.gb(nbytes)} of routed experts" if found.groups else ""
    lines = [f"{found.path}: {units.count(found.tensors, 'tensor')}{holds}", *_loaders(found)]
    for group in found.groups:
        lines += _group(group)
    if found.refused:
        lines.append("not served:")
        for refused in found.refused:
            lines.append(f"  {listed(refused.layers)}: {refused.reason}")
    if found.token:
        lines += _token(found, found.token)
    if found.groups:
        lines.append(_memory(found))
    if measured:
        lines += _speed(found, measured)
    return lines


def _loaders(found: Inspection) -> list[str]:
    """Lines of text: the loader that reads the checkpoint, and what the others say; those that say the same in one line."""
    scores = {finding.loader: finding.score for finding in found.findings}
    if found.loader:
        lines = [f"loader: {found.loader}, score {scores[found.loader]:g} of 1 by names, dtypes, shapes and configuration"]
    else:
        lines = ["loader: none", f"  {found.why_no_loader}"]
    others: dict[str, list[str]] = {}
    for finding in found.findings:
        if finding.loader != found.loader:
            others.setdefault(finding.reason or f"score {finding.score:g}", []).append(finding.loader)
    return lines + [f"  not {', '.join(names)}: {reason}" for reason, names in others.items()]


def _group(group: LayerGroup) -> list[str]:
    e = group.experts
    shape = f"{units.count(e.num_experts, 'expert')}, hidden {e.hidden}, intermediate {e.intermediate}"
    lines = [f"{listed(group.layers)} ({e.name}), loader {group.loader}: {shape}"]
    lines += [f"  {p}: {list(e.shape(p))}, {e.formats[p].description}" for p in PROJECTIONS]
    lines.append(f"  activation: {_activation(e.activation)}; router weights multiply {_ROUTER_WEIGHTS[e.router_weight]}")
    lines.append(f"  checkpoint: {_sizes(e.nbytes, group)}")
    if group.choice is None:
        return [*lines, f"  no backend: {group.why_not}"]
    chosen = group.choice
    kernels = f", kernels of {group.isa}" if group.isa else ""
    lines.append(f"  backend: {chosen.name} ({chosen.why}), activations {chosen.activations}{kernels}")
    return [*lines, f"  packed: {_sizes(group.packed_nbytes, group)}"]


def _activation(a: GatedActivation) -> str:
    gate = "silu(gate)" if a.alpha == 1 else f"gate * sigmoid({a.alpha:g} * gate)"
    up = f"(up + {a.up_offset:g})" if a.up_offset else "up"
    return f"{gate} * {up}" + (f", gate at most {a.limit:g}, up within {a.limit:g}" if math.isfinite(a.limit) else "")


def _sizes(nbytes: int, group: LayerGroup) -> str:
    each, layers = nbytes / group.experts.num_experts, len(group.layers)
    return f"{units.gb(each)} an expert, {units.gb(nbytes)} a layer, {units.gb(layers * nbytes)} in all"


def _token(found: Inspection, token: TokenBytes) -> list[str]:
    """Lines of text: the bytes of a token."""
    counts = sorted({layer.num_experts for layer in token.routed.values()})
    each = sorted({layer.expert_nbytes for layer in token.routed.values()})
    experts = f"{found.top_k} of {_range(counts, str)} a layer" if found.top_k else f"{_range(each, units.gb)} an expert"
    of_experts = f"{units.gb(token.of_experts(found.top_k))}, {experts}" if found.top_k else experts
    total, least = found.token_nbytes, "" if token.complete else "at least "
    known = f"not known: {found.why_no_top_k}" if total is None else f"{least}{units.gb(total)}"
    output = f"{units.gb(token.output)} of it the output layer" if token.output else "no output layer is here"
    lines = [f"bytes that a token reads (decode, one text): {known}"]
    if token.routed:
        lines.append(f"  routed experts of {listed(list(token.routed))}: {of_experts}")
    lines.append(f"  dense part, all else that is read once a token: {units.gb(token.dense)}, {output}")
    if token.left_out:
        lines.append(f"  not read: {', '.join(f'{units.gb(nbytes)} of {what}' for what, nbytes in token.left_out.items())}")
    if token.unread:
        files = printable(units.some(token.files))
        lines.append(f"  not counted: {units.count(token.unread, 'tensor')} of files that are absent or broken ({files})")
        if token.incomplete:
            lines[-1] += f", experts of {listed(token.incomplete)} among them"
    if token.absent:
        lines.append(f"  not counted: {listed(token.absent)}, of which there is no tensor")
    return lines


def _range(values: list, text: Callable[..., str]) -> str:
    """The least and the most of sorted values."""
    return " to ".join(text(value) for value in dict.fromkeys((values[0], values[-1]))) if values else text(0)


def _memory(found: Inspection) -> str:
    needs = f"memory: loading needs {units.gb(found.needed)}, {units.gb(found.staged)} of it to read into"
    if found.available is None:
        return f"{needs}; the system does not say how much is available"
    verdict = {True: ": it fits", False: ": it does not fit", None: ""}[found.fits]
    return f"{needs}; {units.gb(max(0, found.available))} is available{verdict}"


def _speed(found: Inspection, measured: Speed) -> list[str]:
    lines = units.machine(measured.limits.values())
    if found.token_nbytes and measured.read:
        rate = units.tokens_s(measured.read / found.token_nbytes)
        of = f"{units.gb(found.token_nbytes)} a token at {units.gb_s(measured.read)}"
        lines.append(f"memory allows at most {rate} of the whole model (decode, one text): {of}")
    if not measured.calls:
        return [*lines, f"tokens/s: not known: {measured.why_not}"]
    counted = listed([layer for group in found.groups for layer in group.layers if found.counts(layer)])
    lines.append(f"at most, for the routed experts of {counted} alone, {found.top_k} experts a token:")
    words = {"read": "reading weights", "multiply": "multiplying"}
    for name, call in measured.calls.items():
        what = f"{name}, {units.count(call.tokens, 'token')} a call"
        rate, took = units.tokens_s(call.tokens / call.seconds), units.ms(call.seconds)
        lines.append(f"  {what}: {rate}, {took}, bounded by {words[call.bound]}")
    return [*lines, "  attention, shared experts and all else of the model take time of their own"]


def _data(found: Inspection, measured: Speed | None) -> dict:
    data = {
        "path": found.path,
        "tensors": found.tensors,
        "loader": found.loader,
        "why_no_loader": found.why_no_loader or None,
        "loaders": [{"name": f.loader, "score": f.score, "reason": f.reason or None} for f in found.findings],
        "groups": [_group_data(group) for group in found.groups],
        "not_served": [{"layers": r.layers, "reason": r.reason} for r in found.refused],
        "top_k": found.top_k,
        "token": found.token and _token_data(found, found.token),
        "memory": {
            "needed_bytes": found.needed,
            "staged_bytes": found.staged,
            "available_bytes": found.available,
            "fits": found.fits,
        },
    }
    if measured:
        if found.token_nbytes and measured.read:
            data["token"]["at_most_tokens_s"] = measured.read / found.token_nbytes
        data["limits"] = units.limits_data(measured.limits.values())
        data["at_most"] = {
            name: {
                "tokens": call.tokens,
                "tokens_s": call.tokens / call.seconds,
                "ms": call.seconds * 1e3,
                "bounded_by": call.bound,
            }
            for name, call in measured.calls.items()
        }
        data["why_not_at_most"] = measured.why_not or None
    return data


def _token_data(found: Inspection, token: TokenBytes) -> dict:
    return {
        "total_bytes": found.token_nbytes,
        "why_no_total": found.why_no_top_k or None,
        "routed_bytes": token.of_experts(found.top_k) if found.top_k else None,
        "dense_bytes": token.dense,
        "output_layer_bytes": token.output or None,
        "routed_layers": [
            {"layer": layer, "experts": experts.num_experts, "expert_bytes": experts.expert_nbytes}
            for layer, experts in token.routed.items()
        ],
        "not_read": [{"what": what, "bytes": nbytes} for what, nbytes in token.left_out.items()],
        "not_counted": {
            "tensors": token.unread,
            "files": token.files,
            "layers_of_experts": token.incomplete,
            "layers": token.absent,
        },
        "complete": token.complete,
        "at_most_tokens_s": None,
    }


def _group_data(group: LayerGroup) -> dict:
    e, chosen = group.experts, group.choice
    return {
        "layers": group.layers,
        "loader": group.loader,
        "base": e.name,
        "experts": e.num_experts,
        "hidden": e.hidden,
        "intermediate": e.intermediate,
        "projections": {p: {"shape": e.shape(p), "format": e.formats[p].description} for p in PROJECTIONS},
        "activation": {"alpha": e.activation.alpha, "limit": e.activation.limit, "up_offset": e.activation.up_offset},
        "router_weight": e.router_weight,
        "expert_bytes": e.nbytes // e.num_experts,
        "layer_bytes": e.nbytes,
        "backend": chosen and chosen.name,
        "why_no_backend": group.why_not or None,
        "activations": chosen and chosen.activations,
        "isa": group.isa,
        "packed_layer_bytes": group.packed_nbytes if chosen else None,
    }
