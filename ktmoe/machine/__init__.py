"""What this process may use: threads, cores, caches, NUMA nodes, memory, and what environment variables say of them."""
