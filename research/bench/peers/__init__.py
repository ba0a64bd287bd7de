"""Other engines on this machine beside ours, in one run: installed, loaded, and recorded."""
