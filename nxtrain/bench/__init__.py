"""Speed, always beside another implementation and beside what the machine can do, in one run; and memory."""
