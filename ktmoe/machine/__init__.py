"""What this process may use: threads, NUMA nodes, memory, and what environment variables say of them."""
