"""The table, from a result alone; docs/performance.md has it as printed."""

from __future__ import annotations

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
