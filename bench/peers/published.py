"""What a results file keeps of make bench-peers."""

from __future__ import annotations

import datetime

from bench.peers.rounds import figures
from bench.results_file import digits


def section(saved: dict) -> dict:
    """An entry of a results file's `peers`, of one format that make bench-peers saved.

    ktmoe's own ways come first. Whoever failed at all points is left out.
    """
    libraries = []
    for name, participant in sorted(saved["participants"].items(), key=lambda item: not item[0].startswith("ktmoe ")):
        measured = [(point, figures(saved, point, name)) for point in saved["points"]]
        calls = [
            {
                "tokens": point["tokens"],
                "ms": digits(found["seconds"] * 1e3),
                **({"lead": digits(found["ratio"])} if found["ratio"] else {}),
                **({"int8_lead": digits(found["int8_ratio"])} if found["int8_ratio"] else {}),
            }
            for point, found in measured
            if found
        ]
        if calls:
            errors = [digits(point["participants"][name]["error"]) for point, found in measured if found]
            known = {"version": str(participant["about"]["version"])} if "version" in participant["about"] else {}
            about = {"name": name, **known, "activations": participant["numerics"]}
            libraries.append({**about, "least_error": min(errors), "most_error": max(errors), "calls": calls})
    commit = {"commit": saved["commit"]} if saved.get("commit") else {}
    date = datetime.date.fromisoformat(saved["date"])
    shape = {name: saved["shape"][name] for name in ("weights", "experts")}
    bases = {"auto": saved["base"], **({"int8": saved["int8_base"]} if saved.get("int8_base") else {})}
    return {**shape, "date": date, **commit, "source": "make bench-peers", **bases, "library": libraries}
