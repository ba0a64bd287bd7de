"""The arrays of one step: what a runner is given and gives back. Imports the root of engine/."""
