"""What runs gave, side by side, read from their run folders.

folder.py       which folders are runs, and what is in them
checkpoints.py  the checkpoint that a run goes on from, and its steps
settings.py     the settings in which runs differ
summary.py      the figures of one run
table.py        all of them as a table for the terminal, as CSV and as JSON
"""
