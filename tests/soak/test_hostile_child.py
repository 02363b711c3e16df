"""The process that runs hostile cases notices what is promised and not kept, and names the case also where it dies."""

import re

import pytest
from faulty_cases import FAULTS
from hostile_processes import Child


def test_every_fault_is_seen(tmp_path):
    with Child("faulty", str(tmp_path)) as child:
        for number, (name, (_, wrong)) in enumerate(FAULTS.items()):
            if name == "crashes":
                with pytest.raises(AssertionError, match=rf"case {number}: the process ended with -11: (?s:.*){wrong}"):
                    child.run(number, 1)
                continue
            found = child.run(number, 1)
            said = "\n".join(found["faults"])
            assert (wrong is None and not said) or re.search(re.escape(wrong), said), f"{name}: {said}"
            assert wrong is None or said.startswith(f"case {number} ({name}): ")
            assert (found["ms"] > 1000) == (name == "takes time")
