"""The measurements of `deploy/gpu`: each writes its results as lines, as soon as it has them."""
