"""Manifests for Kubernetes, and the checks of them that need no cluster."""
