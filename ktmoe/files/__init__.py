"""Writing files that are whole or absent: atomic files, safetensors files tensor by tensor, a lock for a folder."""
