"""HybridPD operator: turns a ``HybridPDService`` into a running prefill/decode pair.

One pass is gather (read the cluster) -> decide (pure functions) -> act (server-side apply).
"""
