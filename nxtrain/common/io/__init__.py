"""Files: atomic writes, JSON lines, checksummed files, object stores, retries."""
