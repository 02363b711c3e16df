"""Pool, queue and driver under ThreadSanitizer, without Python: threads.c says who does what. Planted faults are reported."""

import pytest
from sanitizers import NATIVE, Fault, run_threads, threads_program, works

ROUNDS = 100
#: What queues a record, of captured/queue.c.
PUSH = """\
    pthread_mutex_lock(&lock);
    r->submitted++;
    if (!queued(r)) {
        r->next = NULL;
        if (queue.last)
            queue.last->next = r;
        else
            queue.first = r;
        queue.last = r;
    }
    pthread_mutex_unlock(&lock);
"""
FAULTS = {
    "a queue without its lock": Fault(
        "captured/queue.c",
        PUSH,
        PUSH.replace("    pthread_mutex_lock(&lock);\n", "").replace("    pthread_mutex_unlock(&lock);\n", ""),
        "captured-queue",
        ("data race", "captured/queue.c", "push"),
    ),
    "a pool without a lock": Fault(
        "base/pool.c",
        "void kt_pool_lock(void) { pthread_mutex_lock(&lock); }\nvoid kt_pool_unlock(void) { pthread_mutex_unlock(&lock); }",
        "void kt_pool_lock(void) { }\nvoid kt_pool_unlock(void) { }",
        "base-pool",
        ("data race",),  # on all that it guards
    ),
    "two locks in both orders": Fault(
        "captured/queue.c",
        "    const bool known = kt_os_process_cpus(&cpus);\n    kt_pool_unlock();",
        "    pthread_mutex_lock(&lock);\n    const bool known = kt_os_process_cpus(&cpus);\n    pthread_mutex_unlock(&lock);\n"
        "    kt_pool_unlock();\n    pthread_mutex_lock(&lock);\n    kt_pool_lock();\n    kt_pool_unlock();\n"
        "    pthread_mutex_unlock(&lock);",
        "captured-queue",
        ("lock-order-inversion", "captured/queue.c", "unpin"),
    ),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("threads")
    if not works("thread", folder):
        pytest.skip("the compiler has no -fsanitize=thread that works here")
    return threads_program(NATIVE, folder)


@pytest.mark.parametrize("shards", [1, 2])
def test_many_threads(program, repeat, shards):
    for seed in repeat(f"{ROUNDS} rounds of callers, replays and replacements, {shards} shards", 2_000):
        done = run_threads(program, ROUNDS, shards, seed)
        assert (done.returncode, done.stderr) == (0, ""), f"seed {seed}: {done.stderr}"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(program, tmp_path, name):
    fault = FAULTS[name]
    faulty = threads_program(fault.patched(tmp_path), tmp_path, reuse=program.parent, only=fault.object)
    for seed in range(20):  # whether two threads meet is for the system to say
        done = run_threads(faulty, ROUNDS, 1, seed)
        if done.returncode != 0:
            break
    assert done.returncode != 0
    assert all(word in done.stderr for word in ("ThreadSanitizer", *fault.reported)), done.stderr
