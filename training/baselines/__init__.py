"""What the paper compares the mixer with: a Transformer, a masked mixer, Mamba 2. Trained, never
served."""
