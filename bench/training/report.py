"""The table of a result, and what a results file keeps of it."""

from __future__ import annotations

import datetime

from bench.results_file import Results, digits
from bench.training.session import figures
from ktmoe.training import saved_nbytes

HEAD = (
    "tokens",
    "participant",
    "forward",
    "of peak",
    "backward",
    "of peak",
    "step",
    "of ktmoe's",
    "memory, loaded",
    "and in a step",
    "largest error",
)

#: What the names of ktmoe's participants that recompute end in.
RECOMPUTE = " recompute"


def section(saved: dict, old: dict) -> dict:
    """A results file's `training`: the saved runs, in the place of old ones of as many experts. old: what the file has."""
    shape = saved["shape"]
    runs = [_run(saved, point) for point in saved["points"]]
    kept = [run for run in old.get("run", ()) if run["experts"] != shape["num_experts"]]
    commit = {"commit": saved["commit"]} if saved["commit"] else {}
    return {
        "date": datetime.date.fromisoformat(saved["date"]),
        **commit,
        "source": "make bench-training",
        "model": "V4-Flash",
        "rank": shape["rank"],
        "run": sorted([*kept, *runs], key=lambda run: (run["experts"], run["tokens"])),
    }


def _run(saved: dict, point: dict) -> dict:
    tokens, shape = point["tokens"], saved["shape"]
    participants = [
        _participant(saved, point, name, found) for name in point["participants"] if (found := figures(saved, point, name))
    ]
    rows = round(tokens * shape["top_k"] / shape["num_experts"])
    return {"experts": shape["num_experts"], "tokens": tokens, "rows": rows, "participant": participants}


def _participant(saved: dict, point: dict, name: str, found: dict) -> dict:
    entry, loaded = point["participants"][name], saved["participants"][name]["about"]["resident bytes"]
    speeds = {
        f"{part}_{what}": digits(value)
        for part in ("forward", "backward")
        for what, value in (("gflop_s", point["flops"] / found[part] / 1e9), ("of_peak", found[f"{part} share"]))
    }
    return {
        "name": name,
        **speeds,
        "step_s": digits(found["forward"] + found["backward"]),
        "ratio": digits(found["ratio"]),
        "loaded_gb": digits(loaded / 1e9),
        "step_gb": digits(max(0, entry["most resident bytes"] - loaded) / 1e9),
        "error": digits(max(entry["errors"].values())),
    }


def table(found: list[Results]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """All that results files have of training."""
    rows = [
        (results.label, f"{run['experts']}", f"{run['tokens']:,}", f"{run['rows']}", *_cells(each))
        for results in found
        for run in results.data.get("training", {}).get("run", ())
        for each in run["participant"]
    ]
    heads = ("participant", "forward", "backward", "step", "of ktmoe's", "memory, loaded", "and in a step", "largest error")
    return ("CPU", "experts", "tokens", "rows an expert", *heads), rows


def _cells(each: dict) -> tuple[str, ...]:
    speeds = (
        f"{each[f'{part}_gflop_s']:.3g} GFLOP/s, {100 * each[f'{part}_of_peak']:.0f} %" for part in ("forward", "backward")
    )
    memory = (f"{each[name]:.1f} GB" if name in each else "-" for name in ("loaded_gb", "step_gb"))
    error = f"{100 * each['error']:.2g} %" if "error" in each else "-"
    return (each["name"], *speeds, f"{each['step_s']:.3g} s", f"{each['ratio']:.2f} x", *memory, error)


def rows(result: dict) -> list[tuple[str, ...]]:
    """One for each participant at each point."""
    found = []
    for point in result["points"]:
        for key, entry in point["participants"].items():
            row = figures(result, point, key)
            if row:
                about = result["participants"][key]["about"]
                loaded, most = about["resident bytes"], entry["most resident bytes"]
                found.append(
                    (
                        str(point["tokens"]),
                        f"{key}, {entry['best']}",
                        _speed(point["flops"], row["forward"]),
                        f"{row['forward share']:.0%}",
                        _speed(point["flops"], row["backward"]),
                        f"{row['backward share']:.0%}",
                        f"{row['forward'] + row['backward']:.2f} s",
                        f"{row['ratio']:.2f} x",
                        f"{loaded / 1e9:.1f} GB",
                        f"+ {max(0, most - loaded) / 1e9:.1f} GB",
                        f"{max(entry['errors'].values()):.2%}",
                    )
                )
    return found


def show(result: dict) -> None:
    """Print it in markdown."""
    for row in (HEAD, ("---",) * len(HEAD), *rows(result)):
        print(f"| {' | '.join(row)} |")
    shape, machine = result["shape"], result["machine"]
    print(f"\n{machine['cpu']}, {machine['threads']} threads; {result['date']}, {result['commit']}")
    print(
        f"{shape['num_experts']} experts of {shape['hidden']} x {shape['intermediate']}, top-{shape['top_k']}, rank "
        f"{shape['rank']}, {shape['weights']}"
    )
    sizes = {name: shape[name] for name in ("num_experts", "hidden", "intermediate", "rank")}
    for point in result["points"]:
        kept = saved_nbytes(point["tokens"], shape["top_k"], **sizes)
        print(f"ktmoe keeps {kept / 1e9:.2f} GB of {point['tokens']} tokens between forward and backward, by the formula")
    for key, participant in result["participants"].items():
        if participant["failure"]:
            print(f"out: {key}: {participant['failure']}")


def _speed(flops: float, seconds: float) -> str:
    return f"{flops / seconds / 1e9:.0f} GFLOP/s"
