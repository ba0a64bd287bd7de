"""The models that the paper compares the mixer with: a Transformer, a masked mixer, Mamba 2 and
RWKV-4. They are trained, never served."""
