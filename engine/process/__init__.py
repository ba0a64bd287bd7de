"""The engine as a process: its loop, watchdog, weight reloads and snapshots."""
