"""What needs torch or matplotlib, as programs of their own: rates of torch, and plots."""
