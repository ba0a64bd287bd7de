"""The models that the paper compares the mixer with: a Transformer, a masked mixer and Mamba 2.
They are trained, never served."""
