"""What runs in other engines' environments: makes their models, and has them generate offline.

Imports nothing of ours but the two files here that all of them share, and of our engine the public
API, as any user's program would.
"""
