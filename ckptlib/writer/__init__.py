"""The writer: a process that never imports torch and turns snapshots in slots into packs, parts and manifests."""
