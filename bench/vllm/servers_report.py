"""Figures of servers: what a results file keeps of them, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from bench.results_file import digits


def section(saved: dict) -> dict:
    """A results file's `vllm_servers`, but for what it says of its run. Servers that failed are left out.

    first_s: until a text's first token. decode_tokens_s: of all texts, while none waits for its first token. tokens_s: new
    tokens of the whole run. decode_lead, lead: how many times as fast the base is, the medians of the rounds' own ratios.
    """
    turns = [turn for record in saved["rounds"] for turn in record.values()]
    return {
        **{name: saved[name] for name in ("version", "layers", "prompt", "new", "read_streams")},
        "read_gb_s": digits(statistics.median(turn["read"] for turn in turns) / 1e9),
        "server": [_server(saved, name) for name, about in saved["servers"].items() if not about["failure"]],
    }


def _server(saved: dict, name: str) -> dict:
    about, base = saved["servers"][name], saved["base"]
    rounds = [{way: turn["points"] for way, turn in record.items()} for record in saved["rounds"]]

    def rates(index: int, key: str, rate: Callable[[dict], float]) -> dict:
        found = {key: digits(statistics.median(rate(points[name][index]) for points in rounds))}
        leads = [rate(points[base][index]) / rate(points[name][index]) for points in rounds if base in points]
        lead = {key.replace("tokens_s", "lead"): digits(statistics.median(leads))} if leads and name != base else {}
        return found | lead

    users = [
        {
            **{key: point[key] for key in ("users", "texts")},
            "first_s": digits(statistics.median(points[name][index]["first"] for points in rounds)),
            **rates(index, "decode_tokens_s", lambda one: one["decode"]),
            **rates(index, "tokens_s", lambda one: one["texts"] * saved["new"] / one["seconds"]),
        }
        for index, point in enumerate(rounds[0][name])
    ]
    environment = {"environment": about["environment"]} if about["environment"] else {}
    return {"name": name, **{key: about[key] for key in ("weights", "of", "options")}, **environment, "users": users}


def table(found: dict) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(heads, rows) of section(): a row for each server with each number of users, which stand together."""
    rows = [
        (
            str(of_users["users"]),
            server["name"],
            f"{of_users['first_s']:.3g} s",
            _rate(of_users, "decode_tokens_s", "decode_lead"),
            _rate(of_users, "tokens_s", "lead"),
        )
        for index in range(max((len(server["users"]) for server in found["server"]), default=0))
        for server in found["server"]
        for of_users in server["users"][index : index + 1]
    ]
    return ("users", "server", "first token after", "decode alone", "whole"), rows


def _rate(of_users: dict, rate: str, lead: str) -> str:
    return f"{of_users[rate]:.3g} tokens/s" + (f", {of_users[lead]:.2f} x" if lead in of_users else "")
