"""`make sanitize` runs these tests; other runs do not collect them, since they compile all native code once more."""

import os

collect_ignore_glob = [] if os.environ.get("KTMOE_TEST_SANITIZE") else ["test_*.py"]
