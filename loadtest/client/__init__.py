"""Sends requests and records the replies. Imports loadtest/workload."""
