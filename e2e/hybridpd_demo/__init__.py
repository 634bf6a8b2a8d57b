"""One HybridPDService from `kubectl apply` to tokens, compared with a single engine."""
