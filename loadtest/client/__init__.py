"""Sends requests and records what comes back. Imports loadtest/workload."""
