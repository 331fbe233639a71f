"""Snapshots in the memory of a host: files that outlive the process that wrote them. No torch."""
