"""Programs that need torch or matplotlib: they measure rates of torch and draw plots."""
