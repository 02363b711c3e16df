"""idle.py FOLDER SECONDS: has layers, a model, queues and threads of all kinds that wait, and prints what they did meanwhile.

A line of JSON: {thread's number: [its name, clock ticks of CPU time, voluntary and involuntary switches]}, of SECONDS in which
the first thread sleeps.
"""

import json
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from crowded_layers import Dense, Experts

from ktmoe import MoEModel, set_num_threads


def look():
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        lines = (task / "status").read_text().splitlines()
        switches = [int(line.split()[1]) for line in lines if "_ctxt_switches" in line]
        found[task.name] = [(task / "comm").read_text().strip(), int(fields[11]) + int(fields[12]), *switches]
    return found


def main():
    warnings.simplefilter("ignore")  # of more threads than CPUs
    set_num_threads(3)
    worlds = [Experts(1, "mxfp4"), Dense(1, "fp8")]
    held = [call for world in worlds for call in world.calls()] + [worlds[0].captured()]
    model = MoEModel.from_checkpoint(sys.argv[1])
    for call in held:
        assert call.check() is None
    time.sleep(0.3)  # idle workers spin for a moment
    before = look()
    time.sleep(float(sys.argv[2]))
    after = look()
    changes = {
        task: [after[task][0], *(b - a for a, b in zip(before[task][1:], after[task][1:], strict=True))] for task in before
    }
    print(json.dumps(changes))
    model.close()


if __name__ == "__main__":
    main()
